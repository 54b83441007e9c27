//! A run that is recorded, and what came of it.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, Instant};

use moe_engine::{Decode, Logits};
use moe_executor::cpu::threads::Threads;
use moe_executor::cuda::Fallbacks;
use moe_executor::recorder::Recorder;
use moe_executor::{Devices, Model, Session};
use moe_gguf::Gguf;
use moe_gguf::map::OffsetMap;
use moe_trace::Phase;
use moe_trace::buffers::{self, BufferEvent};
use moe_trace::transfers::{self, Transfer};
use moe_trace::{Manifest, Run, RunOptions, RunWriter, TRACE_FILE, TensorAccessLog, Trace, check};

use super::Case;

/// Too few rows for a prompt's copies.
pub const PROMPT: std::ops::Range<u32> = 300..320;
/// Tokens that follow it, a pass each. The cache grows at the first one, and then at none.
pub const N_GENERATED: u32 = 8;

/// Experts of a row and their weights, by layer and position.
pub type Choices = BTreeMap<(u16, u32), (Vec<i32>, Vec<f32>)>;

pub struct Recorded {
    pub records: Vec<TensorAccessLog>,
    pub transfers: Vec<Transfer>,
    /// What the observer was told, if there was one.
    pub observed: Choices,
    pub passes: Vec<MeasuredPass>,
    /// Of all GPUs together.
    pub fallbacks: Fallbacks,
    pub buffers: Vec<BufferEvent>,
    /// What is wrong with the run.
    pub faults: Vec<String>,
}

/// The prompt's, or that of a token behind it.
pub struct MeasuredPass {
    pub phase: Phase,
    /// Of the first row.
    pub position: u32,
    /// From before it to behind it.
    pub took: Duration,
    /// Times that the host waited for a GPU.
    pub waits: u64,
}

impl MeasuredPass {
    /// Its part of the records.
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

/// Records a model, on the host alone without a case. With an observer the host waits for every choice.
pub fn record(gguf: &Gguf, case: Option<&Case>, observe: bool) -> Recorded {
    let model = Model::load(gguf).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let (map, options) = (OffsetMap::new(gguf), RunOptions::default());
    let writer = RunWriter::create(&run, Manifest::default(), &map, options).unwrap();
    let threads = Threads::new(2).unwrap();
    let devices = case.map_or_else(Devices::cpu, |case| case.open(gguf, &model));
    let recorder = Recorder::new(Some(writer));
    let mut session = Session::with_devices(&model, &threads, devices, recorder, 1024);
    let observed = Rc::new(RefCell::new(Choices::new()));
    if observe {
        let seen = observed.clone();
        session.observe(Box::new(move |routed| {
            let k = routed.n_expert_used;
            let rows = routed.ids.chunks_exact(k);
            let rows = rows.zip(routed.weights.chunks_exact(k));
            for (&position, (ids, weights)) in routed.positions.iter().zip(rows) {
                let choice = (ids.to_vec(), weights.to_vec());
                let at = (routed.layer.0, position);
                seen.borrow_mut().insert(at, choice);
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
    let (recorder, ended) = session.into_recorder();
    ended.unwrap();
    recorder.into_writer().unwrap().finish().unwrap();
    Recorded {
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

/// The name of a record's operation, without its layer.
pub fn stem(record: &TensorAccessLog) -> String {
    let name = record.dst_name().into_owned();
    let cut = name.rsplit_once('-').map(|(stem, _)| stem.to_owned());
    cut.unwrap_or(name)
}

/// Of the experts that a layer chose in a pass, each once, in the order of the rows.
pub fn distinct(observed: &Choices, layer: u16, pass: &MeasuredPass) -> Vec<i32> {
    let rows = match pass.phase {
        Phase::Prompt => 0..PROMPT.len() as u32,
        Phase::Generate => pass.position..pass.position + 1,
    };
    let mut distinct = Vec::new();
    for (ids, _) in rows.filter_map(|position| observed.get(&(layer, position))) {
        for &id in ids {
            if !distinct.contains(&id) {
                distinct.push(id);
            }
        }
    }
    distinct
}
