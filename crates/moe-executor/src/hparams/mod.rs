//! Hyper-parameters of all architectures, read from the `<arch>.*` keys of a GGUF file.

mod heads;
mod keys;
mod known;
mod rope;
mod router;
mod window;

use moe_gguf::LayerId;

use crate::error::{Error, Result};

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
    /// Number of key and value heads of the first layer.
    pub n_head_kv: usize,
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
    /// Whether the numbers of heads may differ between layers, and the width of values from that of keys.
    pub heads_by_layer: bool,
    /// Whether RoPE with factors for short and long contexts is supported.
    pub longrope: bool,
    pub norm: NormKind,
    pub norm_bias: bool,
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

    /// Elements of a row of keys and of values in the cache, by layer; 0 in a layer that reads the cache of another layer.
    pub(crate) fn cache_widths(&self) -> impl Iterator<Item = [usize; 2]> {
        let layers = self.layers().zip(&self.heads);
        layers.map(|(il, heads)| heads.cache_widths(il))
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
        let head_dim = first.k_dim;
        if !keys.is_set("expert_count")? {
            return Err(keys.no_experts());
        }
        let n_expert = keys.count("expert_count", 1 << 14)?;
        let with_experts =
            |suffix: &str, max| keys.counts_where(suffix, n_layer, |il| layout.is_moe(il), max);
        let n_used = with_experts("expert_used_count", n_expert)?;
        const OWN: &str = "expert_feed_forward_length";
        const DENSE: &str = "feed_forward_length";
        let n_ff_exp = match layout.expert_width {
            ExpertWidth::Own => with_experts(OWN, MAX_WIDTH)?,
            ExpertWidth::Dense => with_experts(DENSE, MAX_WIDTH)?,
            ExpertWidth::OwnOrShare | ExpertWidth::OwnOrDense if keys.is_set(OWN)? => {
                with_experts(OWN, MAX_WIDTH)?
            }
            ExpertWidth::OwnOrDense => with_experts(DENSE, MAX_WIDTH)?,
            ExpertWidth::OwnOrShare => {
                let n_ff = with_experts(DENSE, MAX_WIDTH)?;
                let shares = n_ff.iter().zip(&n_used).map(|(n_ff, k)| n_ff / k.max(&1));
                shares.collect()
            }
        };
        let mut moe_layers = (0..n_layer).filter(|&layer| layout.is_moe(layer));
        if let Some(layer) = moe_layers.find(|&layer| n_ff_exp[layer] == 0) {
            let reason = format!(
                "`feed_forward_length` divided by it is 0, which is the width of the experts of layer {layer}"
            );
            return Err(keys.bad("expert_used_count", n_used[layer], &reason));
        }
        let is_dense = |layer: usize| !layout.is_moe(layer);
        let mut n_ff = if layout.dense_everywhere {
            keys.counts(DENSE, 0..n_layer, MAX_WIDTH)?
        } else if (0..n_layer).any(is_dense) {
            keys.counts_where(DENSE, n_layer, is_dense, MAX_WIDTH)?
        } else {
            // Like llama.cpp, checks the length of a list that is not used.
            keys.values(DENSE).map(|_| Vec::new())?
        };
        n_ff.resize(n_layer, 0);
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
            n_head_kv: first.n_kv,
            head_dim,
            n_expert,
            n_expert_used: n_used.iter().copied().max().unwrap_or(0),
            n_expert_used_by_layer: n_used,
            n_ff_exp_by_layer: n_ff_exp,
            n_ff_by_layer: n_ff,
            expert_groups: read_groups(keys, n_expert)?,
            n_vocab: embd.ne[1] as usize,
            norm: layout.norm,
            norm_bias: layout.norm_bias,
            norm_eps: keys.f32(match layout.norm {
                NormKind::Rms => "attention.layer_norm_rms_epsilon",
                NormKind::Layer => "attention.layer_norm_epsilon",
            })?,
            rope: Rope::read(keys, head_dim, n_ctx_train, &layout)?,
            window: None,
            swiglu_limits: vec![SwigluLimits::default(); n_layer],
        })
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
