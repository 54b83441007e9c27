//! What a run leaves in its trace: the operations of llama.cpp's graph under its names, and as many as announced.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use moe_executor::cpu::threads::Threads;
use moe_executor::generate::{Decode, Generated, Limits, Stop, generate, max_records};
use moe_executor::recorder::{Mode, Recorder};
use moe_executor::sampler::{Sampler, SamplerParams};
use moe_executor::session::Logits;
use moe_executor::{Model, Session};
use moe_gguf::Gguf;
use moe_gguf::map::OffsetMap;
use moe_trace::buffers::{self, BufferEvent, Change, Timeline};
use moe_trace::correlation::Correlation;
use moe_trace::graph::{self, Graph};
use moe_trace::names::base_name;
use moe_trace::record::{FLAG_SOURCES_OMITTED, PHASE_GENERATE, PHASE_PROMPT, SOURCE_BUFFER};
use moe_trace::{Manifest, RunOptions, RunWriter, TensorAccessLog, Trace, ops};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures")
}

/// Nodes that llama.cpp computes for a prompt with flash attention: operation, name, names of the sources.
type Nodes = BTreeMap<String, Vec<(String, String, Vec<String>)>>;

struct Recorded {
    records: Vec<TensorAccessLog>,
    /// Of the prompt and of a generated token.
    graphs: [Graph; 2],
    buffers: Vec<BufferEvent>,
    announced: u64,
    generated: Generated,
}

fn record(file: &str, prompt: &[u32], limits: Limits, options: RunOptions) -> Recorded {
    record_mode(file, prompt, limits, options, Mode::All)
}

fn record_mode(
    file: &str,
    prompt: &[u32],
    limits: Limits,
    options: RunOptions,
    mode: Mode,
) -> Recorded {
    let gguf = Gguf::open(fixtures().join(file)).unwrap();
    let model = Model::load(&gguf).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let map = OffsetMap::new(&gguf);
    let writer = RunWriter::create(&run, Manifest::default(), &map, options).unwrap();
    let threads = Threads::new(1).unwrap();
    let recorder = Recorder::new(Some(writer)).with_mode(mode);
    let mut session = Session::new(&model, &threads, recorder, 1024);
    let mut sampler = Sampler::new(SamplerParams::default());
    let go_on = AtomicBool::new(false);
    let generated = generate(&mut session, &mut sampler, prompt, &limits, &go_on, |_| {}).unwrap();
    session
        .into_recorder()
        .into_writer()
        .unwrap()
        .finish()
        .unwrap();
    Recorded {
        graphs: [PHASE_PROMPT, PHASE_GENERATE]
            .map(|phase| Graph::read(&graph::path(&run, phase)).unwrap()),
        buffers: buffers::read(&run.join(buffers::FILE_NAME)).unwrap(),
        records: Trace::open(run.join("trace.bin"))
            .unwrap()
            .records()
            .to_vec(),
        announced: max_records(
            |n_tokens| model.records_per_pass(n_tokens, mode),
            prompt.len(),
            1024,
            &limits,
        ),
        generated,
    }
}

const LIMITS: Limits = Limits {
    n_predict: 3,
    n_batch: 512,
    ignore_eos: true,
};

/// Where llama.cpp has no name, the record has one of its own.
fn same_name(theirs: &str, ours: &str) -> bool {
    theirs.starts_with("node_") || theirs == ours
}

fn follows_llama_cpp(file: &str, arch: &str) {
    let json = std::fs::read(fixtures().join("reference/nodes.json")).unwrap();
    let nodes: Nodes = serde_json::from_slice(&json).unwrap();
    let prompt: Vec<u32> = (300..309).collect();
    let recorded = record(file, &prompt, LIMITS, RunOptions::default());
    for (graph, n_tokens) in recorded.graphs.iter().zip([9, 1]) {
        graph_follows_llama_cpp(&nodes[arch], graph);
        assert_eq!(graph.metadata.n_tokens, Some(n_tokens));
    }

    // one record an operation: the first of every group with the same start
    let mut operations: Vec<&TensorAccessLog> = Vec::new();
    for record in recorded.records.iter().filter(|r| r.phase == PHASE_PROMPT) {
        let same = |last: &&TensorAccessLog| {
            (last.timestamp_ns, last.dst_name) == (record.timestamp_ns, record.dst_name)
        };
        if !operations.last().is_some_and(same) {
            operations.push(record);
        }
    }
    assert_eq!(operations.len(), nodes[arch].len());
    for ((op, name, sources), record) in nodes[arch].iter().zip(operations) {
        assert_eq!(
            ops::name(record.operation_type),
            Some(op.as_str()),
            "{name}"
        );
        let ours = record.dst_name();
        assert!(same_name(name, &ours), "{name} is recorded as {ours}");
        assert_eq!(
            record.sources().len(),
            sources.len().min(4),
            "sources of {name}"
        );
        assert_eq!(
            record.has_flag(FLAG_SOURCES_OMITTED),
            sources.len() > 4,
            "{name}"
        );
        for (theirs, ours) in sources.iter().zip(record.sources()) {
            assert!(
                same_name(theirs, &ours.name()),
                "{name} reads {theirs}, not {}",
                ours.name()
            );
        }
    }
}

/// The graph that the recorder wrote, against the nodes of llama.cpp: operations in order, and for each the names of all
/// that it reads, the fifth source included.
fn graph_follows_llama_cpp(nodes: &[(String, String, Vec<String>)], graph: &Graph) {
    let (operations, leaves) = graph.nodes.split_at(nodes.len());
    assert!(leaves.iter().all(|node| node.operation == "CONST"));
    let place = |id: &str| -> usize { id.strip_prefix("node_").unwrap().parse().unwrap() };
    let mut edges = graph.edges.iter();
    for (i, ((op, name, sources), node)) in nodes.iter().zip(operations).enumerate() {
        assert_eq!(&node.operation, op, "{name}");
        assert!(
            same_name(name, &node.label) || base_name(name) == node.label,
            "{name}"
        );
        assert!(!node.shape.is_empty(), "{name}");
        for (n, theirs) in sources.iter().enumerate() {
            let edge = edges.next().unwrap();
            assert_eq!(place(&edge.target), i, "{name}");
            assert!(edge.label.starts_with(&format!("src {n}")), "{name}");
            let source = place(&edge.source);
            let ours = &graph.nodes[source];
            // The chosen experts are a view of their sorting, under a name of its own.
            let renamed = theirs.replace("_topk-", "_argsort-");
            let read = base_name(&renamed);
            assert!(
                same_name(theirs, &ours.label) || read == ours.label,
                "{name} reads {theirs}"
            );
            assert!(
                source < i || ours.operation == "CONST",
                "{name} reads what comes later"
            );
        }
    }
    assert!(edges.next().is_none());
    assert_eq!(graph.metadata.total_edges as usize, graph.edges.len());
}

#[test]
fn qwen3moe_records_the_nodes_of_llama_cpp() {
    follows_llama_cpp("random-qwen3moe-F16.gguf", "qwen3moe");
}

#[test]
fn llama_records_the_nodes_of_llama_cpp() {
    follows_llama_cpp("random-llama-F16.gguf", "llama");
}

#[test]
fn qwen2moe_records_the_nodes_of_llama_cpp() {
    follows_llama_cpp("random-qwen2moe-F16.gguf", "qwen2moe");
}

#[test]
fn olmoe_records_the_nodes_of_llama_cpp() {
    follows_llama_cpp("random-olmoe-F16.gguf", "olmoe");
}

#[test]
fn dots1_records_the_nodes_of_llama_cpp() {
    follows_llama_cpp("random-dots1-F16.gguf", "dots1");
}

#[test]
fn gpt_oss_records_the_nodes_of_llama_cpp() {
    follows_llama_cpp("random-gpt-oss-F16.gguf", "gpt-oss");
}

#[test]
fn as_many_records_as_announced() {
    let prompt: Vec<u32> = (300..320).collect();
    let recorded = |file: &str| {
        let recorded = record(file, &prompt, LIMITS, RunOptions::default());
        recorded.announced - recorded.records.len() as u64
    };
    // gpt-oss routes every token in every layer: the bound is met but for a second cut in each pass
    assert_eq!(recorded("random-gpt-oss-F16.gguf"), 4);
    // elsewhere the last layer of a prompt routes one row of twenty
    for arch in ["dots1", "llama", "olmoe", "qwen2moe", "qwen3moe"] {
        assert_eq!(
            recorded(&format!("random-{arch}-F16.gguf")),
            19 * 3,
            "{arch}"
        );
    }
}

#[test]
fn every_token_of_a_batch_has_its_experts() {
    let prompt: Vec<u32> = (300..320).collect();
    let recorded = record(
        "random-qwen3moe-F16.gguf",
        &prompt,
        LIMITS,
        RunOptions::default(),
    );
    let routed = |layer: u16| -> Vec<(u8, u32)> {
        let gate = format!("ffn_moe_gate-{layer}");
        let records = recorded.records.iter().filter(|r| r.dst_name() == gate);
        records.map(|r| (r.phase, r.token_id.get())).collect()
    };
    let prompt = (0..20).map(|p| (PHASE_PROMPT, p));
    let generated = (20..23).map(|p| (PHASE_GENERATE, p));
    assert_eq!(
        routed(0),
        prompt.chain(generated.clone()).collect::<Vec<_>>()
    );
    assert_eq!(
        routed(3),
        [(PHASE_PROMPT, 19)]
            .into_iter()
            .chain(generated)
            .collect::<Vec<_>>()
    );
    for record in recorded.records.iter().filter(|r| r.num_experts > 0) {
        let mut ids: Vec<i32> = record.expert_ids().iter().map(|id| id.get()).collect();
        let sum: f32 = record.expert_weights[..4].iter().map(|w| w.get()).sum();
        assert!((sum - 1.0).abs() < 1e-5, "weights of a token sum to {sum}");
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), 4);
        assert!(ids.iter().all(|id| (0..16).contains(id)));
        assert_eq!(record.expert_lane[..5], [1, 1, 1, 1, 0]);
    }
}

#[test]
fn a_slot_of_the_experts_has_the_bytes_of_ggml_s_view() {
    let prompt: Vec<u32> = (300..320).collect();
    let file = "random-qwen3moe-F16.gguf";
    let recorded = record(file, &prompt, LIMITS, RunOptions::default());
    let sizes = |phase| -> Vec<u64> {
        let of_phase = recorded.records.iter().filter(|r| r.phase == phase);
        let sums = of_phase.filter(|r| r.dst_name() == "ffn_moe_out-0");
        sums.map(|r| r.source_size(1)).collect()
    };
    // rows of 64 f32; from the first of 20 tokens' 4 rows to the last token's
    assert_eq!(sizes(PHASE_PROMPT), [64 * 4 * (19 * 4 + 1)]);
    assert_eq!(sizes(PHASE_GENERATE), [256, 256, 256]);
}

#[test]
fn a_buffer_keeps_its_identity() {
    let prompt: Vec<u32> = (300..320).collect();
    for arch in ["dots1", "gpt-oss", "olmoe", "qwen2moe"] {
        let file = format!("random-{arch}-F16.gguf");
        let recorded = record(&file, &prompt, LIMITS, RunOptions::default());
        let mut addresses = BTreeMap::new();
        let generated = recorded.records.iter();
        for record in generated.filter(|r| r.phase == PHASE_GENERATE) {
            let buffers = record.sources().iter();
            for source in buffers.filter(|s| s.memory_source == SOURCE_BUFFER) {
                let id = source.offset_or_buffer_id.get();
                let is_cache = id >= 1 << 16;
                if !is_cache {
                    let address = source.tensor_ptr.get();
                    let first = *addresses.entry(id).or_insert(address);
                    assert_eq!(first, address, "{arch}: {} of buffer {id}", source.name());
                }
            }
        }
        assert!(addresses.len() > 10, "{addresses:?}");
    }
}

#[test]
fn every_access_to_the_file_is_an_entry_of_its_map() {
    let prompt: Vec<u32> = (300..320).collect();
    for arch in ["dots1", "gpt-oss", "llama", "olmoe", "qwen2moe", "qwen3moe"] {
        let file = format!("random-{arch}-F16.gguf");
        let recorded = record(&file, &prompt, LIMITS, RunOptions::default());
        let gguf = Gguf::open(fixtures().join(&file)).unwrap();
        let map = OffsetMap::new(&gguf);
        let correlation = Correlation::new(&map);
        let mut read = std::collections::BTreeSet::new();
        for record in &recorded.records {
            for (i, source) in record.sources().iter().enumerate() {
                let tensor = correlation.resolve(record, i);
                assert_eq!(
                    tensor.is_some(),
                    source.is_disk(),
                    "{arch}: {}",
                    source.name()
                );
                // By the name alone it is the same tensor.
                let named = gguf
                    .tensor(base_name(&source.name()))
                    .map(|tensor| tensor.index);
                assert_eq!(tensor, named, "{arch}: {}", source.name());
                read.extend(tensor);
            }
        }
        // All of the model is read, but for what a record has no place for.
        let unread = gguf
            .tensors()
            .iter()
            .filter(|tensor| !read.contains(&tensor.index));
        let unread: Vec<&str> = unread.map(|tensor| tensor.name.as_str()).collect();
        assert!(
            unread.iter().all(|name| name.contains("attn_sinks")),
            "{arch}: {unread:?}"
        );
    }
}

#[test]
fn every_buffer_that_is_read_was_told() {
    let prompt: Vec<u32> = (300..320).collect();
    for arch in ["dots1", "gpt-oss", "qwen2moe", "qwen3moe"] {
        let file = format!("random-{arch}-F16.gguf");
        let recorded = record(&file, &prompt, LIMITS, RunOptions::default());
        let mut sizes: BTreeMap<u64, u64> = BTreeMap::new();
        for event in &recorded.buffers {
            if let Change::Alloc(buffer) = &event.change {
                let size = sizes.entry(buffer.buffer_id).or_default();
                *size = buffer.size.max(*size);
            }
        }
        for record in &recorded.records {
            let sources = record.sources().iter().enumerate();
            for (i, source) in sources.filter(|(_, s)| s.memory_source == SOURCE_BUFFER) {
                let id = source.offset_or_buffer_id.get();
                // The mask is no memory: nothing is read of it.
                let told = sizes.get(&id).copied().unwrap_or(0);
                let read = record.source_size(i);
                assert!(read <= told, "{arch}: {} of buffer {id}", source.name());
                assert!(
                    told > 0 || source.name() == "attn_inp_kq_mask",
                    "{arch}: {}",
                    source.name()
                );
            }
        }
        // Told for the pass in which they came: none after the first record that reads of it.
        let first = recorded.records[0].timestamp_ns.get();
        assert!(
            recorded.buffers[0]
                .timestamp_ns
                .is_some_and(|ns| ns <= first)
        );
        let (timeline, n_strange) = Timeline::new(&recorded.buffers);
        assert_eq!(n_strange, 0);
        // At the end the weights alone are left: the file, and its vectors as f32.
        let left: Vec<_> = timeline
            .buffers
            .iter()
            .filter(|b| b.dealloc_time_ms.is_none())
            .collect();
        assert!(left.iter().all(|b| b.usage_name == "WEIGHTS"), "{left:?}");
        let size = std::fs::metadata(fixtures().join(&file)).unwrap().len();
        assert!(left.iter().any(|b| b.name == file && b.size == size));
        // Four layers of keys and values, 24 positions at least.
        let caches = timeline
            .buffers
            .iter()
            .filter(|b| b.name.starts_with("cache_"));
        assert!(caches.count() >= 6, "{arch}");
    }
}

#[test]
fn buffers_are_told_when_they_grow_and_not_for_every_token() {
    let prompt: Vec<u32> = (300..320).collect();
    let limits = Limits {
        n_predict: 100,
        ..LIMITS
    };
    let recorded = record(
        "random-qwen3moe-F16.gguf",
        &prompt,
        limits,
        RunOptions::default(),
    );
    let mut times: Vec<f64> = recorded.buffers.iter().map(|e| e.timestamp_ms).collect();
    times.dedup();
    // The prompt's 20 positions, then 40, 80 and 160 in the cache, and the end.
    assert_eq!(times.len(), 5, "{times:?}");
    assert!(times.is_sorted());
}

#[test]
fn a_full_trace_ends_between_passes() {
    let prompt: Vec<u32> = (300..320).collect();
    let options = RunOptions {
        max_trace_bytes: Some(600 << 10),
        ..RunOptions::default()
    };
    let recorded = record("random-qwen3moe-F16.gguf", &prompt, LIMITS, options);
    assert_eq!(recorded.generated.stop, Stop::TraceFull);
    assert!(recorded.records.len() <= 600);
    assert_eq!(recorded.records.last().unwrap().dst_name(), "result_output");
}

#[test]
fn experts_alone_leave_the_same_routing() {
    let prompt: Vec<u32> = (300..320).collect();
    let routing = |mode| -> Vec<(String, u32, Vec<i32>)> {
        let file = "random-gpt-oss-F16.gguf";
        let recorded = record_mode(file, &prompt, LIMITS, RunOptions::default(), mode);
        if mode == Mode::Experts {
            assert_eq!(recorded.announced, recorded.records.len() as u64);
        }
        let experts = recorded.records.iter().filter(|r| r.num_experts > 0);
        experts
            .map(|r| {
                let ids = r.expert_ids().iter().map(|id| id.get()).collect();
                (r.dst_name().into_owned(), r.token_id.get(), ids)
            })
            .collect()
    };
    let experts = routing(Mode::Experts);
    // four layers, six expert operations, twenty prompt and three generated tokens
    assert_eq!(experts.len(), 4 * 6 * 23);
    assert_eq!(experts, routing(Mode::All));
}

/// The bytes of a fixture with one F32 of a tensor replaced.
fn damaged(file: &str, tensor: &str, value: f32) -> Gguf {
    let path = fixtures().join(file);
    let mut bytes = std::fs::read(&path).unwrap();
    let at = Gguf::open(&path).unwrap().tensor(tensor).unwrap().offset as usize;
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
    Gguf::from_bytes(file, bytes).unwrap()
}

#[test]
fn results_that_are_not_finite_end_the_run() {
    let file = "random-qwen3moe-F16.gguf";
    for (tensor, value, node) in [
        ("blk.2.ffn_norm.weight", f32::NAN, "ffn_moe_logits-2"),
        ("blk.1.attn_norm.weight", f32::INFINITY, "ffn_moe_logits-1"),
        ("output_norm.weight", f32::NAN, "result_output"),
    ] {
        let gguf = damaged(file, tensor, value);
        let model = Model::load(&gguf).unwrap();
        let threads = Threads::new(1).unwrap();
        let mut session = Session::new(&model, &threads, Recorder::new(None), 64);
        let error = session
            .decode(&[300, 301], PHASE_PROMPT, Logits::Last)
            .unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with(&format!("{node} at position")),
            "{error}"
        );
    }
}

#[test]
fn a_layer_that_the_header_does_not_count_is_refused() {
    let path = fixtures().join("random-qwen3moe-F16.gguf");
    let mut bytes = std::fs::read(&path).unwrap();
    let key = b"qwen3moe.block_count";
    let at = bytes.windows(key.len()).position(|w| w == key).unwrap() + key.len() + 4;
    assert_eq!(bytes[at..at + 4], 4u32.to_le_bytes());
    bytes[at] = 3;
    let gguf = Gguf::from_bytes("short", bytes).unwrap();
    let error = Model::load(&gguf).err().unwrap().to_string();
    assert!(
        error.contains("blk.3.") && error.contains("the model has 3"),
        "{error}"
    );
}
