//! The dynamic cache with slots on a GPU: results, lanes in records, and counts.

use moe_executor::cpu::threads::Threads;
use moe_executor::cuda::Policy;
use moe_executor::hot_cache::{DynamicParams, DynamicSlots};
use moe_executor::recorder::Recorder;
use moe_executor::{CacheParams, DeviceId, Model, Session};
use moe_placement::cache::{OnlinePolicy, PolicyName};
use moe_placement::dynamic::{Counts, Settings};
use moe_placement::perf::PerfMode;
use moe_placement::predict::PredictorName;
use moe_testkit::Report;
use moe_trace::record::lane;

use super::recording::{record, stem};
use super::{Case, Dynamic, MODELS, case, has_gpu, open};
use crate::hot_cache::dynamic::sizes;
use crate::hot_cache::{Request, request};
use crate::reference::PROMPTS;

/// Layers on GPU 0, experts in CPU memory and in slots on the GPU.
fn dynamic(percent: u64, policy: PolicyName, predictor: Option<PredictorName>) -> Case {
    Case {
        dynamic: Some(Dynamic {
            percent,
            policy,
            predictor,
        }),
        ..case(Policy::Cpu)
    }
}

const LRU: PolicyName = PolicyName::Shared(OnlinePolicy::Lru);
const LFU: PolicyName = PolicyName::Shared(OnlinePolicy::Lfu);
const LAYER: PolicyName = PolicyName::Layered(OnlinePolicy::Lru);

#[test]
fn dynamic_cache_matches_llama_cpp() {
    for (percent, policy, predictor) in [
        (0, LRU, None),
        (30, LRU, Some(PredictorName::Markov)),
        (30, LFU, None),
        (60, LAYER, Some(PredictorName::Hottest)),
        (100, LRU, Some(PredictorName::Previous)),
        (100, LFU, None),
    ] {
        dynamic(percent, policy, predictor).compare(&MODELS, &PROMPTS);
    }
}

/// The slots are used for prompts, too, or the GPU computes prompts with copies from the slots and from CPU memory.
#[test]
fn dynamic_cache_without_copies_for_prompts_matches_llama_cpp() {
    for percent in [20, 70, 100] {
        let no_copies = Case {
            min_batch: None,
            ..dynamic(percent, LRU, Some(PredictorName::CoActivation))
        };
        no_copies.compare(&MODELS, &["python", "long"]);
    }
}

#[test]
fn dynamic_cache_with_layers_on_cpu_matches_llama_cpp() {
    for n_gpu_layers in [0, 2] {
        let some = Case {
            n_gpu_layers,
            ..dynamic(50, LRU, Some(PredictorName::Markov))
        };
        some.compare(&MODELS, &["python", "long"]);
    }
}

/// The recorded lanes are those that the counters count.
#[test]
fn records_and_counts_the_lane_of_each_expert() {
    if !has_gpu() {
        return;
    }
    let mut report = Report::default();
    for (name, _) in MODELS {
        let gguf = open(name);
        for case in [
            dynamic(0, LRU, None),
            dynamic(40, LRU, None),
            dynamic(60, LFU, Some(PredictorName::Markov)),
            dynamic(100, LRU, None),
        ] {
            let what = format!("{name}, {case:?}");
            let recorded = record(&gguf, Some(&case), false);
            let (counters, counts) = (recorded.counters.unwrap(), recorded.counts.unwrap());
            let mut n = [0; lane::NAMES.len()];
            let is_down = |r: &&moe_trace::TensorAccessLog| stem(r) == "ffn_moe_down";
            for down in recorded.records.iter().filter(is_down) {
                for &of in &down.expert_lane[..down.expert_ids().len()] {
                    n[usize::from(of)] += 1;
                }
            }
            let of = |lane: u8| n[usize::from(lane)];
            let in_slots = of(lane::CACHE_HIT) + of(lane::CACHE_MISS);
            let expected = (in_slots, of(lane::CPU));
            let counted = (counters.hot_slots(), counters.cold_slots());
            let is_sound = recorded.faults.is_empty()
                && recorded.fallbacks.ops == 0
                && recorded.events.failed_calls == 0
                && counts.failed_copies == 0;
            if counted != expected || !is_sound || n.iter().sum::<u64>() != in_slots + of(lane::CPU)
            {
                report.fail(format!(
                    "{what}: lanes {n:?}; counted {counted:?}; {counts:?}; {:?}; {:?}; {:?}",
                    recorded.faults, recorded.fallbacks, recorded.events
                ));
            }
            println!("{what}: {counts:?}");
        }
    }
    report.finish();
}

/// Layers that are launched before the CPU knows their routing decisions yield the results and counts of layers that wait for them
/// (with times of lanes).
#[test]
fn launching_ahead_changes_no_result() {
    if !has_gpu() {
        return;
    }
    let mut report = Report::default();
    for (name, _) in MODELS {
        let gguf = open(name);
        let model = Model::load(&gguf).unwrap();
        let threads = Threads::new(2).unwrap();
        let sizes = sizes(&gguf, &model);
        let all: u64 = sizes.iter().map(|(_, _, bytes)| bytes).sum();
        for (percent, policy) in [(30, LRU), (50, LFU), (60, LAYER), (100, LRU)] {
            let run = |mode: PerfMode| -> (Vec<Request>, Counts) {
                let devices = case(Policy::Cpu).open(&gguf, &model);
                let recorder = Recorder::new(None);
                let cache = CacheParams::new(64);
                let session = Session::with_devices(&model, &threads, devices, recorder, cache);
                let mut session = session.unwrap();
                let params = DynamicParams {
                    settings: Settings::new(policy, all * percent / 100),
                    sizes: sizes.clone(),
                    device: DeviceId::Gpu(0),
                };
                session
                    .expert_cache()
                    .enable_dynamic_cache(&params, mode)
                    .unwrap();
                let requests = (0..4).map(|at| request(&mut session, at, 20 + 30 * at));
                let requests = requests.collect();
                let events = session.hot_cache().unwrap().events();
                assert_eq!(events.first_failure, None, "{name}, {percent} %");
                let counts = session.dynamic_cache().map(DynamicSlots::counts);
                (requests, counts.unwrap())
            };
            let (ahead, counts) = run(PerfMode::Update);
            let (waits, expected) = run(PerfMode::Full);
            if ahead != waits || counts != expected {
                report.fail(format!(
                    "{name}, {percent} %, {policy}: same results: {}; {counts:?}, {expected:?}",
                    ahead == waits
                ));
            }
        }
    }
    report.finish();
}

/// No layer of a single token waits, whether its experts are in slots or not, also if the run is recorded.
#[test]
fn single_tokens_wait_only_for_logits_and_end_of_pass() {
    if !has_gpu() {
        return;
    }
    let mut report = Report::default();
    // The layers of the other models have experts of several sizes.
    for (name, _) in MODELS.into_iter().filter(|(name, _)| name.ends_with("F16")) {
        for percent in [60, 100] {
            let recorded = record(&open(name), Some(&dynamic(percent, LRU, None)), false);
            let waits: Vec<u64> = recorded.passes.iter().map(|pass| pass.waits).collect();
            println!("{name}, {percent} %: waits of the passes {waits:?}");
            // The prompt, and the first token, after which the cache meets its budget.
            if waits[2..].iter().any(|&waits| waits != 2) || recorded.fallbacks.ops > 0 {
                report.fail(format!(
                    "{name}, {percent} %: waits of the passes {waits:?}, not 2 from the third on; {:?}",
                    recorded.fallbacks
                ));
            }
        }
    }
    report.finish();
}
