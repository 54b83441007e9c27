//! Tests with `tests/support/libcuda.c`, a driver whose GPUs compute nothing. Each runs in a process of its own, which loads
//! that driver.

use std::process::Command;

use moe_executor::cpu::threads::Threads;
use moe_executor::cuda::{Gpu, GpuSpec, Policy};
use moe_executor::hot_cache::{LaneContents, LaneEvents};
use moe_executor::placement::Rules;
use moe_executor::recorder::Recorder;
use moe_executor::{CacheParams, DeviceId, Devices, Model, Session};
use moe_gguf::ExpertId;
use moe_placement::perf::PerfMode;
use moe_placement::random::SplitMix64;
use moe_placement::update::Exchange;
use moe_testkit::repository;

use crate::hot_cache::{Request, moe_layers, open, random_lanes, request};

/// Tests that need no results of kernels.
const WITHOUT_RESULTS: [&str; 9] = [
    "cuda_models::graphs::graphs_yield_the_logits_of_single_launches",
    "cuda_models::graphs::models_that_are_partly_on_the_cpu_use_no_graphs",
    "cuda_models::hot_cache::exchanges_replace_experts_on_the_gpu",
    "cuda_models::hot_cache::layers_that_do_not_fit_stay_cold",
    "cuda_models::hot_cache::layers_with_all_experts_cached_wait_only_for_logits_and_end_of_pass",
    "cuda_models::hot_cache::layers_with_cold_experts_wait_once",
    "cuda_models::hot_cache::records_and_counts_the_lane_of_each_expert",
    "cuda_models::soundness::records_a_sound_run_with_every_hot_cache",
    "cuda_models::waits::observer_of_batches_adds_no_wait",
];

/// Runs tests of this program with the driver, one after the other.
fn run(tests: &[&str]) {
    if !moe_testkit::has_compiler("cc") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-o"]);
    cc.arg(dir.path().join("libcuda.so"));
    cc.arg(repository("tests/support/libcuda.c"));
    assert!(cc.status().unwrap().success(), "{cc:?}");
    for test in tests {
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--include-ignored", "--nocapture"])
            .env("LD_LIBRARY_PATH", dir.path())
            .env("MOE_REQUIRE", "gpu")
            .output()
            .unwrap();
        let [stdout, stderr] =
            [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
        let passed = output.status.success() && stdout.contains("1 passed");
        assert!(passed, "{test}: {:?}\n{stdout}\n{stderr}", output.status);
    }
}

#[test]
fn hot_cache_records_counts_and_waits_on_any_gpu() {
    run(&WITHOUT_RESULTS);
}

#[test]
fn hot_cache_after_every_failure_yields_the_results_of_the_cpu() {
    run(&["stand_in::failures"]);
}

#[test]
fn a_driver_without_graphs_launches_each_kernel() {
    run(&["stand_in::without_graphs"]);
}

#[test]
#[ignore = "a_driver_without_graphs_launches_each_kernel runs it in a process of its own"]
fn without_graphs() {
    let gguf = open("random-gpt-oss-F16.gguf");
    let model = Model::load(&gguf).unwrap();
    let threads = Threads::new(1).unwrap();
    let gpus = Gpu::open_all(&[GpuSpec::default()]).unwrap();
    let n_layer = model.hparams().n_layer;
    let names = gguf.tensors().iter().map(|tensor| tensor.name.as_str());
    let placement = Rules::new(n_layer, n_layer + 1, Vec::new())
        .resolve(names)
        .unwrap();
    let devices = Devices::new(gpus, placement, Policy::Gpu, None);
    let (recorder, cache) = (Recorder::new(None), CacheParams::new(64));
    let mut session = Session::with_devices(&model, &threads, devices, recorder, cache).unwrap();
    let n_graphs = |session: &Session| session.devices().gpus()[0].gpu().n_graphs();
    fail("graph");
    request(&mut session, 0, 20);
    assert_eq!(n_graphs(&session), 0);
    assert_eq!(session.devices().gpus()[0].fallbacks.ops, 0);
    fail("");
}

/// Makes all later operations of a kind fail.
fn fail(step: &str) {
    // SAFETY: this process runs one test, whose session uses one thread.
    unsafe { std::env::set_var("STAND_IN_FAILS", step) };
}

/// With all layers and cold experts on the CPU, results are those of the CPU if all lanes on the GPU fail.
#[test]
#[ignore = "hot_cache_after_every_failure_yields_the_results_of_the_cpu runs it in a process of its own"]
fn failures() {
    let threads = Threads::new(1).unwrap();
    for name in ["random-gpt-oss-F16.gguf", "tiny-qwen3moe-Q4_K_M.gguf"] {
        fail("");
        let gguf = open(name);
        let model = Model::load(&gguf).unwrap();
        let n_layers = moe_layers(&model).len() as u64;
        let mut plain =
            Session::new(&model, &threads, Recorder::new(None), CacheParams::new(64)).unwrap();
        let expected = request(&mut plain, 0, 20);
        let mut random = SplitMix64::new(5);
        let lanes = random_lanes(&model, &mut random, 1, 60);
        let lanes: Vec<LaneContents> = lanes
            .into_iter()
            .map(|lane| LaneContents {
                device: DeviceId::Gpu(0),
                ..lane
            })
            .collect();
        let open_session = || {
            let gpus = Gpu::open_all(&[GpuSpec::default()]).unwrap();
            let rules = Rules::new(model.hparams().n_layer, 0, Vec::new());
            let names = gguf.tensors().iter().map(|tensor| tensor.name.as_str());
            let placement = rules.experts_on_cpu(None).resolve(names).unwrap();
            let devices = Devices::new(gpus, placement, Policy::Cpu, None);
            Session::with_devices(
                &model,
                &threads,
                devices,
                Recorder::new(None),
                CacheParams::new(64),
            )
            .unwrap()
        };

        // Allocations, then copies fail while the cache is built.
        for (step, reason) in [("memory", "OUT_OF_MEMORY"), ("copy", "INVALID_VALUE")] {
            let mut session = open_session();
            fail(step);
            let report = session
                .expert_cache()
                .enable_hot_cache(&lanes, PerfMode::Full)
                .unwrap();
            assert_eq!(report.lane_bytes, [0], "{name}, {step}");
            assert_eq!(report.dropped.len() as u64, n_layers, "{name}, {step}");
            let dropped = &report.dropped[0];
            assert!(
                dropped.reason.contains(reason),
                "{name}, {step}: {dropped:?}"
            );
            assert_eq!(request(&mut session, 0, 20), expected, "{name}, {step}");
            let events = session.hot_cache().unwrap().events();
            assert_eq!(events.dropped_layers, n_layers);
            assert!(events.first_failure.as_ref().unwrap().contains(reason));
            assert_eq!(session.counters().unwrap().lock().hot_slots(), 0);
            fail("");
        }

        // Allocations, copies and kernels fail while the cache is used.
        for step in ["memory", "copy", "kernel"] {
            let mut session = open_session();
            let report = session
                .expert_cache()
                .enable_hot_cache(&lanes, PerfMode::Full)
                .unwrap();
            assert_eq!(report.dropped, [], "{name}, {step}");
            fail(step);
            assert_failed_calls(&mut session, &expected, &format!("{name}, {step}"));
            fail("");
            request(&mut session, 1, 20);
            let hot = session.counters().unwrap().lock().hot_slots();
            assert!(hot > 0, "{name}: the lane works again after {step}");
        }

        // A copy fails during an exchange.
        let mut session = open_session();
        session
            .expert_cache()
            .enable_hot_cache(&lanes, PerfMode::Full)
            .unwrap();
        fail("copy");
        let layer = moe_layers(&model)[1];
        let cached = session.hot_cache().unwrap().experts(0)[&layer].clone();
        let is_cold = |expert: &ExpertId| !cached.contains(expert);
        let exchange = Exchange {
            layer,
            evict: cached[1],
            add: (0..).map(ExpertId).find(is_cold).unwrap(),
            evict_score: 0,
            add_score: 1,
        };
        assert_eq!(session.expert_cache().exchange(&[exchange]), 0, "{name}");
        let cache = session.hot_cache().unwrap();
        assert!(!cache.contains(layer, exchange.evict) && !cache.contains(layer, exchange.add));
        assert_eq!(cache.experts(0)[&layer].len(), cached.len() - 1);
        assert_eq!(cache.events().failed_exchanges, 1);
        assert_failed_calls(&mut session, &expected, &format!("{name}, exchange"));
        fail("");
    }
}

/// Checks that the CPU computes all experts, and that failures of the lane are counted.
fn assert_failed_calls(session: &mut Session, expected: &Request, what: &str) {
    assert_eq!(request(session, 0, 20), *expected, "{what}");
    let events: &LaneEvents = session.hot_cache().unwrap().events();
    let n_layers = session.model().hparams().n_layer as u64;
    assert!(events.failed_calls > n_layers, "{what}: {events:?}");
    assert!(events.failed_calls <= 7 * n_layers, "{what}: {events:?}");
    let fallbacks = &session.devices().gpus()[0].fallbacks;
    assert_eq!(fallbacks.ops, events.failed_calls, "{what}");
    let counters = session.counters().unwrap();
    let counters = counters.lock();
    assert_eq!(counters.hot_slots(), 0, "{what}");
    assert!(counters.cold_slots() > 0, "{what}");
}
