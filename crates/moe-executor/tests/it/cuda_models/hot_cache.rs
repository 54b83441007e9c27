//! The hot cache with lanes on GPUs: results, lanes in records, counters, waits and limits of memory.

use moe_executor::Model;
use moe_executor::cpu::threads::Threads;
use moe_executor::cuda::Policy;
use moe_executor::hot_cache::{DroppedLayer, LaneContents, Profile};
use moe_executor::recorder::Recorder;
use moe_executor::{CacheParams, CacheType, DeviceId, Session};
use moe_gguf::{ExpertId, Gguf, LayerId};
use moe_placement::perf::PerfMode;
use moe_placement::random::SplitMix64;
use moe_placement::update::Exchange;
use moe_testkit::Report;
use moe_trace::record::{PHASE_GENERATE, lane};

use super::recording::{record, stem};
use super::{Case, MODELS, RandomLanes, TWICE, case, has_gpu, open};
use crate::hot_cache::{ARCHITECTURES, moe_layers, pairs, random_plan, synthetic};
use crate::reference::PROMPTS;

const GPU: &[DeviceId] = &[DeviceId::Gpu(0)];
/// On both entries of a GPU, and on the CPU.
const THREE: &[DeviceId] = &[DeviceId::Gpu(1), DeviceId::Cpu, DeviceId::Gpu(0)];

/// Layers on GPU 0, experts in CPU memory and in a hot cache on the GPU.
fn hot(percent: usize) -> Case {
    Case {
        hot: Some(RandomLanes {
            devices: GPU,
            percent,
        }),
        ..case(Policy::Cpu)
    }
}

fn all_lanes(percent: usize) -> Case {
    Case {
        gpus: TWICE,
        hot: Some(RandomLanes {
            devices: THREE,
            percent,
        }),
        ..case(Policy::Cpu)
    }
}

#[test]
fn hot_cache_matches_llama_cpp() {
    for percent in [0, 30, 70, 100] {
        hot(percent).compare(&MODELS, &PROMPTS);
    }
}

/// The device of the layer selects the experts, and a lane computes a slot for each of them.
#[test]
fn hot_cache_without_shortcuts_matches_llama_cpp() {
    for case in [hot(50), all_lanes(70)] {
        let general = Case {
            profile: Some(Profile::GENERAL),
            ..case
        };
        general.compare(&MODELS, &["python", "long"]);
    }
}

/// The GPU computes all experts of a prompt; those in the cache are copied from it.
#[test]
fn hot_cache_without_copies_for_prompts_matches_llama_cpp() {
    for percent in [40, 100] {
        let no_copies = Case {
            min_batch: None,
            ..hot(percent)
        };
        no_copies.compare(&MODELS, &["python", "long"]);
    }
}

#[test]
fn three_lanes_match_llama_cpp() {
    for (percent, min_batch) in [(50, None), (80, Some(32)), (100, None)] {
        let three = Case {
            min_batch,
            ..all_lanes(percent)
        };
        three.compare(&MODELS, &["python", "long"]);
    }
}

/// Attention on the CPU, or on the GPU for some layers only.
#[test]
fn hot_cache_with_layers_on_cpu_matches_llama_cpp() {
    for n_gpu_layers in [0, 2] {
        for case in [hot(60), all_lanes(60)] {
            let some = Case {
                n_gpu_layers,
                ..case
            };
            some.compare(&MODELS, &["python", "long"]);
        }
    }
}

/// Calls `check` with each model. It returns what is wrong with the model.
fn check_models(check: impl Fn(&str, &Gguf, &Model) -> Vec<String>) {
    if !has_gpu() {
        return;
    }
    let mut report = Report::default();
    for (name, _) in MODELS {
        let gguf = open(name);
        let model = Model::load(&gguf).unwrap();
        for wrong in check(name, &gguf, &model) {
            report.fail(format!("{name}: {wrong}"));
        }
    }
    report.finish();
}

/// The recorded lanes are those of the cache, and the counters have the same hits.
#[test]
fn records_and_counts_the_lane_of_each_expert() {
    check_models(|_, gguf, model| {
        let cases = [hot(0), hot(50), hot(100), all_lanes(60), all_lanes(100)];
        let wrong = cases.iter().filter_map(|case| {
            let cached = pairs(&case.hot.unwrap().contents(model));
            let recorded = record(gguf, Some(case), false);
            let counters = recorded.counters.unwrap();
            let mut n = [0; lane::NAMES.len()];
            let mut wrong = 0;
            let down = recorded.records.iter();
            for down in down.filter(|r| stem(r) == "ffn_moe_down") {
                for (id, &of) in down.expert_ids().iter().zip(&down.expert_lane) {
                    let key = (LayerId(down.layer_id.get()), ExpertId(id.get() as u32));
                    let expected = if cached.contains(&key) {
                        lane::HOT_CACHE
                    } else {
                        lane::CPU
                    };
                    wrong += u64::from(of != expected);
                    n[usize::from(of)] += 1;
                }
            }
            let counted = (counters.hot_slots(), counters.cold_slots());
            let expected = (n[usize::from(lane::HOT_CACHE)], n[usize::from(lane::CPU)]);
            let is_sound = recorded.faults.is_empty() && recorded.fallbacks.ops == 0;
            let is_right = wrong == 0 && counted == expected && is_sound;
            (!is_right || recorded.events.failed_calls > 0).then(|| {
                format!(
                    "{case:?}: {wrong} wrong lanes of {n:?}; counted {counted:?}; {:?}; {:?}; {:?}",
                    recorded.faults, recorded.fallbacks, recorded.events
                )
            })
        });
        wrong.collect()
    });
}

/// With all experts of all layers in one lane on the GPU, nothing in a pass waits, with and without counters and records.
#[test]
fn layers_with_all_experts_cached_wait_only_for_logits_and_end_of_pass() {
    check_models(|_, gguf, _| {
        let recorded = record(gguf, Some(&hot(100)), false);
        let waits: Vec<u64> = recorded.passes.iter().map(|pass| pass.waits).collect();
        let down = recorded.records.iter().filter(|r| r.num_experts > 0);
        let elsewhere = down.filter(|r| {
            let lanes = &r.expert_lane[..r.expert_ids().len()];
            r.phase == PHASE_GENERATE && lanes.iter().any(|&lane| lane != lane::HOT_CACHE)
        });
        let elsewhere = elsewhere.count();
        let is_wrong = waits[2..].iter().any(|&waits| waits != 2) || elsewhere > 0;
        let wrong = is_wrong.then(|| {
            format!(
                "waits of the passes {waits:?}, not 2; {elsewhere} records with experts elsewhere"
            )
        });
        wrong.into_iter().collect()
    });
}

/// With cold experts, the CPU waits once per layer: for activations, and for the selected experts or the router's scores.
#[test]
fn layers_with_cold_experts_wait_once() {
    check_models(|_, gguf, model| {
        let n_layers = moe_layers(model).len() as u64;
        let general = Case {
            profile: Some(Profile::GENERAL),
            ..hot(50)
        };
        let wrong = [hot(50), general].into_iter().filter_map(|case| {
            let recorded = record(gguf, Some(&case), false);
            let waits: Vec<u64> = recorded.passes.iter().map(|pass| pass.waits).collect();
            let is_wrong = waits[2..].iter().any(|&waits| waits != 2 + n_layers);
            is_wrong.then(|| format!("waits of the passes {waits:?}, not 2 + {n_layers}; {case:?}"))
        });
        wrong.collect()
    });
}

/// Layers that do not fit are missing in their lane; the results are those of a smaller cache.
#[test]
fn layers_that_do_not_fit_stay_cold() {
    check_models(|_, gguf, model| {
        let mut wrong = Vec::new();
        let small = Case {
            gpus: &[(0, Some(0.4))],
            n_gpu_layers: 0,
            ..hot(90)
        };
        let threads = Threads::new(2).unwrap();
        let mut session = session(&small, gguf, model, &threads);
        let lanes = small.hot.unwrap().contents(model);
        let built = session
            .expert_cache()
            .enable_hot_cache(&lanes, PerfMode::Full)
            .unwrap();
        let (used, _, limit) = session.devices().gpus()[0].gpu().memory();
        let cache = session.hot_cache().unwrap();
        let dropped = built.dropped.len();
        let is_dropped = |d: &DroppedLayer| {
            !cache.experts(0).contains_key(&d.layer) && d.reason.contains("bytes of GPU memory")
        };
        let is_right = built.dropped.iter().all(is_dropped)
            && dropped > 0
            && cache.events().dropped_layers == dropped as u64
            && (built.lane_bytes[0]..=limit).contains(&used);
        if !is_right {
            wrong.push(format!("{built:?}, {used} of {limit} bytes used"));
        }
        session.disable_hot_cache();
        let (used, _, _) = session.devices().gpus()[0].gpu().memory();
        if used != 0 {
            wrong.push(format!("{used} bytes are in use without the cache"));
        }
        wrong
    });
}

/// A cache after exchanges computes what a cache computes that was built with the new experts.
#[test]
fn exchanges_replace_experts_on_the_gpu() {
    check_models(|_, gguf, model| {
        let threads = Threads::new(2).unwrap();
        let layers = moe_layers(model);
        let n_expert = model.hparams().n_expert as u32;
        let lane = |first: u32| {
            let experts = (first..first + n_expert / 2).map(ExpertId);
            let experts: Vec<ExpertId> = experts.collect();
            LaneContents {
                device: DeviceId::Gpu(0),
                experts: layers
                    .iter()
                    .map(|&layer| (layer, experts.clone()))
                    .collect(),
            }
        };
        let with_lane = |first| {
            let mut session = session(&hot(0), gguf, model, &threads);
            let report = session
                .expert_cache()
                .enable_hot_cache(&[lane(first)], PerfMode::Update);
            report.unwrap();
            session
        };
        let mut exchanged = with_lane(0);
        crate::hot_cache::request(&mut exchanged, 0, 30);
        let pairs = layers.iter().flat_map(|&layer| {
            let pairs = (0..n_expert / 2).map(move |evict| (layer, evict));
            pairs.map(|(layer, evict)| Exchange {
                layer,
                evict: ExpertId(evict),
                add: ExpertId(evict + n_expert / 2),
                evict_score: 0,
                add_score: 1,
            })
        });
        let exchanges: Vec<Exchange> = pairs.collect();
        let n = exchanged.expert_cache().exchange(&exchanges);
        let mut built = with_lane(n_expert / 2);
        let [a, b] = [&mut exchanged, &mut built].map(|s| crate::hot_cache::request(s, 1, 30));
        let is_wrong = n != exchanges.len() || a != b;
        let wrong = is_wrong.then(|| format!("{n} exchanges; equal results: {}", a == b));
        wrong.into_iter().collect()
    });
}

/// A session without a hot cache, on the devices of a case.
fn session<'a, 'g>(
    case: &Case,
    gguf: &'g Gguf,
    model: &'a Model<'g>,
    threads: &'a Threads,
) -> Session<'a, 'g> {
    let devices = case.open(gguf, model);
    let recorder = Recorder::new(None);
    Session::with_devices(
        model,
        threads,
        devices,
        recorder,
        CacheParams::of_type(CacheType::F32, 64),
    )
    .unwrap()
}

/// F32 models generate the tokens of the CPU with the lanes of random plans on GPUs and the CPU.
#[test]
fn random_plans_generate_the_tokens_of_the_cpu() {
    if !has_gpu() {
        return;
    }
    let mut report = Report::default();
    let mut random = SplitMix64::new(77);
    let threads = Threads::new(2).unwrap();
    for (seed, arch) in (0..).zip(ARCHITECTURES) {
        let gguf = synthetic(arch, seed);
        let model = Model::load(&gguf).unwrap();
        let mut plain = Session::new(
            &model,
            &threads,
            Recorder::new(None),
            CacheParams::of_type(CacheType::F32, 64),
        )
        .unwrap();
        let expected = crate::hot_cache::request(&mut plain, 0, 30).tokens;
        for round in 0..6 {
            let mut hot = session(&all_lanes(0), &gguf, &model, &threads);
            let lanes = random_plan(&gguf, &mut random, THREE);
            hot.expert_cache()
                .enable_hot_cache(&lanes, PerfMode::Update)
                .unwrap();
            let tokens = crate::hot_cache::request(&mut hot, 0, 30).tokens;
            if tokens != expected {
                report.fail(format!(
                    "{arch}, round {round}: {tokens:?}, not {expected:?}"
                ));
            }
        }
    }
    report.finish();
}
