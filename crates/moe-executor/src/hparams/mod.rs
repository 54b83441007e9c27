//! Hyper-parameters of all architectures, read from the `<arch>.*` keys of a GGUF file.

mod cache;
mod heads;
mod keys;
mod known;
mod rope;
mod router;
mod window;

use moe_gguf::LayerId;

use crate::error::{Error, Result};

pub use cache::{LayerCache, StateShape};
pub use heads::Heads;
pub(crate) use keys::{Keys, MAX_WIDTH};
pub(crate) use known::ignored;
pub use rope::{Rope, RopeLayout};
pub(crate) use router::Gating;
pub use router::Groups;
pub use window::{Window, WindowKind};
pub(crate) use window::{WindowRope, WindowRules};

/// Hyper-parameters of a decoder with mixture-of-experts layers.
#[derive(Debug, Clone)]
pub struct HParams {
    /// Architecture name (`general.architecture`).
    pub arch: String,
    /// Number of layers: `block_count` minus the blocks of an MTP head (`nextn_predict_layers`).
    pub n_layer: usize,
    /// Context length in training, tokens.
    pub n_ctx_train: usize,
    /// Width of the residual stream.
    pub n_embd: usize,
    /// Attention heads, by layer.
    pub heads: Vec<Heads>,
    /// Number of query heads of the first layer.
    pub n_head: usize,
    /// Number of key and value heads of a layer with attention: the maximum over the layers, at least 1.
    pub n_head_kv: usize,
    /// What each layer keeps of earlier tokens. An architecture with recurrent layers sets their states after the header is read.
    pub caches: Vec<LayerCache>,
    /// Width of a query or a key in layers without a sliding window.
    pub head_dim: usize,
    /// Experts per MoE layer.
    pub n_expert: usize,
    /// Selected experts per token (top-k): the maximum over the layers.
    pub n_expert_used: usize,
    /// Selected experts per token, by layer; 0 in a dense layer.
    pub n_expert_used_by_layer: Vec<usize>,
    /// Hidden width of one expert, by layer; 0 in a dense layer.
    pub n_ff_exp_by_layer: Vec<usize>,
    /// Hidden width of the dense block, by layer; 0 in a MoE layer without one.
    pub n_ff_by_layer: Vec<usize>,
    /// By layer, whether it has a MoE or dense block.
    pub has_block: Vec<bool>,
    /// Expert groups, if experts are selected from the best groups only.
    pub expert_groups: Option<Groups>,
    /// Tokens in the vocabulary.
    pub n_vocab: usize,
    /// Kind of the norms.
    pub norm: NormKind,
    /// Epsilon of the norms.
    pub norm_eps: f32,
    /// Whether the norms of layers and output have biases.
    pub norm_bias: bool,
    /// Rotary position embedding.
    pub rope: Rope,
    /// Sliding attention window, if the architecture has one.
    pub window: Option<Window>,
    /// Limits of SwiGLU activations, by layer.
    pub swiglu_limits: Vec<SwigluLimits>,
}

/// Limits of the SwiGLU activations of a layer: an upper bound of the activated gate, and a bound of the absolute values of up.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct SwigluLimits {
    /// Of the selected experts.
    pub experts: Option<f32>,
    /// Of the shared expert, or of the dense block.
    pub dense: Option<f32>,
}

/// How a norm scales the elements of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormKind {
    /// RMS norm.
    Rms,
    /// Layer norm: the mean is subtracted before.
    Layer,
}

/// Where an architecture stores the hidden width of an expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ExpertWidth {
    /// In `expert_feed_forward_length`.
    Own,
    /// In `feed_forward_length`, like the width of a dense layer.
    Dense,
    /// In `expert_feed_forward_length`; `feed_forward_length / expert_used_count` if that key is missing or 0.
    OwnOrShare,
    /// In `expert_feed_forward_length`; `feed_forward_length` if that key is missing or 0.
    OwnOrDense,
}

/// Which elements of a head an architecture rotates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rotated {
    /// All.
    Head,
    /// The first `rope.dimension_count`.
    Part,
}

/// How an architecture stores the shapes of its blocks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout {
    pub expert_width: ExpertWidth,
    /// Number of dense layers, which come first.
    pub n_dense: usize,
    /// Period of the MoE layers, at least 1: among the other layers, only the last layer of each period is a MoE layer.
    pub moe_step: usize,
    /// Whether MoE layers also have a dense block of the width `feed_forward_length`.
    pub dense_everywhere: bool,
    pub rotated: Rotated,
    /// Whether the numbers of heads may differ between layers.
    pub heads_by_layer: bool,
    /// Whether RoPE with factors for short and long contexts is supported.
    pub longrope: bool,
    pub norm: NormKind,
    pub norm_bias: bool,
    /// Whether the number of key and value heads is 0 in layers without attention. Their [`LayerCache`] is then `Nothing`.
    pub layers_without_heads: bool,
    /// Whether values may have another width than keys.
    pub own_value_length: bool,
    /// Whether `feed_forward_length` is 0 in layers without a MoE or dense block.
    pub layers_without_block: bool,
    /// Whether the epsilon of RMS norms is in `attention.layer_norm_epsilon` if its own key is missing.
    pub shares_epsilon: bool,
}

impl Layout {
    /// All layers are MoE layers.
    pub(crate) const fn all_moe(expert_width: ExpertWidth) -> Layout {
        Layout {
            expert_width,
            n_dense: 0,
            moe_step: 1,
            dense_everywhere: false,
            rotated: Rotated::Head,
            heads_by_layer: false,
            longrope: false,
            norm: NormKind::Rms,
            norm_bias: false,
            layers_without_heads: false,
            own_value_length: false,
            layers_without_block: false,
            shares_epsilon: false,
        }
    }

    /// The first `n_dense` layers are dense. Experts have their own width.
    pub(crate) const fn dense_first(n_dense: usize) -> Layout {
        Layout {
            n_dense,
            ..Layout::all_moe(ExpertWidth::Own)
        }
    }

    /// Whether a layer is a MoE layer.
    fn is_moe(&self, layer: usize) -> bool {
        layer >= self.n_dense && (layer + 1).is_multiple_of(self.moe_step)
    }
}

impl HParams {
    /// The layers in order.
    pub fn layers(&self) -> impl Iterator<Item = LayerId> + use<> {
        (0..).map(LayerId).take(self.n_layer)
    }

    /// By layer, whether its attention is limited to a window.
    pub(crate) fn windowed_layers(&self) -> impl Iterator<Item = bool> {
        let window = self.window.as_ref();
        (0..self.n_layer).map(move |layer| window.is_some_and(|window| window.layers[layer]))
    }

    /// Reads the keys that all architectures have.
    ///
    /// Numbers of selected experts and feed-forward widths may be lists with one value per layer; head counts only if `layout` allows
    /// it.
    ///
    /// # Errors
    /// A key is missing, or its value is not supported.
    pub(crate) fn read(keys: &Keys, layout: Layout) -> Result<HParams> {
        known::refuse_unsupported(keys)?;
        let gguf = keys.gguf;
        let n_layer = read_n_layer(keys)?;
        let n_embd = keys.count("embedding_length", MAX_WIDTH)?;
        let heads = Heads::read(keys, &layout, n_layer, n_embd)?;
        // `n_layer` is at least 1.
        let first = heads[0];
        let n_head_kv = heads.iter().map(|heads| heads.n_kv).max();
        let caches = heads.iter().map(|heads| match heads.n_kv {
            0 => LayerCache::Nothing,
            _ => LayerCache::KeysAndValues,
        });
        let caches = caches.collect();
        if !keys.is_set("expert_count")? {
            return Err(keys.no_experts());
        }
        let n_expert = keys.count("expert_count", 1 << 14)?;
        const OWN: &str = "expert_feed_forward_length";
        const DENSE: &str = "feed_forward_length";
        let has_block = read_blocks(keys, &layout, n_layer)?;
        let layers = |is_used: &dyn Fn(usize) -> bool| -> Vec<usize> {
            let layers = 0..n_layer;
            layers
                .filter(|&layer| has_block[layer] && is_used(layer))
                .collect()
        };
        let with_experts = layers(&|layer| layout.is_moe(layer));
        let dense = layers(&|layer| !layout.is_moe(layer));
        let counts = |key: &str, max| keys.counts(key, &with_experts, n_layer, max);
        let n_used = counts("expert_used_count", n_expert)?;
        let n_ff_exp = match layout.expert_width {
            ExpertWidth::Own => counts(OWN, MAX_WIDTH)?,
            ExpertWidth::Dense => counts(DENSE, MAX_WIDTH)?,
            ExpertWidth::OwnOrShare | ExpertWidth::OwnOrDense if keys.is_set(OWN)? => {
                counts(OWN, MAX_WIDTH)?
            }
            ExpertWidth::OwnOrDense => counts(DENSE, MAX_WIDTH)?,
            ExpertWidth::OwnOrShare => {
                let n_ff = counts(DENSE, MAX_WIDTH)?;
                let shares = n_ff.iter().zip(&n_used).map(|(n_ff, k)| n_ff / k.max(&1));
                shares.collect()
            }
        };
        if let Some(&layer) = with_experts.iter().find(|&&layer| n_ff_exp[layer] == 0) {
            let reason = format!(
                "`feed_forward_length` divided by it is 0, which is the width of the experts of layer {layer}"
            );
            return Err(keys.bad("expert_used_count", n_used[layer], &reason));
        }
        let n_ff = if layout.dense_everywhere {
            let with_block = layers(&|_| true);
            keys.counts(DENSE, &with_block, n_layer, MAX_WIDTH)?
        } else if !dense.is_empty() {
            keys.counts(DENSE, &dense, n_layer, MAX_WIDTH)?
        } else {
            // Like llama.cpp, checks the length of a list that is not used.
            keys.values(DENSE).map(|_| vec![0; n_layer])?
        };
        let n_ctx_train = keys.count("context_length", 1 << 30)?;
        let file = || gguf.files()[0].path.clone();
        let embd = gguf
            .tensor("token_embd.weight")
            .ok_or_else(|| Error::MissingTensor {
                file: file(),
                tensor: "token_embd.weight".into(),
                arch: keys.arch().into(),
            })?;
        Ok(HParams {
            arch: keys.arch().to_owned(),
            n_layer,
            n_ctx_train,
            n_embd,
            heads,
            n_head: first.n,
            n_head_kv: n_head_kv.unwrap_or(0).max(1),
            caches,
            head_dim: first.k_dim,
            n_expert,
            n_expert_used: n_used.iter().copied().max().unwrap_or(0),
            n_expert_used_by_layer: n_used,
            n_ff_exp_by_layer: n_ff_exp,
            n_ff_by_layer: n_ff,
            has_block,
            expert_groups: read_groups(keys, n_expert)?,
            n_vocab: embd.ne[1] as usize,
            norm: layout.norm,
            norm_bias: layout.norm_bias,
            norm_eps: read_epsilon(keys, &layout)?,
            rope: Rope::read(keys, first.k_dim, n_ctx_train, &layout)?,
            window: None,
            swiglu_limits: vec![SwigluLimits::default(); n_layer],
        })
    }
}

/// By layer, whether it has a MoE or dense block. At least one layer has a block.
fn read_blocks(keys: &Keys, layout: &Layout, n_layer: usize) -> Result<Vec<bool>> {
    const KEY: &str = "feed_forward_length";
    if !layout.layers_without_block {
        return Ok(vec![true; n_layer]);
    }
    let values = keys.values(KEY)?;
    let width = |layer| values.as_ref().and_then(|values| values.get(layer));
    let has_block: Vec<bool> = (0..n_layer)
        .map(|layer| width(layer).unwrap_or(0) > 0)
        .collect();
    if !has_block.contains(&true) {
        return Err(keys.bad(KEY, 0, "no layer has experts"));
    }
    Ok(has_block)
}

fn read_epsilon(keys: &Keys, layout: &Layout) -> Result<f32> {
    const RMS: &str = "attention.layer_norm_rms_epsilon";
    const LAYER: &str = "attention.layer_norm_epsilon";
    match layout.norm {
        NormKind::Layer => keys.f32(LAYER),
        NormKind::Rms if layout.shares_epsilon => match keys.opt_f32(RMS)? {
            Some(epsilon) => Ok(epsilon),
            None => keys.f32(LAYER),
        },
        NormKind::Rms => keys.f32(RMS),
    }
}

fn read_n_layer(keys: &Keys) -> Result<usize> {
    let n_block = keys.count("block_count", 1 << 12)?;
    let n_nextn = keys.opt_usize("nextn_predict_layers")?.unwrap_or(0);
    match n_block.checked_sub(n_nextn) {
        Some(n_layer @ 1..) => Ok(n_layer),
        _ => {
            let reason = format!("it must be less than `block_count`, {n_block}");
            Err(keys.bad("nextn_predict_layers", n_nextn, &reason))
        }
    }
}

fn read_groups(keys: &Keys, n_expert: usize) -> Result<Option<Groups>> {
    let n = keys.opt_usize("expert_group_count")?.unwrap_or(0);
    if n < 2 {
        return Ok(None);
    }
    if n >= n_expert || !n_expert.is_multiple_of(n) {
        let reason = format!("it must divide the {n_expert} experts into groups of at least 2");
        return Err(keys.bad("expert_group_count", n, &reason));
    }
    let n_used = keys.count("expert_group_used_count", n - 1)?;
    Ok(Some(Groups { n, n_used }))
}
