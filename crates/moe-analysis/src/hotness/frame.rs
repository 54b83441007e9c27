//! Hotness as a data frame.

use moe_trace::tables::PHASES;
use polars::prelude::*;

use super::{Error, Hotness, Phases};

impl Hotness {
    /// One row for each layer that routed something, expert and phase: `layer_id`, `expert_id`, `phase`, `count`, `mass`.
    pub fn frame(&self) -> Result<DataFrame, Error> {
        let mut columns = Columns::default();
        for layer in self.layers(Phases::All) {
            for (name, phase) in PHASES.iter().zip([Phases::Prompt, Phases::Generate]) {
                for (expert, tally) in (0u32..).zip(self.experts(layer, phase)) {
                    columns.layer_id.push(layer);
                    columns.expert_id.push(expert);
                    columns.phase.push(*name);
                    columns.count.push(tally.count);
                    columns.mass.push(tally.mass);
                }
            }
        }
        Ok(df!(
            "layer_id" => columns.layer_id,
            "expert_id" => columns.expert_id,
            "phase" => columns.phase,
            "count" => columns.count,
            "mass" => columns.mass,
        )?)
    }

    /// The experts of each layer, hottest first: `layer_id`, `expert_id`, `count`, `share` (of the layer's choices), `mass`.
    ///
    /// Layers ascend; equal counts are in the order of their ids. Experts that were never chosen are there, with count 0.
    pub fn ranked(&self, phases: Phases) -> Result<DataFrame, Error> {
        let wanted = phases
            .indices()
            .iter()
            .map(|&phase| col("phase").eq(lit(PHASES[phase])))
            .reduce(Expr::or)
            .unwrap_or(lit(true));
        let layer = [col("layer_id")];
        let ranked = self
            .frame()?
            .lazy()
            .filter(wanted)
            .group_by([col("layer_id"), col("expert_id")])
            .agg([col("count").sum(), col("mass").sum()])
            .filter(col("count").sum().over(layer.clone())?.gt(lit(0)))
            .with_column(
                (col("count").cast(DataType::Float64) / col("count").sum().over(layer)?)
                    .alias("share"),
            )
            .sort_by_exprs(
                [col("layer_id"), col("count"), col("expert_id")],
                SortMultipleOptions::default().with_order_descending_multi([false, true, false]),
            )
            .select([
                col("layer_id"),
                col("expert_id"),
                col("count"),
                col("share"),
                col("mass"),
            ]);
        Ok(ranked.collect()?)
    }
}

#[derive(Default)]
struct Columns {
    layer_id: Vec<u32>,
    expert_id: Vec<u32>,
    phase: Vec<&'static str>,
    count: Vec<u64>,
    mass: Vec<f64>,
}
