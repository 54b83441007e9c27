//! Plans with random rankings, budgets and strategies.

use std::fmt::Write;

use moe_executor::cpu::threads::Threads;
use moe_executor::hot_cache::LaneContents;
use moe_executor::recorder::Recorder;
use moe_executor::{CacheParams, DeviceId, Model, Session};
use moe_gguf::experts::expert_bytes_by_layer;
use moe_gguf::map::OffsetMap;
use moe_placement::learn::parse_observations;
use moe_placement::perf::PerfMode;
use moe_placement::plan::{ExpertSizes, LayerCurve, Plan, Strategy, Weighting, rank};
use moe_placement::random::SplitMix64;

use super::{moe_layers, open, request};

/// Sizes of the experts of a model, and a learn file with random counts.
fn inputs(model: &Model, random: &mut SplitMix64) -> (ExpertSizes, String) {
    let bytes = expert_bytes_by_layer(&OffsetMap::new(model.gguf()));
    let mut sizes = String::from("layer,expert,bytes\n");
    let mut layers = Vec::new();
    for layer in moe_layers(model) {
        let mut experts = Vec::new();
        for expert in 0..model.hparams().n_expert {
            writeln!(sizes, "{layer},{expert},{}", bytes[&layer]).unwrap();
            experts.push(format!("[{expert},{}]", 1 + random.below(50)));
        }
        let experts = experts.join(",");
        layers.push(format!(r#"{{"layer":{layer},"experts":[{experts}]}}"#));
    }
    let schema = "llama.cpp.moe_layer_opt_perf.v1";
    let layers = layers.join(",");
    let learn = format!(r#"{{"schema":"{schema}","layers":[{layers}]}}"#);
    (ExpertSizes::from_csv(&sizes).unwrap(), learn)
}

#[test]
fn planned_caches_fit_their_budgets_and_yield_the_results_of_the_cpu() {
    let mut random = SplitMix64::new(4);
    let threads = Threads::new(2).unwrap();
    for name in ["random-gpt-oss-F16.gguf", "random-qwen2moe-F16.gguf"] {
        let gguf = open(name);
        let model = Model::load(&gguf).unwrap();
        let mut session =
            Session::new(&model, &threads, Recorder::new(None), CacheParams::new(64)).unwrap();
        let expected = request(&mut session, 0, 40);
        let (sizes, learn) = inputs(&model, &mut random);
        let observations = parse_observations(&learn).unwrap();
        let ranking = rank(&observations, Weighting::Flat, LayerCurve::DEFAULT);
        let total: u64 = sizes.iter().map(|(_, _, bytes)| bytes).sum();
        for round in 0..9 {
            let n_lanes = 1 + round % 3;
            let strategy = [Strategy::Warm, Strategy::HotEven, Strategy::EvenSplit][round / 3];
            let budget = |_| (total as usize * random.below(120) / 100 / n_lanes) as u64;
            let budgets: Vec<u64> = (0..n_lanes).map(budget).collect();
            let plan = Plan::new(&ranking, &sizes, &budgets, strategy, None).unwrap();
            let lanes = plan.lanes.iter();
            let lanes = lanes.map(|lane| LaneContents::new(DeviceId::Cpu, lane));
            let lanes: Vec<LaneContents> = lanes.collect();
            let report = session
                .expert_cache()
                .enable_hot_cache(&lanes, PerfMode::Full)
                .unwrap();
            let used: Vec<u64> = plan.lanes.iter().map(|lane| lane.used_bytes).collect();
            assert_eq!(report.lane_bytes, used, "{name}, {budgets:?}, {strategy:?}");
            assert!(
                used.iter()
                    .zip(&budgets)
                    .all(|(used, budget)| used <= budget)
            );
            let result = request(&mut session, 1 + round as u32, 40);
            assert_eq!(result, expected, "{name}, {budgets:?}, {strategy:?}");
        }
    }
}
