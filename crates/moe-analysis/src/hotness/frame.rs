//! Hotness as a data frame.

use moe_trace::tables::PHASES;
use polars::prelude::*;

use super::{Error, ExpertTally, Hotness, Phases};

impl Hotness {
    /// One row for each layer that routed something, expert and phase: `layer_id`, `expert_id`, `phase` (null where it is not
    /// told: such rows are there only for layers that have such choices), `count`, `mass` (null where router weights are not told).
    pub fn frame(&self) -> Result<DataFrame, Error> {
        let mut columns = Columns::default();
        for layer in self.layers(Phases::All) {
            for (name, phase) in PHASES.iter().zip([Phases::Prompt, Phases::Generate]) {
                columns.push(layer, Some(name), self.experts(layer, phase));
            }
            if self.has_unknown_phase(layer) {
                columns.push(layer, None, self.experts_of_unknown_phase(layer));
            }
        }
        Ok(df!(
            "layer_id" => columns.layer_id,
            "expert_id" => columns.expert_id,
            "phase" => columns.phase,
            "count" => columns.count,
            "mass" => columns.mass.into_iter().map(|mass| self.has_mass.then_some(mass)).collect::<Vec<_>>(),
        )?)
    }

    /// The experts of each layer, hottest first: `layer_id`, `expert_id`, `count`, `share` (of the layer's choices), `mass`.
    ///
    /// Layers ascend; equal counts are in the order of their ids. Experts that were never chosen are there, with count 0.
    pub fn ranked(&self, phases: Phases) -> Result<DataFrame, Error> {
        let wanted = match phases {
            Phases::All => lit(true),
            Phases::Prompt => col("phase").eq(lit(PHASES[0])),
            Phases::Generate => col("phase").eq(lit(PHASES[1])),
        };
        // A sum of nulls would be 0.
        let mass = if self.has_mass {
            col("mass").sum()
        } else {
            col("mass").first()
        };
        let layer = [col("layer_id")];
        let ranked = self
            .frame()?
            .lazy()
            .filter(wanted)
            .group_by([col("layer_id"), col("expert_id")])
            .agg([col("count").sum(), mass])
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
    phase: Vec<Option<&'static str>>,
    count: Vec<u64>,
    mass: Vec<f64>,
}

impl Columns {
    /// Rows of the experts of a layer in a phase (`[n_expert]`).
    fn push(&mut self, layer: u32, phase: Option<&'static str>, experts: Vec<ExpertTally>) {
        for (expert, tally) in (0u32..).zip(experts) {
            self.layer_id.push(layer);
            self.expert_id.push(expert);
            self.phase.push(phase);
            self.count.push(tally.count);
            self.mass.push(tally.mass);
        }
    }
}
