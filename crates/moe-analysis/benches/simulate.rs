//! Simulated look-ups per second: each policy with budgets of 1/8 and 1/2 of all experts; the LRU curve from all experts,
//! and from a sample of 1/10; and all policies with eight budgets on all cores.
//!
//!   cargo bench --package moe-analysis --bench simulate
//!
//! The synthetic trace has 48 layers of 128 experts and eight experts per token. A third of the experts are those of the
//! previous token, the others have a skewed distribution. `MOE_ANALYZE_TOKENS` is its length (default: 10,000 tokens, 3.84
//! million look-ups).

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use moe_analysis::simulate::{
    Batches, Collector, LruCurve, SimulateOptions, policy_inputs, replay, sampled_lru, simulate,
};
use moe_placement::cache::PolicyName;
use moe_trace::{ExpertId, LayerId, Phase, RoutingRow, Sink, TokenId};

const N_LAYER: u16 = 48;
const N_EXPERT: u32 = 128;
const N_USED: usize = 8;
/// Size of an expert in bytes.
const BYTES: u64 = 2_654_208;

/// Marsaglia's xorshift64.
struct Random(u64);

impl Random {
    /// Integer in `0..n`.
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((u128::from(self.0) * u128::from(n)) >> 64) as u64
    }
}

fn synthetic(n_token: u32) -> Batches {
    let mut random = Random(88_172_645_463_325_252);
    let mut last: Vec<Vec<u32>> = vec![Vec::new(); N_LAYER.into()];
    let mut collector = Collector::new();
    for token_id in 0..n_token {
        for layer_id in 0..N_LAYER {
            let last = &mut last[usize::from(layer_id)];
            let mut selected = Vec::new();
            while selected.len() < N_USED {
                let expert = match random.below(3) {
                    0 if !last.is_empty() => last[random.below(N_USED as u64) as usize],
                    _ => {
                        // The minimum of two random ranks. The order of the experts differs between layers.
                        let rank = random.below(128).min(random.below(128)) as u32;
                        (rank * 37 + u32::from(layer_id) * 11) % N_EXPERT
                    }
                };
                if !selected.contains(&expert) {
                    selected.push(expert);
                }
            }
            for &expert_id in &selected {
                let row = RoutingRow {
                    token_id: TokenId(token_id),
                    expert_id: ExpertId(expert_id),
                    phase: Some(Phase::Generate),
                    ..RoutingRow::at_layer(LayerId(layer_id))
                };
                collector.routing(&row).expect("a valid row");
            }
            *last = selected;
        }
    }
    let sizes = (0..N_LAYER).flat_map(|layer| {
        (0..N_EXPERT).map(move |expert| (LayerId(layer), ExpertId(expert), BYTES))
    });
    collector.finish(&sizes.collect()).expect("batches")
}

fn caches(criterion: &mut Criterion) {
    let n_token = std::env::var("MOE_ANALYZE_TOKENS").ok();
    let n_token = n_token.and_then(|n| n.parse().ok()).unwrap_or(10_000);
    let batches = synthetic(n_token);
    let total = batches.experts().total_bytes();
    let options = SimulateOptions {
        learn: None,
        train_fraction: 0.1,
        update_rate: 0.1,
        seed: 0,
    };
    let mut policies = PolicyName::all();
    policies.retain(|policy| !policy.needs_learn_file());
    let inputs = policy_inputs(&batches, &policies, &options).expect("policy inputs");

    let mut group = criterion.benchmark_group("simulate");
    group.sample_size(10);
    group.throughput(Throughput::Elements(batches.n_look_ups()));
    for &policy in &policies {
        for part in [8, 2] {
            let id = BenchmarkId::new(policy.to_string(), format!("1/{part}"));
            group.bench_function(id, |b| {
                b.iter(|| {
                    let cache = inputs.policy(policy, batches.experts(), total / part);
                    replay(&batches, cache.expect("a policy").as_mut())
                });
            });
        }
    }
    let budgets: Vec<u64> = (1..=8).map(|part| total * part / 8).collect();
    group.bench_function("lru with all budgets", |b| {
        b.iter(|| LruCurve::new(&batches))
    });
    group.bench_function("lru from a tenth of the experts", |b| {
        b.iter(|| sampled_lru(&batches, &budgets, 0.1, 0));
    });
    let n = batches.n_look_ups() * (budgets.len() * policies.len()) as u64;
    group.throughput(Throughput::Elements(n));
    group.bench_function("all policies with eight budgets", |b| {
        b.iter(|| simulate(&batches, &budgets, &policies, &options, || ()));
    });
    group.finish();
}

criterion_group!(benches, caches);
criterion_main!(benches);
