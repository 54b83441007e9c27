//! The experts of a model, and their sizes.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use moe_gguf::Gguf;
use moe_gguf::experts::{expert_bytes, expert_layer_bytes};
use moe_gguf::map::OffsetMap;
use moe_gguf::names::{Category, Projection, Role};
use moe_placement::plan::ExpertSizes;
use moe_trace::{LayerId, ModelInfo, bounded};

use crate::context::Context;
use crate::output::human_bytes;

/// Why there is no command if expert sizes come from a table.
const NO_MODEL: &str = "the command needs the model file: pass --model instead of --sizes";

/// Why there is no command for the first Mixtral files.
const SEPARATE_EXPERTS: &str =
    "llama.cpp does not load models with separate tensors for each expert: convert the model again";

/// Returns the size in bytes of each expert in a model's map. `n_layer` is the number of blocks without the MTP head, if known. The
/// fork does not cache experts of an MTP head.
pub fn sizes_of(map: &OffsetMap, n_layer: Option<u32>) -> ExpertSizes {
    let sizes = expert_bytes(map).into_iter();
    sizes
        .map(|((layer, expert), bytes)| (layer, expert, bytes))
        .filter(|&(layer, ..)| n_layer.is_none_or(|n_layer| u32::from(layer.0) < n_layer))
        .collect()
}

/// Returns the layers whose experts have a gate projection.
fn layers_with_gate(map: &OffsetMap) -> BTreeSet<LayerId> {
    let experts = map
        .rows
        .iter()
        .filter(|row| row.category == Category::Expert);
    let gates =
        experts.filter(|row| matches!(row.projection, Some(Projection::Gate | Projection::GateUp)));
    gates.filter_map(|row| row.layer_id).collect()
}

/// The experts of a model.
pub struct Experts {
    /// Size of each expert in bytes, as the fork counts them.
    pub sizes: ExpertSizes,
    /// Size of all expert tensors of a layer in bytes.
    pub layer_bytes: BTreeMap<LayerId, u64>,
    /// Layers whose experts have no gate projection. The executor does not cache them.
    pub without_gate: BTreeSet<LayerId>,
    /// Path of the model, or the reason why llama.cpp cannot load it.
    pub model: Result<PathBuf, &'static str>,
    /// ModelInfo from the model's header.
    pub model_info: Option<ModelInfo>,
}

impl Experts {
    /// Reads the model or the table of sizes. Returns `None` if neither is given.
    pub fn read(
        model: Option<&Path>,
        sizes: Option<&Path>,
        ctx: &Context,
    ) -> anyhow::Result<Option<Experts>> {
        match (model, sizes) {
            (Some(model), _) => Experts::from_model(model, ctx).map(Some),
            (None, Some(sizes)) => Experts::from_csv(sizes).map(Some),
            (None, None) => Ok(None),
        }
    }

    fn from_model(path: &Path, ctx: &Context) -> anyhow::Result<Experts> {
        let gguf = Gguf::open(path)?;
        let model_info = ModelInfo::from_gguf(&path.to_string_lossy(), &gguf)?;
        let n_layer = model_info.n_hidden_layer();
        let map = OffsetMap::new(&gguf);
        let sizes = sizes_of(&map, n_layer);
        if sizes.is_empty() {
            bail!(
                "{} has no routed experts; pass a mixture-of-experts model",
                path.display()
            );
        }
        let layer_bytes: BTreeMap<LayerId, u64> = expert_layer_bytes(&gguf)
            .into_iter()
            .filter(|(layer, _)| n_layer.is_none_or(|n_layer| u32::from(layer.0) < n_layer))
            .collect();
        let has_separate = gguf
            .tensors()
            .iter()
            .any(|tensor| Role::of(&tensor.name).expert_id.is_some());
        let sum =
            |layers: &BTreeMap<LayerId, u64>| layers.values().copied().fold(0, u64::saturating_add);
        let uncounted = sum(&layer_bytes).saturating_sub(sum(&sizes.layers()));
        if uncounted > 0 {
            ctx.note(format_args!(
                "{} of tensors with a value per expert, such as scales, are not part of the budget, as in the fork",
                human_bytes(uncounted)
            ));
        }
        let with_gate = layers_with_gate(&map);
        let layers = layer_bytes.keys().copied();
        let without_gate = layers.filter(|layer| !with_gate.contains(layer)).collect();
        Ok(Experts {
            sizes,
            layer_bytes,
            without_gate,
            model: if has_separate {
                Err(SEPARATE_EXPERTS)
            } else {
                Ok(path.to_owned())
            },
            model_info: Some(model_info),
        })
    }

    fn from_csv(path: &Path) -> anyhow::Result<Experts> {
        let text = bounded::read_text(path)?;
        let sizes = ExpertSizes::from_csv(&text).with_context(|| path.display().to_string())?;
        if sizes.is_empty() {
            bail!(
                "{} contains no expert; add a line `layer,expert,bytes` for each",
                path.display()
            );
        }
        Ok(Experts {
            layer_bytes: sizes.layers(),
            sizes,
            without_gate: BTreeSet::new(),
            model: Err(NO_MODEL),
            model_info: None,
        })
    }

    /// Returns the architecture of the model, if it is known.
    pub fn arch(&self) -> Option<&str> {
        self.model_info.as_ref()?.arch.as_deref()
    }
}
