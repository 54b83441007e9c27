//! The dynamic cache with slots in CPU memory.

use moe_executor::cpu::threads::Threads;
use moe_executor::hot_cache::{DynamicParams, Error};
use moe_executor::recorder::Recorder;
use moe_executor::{CacheParams, DeviceId, Model, Session};
use moe_gguf::experts::expert_bytes_by_layer;
use moe_gguf::map::OffsetMap;
use moe_gguf::{ExpertId, Gguf};
use moe_placement::cache::{OnlinePolicy, PolicyName};
use moe_placement::dynamic::Settings;
use moe_placement::perf::PerfMode;
use moe_placement::plan::ExpertSizes;
use moe_placement::predict::PredictorName;
use moe_placement::random::SplitMix64;

use super::{MODELS, moe_layers, open, request};

/// Sizes of the experts of a model.
pub fn sizes(gguf: &Gguf, model: &Model) -> ExpertSizes {
    let bytes = expert_bytes_by_layer(&OffsetMap::new(gguf));
    let n_expert = model.hparams().n_expert as u32;
    let layers = moe_layers(model).into_iter();
    layers
        .flat_map(|layer| (0..n_expert).map(move |expert| (layer, ExpertId(expert))))
        .map(|(layer, expert)| (layer, expert, bytes[&layer]))
        .collect()
}

/// Random settings of a cache with `percent` of all experts.
pub fn random_settings(
    random: &mut SplitMix64,
    sizes: &ExpertSizes,
    n_layer: usize,
    percent: u64,
) -> Settings {
    let all: u64 = sizes.iter().map(|(_, _, bytes)| bytes).sum();
    let online = OnlinePolicy::ALL[random.below(OnlinePolicy::ALL.len())];
    let policy = match random.below(2) {
        0 => PolicyName::Shared(online),
        _ => PolicyName::Layered(online),
    };
    let predictors = PredictorName::ALL.map(Some);
    let predictor = predictors.into_iter().chain([None]).nth(random.below(5));
    Settings {
        predictor: predictor.flatten().filter(|_| n_layer > 1),
        depth: 1 + random.below((n_layer - 1).max(1)),
        n_predict: Some(1 + random.below(3)).filter(|n| *n < 3),
        ..Settings::new(policy, all * percent / 100)
    }
}

/// Slots in CPU memory contain the same matrices, and results are added in the same order.
#[test]
fn random_caches_yield_the_results_of_the_cpu() {
    let mut random = SplitMix64::new(29);
    let threads = Threads::new(2).unwrap();
    for name in MODELS {
        let gguf = open(name);
        let model = Model::load(&gguf).unwrap();
        let sizes = sizes(&gguf, &model);
        let n_layer = moe_layers(&model).len();
        let session =
            || Session::new(&model, &threads, Recorder::new(None), CacheParams::new(64)).unwrap();
        let expected = request(&mut session(), 0, 20);
        for percent in [0, 5, 20, 40, 60, 80, 100, 150] {
            let settings = random_settings(&mut random, &sizes, n_layer, percent);
            let what = format!("{name}, {settings:?}");
            let mut session = session();
            let params = DynamicParams {
                settings,
                sizes: sizes.clone(),
                device: DeviceId::Cpu,
            };
            let report = session
                .expert_cache()
                .enable_dynamic_cache(&params, PerfMode::Full)
                .unwrap();
            assert_eq!(report.dropped, [], "{what}");
            for sequence in 0..2 {
                assert_eq!(request(&mut session, sequence, 20), expected, "{what}");
            }
            let events = session.hot_cache().unwrap().events();
            assert_eq!(events.failed_calls, 0, "{what}");
            let counts = session.dynamic_cache().unwrap().counts();
            assert_eq!(counts.failed_copies, 0, "{what}");
            assert!(counts.look_ups[0] > 0 && counts.look_ups[1] > 0, "{what}");
            let counters = session.counters().unwrap().lock().clone();
            let slots = (counters.hot_slots(), counters.cold_slots());
            match percent {
                // Prefetched experts have slots of their own.
                0 if params.settings.predictor.is_none() => assert_eq!(slots.0, 0, "{what}"),
                100.. => assert_eq!((slots.1, counts.evictions), (0, 0), "{what}"),
                _ => {}
            }
            session.disable_hot_cache();
            assert!(session.dynamic_cache().is_none());
            assert_eq!(request(&mut session, 2, 20), expected, "{what}, disabled");
        }
    }
}

/// A prompt selects more experts than fit: the CPU computes the others, and the cache stays consistent.
#[test]
fn experts_without_a_slot_are_cold() {
    let gguf = open("random-gpt-oss-F16.gguf");
    let model = Model::load(&gguf).unwrap();
    let sizes = sizes(&gguf, &model);
    let threads = Threads::new(1).unwrap();
    let mut session =
        Session::new(&model, &threads, Recorder::new(None), CacheParams::new(64)).unwrap();
    let bytes = sizes.iter().next().unwrap().2;
    let lru = PolicyName::Shared(OnlinePolicy::Lru);
    let params = DynamicParams {
        settings: Settings::new(lru, bytes),
        sizes,
        device: DeviceId::Cpu,
    };
    let report = session
        .expert_cache()
        .enable_dynamic_cache(&params, PerfMode::Update)
        .unwrap();
    assert_eq!(report.n_slots, [1, 0]);
    request(&mut session, 0, 20);
    let counts = session.dynamic_cache().unwrap().counts();
    assert!(counts.without_slot > 0);
    let counters = session.counters().unwrap().lock().clone();
    assert!(counters.hot_slots() > 0 && counters.cold_slots() > 0);
}

#[test]
fn rejects_missing_devices_and_settings_of_other_models() {
    let gguf = open("random-qwen3moe-F16.gguf");
    let model = Model::load(&gguf).unwrap();
    let sizes = sizes(&gguf, &model);
    let threads = Threads::new(1).unwrap();
    let mut session =
        Session::new(&model, &threads, Recorder::new(None), CacheParams::new(8)).unwrap();
    let lru = PolicyName::Shared(OnlinePolicy::Lru);
    let mut params = DynamicParams {
        settings: Settings::new(lru, 1 << 20),
        sizes,
        device: DeviceId::Gpu(0),
    };
    let refused = session
        .expert_cache()
        .enable_dynamic_cache(&params, PerfMode::Off);
    assert!(matches!(
        refused,
        Err(moe_executor::Error::HotCache(Error::NoSuchDevice { .. }))
    ));
    params.device = DeviceId::Cpu;
    params.settings.predictor = Some(PredictorName::Markov);
    params.settings.depth = 100;
    let refused = session
        .expert_cache()
        .enable_dynamic_cache(&params, PerfMode::Off);
    assert!(matches!(refused, Err(moe_executor::Error::DynamicCache(_))));
    assert!(session.hot_cache().is_none());
}
