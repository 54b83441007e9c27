//! Exchanges between requests.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use moe_executor::cpu::threads::Threads;
use moe_executor::hot_cache::LaneContents;
use moe_executor::recorder::Recorder;
use moe_executor::{CacheParams, Model, Session};
use moe_gguf::{ExpertId, LayerId};
use moe_placement::perf::{PerfMode, SharedCounters};
use moe_placement::random::SplitMix64;
use moe_placement::update::Exchange;

use super::{MODELS, moe_layers, open, pairs, random_lanes, request, synthetic};

fn exchange(layer: LayerId, evict: ExpertId, add: ExpertId) -> Exchange {
    Exchange {
        layer,
        evict,
        add,
        evict_score: 0,
        add_score: 1,
    }
}

/// Random exchanges that a cache can make one after the other; makes them in `lanes`.
fn exchanges(
    model: &Model,
    random: &mut SplitMix64,
    lanes: &mut [LaneContents],
    n: usize,
) -> Vec<Exchange> {
    let layers = moe_layers(model);
    let n_expert = model.hparams().n_expert;
    let mut made = Vec::new();
    while made.len() < n {
        let layer = layers[random.below(layers.len())];
        let add = ExpertId(random.below(n_expert) as u32);
        let is_cached = pairs(lanes).contains(&(layer, add));
        let n_lanes = lanes.len();
        let lane = &mut lanes[random.below(n_lanes)];
        let Some(experts) = lane.experts.get_mut(&layer).filter(|_| !is_cached) else {
            continue;
        };
        let slot = random.below(experts.len());
        made.push(exchange(layer, experts[slot], add));
        experts[slot] = add;
    }
    made
}

#[test]
fn cache_after_exchanges_equals_a_cache_built_with_the_new_experts() {
    let mut random = SplitMix64::new(23);
    let threads = Threads::new(2).unwrap();
    for name in MODELS {
        let gguf = open(name);
        let model = Model::load(&gguf).unwrap();
        let mut session =
            Session::new(&model, &threads, Recorder::new(None), CacheParams::new(64)).unwrap();
        let expected = request(&mut session, 0, 60);
        let mut lanes = random_lanes(&model, &mut random, 2, 30);
        session
            .expert_cache()
            .enable_hot_cache(&lanes, PerfMode::Update)
            .unwrap();
        for round in 0..4 {
            // All exchanges between two requests, in one call or in several.
            for n in [[7, 0], [1, 5]][round % 2] {
                let exchanges = exchanges(&model, &mut random, &mut lanes, n);
                assert_eq!(session.expert_cache().exchange(&exchanges), n, "{name}");
            }
            for (lane, contents) in lanes.iter().enumerate() {
                let cached = session.hot_cache().unwrap().experts(lane);
                assert_eq!(cached, contents.experts, "{name}");
            }
            session.counters().unwrap().lock().reset();
            let result = request(&mut session, 1 + round as u32, 60);
            assert_eq!(result, expected, "{name}, round {round}");
            let report = |session: &Session| {
                let counters = session.counters().unwrap();
                let report = counters.lock().to_learn_file();
                report.to_json()
            };
            let counted = report(&session);

            let mut built =
                Session::new(&model, &threads, Recorder::new(None), CacheParams::new(64)).unwrap();
            built
                .expert_cache()
                .enable_hot_cache(&lanes, PerfMode::Update)
                .unwrap();
            assert_eq!(
                request(&mut built, 0, 60),
                expected,
                "{name}, round {round}"
            );
            assert_eq!(report(&built), counted, "{name}");
        }
    }
}

#[test]
fn impossible_exchanges_have_no_effect() {
    let gguf = open("random-dots1-F16.gguf");
    let model = Model::load(&gguf).unwrap();
    let threads = Threads::new(1).unwrap();
    let mut session =
        Session::new(&model, &threads, Recorder::new(None), CacheParams::new(64)).unwrap();
    let layer = moe_layers(&model)[0];
    let n_expert = model.hparams().n_expert as u32;
    let [a, b, c] = [0, 1, 2].map(ExpertId);
    assert_eq!(
        session.expert_cache().exchange(&[exchange(layer, a, c)]),
        0,
        "no cache"
    );
    let lanes = [LaneContents {
        device: moe_executor::DeviceId::Cpu,
        experts: [(layer, vec![a, b])].into(),
    }];
    session
        .expert_cache()
        .enable_hot_cache(&lanes, PerfMode::Off)
        .unwrap();
    let impossible = [
        exchange(layer, c, ExpertId(3)),
        exchange(layer, a, b),
        exchange(layer, a, a),
        exchange(layer, a, ExpertId(n_expert)),
        exchange(layer, ExpertId(n_expert), c),
        exchange(LayerId(0), a, c),
        exchange(LayerId(u16::MAX), a, c),
    ];
    assert_eq!(session.expert_cache().exchange(&impossible), 0);
    assert_eq!(session.hot_cache().unwrap().experts(0), lanes[0].experts);
}

/// Reads reports until `stop`. Those of a pass are complete: the first two layers have the same number of slots.
fn read_reports(counters: &SharedCounters, stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        let report = counters.lock().to_learn_file();
        let slots = report.layer_slots().unwrap();
        if let [first, second, ..] = &slots[..] {
            assert_eq!(first.hot + first.cold, second.hot + second.cold);
        }
        thread::yield_now();
    }
}

/// Exchanges of a session change neither the results of others, which run at the same time, nor its own.
#[test]
fn concurrent_sessions_with_exchanges_yield_the_results_of_the_cpu() {
    let gguf = synthetic("qwen3moe", 4);
    let model = Model::load(&gguf).unwrap();
    let pool = Threads::new(2).unwrap();
    let mut plain = Session::new(&model, &pool, Recorder::new(None), CacheParams::new(64)).unwrap();
    let expected = request(&mut plain, 0, 40);
    let decode = |seed: u64| {
        let mut random = SplitMix64::new(seed);
        let threads = Threads::new(2).unwrap();
        let mut session =
            Session::new(&model, &threads, Recorder::new(None), CacheParams::new(64)).unwrap();
        let mut lanes = random_lanes(&model, &mut random, 2, 40);
        session
            .expert_cache()
            .enable_hot_cache(&lanes, PerfMode::Full)
            .unwrap();
        let (counters, stop) = (session.counters().unwrap(), AtomicBool::new(false));
        thread::scope(|scope| {
            scope.spawn(|| read_reports(&counters, &stop));
            let rounds = (0..4).all(|round| {
                let exchanges = exchanges(&model, &mut random, &mut lanes, 5);
                session.expert_cache().exchange(&exchanges) == 5
                    && request(&mut session, round, 40) == expected
            });
            stop.store(true, Ordering::Relaxed);
            assert!(rounds, "seed {seed}");
        });
    };
    thread::scope(|scope| {
        for seed in 0..3 {
            let decode = &decode;
            scope.spawn(move || decode(seed));
        }
    });
}
