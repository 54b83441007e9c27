//! Records and observations of passes over several sequences.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::rc::Rc;

use moe_engine::{BatchEntry, BatchSession, Mode, RouterOutput};
use moe_executor::cpu::threads::Threads;
use moe_executor::recorder::Recorder;
use moe_executor::{CacheParams, CacheType, Model, Session};
use moe_gguf::Gguf;
use moe_gguf::map::OffsetMap;
use moe_testkit::fixture;
use moe_trace::{Manifest, Phase, Run, RunOptions, RunWriter, check};

/// Sequence id, layer, position.
type Key = (u32, u16, u32);
/// Experts, weights and phase of a token in a layer.
type Routed = (Vec<u32>, Vec<f32>, Phase);
type Rows = BTreeMap<Key, Routed>;

const PROMPTS: [(u32, &[u32]); 2] = [(4, &[300, 301, 302, 303, 304]), (9, &[7, 400, 33])];
const GENERATED: [u32; 2] = [11, 12];

/// Records passes over `batches`, and returns the observed routing.
fn record(dir: &Path, batches: &[Vec<BatchEntry>]) -> Rows {
    let gguf = Gguf::open(fixture("random-qwen3moe-F16.gguf")).unwrap();
    let model = Model::load(&gguf).unwrap();
    let hp = model.hparams();
    let mut manifest = Manifest::default();
    manifest.model.n_layer = hp.n_layer as u32;
    manifest.model.n_expert = hp.n_expert as u32;
    manifest.model.n_expert_used = hp.n_expert_used as u32;
    let writer =
        RunWriter::create(dir, manifest, &OffsetMap::new(&gguf), RunOptions::default()).unwrap();
    let threads = Threads::new(1).unwrap();
    let recorder = Recorder::new(Some(writer)).with_mode(Mode::All);
    let cache = CacheParams::of_type(CacheType::F32, 64).with_sequences(2);
    let mut session = Session::new(&model, &threads, recorder, cache).unwrap();
    let observed: Rc<RefCell<Rows>> = Rc::default();
    let rows = observed.clone();
    session.set_observer(Some(Box::new(move |output: &RouterOutput| {
        let k = output.n_expert_used;
        let tokens = output.positions.iter().zip(output.sequences);
        for (row, (&position, sequence)) in tokens.enumerate() {
            let ids = output.ids[row * k..][..k].iter().map(|&id| id as u32);
            let weights = output.weights[row * k..][..k].to_vec();
            let routed = (ids.collect(), weights, sequence.phase);
            let key = (sequence.id, output.layer.0, position);
            assert!(rows.borrow_mut().insert(key, routed).is_none(), "{key:?}");
        }
    })));
    for (slot, (id, _)) in PROMPTS.into_iter().enumerate() {
        session.begin_slot(slot, id).unwrap();
    }
    for batch in batches {
        session.decode_batch(batch).unwrap();
    }
    session.set_observer(None);
    let (recorder, ended) = session.into_recorder();
    ended.unwrap();
    recorder.into_writer().unwrap().finish().unwrap();
    observed.take()
}

/// The entries of the prompt of a slot from position `from` to `to`, and whether the logits of the last one are wanted.
fn prompt(slot: usize, from: usize, to: usize, logits: bool) -> Vec<BatchEntry> {
    let tokens = PROMPTS[slot].1;
    let entry = |position| BatchEntry {
        slot,
        token: tokens[position],
        position,
        phase: Phase::Prompt,
        logits: logits && position + 1 == to,
    };
    (from..to).map(entry).collect()
}

/// The generated token of a slot.
fn generated(slot: usize) -> Vec<BatchEntry> {
    vec![BatchEntry {
        slot,
        token: GENERATED[slot],
        position: PROMPTS[slot].1.len(),
        phase: Phase::Generate,
        logits: true,
    }]
}

/// The routing in the records of a run.
fn recorded(run: &Run) -> Rows {
    let mut rows = Rows::new();
    for operation in run.routing() {
        let layer = operation.head().layer().unwrap();
        for token in operation.tokens() {
            let experts: Vec<_> = token.experts().collect();
            let ids = experts.iter().map(|expert| expert.expert_id.0);
            let weights = experts.iter().map(|expert| expert.weight.unwrap());
            let phase = token.head().phase().unwrap();
            let routed = (ids.collect(), weights.collect(), phase);
            let key = (token.sequence_id().unwrap(), layer.0, token.token_id().0);
            assert!(rows.insert(key, routed).is_none(), "{key:?}");
        }
    }
    rows
}

#[test]
fn tokens_of_a_batch_have_the_routing_that_they_have_alone() {
    let dir = tempfile::tempdir().unwrap();
    let together = [
        // A chunk of one prompt and the other prompt; then the rest of the prompt and a generated token; then two of them. In the
        // second pass the first token of the last layer is not that of the pass.
        [prompt(0, 0, 2, false), prompt(1, 0, 3, true)].concat(),
        [prompt(0, 2, 4, false), generated(1)].concat(),
        prompt(0, 4, 5, true),
        generated(0),
    ];
    let path = dir.path().join("together");
    let observed = record(&path, &together);
    let run = Run::open(&path).unwrap();
    assert_eq!(check::check(&run), []);
    let rows = recorded(&run);
    assert_eq!(rows, observed);
    let passes = moe_trace::passes::Passes::new(run.trace.operations());
    assert_eq!(passes.count(), together.len());

    let mut alone = Rows::new();
    for (slot, batches) in [
        (
            0,
            vec![
                prompt(0, 0, 2, false),
                prompt(0, 2, 4, false),
                prompt(0, 4, 5, true),
                generated(0),
            ],
        ),
        (1, vec![prompt(1, 0, 3, true), generated(1)]),
    ] {
        let path = dir.path().join(slot.to_string());
        record(&path, &batches);
        alone.extend(recorded(&Run::open(&path).unwrap()));
    }
    // Kernels of other batch sizes add in another order, so that weights differ in their last bits.
    assert!(rows.keys().eq(alone.keys()));
    for (key, (ids, weights, phase)) in &rows {
        let (ids_alone, weights_alone, phase_alone) = &alone[key];
        assert_eq!((ids, phase), (ids_alone, phase_alone), "{key:?}");
        for (weight, alone) in weights.iter().zip(weights_alone) {
            assert!((weight - alone).abs() < 1e-5, "{key:?}: {weight} {alone}");
        }
    }
    let generated = rows.iter().filter(|(_, row)| row.2 == Phase::Generate);
    let keys: BTreeSet<(u32, u32)> = generated.map(|(key, _)| (key.0, key.2)).collect();
    assert_eq!(keys, BTreeSet::from([(4, 5), (9, 3)]));
}
