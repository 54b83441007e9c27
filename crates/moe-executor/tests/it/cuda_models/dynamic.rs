//! The dynamic cache with slots on a GPU: results, lanes in records, and counts.

use moe_executor::cuda::Policy;
use moe_placement::cache::{OnlinePolicy, PolicyName};
use moe_placement::predict::PredictorName;
use moe_testkit::Report;
use moe_trace::record::lane;

use super::recording::{record, stem};
use super::{Case, Dynamic, MODELS, case, has_gpu, open};
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
