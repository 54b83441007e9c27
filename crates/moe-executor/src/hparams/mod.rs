//! Hyper-parameters of all architectures, read from the `<arch>.*` keys of a GGUF file.

mod cache;
mod keys;
mod known;
mod rope;
mod router;
mod window;

use std::ops::Range;

use moe_gguf::LayerId;

use crate::error::{Error, Result};

pub use cache::{LayerCache, StateShape};
pub(crate) use keys::{Keys, MAX_WIDTH};
pub(crate) use known::ignored;
pub use rope::{Rope, RopeLayout};
pub(crate) use router::Gating;
pub use router::Groups;
pub use window::Window;
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
    /// Number of query heads.
    pub n_head: usize,
    /// Number of key and value heads of a layer with attention.
    pub n_head_kv: usize,
    /// What each layer keeps of earlier tokens. An architecture with recurrent layers sets their states after [`HParams::read`].
    pub caches: Vec<LayerCache>,
    /// Width of a head of queries and keys.
    pub head_dim: usize,
    /// Width of a head of values.
    pub value_dim: usize,
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
    /// Whether MoE layers also have a dense block of the width `feed_forward_length`.
    pub dense_everywhere: bool,
    pub rotated: Rotated,
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
            dense_everywhere: false,
            rotated: Rotated::Head,
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
}

impl HParams {
    /// The layers in order.
    pub fn layers(&self) -> impl Iterator<Item = LayerId> + use<> {
        (0..).map(LayerId).take(self.n_layer)
    }

    /// Reads the keys that all architectures have.
    ///
    /// Head counts must be the same in all layers with attention. Numbers of selected experts and feed-forward widths may be lists with
    /// one value per layer.
    ///
    /// # Errors
    /// A key is missing, or its value is not supported.
    pub(crate) fn read(keys: &Keys, layout: Layout) -> Result<HParams> {
        known::refuse_unsupported(keys)?;
        let gguf = keys.gguf;
        let n_layer = read_n_layer(keys)?;
        let n_embd = keys.count("embedding_length", MAX_WIDTH)?;
        let n_head = keys.count("attention.head_count", 1 << 14)?;
        let head_dim = keys.count_or("attention.key_length", n_embd / n_head, 1 << 14)?;
        let default = if layout.own_value_length {
            n_embd / n_head
        } else {
            head_dim
        };
        let value_dim = keys.count_or("attention.value_length", default, 1 << 14)?;
        if value_dim != head_dim && !layout.own_value_length {
            let reason = format!("it must equal the key length, {head_dim}");
            return Err(keys.bad("attention.value_length", value_dim, &reason));
        }
        let heads_kv = read_heads_kv(keys, &layout, n_layer, n_head)?;
        let n_head_kv = heads_kv.iter().copied().max().unwrap_or(0).max(1);
        let caches = heads_kv.iter().map(|&n| match n {
            0 => LayerCache::Nothing,
            _ => LayerCache::KeysAndValues,
        });
        if !keys.is_set("expert_count")? {
            return Err(keys.no_experts());
        }
        let n_expert = keys.count("expert_count", 1 << 14)?;
        let n_dense = layout.n_dense.min(n_layer);
        const OWN: &str = "expert_feed_forward_length";
        const DENSE: &str = "feed_forward_length";
        let has_block = read_blocks(keys, &layout, n_layer)?;
        let with_block = |layers: Range<usize>| -> Vec<usize> {
            layers.filter(|&layer| has_block[layer]).collect()
        };
        let with_experts = with_block(n_dense..n_layer);
        let counts = |key, max| keys.counts(key, &with_experts, n_layer, max);
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
        let dense = |layers| keys.counts(DENSE, &with_block(layers), n_layer, MAX_WIDTH);
        let n_ff = match n_dense {
            _ if layout.dense_everywhere => dense(0..n_layer)?,
            // Like llama.cpp, checks the length of a list that is not used.
            0 => keys.values(DENSE).map(|_| vec![0; n_layer])?,
            _ => dense(0..n_dense)?,
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
            n_head,
            n_head_kv,
            caches: caches.collect(),
            head_dim,
            value_dim,
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
            rope: Rope::read(keys, head_dim, n_ctx_train, &layout)?,
            window: None,
        })
    }
}

/// The number of key and value heads by layer: the same in all layers, or 0 in some of them if the layout allows it.
fn read_heads_kv(
    keys: &Keys,
    layout: &Layout,
    n_layer: usize,
    n_head: usize,
) -> Result<Vec<usize>> {
    const KEY: &str = "attention.head_count_kv";
    let heads = match keys.values(KEY)? {
        Some(values) if layout.layers_without_heads => {
            let heads = (0..n_layer).map(|layer| values.get(layer).unwrap_or(0));
            let heads = heads.map(|n| usize::try_from(n).unwrap_or(usize::MAX));
            let heads: Vec<usize> = heads.collect();
            let mut with_heads = heads.iter().filter(|&&n| n > 0);
            let first = with_heads.next().copied().unwrap_or(1);
            if with_heads.any(|&n| n != first) {
                let reason = "layers with attention must have the same number of heads";
                return Err(keys.bad(KEY, values, reason));
            }
            heads
        }
        _ => vec![keys.count_or(KEY, n_head, n_head)?; n_layer],
    };
    let n = heads.iter().copied().max().unwrap_or(0).max(1);
    if n > n_head || !n_head.is_multiple_of(n) {
        return Err(keys.bad(KEY, n, "`attention.head_count` must be a multiple of it"));
    }
    Ok(heads)
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
