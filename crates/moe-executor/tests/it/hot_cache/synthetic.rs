//! Synthetic F32 models: plans, budgets and lanes decide where an expert is computed, not what is generated.

use moe_executor::cpu::threads::Threads;
use moe_executor::hot_cache::LaneContents;
use moe_executor::recorder::Recorder;
use moe_executor::{CacheParams, DeviceId, Model, Session};
use moe_gguf::Gguf;
use moe_gguf::experts::expert_bytes;
use moe_gguf::map::OffsetMap;
use moe_placement::perf::PerfMode;
use moe_placement::plan::{Entry, ExpertSizes, Plan, Strategy};
use moe_placement::random::SplitMix64;
use moe_synth::model::{Spec, Synth, SynthOptions};

use super::{pairs, request};

/// Architectures that both the executor and the writer of synthetic models support.
pub const ARCHITECTURES: [&str; 4] = ["qwen3moe", "gpt-oss", "llama", "olmoe"];

/// A small F32 model with random weights.
pub fn synthetic(arch: &str, seed: u64) -> Gguf {
    let text = format!(
        r#"{{"arch": "{arch}", "n_layer": 3, "n_embd": 128, "n_head": 2, "n_expert": 8, "n_expert_used": 3, "n_ff_exp": 64,
            "quant": "F32", "vocab": {{"n_tokens": 400}}}}"#
    );
    let spec: Spec = serde_json::from_str(&text).unwrap();
    let synth = Synth::new(&spec, SynthOptions { seed, zipf: 0.5 }).unwrap();
    Gguf::from_bytes(arch, synth.write(Vec::new()).unwrap()).unwrap()
}

/// The lanes of a plan with a random ranking, and a random strategy and budgets. The first lanes are on `devices`.
pub fn random_plan(
    gguf: &Gguf,
    random: &mut SplitMix64,
    devices: &[DeviceId],
) -> Vec<LaneContents> {
    let sizes = expert_bytes(&OffsetMap::new(gguf)).into_iter();
    let sizes: ExpertSizes = sizes
        .map(|((layer, expert), bytes)| (layer, expert, bytes))
        .collect();
    let total: u64 = sizes.iter().map(|(.., bytes)| bytes).sum();
    let entries = sizes.iter().map(|(layer, expert, _)| Entry {
        layer,
        expert,
        hits: 1,
        score: random.below(1000) as u64,
    });
    let mut ranking: Vec<Entry> = entries.collect();
    ranking.sort_by_key(|entry| std::cmp::Reverse(entry.score));
    let n_lanes = 1 + random.below(devices.len());
    let budgets = (0..n_lanes).map(|_| random.below(total as usize) as u64);
    let budgets: Vec<u64> = budgets.collect();
    let strategies = [Strategy::Warm, Strategy::HotEven, Strategy::EvenSplit];
    let strategy = strategies[random.below(strategies.len())];
    let plan = Plan::new(&ranking, &sizes, &budgets, strategy, None).unwrap();
    let lanes = devices.iter().zip(&plan.lanes);
    lanes
        .map(|(&device, lane)| LaneContents::new(device, lane))
        .collect()
}

fn session<'a, 'g>(model: &'a Model<'g>, threads: &'a Threads) -> Session<'a, 'g> {
    Session::new(model, threads, Recorder::new(None), CacheParams::new(64)).unwrap()
}

#[test]
fn random_plans_generate_the_tokens_of_the_cpu() {
    let mut random = SplitMix64::new(1919);
    let threads = Threads::new(2).unwrap();
    let mut n_cached = 0;
    for (seed, arch) in (0..).zip(ARCHITECTURES) {
        let gguf = synthetic(arch, seed);
        let model = Model::load(&gguf).unwrap();
        let expected = request(&mut session(&model, &threads), 0, 30);
        for round in 0..12 {
            let lanes = random_plan(&gguf, &mut random, &[DeviceId::Cpu; 3]);
            let mut hot = session(&model, &threads);
            hot.expert_cache()
                .enable_hot_cache(&lanes, PerfMode::Update)
                .unwrap();
            assert_eq!(request(&mut hot, 0, 30), expected, "{arch}, round {round}");
            n_cached += pairs(&lanes).len();
        }
    }
    assert!(n_cached > 100, "{n_cached} experts in all plans");
}
