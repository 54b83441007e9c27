//! A cache does not change results.

use moe_executor::cpu::threads::Threads;
use moe_executor::hot_cache::{Error, HotCacheReport, LaneContents};
use moe_executor::recorder::Recorder;
use moe_executor::{CacheParams, DeviceId, Model, Session};
use moe_gguf::{ExpertId, LayerId};
use moe_placement::perf::PerfMode;
use moe_placement::random::SplitMix64;

use super::{MODELS, moe_layers, open, pairs, random_lanes, request};

/// Lanes in CPU memory multiply the same matrices with the same code, and add results in the same order.
#[test]
fn random_lanes_yield_the_results_of_the_cpu() {
    let mut random = SplitMix64::new(19);
    for name in MODELS {
        let gguf = open(name);
        let model = Model::load(&gguf).unwrap();
        for threads in [1, 3] {
            let threads = Threads::new(threads).unwrap();
            let mut plain =
                Session::new(&model, &threads, Recorder::new(None), CacheParams::new(64)).unwrap();
            let expected = request(&mut plain, 0, 20);
            for (n_lanes, percent) in [(1, 0), (1, 20), (2, 50), (3, 80), (1, 100), (3, 100)] {
                let mut session =
                    Session::new(&model, &threads, Recorder::new(None), CacheParams::new(64))
                        .unwrap();
                let lanes = random_lanes(&model, &mut random, n_lanes, percent);
                let report = session
                    .expert_cache()
                    .enable_hot_cache(&lanes, PerfMode::Update)
                    .unwrap();
                assert_eq!(report.dropped, []);
                let what = format!("{name}, {n_lanes} lanes, {percent} %");
                assert_eq!(request(&mut session, 0, 20), expected, "{what}");
                let cached = pairs(&lanes);
                let cache = session.hot_cache().unwrap();
                assert_eq!(cache.cached().len(), cached.len(), "{what}");
                assert!(cached.iter().all(|&(l, e)| cache.contains(l, e)), "{what}");
                session.disable_hot_cache();
                assert_eq!(request(&mut session, 1, 20), expected, "{what}, disabled");
            }
        }
    }
}

#[test]
fn reports_bytes_with_one_dummy_per_layer() {
    let gguf = open("random-gpt-oss-F16.gguf");
    let model = Model::load(&gguf).unwrap();
    let hp = model.hparams();
    let threads = Threads::new(1).unwrap();
    let mut session =
        Session::new(&model, &threads, Recorder::new(None), CacheParams::new(8)).unwrap();
    let lane = |experts: &[(u16, &[u32])]| LaneContents {
        device: DeviceId::Cpu,
        experts: experts
            .iter()
            .map(|(layer, ids)| {
                (
                    LayerId(*layer),
                    ids.iter().map(|&id| ExpertId(id)).collect(),
                )
            })
            .collect(),
    };
    let lanes = [lane(&[(0, &[3, 1]), (1, &[2])]), lane(&[(1, &[0, 5, 4])])];
    let report = session
        .expert_cache()
        .enable_hot_cache(&lanes, PerfMode::Off)
        .unwrap();
    let n_ff = hp.n_ff_exp_by_layer[0];
    // Three F16 matrices, and three biases.
    let expert = (3 * 2 * hp.n_embd * n_ff + 4 * (2 * n_ff + hp.n_embd)) as u64;
    let expected = HotCacheReport {
        lane_bytes: vec![5 * expert, 4 * expert],
        dropped: Vec::new(),
        without_profile: None,
    };
    assert_eq!(report, expected);
    let cache = session.hot_cache().unwrap();
    assert_eq!(cache.experts(0), lanes[0].experts);
    assert_eq!(cache.devices(), [DeviceId::Cpu; 2]);
}

#[test]
fn rejects_contents_that_the_model_does_not_have() {
    let gguf = open("random-dots1-F16.gguf");
    let model = Model::load(&gguf).unwrap();
    let threads = Threads::new(1).unwrap();
    let mut session =
        Session::new(&model, &threads, Recorder::new(None), CacheParams::new(8)).unwrap();
    let moe = moe_layers(&model)[0];
    let n_expert = model.hparams().n_expert;
    let lane = |device, layer, expert| LaneContents {
        device,
        experts: [(layer, vec![ExpertId(expert)])].into(),
    };
    let cpu = DeviceId::Cpu;
    let mut error = |lanes: &[LaneContents]| {
        let error = session
            .expert_cache()
            .enable_hot_cache(lanes, PerfMode::Update);
        match error.unwrap_err() {
            moe_executor::Error::HotCache(error) => error,
            error => panic!("{error}"),
        }
    };
    assert_eq!(
        error(&vec![lane(cpu, moe, 0); 4]),
        Error::TooManyLanes { n: 4 }
    );
    let (device, layer) = (DeviceId::Gpu(1), LayerId(0));
    assert_eq!(
        error(&[lane(device, moe, 0)]),
        Error::NoSuchDevice {
            lane: 0,
            device,
            n_gpus: 0
        }
    );
    assert_eq!(
        error(&[lane(cpu, moe, 0), lane(cpu, layer, 0)]),
        Error::NoExperts { lane: 1, layer }
    );
    assert_eq!(
        error(&[lane(cpu, moe, n_expert as u32)]),
        Error::ExpertOutOfRange {
            lane: 0,
            layer: moe,
            expert: ExpertId(n_expert as u32),
            n_expert
        }
    );
    assert_eq!(
        error(&[lane(cpu, moe, 1), lane(cpu, moe, 1)]),
        Error::Repeated {
            layer: moe,
            expert: ExpertId(1)
        }
    );
}
