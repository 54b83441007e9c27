//! Plans a hot expert cache: `plan_cache LEARN.json SIZES.csv BUDGET_MIB`.
//!
//! `LEARN.json` is a learn file, for example of `moe-analyze hotness --learn`. `SIZES.csv` contains the sizes of the experts
//! with the header `layer,expert,bytes`. Without arguments, the example uses a small built-in model.

use std::error::Error;

use moe_placement::learn::{is_usable, parse_observations};
use moe_placement::plan::{ExpertSizes, LayerCurve, Plan, Strategy, Weighting, mib_to_bytes, rank};
use moe_placement::{ExpertId, LayerId};

/// Two layers with four experts of 1 MiB each.
const LEARN: &str = r#"{"schema": "llama.cpp.moe_layer_opt_perf.v1", "layers": [
    {"layer": 0, "experts": [[0, 60], [1, 25], [2, 10], [3, 5]]},
    {"layer": 1, "experts": [[0, 1], [1, 2], [2, 3], [3, 94]]}]}"#;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (learn, sizes, budget) = match &arguments[..] {
        [] => (LEARN.to_owned(), built_in_sizes(), mib_to_bytes(5)),
        [learn, sizes, budget] => (
            std::fs::read_to_string(learn)?,
            ExpertSizes::from_csv(&std::fs::read_to_string(sizes)?)?,
            mib_to_bytes(budget.parse()?),
        ),
        _ => return Err("usage: plan_cache [LEARN.json SIZES.csv BUDGET_MIB]".into()),
    };

    let observations = parse_observations(&learn)?;
    if !is_usable(&observations) {
        return Err("the learn file contains no counts; record a longer run".into());
    }
    let ranking = rank(&observations, Weighting::Flat, LayerCurve::DEFAULT);
    let plan = Plan::new(&ranking, &sizes, &[budget], Strategy::Warm, None)?;

    let n_selections: u64 = ranking.iter().map(|entry| entry.hits).sum();
    let hits: u64 = plan.selected().map(|(_, expert)| expert.entry.hits).sum();
    println!(
        "{} experts in {} of {budget} bytes, expected hit rate {:.1} %",
        plan.selected().count(),
        plan.used_bytes(),
        100.0 * hits as f64 / n_selections.max(1) as f64
    );
    for (_, expert) in plan.selected() {
        let entry = expert.entry;
        println!(
            "layer {:>3}  expert {:>4}  {:>8} hits  {:>10} bytes",
            entry.layer, entry.expert, entry.hits, expert.bytes
        );
    }
    Ok(())
}

fn built_in_sizes() -> ExpertSizes {
    let experts = (0..2).flat_map(|layer| (0..4).map(move |expert| (layer, expert)));
    experts
        .map(|(layer, expert)| (LayerId(layer), ExpertId(expert), mib_to_bytes(1)))
        .collect()
}
