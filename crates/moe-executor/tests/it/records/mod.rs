//! Records of a run: the operations of llama.cpp's graph with its names, and their number.

mod batches;
mod buffer_events;
pub mod described;
mod memory;
mod nodes;
mod refused;

use std::sync::atomic::AtomicBool;

use moe_engine::{Generated, Limits, Mode, Sampler, SamplerParams, Stop, generate, max_records};
use moe_executor::cpu::threads::Threads;
use moe_executor::recorder::Recorder;
use moe_executor::{CacheParams, Model, Session};
use moe_gguf::Gguf;
use moe_gguf::map::OffsetMap;
use moe_testkit::fixture;
use moe_trace::buffers::{self, BufferEvent};
use moe_trace::correlation::Correlation;
use moe_trace::graph::{self, Graph};
use moe_trace::names::base_name;
use moe_trace::record::{PHASE_GENERATE, PHASE_PROMPT};
use moe_trace::{Manifest, Phase, RunOptions, RunWriter, TensorAccessLog, Trace};

struct Recorded {
    records: Vec<TensorAccessLog>,
    /// Graphs of a prompt and of a decoded token.
    graphs: [Graph; 2],
    buffers: Vec<BufferEvent>,
    /// Upper bound of the number of records, computed before the run.
    max_records: u64,
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
    record_with(file, prompt, limits, options, mode, CacheParams::new(1024))
}

/// Like [`record_mode`], with a KV cache of 1,024 positions.
fn record_with(
    file: &str,
    prompt: &[u32],
    limits: Limits,
    options: RunOptions,
    mode: Mode,
    cache: CacheParams,
) -> Recorded {
    let gguf = Gguf::open(fixture(file)).unwrap();
    let model = Model::load(&gguf).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let map = OffsetMap::new(&gguf);
    let writer = RunWriter::create(&run, Manifest::default(), &map, options).unwrap();
    let threads = Threads::new(1).unwrap();
    let recorder = Recorder::new(Some(writer)).with_mode(mode);
    let mut session = Session::new(&model, &threads, recorder, cache).unwrap();
    let mut sampler = Sampler::new(SamplerParams::default());
    let go_on = AtomicBool::new(false);
    let generated = generate(&mut session, &mut sampler, prompt, &limits, &go_on, |_| {}).unwrap();
    let (recorder, ended) = session.into_recorder();
    ended.unwrap();
    recorder.into_writer().unwrap().finish().unwrap();
    Recorded {
        graphs: Phase::ALL.map(|phase| Graph::read(&graph::path(&run, phase)).unwrap()),
        buffers: buffers::read(&run.join(buffers::FILE_NAME)).unwrap(),
        records: Trace::open(run.join("trace.bin"))
            .unwrap()
            .records()
            .to_vec(),
        max_records: max_records(
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

#[test]
fn number_of_records_is_close_to_its_bound() {
    let prompt: Vec<u32> = (300..320).collect();
    let recorded = |file: &str| {
        let recorded = record(file, &prompt, LIMITS, RunOptions::default());
        recorded.max_records - recorded.records.len() as u64
    };
    // gpt-oss routes all tokens in all layers.
    assert_eq!(recorded("random-gpt-oss-F16.gguf"), 0);
    // In the other architectures the last layer routes one of the 20 tokens of the prompt.
    for arch in ["dots1", "llama", "olmoe", "qwen2moe", "qwen3moe"] {
        assert_eq!(
            recorded(&format!("random-{arch}-F16.gguf")),
            19 * 3,
            "{arch}"
        );
    }
}

#[test]
fn records_the_experts_of_each_token() {
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
fn size_of_an_expert_slot_is_that_of_the_view_in_ggml() {
    let prompt: Vec<u32> = (300..320).collect();
    let file = "random-qwen3moe-F16.gguf";
    let recorded = record(file, &prompt, LIMITS, RunOptions::default());
    let sizes = |phase| -> Vec<u64> {
        let of_phase = recorded.records.iter().filter(|r| r.phase == phase);
        let sums = of_phase.filter(|r| r.dst_name() == "ffn_moe_out-0");
        sums.map(|r| r.source_size(1)).collect()
    };
    // Rows of 32 f32, 4 per token; the view extends from the row of the first token to the row of the last of 20 tokens.
    assert_eq!(sizes(PHASE_PROMPT), [32 * 4 * (19 * 4 + 1)]);
    assert_eq!(sizes(PHASE_GENERATE), [128, 128, 128]);
}

#[test]
fn resolves_all_file_accesses_in_the_offset_map() {
    let prompt: Vec<u32> = (300..320).collect();
    for arch in ["dots1", "gpt-oss", "llama", "olmoe", "qwen2moe", "qwen3moe"] {
        let file = format!("random-{arch}-F16.gguf");
        let recorded = record(&file, &prompt, LIMITS, RunOptions::default());
        let gguf = Gguf::open(fixture(&file)).unwrap();
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
                // The name alone identifies the same tensor.
                let named = gguf
                    .tensor(base_name(&source.name()))
                    .map(|tensor| tensor.index);
                assert_eq!(tensor, named, "{arch}: {}", source.name());
                read.extend(tensor);
            }
        }
        // All tensors are read except fifth sources, for which a record has no field.
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
fn stops_between_passes_at_the_maximum_trace_size() {
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
fn mode_experts_records_the_same_routing() {
    let prompt: Vec<u32> = (300..320).collect();
    let routing = |mode| -> Vec<(String, u32, Vec<i32>)> {
        let file = "random-gpt-oss-F16.gguf";
        let recorded = record_mode(file, &prompt, LIMITS, RunOptions::default(), mode);
        if mode == Mode::Experts {
            assert_eq!(recorded.max_records, recorded.records.len() as u64);
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
    // Four layers, six expert operations, 20 tokens of the prompt and 3 decoded tokens.
    assert_eq!(experts.len(), 4 * 6 * 23);
    assert_eq!(experts, routing(Mode::All));
}

/// Attention and router run between the experts of two layers and have no records in this mode.
#[test]
fn mode_experts_excludes_the_time_of_other_operations() {
    let prompt: Vec<u32> = (300..320).collect();
    let file = "random-gpt-oss-F16.gguf";
    let recorded = record_mode(file, &prompt, LIMITS, RunOptions::default(), Mode::Experts);
    let generated = recorded.records.iter();
    let generated: Vec<_> = generated.filter(|r| r.phase == PHASE_GENERATE).collect();
    let mut gates = 0;
    for pair in generated.windows(2) {
        let end = pair[0].timestamp_ns.get() + pair[0].duration_ns.get();
        let start = pair[1].timestamp_ns.get();
        if pair[1].dst_name().starts_with("ffn_moe_gate-") {
            gates += 1;
            assert!(
                start > end,
                "{} starts at {start}, the end of the previous record",
                pair[1].dst_name()
            );
        }
        assert!(start >= end);
    }
    assert_eq!(gates, 4 * 3 - 1);
}
