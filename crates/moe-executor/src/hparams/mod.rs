//! Hyper-parameters of all architectures, read from the `<arch>.*` keys of a GGUF file.

mod keys;
mod known;
mod router;

use moe_gguf::LayerId;

use crate::error::{Error, Result};

pub(crate) use keys::{Keys, MAX_WIDTH};
pub(crate) use known::ignored;
pub(crate) use router::Gating;
pub use router::Groups;

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
    /// Number of key and value heads.
    pub n_head_kv: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Experts per MoE layer.
    pub n_expert: usize,
    /// Selected experts per token (top-k): the maximum over the layers.
    pub n_expert_used: usize,
    /// Selected experts per token, by layer; 0 in a dense layer.
    pub n_expert_used_by_layer: Vec<usize>,
    /// Hidden width of one expert, by layer; 0 in a dense layer.
    pub n_ff_exp_by_layer: Vec<usize>,
    /// Hidden width of the dense block, by layer; 0 in a MoE layer.
    pub n_ff_by_layer: Vec<usize>,
    /// Expert groups, if experts are selected from the best groups only.
    pub expert_groups: Option<Groups>,
    /// Tokens in the vocabulary.
    pub n_vocab: usize,
    /// Epsilon of the RMS norms.
    pub rms_eps: f32,
    /// Rotary position embedding.
    pub rope: Rope,
    /// Sliding attention window, if the architecture has one.
    pub window: Option<Window>,
}

/// Which two elements of a head RoPE rotates together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeLayout {
    /// Elements `i` and `i + n_dims / 2` (ggml's `GGML_ROPE_TYPE_NEOX`).
    Halves,
    /// Elements `2 i` and `2 i + 1` (ggml's `GGML_ROPE_TYPE_NORMAL`).
    Neighbours,
}

/// Parameters of the rotary position embedding, including YaRN.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rope {
    /// Rotated dimensions of a head.
    pub n_dims: usize,
    /// Which elements are rotated together. It depends on the architecture, not on a key.
    pub layout: RopeLayout,
    /// Base of the frequencies.
    pub freq_base: f32,
    /// 1 / context scaling factor.
    pub freq_scale: f32,
    /// 1 with YaRN, 0 without.
    pub ext_factor: f32,
    /// Factor on the rotated vectors, in addition to the factor of YaRN.
    pub attn_factor: f32,
    /// Context length before scaling.
    pub n_ctx_orig: usize,
    /// YaRN's `beta_fast` and `beta_slow`. llama.cpp reads no key for them in these architectures.
    pub beta: (f32, f32),
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
}

/// How an architecture stores the shapes of its blocks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout {
    pub expert_width: ExpertWidth,
    /// Number of dense layers, which come first.
    pub n_dense: usize,
}

impl Layout {
    /// All layers are MoE layers.
    pub(crate) const fn all_moe(expert_width: ExpertWidth) -> Layout {
        Layout {
            expert_width,
            n_dense: 0,
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
    /// Head counts must be the same in all layers. Numbers of selected experts and feed-forward widths may be lists with
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
        let value_length = keys.count_or("attention.value_length", head_dim, 1 << 14)?;
        if value_length != head_dim {
            let reason = format!("it must equal the key length, {head_dim}");
            return Err(keys.bad("attention.value_length", value_length, &reason));
        }
        let n_head_kv = keys.count_or("attention.head_count_kv", n_head, n_head)?;
        if n_head % n_head_kv != 0 {
            return Err(keys.bad(
                "attention.head_count_kv",
                n_head_kv,
                "`attention.head_count` must be a multiple of it",
            ));
        }
        if !keys.is_set("expert_count")? {
            return Err(keys.no_experts());
        }
        let n_expert = keys.count("expert_count", 1 << 14)?;
        let n_dense = layout.n_dense.min(n_layer);
        let with_experts = n_dense..n_layer;
        let n_used = keys.counts("expert_used_count", with_experts.clone(), n_expert)?;
        const OWN: &str = "expert_feed_forward_length";
        const DENSE: &str = "feed_forward_length";
        let n_ff_exp = match layout.expert_width {
            ExpertWidth::Own => keys.counts(OWN, with_experts, MAX_WIDTH)?,
            ExpertWidth::Dense => keys.counts(DENSE, with_experts, MAX_WIDTH)?,
            ExpertWidth::OwnOrShare if keys.is_set(OWN)? => {
                keys.counts(OWN, with_experts, MAX_WIDTH)?
            }
            ExpertWidth::OwnOrShare => {
                let n_ff = keys.counts(DENSE, with_experts, MAX_WIDTH)?;
                let shares = n_ff.iter().zip(&n_used).map(|(n_ff, k)| n_ff / k.max(&1));
                shares.collect()
            }
        };
        if let Some(layer) = (n_dense..n_layer).find(|&layer| n_ff_exp[layer] == 0) {
            let reason = format!(
                "`feed_forward_length` divided by it is 0, which is the width of the experts of layer {layer}"
            );
            return Err(keys.bad("expert_used_count", n_used[layer], &reason));
        }
        let mut n_ff = match n_dense {
            // Like llama.cpp, checks the length of a list that is not used.
            0 => keys.values(DENSE).map(|_| Vec::new())?,
            _ => keys.counts(DENSE, 0..n_dense, MAX_WIDTH)?,
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
            n_head,
            n_head_kv,
            head_dim,
            n_expert,
            n_expert_used: n_used.iter().copied().max().unwrap_or(0),
            n_expert_used_by_layer: n_used,
            n_ff_exp_by_layer: n_ff_exp,
            n_ff_by_layer: n_ff,
            expert_groups: read_groups(keys, n_expert)?,
            n_vocab: embd.ne[1] as usize,
            rms_eps: keys.f32("attention.layer_norm_rms_epsilon")?,
            rope: Rope::read(keys, head_dim, n_ctx_train)?,
            window: None,
        })
    }

    /// Reads the keys of an architecture with sliding-window layers.
    ///
    /// # Errors
    /// A key is missing, or the width of a head differs between windowed and other layers.
    pub(crate) fn read_window(&mut self, keys: &Keys) -> Result<()> {
        for (suffix, width) in [
            ("attention.key_length_swa", self.head_dim),
            ("attention.value_length_swa", self.head_dim),
            ("rope.dimension_count_swa", self.rope.n_dims),
        ] {
            let own = keys.opt_usize(suffix)?.unwrap_or(width);
            if own != width {
                let reason = format!(
                    "a width other than that of the other layers ({width}) is not supported"
                );
                return Err(keys.bad(suffix, own, &reason));
            }
        }
        self.window = Some(Window {
            n_positions: keys.count("attention.sliding_window", 1 << 30)?,
            layers: keys.window_layers(self.n_layer)?,
            rope: self.rope.windowed(keys)?,
        });
        Ok(())
    }
}

/// A sliding attention window.
#[derive(Debug, Clone)]
pub struct Window {
    /// Positions that a token attends to, including its own.
    pub n_positions: usize,
    /// By layer, whether its attention is limited to the window.
    pub layers: Vec<bool>,
    /// Rotary position embedding of these layers.
    pub rope: Rope,
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

impl Rope {
    fn read(keys: &Keys, head_dim: usize, n_ctx_train: usize) -> Result<Rope> {
        const N_DIMS: &str = "rope.dimension_count";
        let n_dims = keys.count_or(N_DIMS, head_dim, MAX_WIDTH)?;
        if n_dims != head_dim {
            let reason =
                format!("it must equal the width of a head, {head_dim}, like in llama.cpp");
            return Err(keys.bad(N_DIMS, n_dims, &reason));
        }
        if n_dims % 2 != 0 {
            return Err(keys.bad(N_DIMS, n_dims, "it must be even"));
        }
        let scaling = keys.opt_str("rope.scaling.type")?.unwrap_or("linear");
        let (freq_scale, ext_factor) = match scaling {
            "none" => (1.0, 0.0),
            "linear" => (Rope::train_scale(keys)?, 0.0),
            "yarn" => (Rope::train_scale(keys)?, 1.0),
            other => {
                return Err(keys.bad(
                    "rope.scaling.type",
                    other,
                    "the supported values are `none`, `linear` and `yarn`",
                ));
            }
        };
        Ok(Rope {
            n_dims,
            layout: RopeLayout::Halves,
            freq_base: keys.f32_or("rope.freq_base", 10_000.0)?,
            freq_scale,
            ext_factor,
            attn_factor: keys.f32_or("rope.scaling.attn_factor", 1.0)?,
            n_ctx_orig: keys.count_or(
                "rope.scaling.original_context_length",
                n_ctx_train,
                1 << 30,
            )?,
            beta: (32.0, 1.0),
        })
    }

    /// 1 / context scaling factor. Older files store the factor in `rope.scale_linear`. A factor of 0 means no scaling.
    fn train_scale(keys: &Keys) -> Result<f32> {
        const KEY: &str = "rope.scaling.factor";
        const OLD_KEY: &str = "rope.scale_linear";
        let (key, factor) = match keys.opt_f32(KEY)? {
            Some(factor) => (KEY, factor),
            None => (OLD_KEY, keys.f32_or(OLD_KEY, 0.0)?),
        };
        match factor {
            0.0 => Ok(1.0),
            factor if factor > 0.0 => Ok(1.0 / factor),
            factor => Err(keys.bad(key, factor, "it must not be negative")),
        }
    }

    /// The rotary embedding of windowed layers. llama.cpp applies the context scaling factor there for every
    /// `rope.scaling.type`.
    pub(crate) fn windowed(self, keys: &Keys) -> Result<Rope> {
        Ok(Rope {
            freq_base: keys.f32_or("rope.freq_base_swa", self.freq_base)?,
            freq_scale: Rope::train_scale(keys)?,
            ..self
        })
    }
}
