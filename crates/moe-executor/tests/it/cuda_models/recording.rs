//! Records a run of a model, and returns its records and measurements.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, Instant};

use moe_engine::{Decode, Logits};
use moe_executor::cpu::threads::Threads;
use moe_executor::cuda::Fallbacks;
use moe_executor::hot_cache::{DynamicSlots, LaneEvents};
use moe_executor::recorder::Recorder;
use moe_executor::{CacheParams, CacheType, Devices, Model, Session};
use moe_gguf::Gguf;
use moe_gguf::map::OffsetMap;
use moe_placement::dynamic::Counts;
use moe_placement::perf::Counters;
use moe_trace::Phase;
use moe_trace::buffers::{self, BufferEvent};
use moe_trace::transfers::{self, Transfer};
use moe_trace::{Manifest, Run, RunOptions, RunWriter, TRACE_FILE, TensorAccessLog, Trace, check};

use super::Case;

/// Tokens of the prompt, fewer than the `min_batch` of [`case`](super::case), so that no weights are copied for products.
pub const PROMPT: std::ops::Range<u32> = 300..320;
/// Number of tokens after the prompt, one pass each. The KV cache grows only at the first one.
pub const N_GENERATED: u32 = 8;

/// Selected experts of a token and their weights, by layer and position.
pub type Selected = BTreeMap<(u16, u32), (Vec<i32>, Vec<f32>)>;

/// A recorded run.
pub struct Recorded {
    pub records: Vec<TensorAccessLog>,
    pub transfers: Vec<Transfer>,
    /// Selected experts as the observer received them; empty without an observer.
    pub observed: Selected,
    pub passes: Vec<MeasuredPass>,
    /// Total of all GPUs.
    pub fallbacks: Fallbacks,
    /// Counters of the hot or dynamic cache, if the case has one.
    pub counters: Option<Counters>,
    /// Counts of the dynamic cache, if the case has one.
    pub counts: Option<Counts>,
    /// Failures and shortcuts of the hot or dynamic cache.
    pub events: LaneEvents,
    pub buffers: Vec<BufferEvent>,
    /// Faults of the run directory.
    pub faults: Vec<String>,
}

/// A forward pass: the prompt, or one token after it.
pub struct MeasuredPass {
    pub phase: Phase,
    /// Position of the first token.
    pub position: u32,
    /// Duration of the call of `decode`.
    pub took: Duration,
    /// Number of times that the CPU waited for a GPU.
    pub waits: u64,
}

impl MeasuredPass {
    /// The records of this pass.
    pub fn of<'r>(
        &self,
        records: &'r [TensorAccessLog],
    ) -> impl Iterator<Item = &'r TensorAccessLog> {
        let (phase, position) = (self.phase, self.position);
        records.iter().filter(move |r| {
            r.phase() == Some(phase) && (phase == Phase::Prompt || r.token_id.get() == position)
        })
    }
}

/// Records a run of a model; without a case, on the CPU alone. With `observe`, the CPU waits for every routing decision.
pub fn record(gguf: &Gguf, case: Option<&Case>, observe: bool) -> Recorded {
    let model = Model::load(gguf).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let (map, options) = (OffsetMap::new(gguf), RunOptions::default());
    let writer = RunWriter::create(&run, Manifest::default(), &map, options).unwrap();
    let threads = Threads::new(2).unwrap();
    let devices = case.map_or_else(Devices::cpu, |case| case.open(gguf, &model));
    let recorder = Recorder::new(Some(writer));
    let mut session = Session::with_devices(
        &model,
        &threads,
        devices,
        recorder,
        CacheParams::of_type(CacheType::F32, 1024),
    )
    .unwrap();
    if let Some(case) = case {
        case.prepare(&mut session);
    }
    let observed = Rc::new(RefCell::new(Selected::new()));
    if observe {
        let seen = observed.clone();
        session.observe(Box::new(move |routed| {
            let k = routed.n_expert_used;
            let tokens = routed.ids.chunks_exact(k);
            let tokens = tokens.zip(routed.weights.chunks_exact(k));
            for (&position, (ids, weights)) in routed.positions.iter().zip(tokens) {
                let key = (routed.layer.0, position);
                seen.borrow_mut()
                    .insert(key, (ids.to_vec(), weights.to_vec()));
            }
        }));
    }
    let prompt: Vec<u32> = PROMPT.collect();
    let mut passes = Vec::new();
    let mut pass = |tokens: &[u32], phase| {
        let waits = |session: &Session| -> u64 {
            let gpus = session.devices().gpus().iter();
            gpus.map(|gpu| gpu.gpu().waits()).sum()
        };
        let (before, position) = (waits(&session), session.n_past() as u32);
        let start = Instant::now();
        session.decode(tokens, phase, Logits::Last).unwrap();
        passes.push(MeasuredPass {
            phase,
            position,
            took: start.elapsed(),
            waits: waits(&session) - before,
        });
    };
    pass(&prompt, Phase::Prompt);
    (1..=N_GENERATED).for_each(|token| pass(&[token], Phase::Generate));

    let mut fallbacks = Fallbacks::default();
    for gpu in session.devices().gpus() {
        fallbacks.ops += gpu.fallbacks.ops;
        fallbacks.tensors.extend_from_slice(&gpu.fallbacks.tensors);
        fallbacks.first = fallbacks.first.or_else(|| gpu.fallbacks.first.clone());
    }
    let counters = session.counters().map(|counters| counters.lock().clone());
    let counts = session.dynamic_cache().map(DynamicSlots::counts);
    let events = session.hot_cache().map(|cache| cache.events().clone());
    let (recorder, ended) = session.into_recorder();
    ended.unwrap();
    recorder.into_writer().unwrap().finish().unwrap();
    Recorded {
        counters,
        counts,
        events: events.unwrap_or_default(),
        records: Trace::open(run.join(TRACE_FILE)).unwrap().records().into(),
        transfers: transfers_of(&run),
        observed: observed.take(),
        passes,
        fallbacks,
        buffers: buffers::read(&run.join(buffers::FILE_NAME)).unwrap(),
        faults: check::check(&Run::open(&run).unwrap())
            .iter()
            .map(ToString::to_string)
            .collect(),
    }
}

fn transfers_of(run: &Path) -> Vec<Transfer> {
    let path = run.join(transfers::FILE_NAME);
    if path.exists() {
        transfers::read(&path).unwrap()
    } else {
        Vec::new()
    }
}

/// The name of the operation of a record without the layer number.
pub fn stem(record: &TensorAccessLog) -> String {
    let name = record.dst_name().into_owned();
    let stem = name.rsplit_once('-').map(|(stem, _)| stem.to_owned());
    stem.unwrap_or(name)
}

/// The distinct selected experts of a layer in a pass, in the order of their first selection.
pub fn distinct(observed: &Selected, layer: u16, pass: &MeasuredPass) -> Vec<i32> {
    let positions = match pass.phase {
        Phase::Prompt => 0..PROMPT.len() as u32,
        Phase::Generate => pass.position..pass.position + 1,
    };
    let mut distinct = Vec::new();
    for (ids, _) in positions.filter_map(|position| observed.get(&(layer, position))) {
        for &id in ids {
            if !distinct.contains(&id) {
                distinct.push(id);
            }
        }
    }
    distinct
}
