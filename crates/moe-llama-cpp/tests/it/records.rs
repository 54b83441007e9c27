//! Runs recorded by both engines have the same routing and the same accesses to the model's files.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use moe_engine::{Decode, Logits, Mode};
use moe_executor::cpu::threads::Threads;
use moe_executor::recorder::Recorder;
use moe_executor::{Adapter, CacheParams, CacheType};
use moe_gguf::map::OffsetMap;
use moe_gguf::{GgmlType, Gguf};
use moe_llama_cpp::{OpNumbers, Recording};
use moe_trace::buffers::{self, Change};
use moe_trace::graph::{self, Graph, LEAF};
use moe_trace::{
    LayerId, Manifest, Phase, Run, RunOptions, RunWriter, TensorAccessLog, check, ops,
};

use crate::architectures::{DESCRIBED, check_each};
use crate::compare::some_tokens;
use crate::engines::{N_CTX, Variant, params};
use crate::models::{described, fixture, make, n_vocab, small};

/// Evaluates two sequences: a prompt in two batches with three further tokens, and a short one.
fn feed(session: &mut dyn Decode, n_vocab: u32) {
    let tokens = some_tokens(43, n_vocab, 11);
    session.begin_sequence(0);
    let mut decode = |tokens: &[u32], phase, logits| {
        session.decode(tokens, phase, logits).map(drop).unwrap();
    };
    decode(&tokens[..32], Phase::Prompt, Logits::None);
    decode(&tokens[32..40], Phase::Prompt, Logits::Last);
    for token in &tokens[40..] {
        decode(&[*token], Phase::Generate, Logits::Last);
    }
    session.begin_sequence(1);
    session
        .decode(&tokens[..5], Phase::Prompt, Logits::Last)
        .map(drop)
        .unwrap();
    session
        .decode(&tokens[5..6], Phase::Generate, Logits::Last)
        .map(drop)
        .unwrap();
}

fn writer(dir: &Path, map: &OffsetMap, ops: ops::OpTable) -> RunWriter {
    let manifest = Manifest {
        ops,
        ..Manifest::default()
    };
    RunWriter::create(dir, manifest, map, RunOptions::default()).unwrap()
}

/// The runs of both engines with an F16 cache, the executor's first.
pub fn both(dir: &Path, path: &Path, mode: Mode) -> [Run; 2] {
    both_with(dir, path, mode, CacheType::F16)
}

/// Like [`both`], with a KV cache of type `cache`.
fn both_with(dir: &Path, path: &Path, mode: Mode, cache: CacheType) -> [Run; 2] {
    both_of(dir, path, &[], mode, cache)
}

/// Like [`both`], with an adapter.
pub fn both_adapted(dir: &Path, path: &Path, adapter: &Path, mode: Mode) -> [Run; 2] {
    let adapter = Gguf::open(adapter).unwrap();
    both_of(dir, path, &[&adapter], mode, CacheType::F16)
}

fn both_of(dir: &Path, path: &Path, adapters: &[&Gguf], mode: Mode, cache: CacheType) -> [Run; 2] {
    let gguf = Gguf::open(path).unwrap();
    let map = OffsetMap::with_adapters(&gguf, adapters);
    let n_vocab = n_vocab(&gguf);
    let [ours, theirs] = ["ours", "theirs"].map(|name| dir.join(name));

    let adapted: Vec<Adapter> = adapters
        .iter()
        .map(|gguf| Adapter { gguf, scale: 0.5 })
        .collect();
    let model = moe_executor::Model::load_with_adapters(&gguf, &adapted).unwrap();
    let threads = Threads::new(1).unwrap();
    let writer_of_ours = writer(&ours, &map, ops::default_table().clone());
    let recorder = Recorder::new(Some(writer_of_ours)).with_mode(mode);
    let mut session = moe_executor::Session::new(
        &model,
        &threads,
        recorder,
        CacheParams::of_type(cache, N_CTX),
    )
    .unwrap();
    feed(&mut session, n_vocab);
    let (recorder, ended) = session.into_recorder();
    ended.unwrap();
    recorder.into_writer().unwrap().finish().unwrap();

    let scaled: Vec<(&Gguf, f32)> = adapters.iter().map(|gguf| (*gguf, 0.5)).collect();
    let model = moe_llama_cpp::Model::load_with_adapters(&gguf, &scaled).unwrap();
    let writer_of_theirs = writer(&theirs, &map, OpNumbers::new().table().clone());
    let recording = Recording::new(&gguf, Some(writer_of_theirs), mode, None);
    let recording = recording.with_adapters(&gguf, adapters);
    let variant = Variant {
        flash_attention: true,
        cache,
    };
    let session = moe_llama_cpp::Session::new(&model, &gguf, params(variant), N_CTX, recording);
    let mut session = session.unwrap();
    feed(&mut session, n_vocab);
    let (writer, ended) = moe_engine::Session::into_writer(Box::new(session));
    ended.unwrap();
    writer.unwrap().finish().unwrap();

    [ours, theirs].map(|dir| {
        let run = Run::open(dir).unwrap();
        assert_eq!(check::check(&run), []);
        run
    })
}

/// A weight that was read: name, file, offset, size, index.
type Weight = (String, u16, u64, u64, u32);

/// Starts and ends of the names of the weights that the first product of a recurrent layer reads, and those of the last.
const FIRST_PRODUCTS: [&str; 4] = [
    ".attn_q.weight",
    ".attn_qkv.weight",
    ".shortconv.in_proj.weight",
    ".ssm_in.weight",
];
const LAST_PRODUCTS: [&str; 3] = [
    ".attn_output.weight",
    ".shortconv.out_proj.weight",
    ".ssm_out.weight",
];

/// Starts of the names of recurrent states. llama.cpp renames some of them.
const STATES: [&str; 3] = ["cache_r_", "cache_s_", "conv_states_all-"];

/// An operation of a run: its name, and the names of its sources.
struct Named {
    op: String,
    layer: Option<LayerId>,
    name: String,
    reads: Vec<String>,
}

/// The operations that both engines have: their indices, and whether they are in a recurrent layer. From the first product of a recurrent
/// layer to its last one, these are the products with weights and the selection of output rows. llama.cpp also reads, clears and writes
/// the states of recurrent layers in nodes of their own.
fn common(operations: &[Named]) -> Vec<(usize, bool)> {
    let convolutions = operations.iter().filter(|named| named.op == "SSM_CONV");
    let recurrent: BTreeSet<LayerId> = convolutions.filter_map(|named| named.layer).collect();
    let mut common = Vec::new();
    let mut is_inside = false;
    for (i, named) in operations.iter().enumerate() {
        let reads = |ends: &[&str]| {
            let mut reads = named.reads.iter();
            reads.any(|name| ends.iter().any(|end| name.ends_with(end)))
        };
        let is_recurrent = named.layer.is_some_and(|layer| recurrent.contains(&layer));
        is_inside |= is_recurrent && reads(&FIRST_PRODUCTS);
        let mut names = named.reads.iter().chain([&named.name]);
        let has_state = names.any(|name| STATES.iter().any(|state| name.starts_with(state)));
        let is_product = named.op == "MUL_MAT" && reads(&[".weight"]);
        if is_product || reads(&["out_ids"]) || !(is_inside || has_state) {
            common.push((i, is_inside));
        }
        is_inside &= !reads(&LAST_PRODUCTS);
    }
    common
}

/// The records of the operations that both engines have.
fn common_records(run: &Run) -> Vec<&TensorAccessLog> {
    let records = run.trace.records();
    let named = records.iter().map(|record| Named {
        op: run.ops().name(record.operation_type).unwrap().to_owned(),
        layer: record.layer(),
        name: record.dst_name().into_owned(),
        reads: record
            .sources()
            .iter()
            .map(|source| source.name().into_owned())
            .collect(),
    });
    let named: Vec<Named> = named.collect();
    let common = common(&named).into_iter();
    common.map(|(i, _)| &records[i]).collect()
}

/// The values of a record that must be equal for both engines.
#[derive(Debug, PartialEq)]
struct RecordFacts {
    op: String,
    name: String,
    layer: Option<LayerId>,
    phase: u8,
    token_id: u32,
    sequence_id: u32,
    n_tokens: u32,
    weights: Vec<Weight>,
    n_sources: usize,
    n_experts: usize,
    slot_base: u8,
    flags: u8,
}

fn facts_of(run: &Run, record: &TensorAccessLog) -> RecordFacts {
    let weights = record
        .sources()
        .iter()
        .enumerate()
        .filter(|(_, s)| s.is_disk());
    RecordFacts {
        op: run.ops().name(record.operation_type).unwrap().to_owned(),
        name: record.dst_name().into_owned(),
        layer: record.layer(),
        phase: record.phase,
        token_id: record.token_id.get(),
        sequence_id: record.sequence_id.get(),
        n_tokens: record.n_tokens.get(),
        weights: weights
            .map(|(i, source)| {
                (
                    source.name().into_owned(),
                    record.source_file[i].get(),
                    source.offset_or_buffer_id.get(),
                    record.source_size(i),
                    source.tensor_idx.get(),
                )
            })
            .collect(),
        n_sources: record.sources().len(),
        n_experts: record.expert_ids().len(),
        slot_base: record.expert_slot_base,
        flags: record.flags,
    }
}

/// Experts of a record with their weights, sorted by expert because near ties may have another order.
fn experts(record: &TensorAccessLog) -> BTreeMap<i32, f32> {
    let ids = record.expert_ids().iter().map(|id| id.get());
    ids.zip(record.expert_weights.iter().map(|w| w.get()))
        .collect()
}

/// Compares the runs record by record and returns the number of records. Names are not compared where llama.cpp's node is
/// unnamed. At least 99 % of the tokens have the same experts with the same weights.
pub fn agree(runs: &[Run; 2]) -> usize {
    agree_with(runs, 99)
}

/// Like [`agree`], with the same experts for at least `percent` % of the routed tokens.
fn agree_with([ours, theirs]: &[Run; 2], percent: u32) -> usize {
    let (a, b) = (common_records(ours), common_records(theirs));
    let (mut n_same, mut n_tokens) = (0, 0);
    let (mut n_weights, mut difference) = (0u32, 0.0);
    for (&a, &b) in a.iter().zip(&b) {
        let (facts_a, mut facts_b) = (facts_of(ours, a), facts_of(theirs, b));
        // Also the suffix of a view of a node without a name.
        if facts_b.name.starts_with("node_") || facts_b.name.starts_with(' ') {
            facts_b.name.clone_from(&facts_a.name);
        }
        assert_eq!(facts_a, facts_b);
        assert!(b.duration_ns.get() > 0);
        if facts_a.n_experts == 0 {
            continue;
        }
        n_tokens += 1;
        let (a, b) = (experts(a), experts(b));
        if !a.keys().eq(b.keys()) {
            continue;
        }
        n_same += 1;
        for (a, b) in a.values().zip(b.values()) {
            n_weights += 1;
            difference += f64::from((a - b).abs());
        }
    }
    // Both have a cache in F16. The models are random, so that a router amplifies differences of the rounding.
    let difference = difference / f64::from(n_weights.max(1));
    assert!(
        difference < 2e-3,
        "mean difference of the weights: {difference}"
    );
    assert_eq!(a.len(), b.len());
    assert!(
        n_tokens > 0 && n_same * 100 >= n_tokens * percent,
        "{n_same} of {n_tokens}"
    );
    a.len()
}

#[test]
fn records_of_fixtures_agree() {
    for arch in ["dots1", "gpt-oss", "llama", "olmoe", "qwen2moe", "qwen3moe"] {
        let dir = tempfile::tempdir().unwrap();
        let path = fixture(format!("random-{arch}-F16.gguf"));
        assert!(agree(&both(dir.path(), &path, Mode::All)) > 500, "{arch}");
    }
}

/// Described architectures whose output rows llama.cpp selects before the output of the attention in the last layer: the llama.cpp engine
/// then records this output with the selected tokens.
const ROWS_FIRST: [&str; 3] = ["arctic", "lfm2moe", "smallthinker"];

#[test]
fn records_of_described_models_agree() {
    let archs = DESCRIBED.into_iter();
    check_each(archs.filter(|arch| !ROWS_FIRST.contains(arch)), |arch| {
        let dir = tempfile::tempdir().unwrap();
        let path = described(dir.path(), arch, GgmlType::F32);
        // Groups of experts amplify the rounding of the cache in F16. `agree_on_described_models` has caches in F32.
        let percent = if arch == "bailingmoe2" { 97 } else { 99 };
        let runs = both(dir.path(), &path, Mode::All);
        assert!(agree_with(&runs, percent) > 500, "{arch}");
    });
}

/// An operation of a graph.
#[derive(Debug, PartialEq)]
struct Operation {
    op: String,
    name: String,
    layer: Option<LayerId>,
    /// Names of its sources, each with the label of the edge.
    reads: Vec<(String, String)>,
}

/// The operations of a run's graph, in order.
fn operations(run: &Run, phase: Phase) -> Vec<Operation> {
    let graph = Graph::read(&graph::path(&run.path, phase)).unwrap();
    let name = |id: &str| {
        let node = graph.nodes.iter().find(|node| node.id == id).unwrap();
        node.label.clone()
    };
    let reads = |id: &str| {
        let edges = graph.edges.iter().filter(|edge| edge.target == id);
        let read = edges.map(|edge| (name(&edge.source), edge.label.clone()));
        read.collect()
    };
    let nodes = graph.nodes.iter().filter(|node| node.operation != LEAF);
    nodes
        .map(|node| Operation {
            op: node.operation.clone(),
            name: node.label.clone(),
            layer: node.layer_id,
            reads: reads(&node.id),
        })
        .collect()
}

/// The operations that both engines have. Products of recurrent layers read only their weights.
fn common_operations(run: &Run, phase: Phase) -> Vec<Operation> {
    let mut operations: Vec<Option<Operation>> =
        operations(run, phase).into_iter().map(Some).collect();
    let named = operations.iter().flatten().map(|operation| Named {
        op: operation.op.clone(),
        layer: operation.layer,
        name: operation.name.clone(),
        reads: operation
            .reads
            .iter()
            .map(|(name, _)| name.clone())
            .collect(),
    });
    let named: Vec<Named> = named.collect();
    let common = common(&named).into_iter();
    let common = common.filter_map(|(i, is_inside)| {
        let mut operation = operations[i].take()?;
        if is_inside {
            operation.reads.retain(|(name, _)| name.starts_with("blk."));
        }
        Some(operation)
    });
    common.collect()
}

/// Compares operations, their order and their sources.
pub fn graphs_agree([ours, theirs]: &[Run; 2]) {
    for phase in Phase::ALL {
        let [ours, mut theirs] = [ours, theirs].map(|run| common_operations(run, phase));
        assert_eq!(ours.len(), theirs.len());
        // Nodes that llama.cpp does not name have a name in the executor.
        let named = theirs.iter().zip(&ours);
        let named = named.filter(|(theirs, _)| theirs.name.starts_with("node_"));
        let names: BTreeMap<String, String> = named
            .map(|(theirs, ours)| (theirs.name.clone(), ours.name.clone()))
            .collect();
        for (operation, ours) in theirs.iter_mut().zip(&ours) {
            // A view of a node without a name.
            if operation.name.is_empty() {
                operation.name.clone_from(&ours.name);
            }
            let read = operation.reads.iter_mut().map(|(name, _)| name);
            for name in read.chain([&mut operation.name]) {
                if let Some(ours) = names.get(name) {
                    name.clone_from(ours);
                }
            }
        }
        for (theirs, ours) in theirs.iter().zip(&ours) {
            assert_eq!(theirs, ours);
        }
    }
}

#[test]
fn graphs_of_described_models_agree() {
    check_each(DESCRIBED, |arch| {
        let dir = tempfile::tempdir().unwrap();
        let path = described(dir.path(), arch, GgmlType::F32);
        graphs_agree(&both(dir.path(), &path, Mode::All));
    });
}

#[test]
fn graphs_agree_and_buffers_are_recorded() {
    let dir = tempfile::tempdir().unwrap();
    let path = fixture("random-qwen3moe-F16.gguf");
    let runs = both(dir.path(), &path, Mode::All);
    graphs_agree(&runs);
    let [_, theirs] = runs;
    let events = buffers::read(&theirs.path.join(buffers::FILE_NAME)).unwrap();
    let allocated: BTreeSet<u64> = events
        .iter()
        .map(|event| match &event.change {
            Change::Alloc(buffer) => {
                assert!(buffer.size > 0 && !buffer.name.is_empty());
                buffer.buffer_id
            }
            Change::Dealloc { .. } => panic!("llama.cpp does not deallocate buffers"),
        })
        .collect();
    for record in theirs.trace.records() {
        for source in record.sources().iter().filter(|source| !source.is_disk()) {
            assert!(allocated.contains(&source.offset_or_buffer_id.get()));
        }
    }
}

/// A KV cache tensor in a graph: name, type, elements of a row, and bytes from a row to the next.
type CacheNode = (String, String, u64, u64);

/// The cache tensors of a run's graph, in order of their names.
fn cache_nodes(run: &Run, phase: Phase) -> Vec<CacheNode> {
    let graph = Graph::read(&graph::path(&run.path, phase)).unwrap();
    let nodes = graph.nodes.into_iter();
    let nodes = nodes.filter(|node| node.label.starts_with("cache_") && node.operation == LEAF);
    let mut nodes: Vec<CacheNode> = nodes
        .map(|node| {
            let (width, rows) = (node.shape[0], node.shape[1..].iter().product::<u64>());
            let bytes = node.size_bytes.unwrap();
            assert_eq!(bytes % rows, 0, "{node:?}");
            (node.label, node.dtype, width, bytes / rows)
        })
        .collect();
    nodes.sort_unstable();
    nodes
}

/// Sources of a record that are views of the KV cache: name and size.
fn cache_views(record: &TensorAccessLog) -> Vec<(String, u64)> {
    let sources = record.sources().iter().enumerate();
    let views = sources.filter(|(_, source)| source.name().starts_with("cache_"));
    views
        .map(|(i, source)| (source.name().into_owned(), record.source_size(i)))
        .collect()
}

/// Views of keys and values have the names, types, row sizes and strides of llama.cpp's nodes. llama.cpp reads a multiple of 256
/// positions, the executor only those that a token attends to. For a quantized cache, llama.cpp also rotates queries, keys and
/// values, which adds operations.
#[test]
fn cache_views_agree() {
    for ty in [CacheType::F16, CacheType::Q8_0] {
        let dir = tempfile::tempdir().unwrap();
        let path = fixture("tiny-qwen3moe-Q4_K_M.gguf");
        let runs = both_with(dir.path(), &path, Mode::All, ty);
        let mut row_size = BTreeMap::new();
        for phase in Phase::ALL {
            let [ours, theirs] = runs.each_ref().map(|run| cache_nodes(run, phase));
            assert_eq!(ours, theirs, "{ty}");
            assert!(!ours.is_empty() && ours.iter().all(|(_, dtype, ..)| dtype == ty.name()));
            row_size.extend(ours.into_iter().map(|(name, _, _, bytes)| (name, bytes)));
        }
        let [ours, theirs] = runs.each_ref().map(|run| {
            let views = run.trace.records().iter().map(cache_views);
            let views = views.filter(|views| !views.is_empty());
            views.collect::<Vec<_>>()
        });
        assert_eq!(ours.len(), theirs.len());
        let mut n_views = 0;
        for (ours, theirs) in ours.iter().zip(&theirs) {
            assert_eq!(ours.len(), theirs.len());
            for ((name, bytes), (name_of_theirs, bytes_of_theirs)) in ours.iter().zip(theirs) {
                assert_eq!(name, name_of_theirs);
                let row = row_size[name.split(' ').next().unwrap()];
                assert_eq!((bytes % row, bytes_of_theirs % row), (0, 0), "{ty}, {name}");
                assert!(0 < *bytes && bytes <= bytes_of_theirs, "{ty}, {name}");
                n_views += 1;
            }
        }
        assert!(n_views > 0);
    }
}

#[test]
fn expert_operations_agree() {
    let dir = tempfile::tempdir().unwrap();
    let path = fixture("random-gpt-oss-F16.gguf");
    // 4 layers, 6 expert operations, 49 tokens
    let runs = both(dir.path(), &path, Mode::Experts);
    assert_eq!(agree(&runs), 4 * 6 * 49);
}

/// Weights that llama.cpp repacks for the CPU are recorded with their places in the file.
#[test]
fn repacked_weights_keep_their_file_offsets() {
    let dir = tempfile::tempdir().unwrap();
    let path = make(dir.path(), "model", &small("qwen3-30b-a3b", "Q4_K"));
    let [ours, theirs] = both(dir.path(), &path, Mode::All);
    let weights = |run: &Run| {
        let mut seen: BTreeMap<Weight, usize> = BTreeMap::new();
        for record in run.trace.records() {
            for weight in facts_of(run, record).weights {
                *seen.entry(weight).or_default() += 1;
            }
        }
        seen
    };
    assert_eq!(weights(&ours), weights(&theirs));
}

/// Further experts than a record can contain are in continuation records.
#[test]
fn records_of_more_than_16_experts_agree() {
    let dir = tempfile::tempdir().unwrap();
    let mut spec = small("qwen3-30b-a3b", "F16");
    (spec.n_expert, spec.n_expert_used) = (32, 20);
    let path = make(dir.path(), "model", &spec);
    let [ours, theirs] = both(dir.path(), &path, Mode::Experts);
    let experts = |run: &Run| {
        let mut seen: BTreeMap<(String, u32, u32), Vec<i32>> = BTreeMap::new();
        for record in run.trace.records() {
            let facts = facts_of(run, record);
            let (base, n) = if facts.flags == 0 { (0, 16) } else { (16, 4) };
            assert_eq!((facts.slot_base, facts.n_experts), (base, n));
            let ids = seen
                .entry((facts.name, facts.sequence_id, facts.token_id))
                .or_default();
            assert_eq!(ids.len(), usize::from(base));
            ids.extend(record.expert_ids().iter().map(|id| id.get()));
        }
        // Near ties may have another order.
        seen.values_mut().for_each(|ids| ids.sort_unstable());
        seen
    };
    let (ours, theirs) = (experts(&ours), experts(&theirs));
    assert!(ours.keys().eq(theirs.keys()));
    let n_same = ours
        .values()
        .zip(theirs.values())
        .filter(|(a, b)| a == b)
        .count();
    assert!(
        n_same * 100 >= ours.len() * 99,
        "{n_same} of {}",
        ours.len()
    );
}
