//! Hyper-parameters that all architectures share, read from the `<arch>.*` keys of a GGUF file.

mod keys;
mod known;

use crate::error::{Error, Result};
use crate::ops::Groups;

pub(crate) use keys::{Keys, MAX_WIDTH};
pub(crate) use known::ignored;

/// Hyper-parameters of a decoder with mixture-of-experts layers.
#[derive(Debug, Clone)]
pub struct HParams {
    /// Architecture name (`general.architecture`).
    pub arch: String,
    /// Layers: `block_count` less the blocks of an MTP head (`nextn_predict_layers`).
    pub n_layer: usize,
    /// Context length of the training.
    pub n_ctx_train: usize,
    /// Width of the residual stream.
    pub n_embd: usize,
    /// Query heads.
    pub n_head: usize,
    /// Key and value heads.
    pub n_head_kv: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Experts of a layer.
    pub n_expert: usize,
    /// Experts that each token uses (top-k), in the layer with the most.
    pub n_expert_used: usize,
    /// Experts that each token uses in each layer; 0 in a layer without experts.
    pub n_expert_used_by_layer: Vec<usize>,
    /// Hidden width of one expert in each layer; 0 in a layer without experts.
    pub n_ff_exp_by_layer: Vec<usize>,
    /// Hidden width of the block of each layer without experts; 0 in a layer with experts.
    pub n_ff_by_layer: Vec<usize>,
    /// Groups that experts are chosen from.
    pub expert_groups: Option<Groups>,
    /// Tokens in the vocabulary.
    pub n_vocab: usize,
    /// Epsilon of the RMS norms.
    pub rms_eps: f32,
    /// Rotary embedding.
    pub rope: Rope,
    /// Sliding attention window, where the architecture has one.
    pub window: Option<Window>,
}

/// Which elements of a head are turned together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeLayout {
    /// Element `i` and `i + n_dims / 2` (GPT-NeoX).
    Halves,
    /// Element `2 i` and `2 i + 1` (llama).
    Neighbours,
}

/// Parameters of the rotary position embedding, YaRN included.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rope {
    /// Rotated dimensions of a head.
    pub n_dims: usize,
    /// Which elements are turned together; it follows from the architecture, not from a key.
    pub layout: RopeLayout,
    /// Base of the frequencies.
    pub freq_base: f32,
    /// 1 / context scaling factor.
    pub freq_scale: f32,
    /// 1 with YaRN, 0 without.
    pub ext_factor: f32,
    /// Factor on the rotated vectors, beside YaRN's own.
    pub attn_factor: f32,
    /// Context length before scaling.
    pub n_ctx_orig: usize,
    /// YaRN's fast and slow rotation bounds. llama.cpp reads no key for them in these architectures.
    pub beta: (f32, f32),
}

/// Where an architecture stores the hidden width of an expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ExpertWidth {
    /// In `expert_feed_forward_length`.
    Own,
    /// In `feed_forward_length`, as if the layer had no experts.
    Dense,
    /// In `expert_feed_forward_length`, or `feed_forward_length / expert_used_count` where that is missing or 0.
    OwnOrShare,
}

/// What an architecture reads besides the keys that all have.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout {
    pub expert_width: ExpertWidth,
    /// First layers without experts.
    pub n_dense: usize,
}

impl Layout {
    /// Experts in all layers.
    pub(crate) const fn all_moe(expert_width: ExpertWidth) -> Layout {
        Layout {
            expert_width,
            n_dense: 0,
        }
    }
}

impl HParams {
    /// Reads the keys that all architectures have.
    ///
    /// Head counts must be the same in all layers; numbers of selected experts and feed-forward widths may be lists with
    /// one value per layer.
    ///
    /// # Errors
    /// A key is missing, or has a value that the executor does not compute with.
    pub(crate) fn read(keys: &Keys, layout: Layout) -> Result<HParams> {
        known::refuse_unsupported(keys)?;
        let gguf = keys.gguf;
        let n_layer = read_n_layer(keys)?;
        let n_embd = keys.count("embedding_length", MAX_WIDTH)?;
        let n_head = keys.count("attention.head_count", 1 << 14)?;
        let head_dim = keys.count_or("attention.key_length", n_embd / n_head, 1 << 14)?;
        let value_length = keys.count_or("attention.value_length", head_dim, 1 << 14)?;
        if value_length != head_dim {
            let reason = format!("it must be equal to the key length, {head_dim}");
            return Err(keys.bad("attention.value_length", value_length, &reason));
        }
        let n_head_kv = keys.count_or("attention.head_count_kv", n_head, n_head)?;
        if n_head % n_head_kv != 0 {
            return Err(keys.bad(
                "attention.head_count_kv",
                n_head_kv,
                "the query heads must be a multiple of it",
            ));
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
            let reason = format!("it leaves no width for the experts of layer {layer}");
            return Err(keys.bad("expert_used_count", n_used[layer], &reason));
        }
        let mut n_ff = match n_dense {
            0 => Vec::new(),
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

    /// Reads the keys of an architecture in which some layers see only a window.
    ///
    /// # Errors
    /// A key is missing, or the layers with a window have heads of another width.
    pub(crate) fn read_window(&mut self, keys: &Keys) -> Result<()> {
        for (suffix, width) in [
            ("attention.key_length_swa", self.head_dim),
            ("attention.value_length_swa", self.head_dim),
            ("rope.dimension_count_swa", self.rope.n_dims),
        ] {
            let own = keys.opt_usize(suffix)?.unwrap_or(width);
            if own != width {
                let reason = format!(
                    "the executor computes with the same width as in the other layers, {width}"
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
    /// Positions that a layer sees, the token's own included.
    pub n_positions: usize,
    /// Which layers see only the window.
    pub layers: Vec<bool>,
    /// Rotary embedding of these layers.
    pub rope: Rope,
}

fn read_n_layer(keys: &Keys) -> Result<usize> {
    let n_block = keys.count("block_count", 1 << 12)?;
    let n_nextn = keys.opt_usize("nextn_predict_layers")?.unwrap_or(0);
    match n_block.checked_sub(n_nextn) {
        Some(n_layer @ 1..) => Ok(n_layer),
        _ => {
            let reason = format!("it must be smaller than the {n_block} blocks (`block_count`)");
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
        let reason = format!("it must divide the {n_expert} experts into groups of two or more");
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
            let reason = format!("it must be the width of a head, {head_dim}, as in llama.cpp");
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
                    "supported are none, linear and yarn",
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

    /// 1 / context scaling factor of the training. Older files store the factor in `rope.scale_linear`; 0 means none.
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

    /// The rotation of the layers that see a window: llama.cpp scales them by the factor of the training, whatever
    /// `rope.scaling.type` says.
    pub(crate) fn windowed(self, keys: &Keys) -> Result<Rope> {
        Ok(Rope {
            freq_base: keys.f32_or("rope.freq_base_swa", self.freq_base)?,
            freq_scale: Rope::train_scale(keys)?,
            ..self
        })
    }
}
