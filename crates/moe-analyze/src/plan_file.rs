//! The output of `plan -o json` as an input.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context as _, bail};
use moe_files::text::counted;
use moe_placement::json;
use moe_placement::plan::{ExpertSizes, LayerCurve, MAX_LANES, Strategy, Weighting};
use moe_trace::{ExpertId, LayerId, bounded};
use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::json_input;

/// The part of the output of `plan -o json` that is read.
#[derive(Deserialize)]
pub struct PlanFile {
    pub lanes: Vec<PlanLane>,
    pub selected: Vec<PlanExpert>,
    weighting: String,
    layer_curve: f64,
    strategy: String,
}

/// A lane of a plan.
#[derive(Deserialize)]
pub struct PlanLane {
    pub budget_bytes: u64,
    pub used_bytes: u64,
}

/// An expert of a plan.
#[derive(Deserialize)]
pub struct PlanExpert {
    pub layer: LayerId,
    pub expert: ExpertId,
    /// Size of the expert in the model of the plan.
    pub bytes: u64,
    #[serde(default)]
    pub lane: usize,
    #[serde(default)]
    pub hits: u64,
}

impl PlanFile {
    /// Whether a JSON document has the lists of a plan.
    pub fn is_plan(text: &str) -> bool {
        #[derive(Deserialize)]
        struct Lists {
            #[serde(rename = "lanes")]
            _lanes: IgnoredAny,
            #[serde(rename = "selected")]
            _selected: IgnoredAny,
        }
        json::parse::<Lists>(text).is_ok()
    }

    /// Reads the output of `plan -o json`.
    ///
    /// # Errors
    /// The file cannot be read, or contains something that no plan contains.
    pub fn read(path: &Path) -> anyhow::Result<PlanFile> {
        PlanFile::parse(path, &bounded::read_json(path)?)
    }

    /// Parses the text of the file `path`.
    ///
    /// # Errors
    /// The text contains something that no plan contains.
    pub fn parse(path: &Path, text: &str) -> anyhow::Result<PlanFile> {
        let plan: PlanFile = json_input::parse(text).with_context(|| {
            format!(
                "{} is not a plan; pass the output of `plan -o json`",
                path.display()
            )
        })?;
        plan.check().with_context(|| path.display().to_string())?;
        Ok(plan)
    }

    pub fn weighting(&self) -> anyhow::Result<Weighting> {
        Ok(self.weighting.parse()?)
    }

    pub fn curve(&self) -> LayerCurve {
        LayerCurve::new(self.layer_curve)
    }

    pub fn strategy(&self) -> anyhow::Result<Strategy> {
        Ok(self.strategy.parse()?)
    }

    /// Rejects experts that a model with experts of these sizes does not have.
    ///
    /// # Errors
    /// The plan is of another model.
    pub fn check_sizes(&self, sizes: &ExpertSizes) -> anyhow::Result<()> {
        for PlanExpert {
            layer,
            expert,
            bytes,
            ..
        } in &self.selected
        {
            match sizes.get(*layer, *expert) {
                None => bail!(
                    "the plan contains expert {expert} of layer {layer}, which the model does not have; plan again with this model"
                ),
                Some(size) if size != *bytes => bail!(
                    "expert {expert} of layer {layer} has {size} bytes in the model, but {bytes} bytes in the plan; plan again with this \
                     model"
                ),
                Some(_) => {}
            }
        }
        Ok(())
    }

    /// Rejects contents that no cache can have.
    fn check(&self) -> anyhow::Result<()> {
        let n_lanes = self.lanes.len();
        if !(1..=MAX_LANES).contains(&n_lanes) {
            bail!(
                "the plan has {}, but a hot cache has 1 to {MAX_LANES}; plan again",
                counted(n_lanes, "lane")
            );
        }
        let mut seen = BTreeSet::new();
        for place in &self.selected {
            let PlanExpert {
                layer,
                expert,
                lane,
                ..
            } = place;
            if *lane >= n_lanes {
                bail!(
                    "expert {expert} of layer {layer} is in lane {lane}, which the plan does not list; plan again"
                );
            }
            if !seen.insert((layer, expert)) {
                bail!("the plan contains expert {expert} of layer {layer} twice; plan again");
            }
        }
        self.weighting()?;
        self.strategy()?;
        if !LayerCurve::is_valid(self.layer_curve) {
            bail!(
                "`layer_curve` is {}, which is out of range (0..=1); plan again",
                self.layer_curve
            );
        }
        Ok(())
    }
}
