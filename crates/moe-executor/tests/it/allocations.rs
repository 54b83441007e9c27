//! Decoding allocates no memory after the first tokens; with a recorder, at most the writer's blocks.

use std::alloc::{GlobalAlloc, Layout, System};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use moe_engine::{Decode, Logits, Mode};
use moe_executor::cpu::threads::Threads;
use moe_executor::hot_cache::LaneContents;
use moe_executor::recorder::Recorder;
use moe_executor::{CacheParams, DeviceId, Model, Session};
use moe_gguf::map::OffsetMap;
use moe_gguf::{ExpertId, Gguf, LayerId};
use moe_placement::perf::PerfMode;
use moe_trace::{Manifest, Phase, RunOptions, RunWriter};

/// Counts the allocations of all threads.
struct Counting;

static CALLS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: all calls are forwarded unchanged to the system allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        CALLS.fetch_add(1, Relaxed);
        // SAFETY: the contract of this function is that of the forwarded call.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the contract of this function is that of the forwarded call.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Tokens whose allocations are counted.
const TOKENS: u32 = 100;
/// Maximum number of record blocks of a writer (`blocks.rs` in moe-trace).
const MAX_BLOCKS: usize = 32;

/// Allocations while [`TOKENS`] tokens are decoded, after the first 20 and before the cache grows again. `cached` is the number
/// of experts per layer in a hot cache; `None`: without a cache.
fn while_decoding(
    file: &str,
    recorder: impl FnOnce(&Gguf) -> Recorder,
    cached: Option<u32>,
) -> usize {
    let gguf = Gguf::open(moe_testkit::fixture(file)).unwrap();
    let model = Model::load(&gguf).unwrap();
    // A second thread would allocate its buffers when it first gets work, which may be late.
    let threads = Threads::new(1).unwrap();
    let mut session =
        Session::new(&model, &threads, recorder(&gguf), CacheParams::new(256)).unwrap();
    if let Some(cached) = cached {
        let layers = (0..model.hparams().n_layer as u16).map(LayerId);
        let layers = layers.filter(|&layer| model.has_experts(layer));
        let lane = LaneContents {
            device: DeviceId::Cpu,
            experts: layers
                .map(|layer| (layer, (0..cached).map(ExpertId).collect()))
                .collect(),
        };
        session
            .expert_cache()
            .enable_hot_cache(&[lane], PerfMode::Full)
            .unwrap();
    }
    let prompt: Vec<u32> = (1..129).collect();
    session
        .decode(&prompt, Phase::Prompt, Logits::Last)
        .unwrap();
    let mut decode = |n: u32| {
        for token in 1..=n {
            session
                .decode(&[token], Phase::Generate, Logits::Last)
                .unwrap();
        }
    };
    decode(20);
    let before = CALLS.load(Relaxed);
    decode(TOKENS);
    CALLS.load(Relaxed) - before
}

/// The counter is global and other tests allocate, too, so the test runs in a process of its own.
#[test]
fn decoding_allocates_nothing_after_the_first_tokens() {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "allocations::alone", "--ignored", "--nocapture"])
        .output()
        .unwrap();
    let [stdout, stderr] =
        [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    let passed = output.status.success() && stdout.contains("1 passed");
    assert!(passed, "{:?}\n{stdout}\n{stderr}", output.status);
}

#[test]
#[ignore = "decoding_allocates_nothing_after_the_first_tokens runs it in a process of its own"]
fn alone() {
    for file in [
        "random-llama-F16.gguf",
        "random-qwen2moe-F16.gguf",
        "random-qwen3moe-F16.gguf",
        "random-olmoe-F16.gguf",
        "random-gpt-oss-F16.gguf",
        "random-dots1-F16.gguf",
        "tiny-qwen3moe-Q4_K_M.gguf",
        "tiny-gpt-oss-MXFP4.gguf",
    ] {
        for cached in [None, Some(0), Some(3)] {
            let allocations = while_decoding(file, |_| Recorder::new(None), cached);
            assert_eq!(
                allocations, 0,
                "{file}, {cached:?} experts in the hot cache"
            );
        }
        for mode in [Mode::All, Mode::Experts] {
            let dir = tempfile::tempdir().unwrap();
            let recorded = while_decoding(
                file,
                |gguf| {
                    let run = dir.path().join("run");
                    let map = OffsetMap::new(gguf);
                    let options = RunOptions::default();
                    let writer =
                        RunWriter::create(&run, Manifest::default(), &map, options).unwrap();
                    Recorder::new(Some(writer)).with_mode(mode)
                },
                Some(2),
            );
            assert!(
                recorded <= MAX_BLOCKS,
                "{file}, recorded, {mode:?}: {recorded} allocations"
            );
        }
    }
}
