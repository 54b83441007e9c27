//! Inputs of a simulation: a trace, expert sizes, a learn file, predictions.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, bail};
use moe_analysis::simulate::{Batches, Collector};
use moe_files::text::counted;
use moe_foreign::{ImportOptions, Input};
use moe_gguf::map::OffsetMap;
use moe_placement::learn::LayerObservation;
use moe_placement::plan::ExpertSizes;
use moe_placement::predict::ExternalPredictions;
use moe_trace::{LayerId, ModelInfo};

use crate::context::Context;
use crate::experts::{self, Experts};
use crate::learn_files;
use crate::traces::{self, TraceArgs};

/// Inputs of a simulation.
pub struct Inputs {
    /// The trace.
    pub batches: Batches,
    /// Predictions of `--predictions`.
    pub predictions: Option<ExternalPredictions>,
    /// Size of the model's tensors without the MTP head in bytes, if the map is known.
    pub model_bytes: Option<u64>,
    /// Observations in the learn file of `--learn`.
    pub learn: Option<Arc<[LayerObservation]>>,
}

impl Inputs {
    /// Reads all inputs. Expert sizes come from the table or model of the options, else from the run's map, else from the trace.
    pub fn read(
        path: &Path,
        sizes: Option<&Path>,
        learn: Option<&Path>,
        predictions: Option<&Path>,
        args: &TraceArgs,
        ctx: &Context,
    ) -> anyhow::Result<Inputs> {
        args.check(&[path])?;
        let mut options = args.options()?;
        let input = traces::open(path, &options)?;
        let mut collector = Collector::new();
        let summary = traces::read(path, &input, &options, &mut collector, ctx)?;
        let n_layer = summary.model_info.n_hidden_layer();
        if collector.n_mtp_selections() > 0 {
            ctx.note(format_args!(
                "omitted {} of experts of the MTP head",
                counted(collector.n_mtp_selections(), "activation")
            ));
        }
        // The other inputs must be of the trace's model.
        options.model = Some(summary.model_info);
        let named = Experts::read(args.model(), sizes, ctx)?;
        let sizes = match (named, &input) {
            (Some(experts), _) => experts.sizes,
            (None, Input::Run(run)) if run.map.is_some() => {
                let sizes = run.map.as_ref().map(|map| experts::sizes_of(map, n_layer));
                sizes.unwrap_or_default()
            }
            (None, _) => collector.recorded_sizes(),
        };
        let map = match (args.gguf()?, &input) {
            (Some((_, gguf)), _) => Some(OffsetMap::new(&gguf)),
            (None, Input::Run(run)) => run.map.clone(),
            (None, _) => None,
        };
        let model_bytes = map.map(|map| bytes_without_mtp_head(&map, n_layer));
        let learn = learn.map(|learn| read_learn_file(learn, &sizes, &options, ctx));
        let predictions = predictions.map(|path| {
            let mut collector = Collector::new();
            let input = traces::open(path, &options)?;
            traces::read(path, &input, &options, &mut collector, ctx)?;
            let batches = collector.finish(&sizes);
            let batches = batches.with_context(|| path.display().to_string())?;
            anyhow::Ok(batches.to_predictions())
        });
        let batches = collector
            .finish(&sizes)
            .with_context(|| path.display().to_string())?;
        Ok(Inputs {
            batches,
            predictions: predictions.transpose()?,
            model_bytes,
            learn: learn.transpose()?,
        })
    }
}

/// Returns the size in bytes of the tensors of a model with `n_layer` hidden layers. The blocks after them are the MTP head.
fn bytes_without_mtp_head(map: &OffsetMap, n_layer: Option<u32>) -> u64 {
    let is_read = |layer: Option<LayerId>| {
        layer.is_none_or(|layer| n_layer.is_none_or(|n| u32::from(layer.0) < n))
    };
    let rows = map.rows.iter().filter(|row| is_read(row.layer_id));
    rows.map(|row| row.size_bytes).sum()
}

/// Reads the observations of a learn file, without the MTP head.
///
/// # Errors
/// The learn file contains an expert that the trace's model does not have.
fn read_learn_file(
    path: &Path,
    sizes: &ExpertSizes,
    options: &ImportOptions,
    ctx: &Context,
) -> anyhow::Result<Arc<[LayerObservation]>> {
    let mut observations = learn_files::read_learn_file(path, options, ctx)?.observations()?;
    let model = options.model.as_ref();
    if let Some(mtp_head) = model.and_then(ModelInfo::mtp_head) {
        observations.retain(|layer| !mtp_head.contains(&layer.layer.0.into()));
    }
    for layer in &observations {
        let mut experts = layer.experts.iter().map(|expert| expert.expert);
        if let Some(expert) = experts.find(|&expert| sizes.get(layer.layer, expert).is_none()) {
            bail!(
                "{} contains expert {expert} of layer {}, which the model of the trace does not have; pass a learn file of the same model",
                path.display(),
                layer.layer
            );
        }
    }
    Ok(observations.into())
}

#[cfg(test)]
mod tests {
    use moe_gguf::Gguf;
    use moe_testkit::gguf::{F32, Raw};

    use super::*;

    #[test]
    fn excludes_the_mtp_head() {
        let raw = Raw::new(3, 1)
            .kv_string("general.architecture", "glm4moe")
            .tensor("token_embd.weight", &[4, 16], F32, 0)
            .tensor("blk.0.ffn_gate_inp.weight", &[4, 2], F32, 0)
            .tensor("blk.1.nextn.eh_proj.weight", &[8, 4], F32, 0);
        let gguf = Gguf::from_bytes("model.gguf", raw.bytes.as_slice()).unwrap();
        let map = OffsetMap::new(&gguf);
        let (head, hidden) = (8 * 4 * 4, (4 * 16 + 4 * 2) * 4);
        assert_eq!(bytes_without_mtp_head(&map, Some(1)), hidden);
        assert_eq!(bytes_without_mtp_head(&map, None), hidden + head);
    }
}
