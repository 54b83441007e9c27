//! What a cache is planned from: a plan, a learn file, or a trace.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context as _, bail};
use moe_foreign::ImportOptions;
use moe_gguf::text::counted;
use moe_placement::learn::{LayerObservation, has_schema, is_usable};
use moe_placement::plan::{ExpertSizes, LayerCurve, MAX_LANES, Strategy, Weighting};
use moe_trace::{ExpertId, LayerId, ModelInfo, bounded};
use serde::Deserialize;

use crate::context::Context;
use crate::inputs::Kind;
use crate::learn_files;
use crate::{json_input, traces};

/// Contents of the file of `--hot-cache`.
pub enum Source {
    /// The output of `plan -o json`.
    Plan(PlanFile),
    /// Observations of a learn file or a trace. Never empty.
    Learn(Vec<LayerObservation>),
}

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

impl Source {
    /// Reads a plan, a learn file, or a trace of the model that `facts` describes.
    ///
    /// # Errors
    /// The file cannot be read, is of another model, or contains no experts.
    pub fn read(path: &Path, facts: ModelInfo, ctx: &Context) -> anyhow::Result<Source> {
        let place = || path.display().to_string();
        if is_plan(path)? {
            let text = bounded::read_json(path)?;
            let plan: PlanFile = json_input::parse(&text).with_context(|| {
                format!(
                    "{} is not a plan; pass the output of `plan -o json`",
                    path.display()
                )
            })?;
            plan.check().with_context(place)?;
            return Ok(Source::Plan(plan));
        }
        let observations = observations(path, facts, ctx)?;
        if !is_usable(&observations) {
            bail!(
                "{} contains no activations; record a longer run",
                path.display()
            );
        }
        Ok(Source::Learn(observations))
    }
}

/// Returns the observations of a learn file or a trace; empty if it has no counts.
fn observations(
    path: &Path,
    facts: ModelInfo,
    ctx: &Context,
) -> anyhow::Result<Vec<LayerObservation>> {
    let options = ImportOptions {
        model: Some(facts),
        ..ImportOptions::default()
    };
    let file = learn_files::read_learn_file(path, &options, ctx)?;
    let observations = file.observations();
    observations.with_context(|| path.display().to_string())
}

/// Whether a file is JSON without the schema of a learn file, and not a trace.
///
/// # Errors
/// The file cannot be read, or is neither a plan nor a learn file.
pub fn is_plan(path: &Path) -> anyhow::Result<bool> {
    if Kind::of(path)? != Kind::Json || traces::detect(path)?.is_some() {
        return Ok(false);
    }
    let has_schema = has_schema(&bounded::read_json(path)?);
    let has_schema = has_schema.with_context(|| {
        format!(
            "{} is neither a plan nor a learn file; pass the output of `plan -o json` or `hotness --out`",
            path.display()
        )
    })?;
    Ok(!has_schema)
}
