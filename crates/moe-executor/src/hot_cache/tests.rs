//! The copies of a cache in CPU memory, and its profile.

use moe_gguf::Gguf;
use moe_placement::random::SplitMix64;
use moe_placement::update::Exchange;

use super::*;
use crate::cpu::threads::Threads;
use crate::devices::Devices;
use crate::model::Model;
use crate::ops::Ops;
use crate::recorder::Recorder;

/// Checks that each slot contains the matrices and biases of its expert, and the dummy zeros.
fn check_copies(model: &Model, cache: &HotCache) {
    for (layer, cached) in (0..).zip(&cache.layers) {
        let parts = cached
            .iter()
            .flat_map(|cached| cached.lanes.iter().flatten());
        for part in parts {
            let linears = model.decoder.moe(LayerId(layer)).unwrap().projections();
            let linears = linears.unwrap();
            let copies = part.on_cpu.as_ref().unwrap();
            for (copy, linear) in copies.iter().zip(linears) {
                let (stack, n_out) = (copy.stack(linear), linear.weights.n_out);
                for (slot, expert) in part.experts.iter().enumerate() {
                    let expert = expert.unwrap().index();
                    assert_eq!(stack.rows(slot, 0..n_out), linear.weights.expert(expert));
                    if let Some(bias) = &linear.bias {
                        assert_eq!(copy.bias()[slot * n_out..][..n_out], *bias.expert(expert));
                    }
                }
                let dummy = part.experts.len();
                assert!(stack.rows(dummy, 0..n_out).iter().all(|&byte| byte == 0));
                let bias = copy.bias().get(dummy * n_out..).unwrap_or_default();
                assert!(bias.iter().all(|&value| value == 0.0));
                assert_eq!(bias.len(), linear.bias.as_ref().map_or(0, |bias| bias.n));
            }
        }
    }
}

#[test]
fn slots_contain_their_experts_before_and_after_exchanges() {
    let mut random = SplitMix64::new(31);
    for name in ["random-gpt-oss-F16.gguf", "tiny-qwen3moe-Q4_K_M.gguf"] {
        let gguf = Gguf::open(moe_testkit::fixture(name)).unwrap();
        let model = Model::load(&gguf).unwrap();
        let n_expert = model.hparams().n_expert as u32;
        let layers = [LayerId(0), LayerId(2)];
        let lane = |first: u32| LaneContents {
            device: DeviceId::Cpu,
            experts: layers
                .iter()
                .map(|&layer| (layer, vec![ExpertId(first + 1), ExpertId(first)]))
                .collect(),
        };
        let lanes = [lane(0), lane(4)];
        let mut devices = Devices::cpu();
        let (mut cache, _) = HotCache::build(&model, &mut devices, &lanes, PerfMode::Off).unwrap();
        check_copies(&model, &cache);
        let mut done = 0;
        for _ in 0..400 {
            let mut expert = || ExpertId(random.below(n_expert as usize) as u32);
            let exchange = Exchange {
                evict: expert(),
                add: expert(),
                layer: layers[random.below(2)],
                evict_score: 0,
                add_score: 0,
            };
            let [evicted, added] =
                [exchange.evict, exchange.add].map(|expert| cache.contains(exchange.layer, expert));
            let n = cache.exchange(&model, &mut devices, &[exchange]);
            assert_eq!(n == 1, evicted && !added, "{exchange:?}");
            done += n;
            check_copies(&model, &cache);
        }
        assert!(done > 20, "{done} exchanges");
        assert_eq!(cache.cached().len(), 8);
    }
}

fn one_expert() -> LaneContents {
    LaneContents {
        device: DeviceId::Cpu,
        experts: [(LayerId(1), vec![ExpertId(3)])].into(),
    }
}

/// The CPU selects the experts of layers with lanes, up to the number of tokens of the profile.
#[test]
fn profile_limits_routing_on_the_cpu() {
    let gguf = Gguf::open(moe_testkit::fixture("tiny-qwen3moe-Q4_K_M.gguf")).unwrap();
    let model = Model::load(&gguf).unwrap();
    let threads = Threads::new(1).unwrap();
    let mut ops = Ops::new(&threads, Recorder::new(None), Devices::cpu());
    let routed = |ops: &Ops, layer| {
        let linears = model.decoder.moe(LayerId(layer)).unwrap().projections();
        [1, 2, 4, 5].map(|tokens| ops.routes_on_cpu(LayerId(layer), linears, tokens))
    };
    assert_eq!(routed(&ops, 1), [false; 4], "no cache");
    let report = ops.enable_hot_cache(&model, &[one_expert()], PerfMode::Off);
    assert_eq!(report.unwrap().without_profile, None);
    assert_eq!(routed(&ops, 1), [true, false, false, false]);
    assert_eq!(routed(&ops, 0), [false; 4], "a layer without lanes");
    for (cpu_routing_max_tokens, expected) in [(0, [false; 4]), (4, [true, true, true, false])] {
        let cache = ops.hot.as_mut().unwrap();
        cache.set_profile(Profile {
            cpu_routing_max_tokens,
            ..Profile::GENERAL
        });
        assert_eq!(routed(&ops, 1), expected);
    }
}
