//! Hyper-parameters that all architectures share, read from the `<arch>.*` keys of a GGUF file.

use moe_gguf::Gguf;

use crate::error::{Error, Result};
use crate::ops::{Gating, Groups};

/// Reads the keys of one architecture, with errors that name file and key.
pub(crate) struct Keys<'g> {
    gguf: &'g Gguf,
    arch: String,
}

impl<'g> Keys<'g> {
    pub(crate) fn new(gguf: &'g Gguf) -> Result<Self> {
        let arch = gguf
            .metadata()
            .str("general.architecture")?
            .map(str::to_owned);
        let arch = arch.ok_or_else(|| Error::MissingKey {
            file: gguf.files()[0].path.clone(),
            key: "general.architecture".into(),
            arch: "GGUF".into(),
        })?;
        Ok(Keys { gguf, arch })
    }

    pub(crate) fn arch(&self) -> &str {
        &self.arch
    }

    fn key(&self, suffix: &str) -> String {
        format!("{}.{suffix}", self.arch)
    }

    fn missing(&self, suffix: &str) -> Error {
        Error::MissingKey {
            file: self.gguf.files()[0].path.clone(),
            key: self.key(suffix),
            arch: self.arch.clone(),
        }
    }

    pub(crate) fn bad(&self, suffix: &str, value: impl ToString, reason: &str) -> Error {
        Error::BadKey {
            file: self.gguf.files()[0].path.clone(),
            key: self.key(suffix),
            value: value.to_string(),
            reason: reason.into(),
        }
    }

    pub(crate) fn opt_usize(&self, suffix: &str) -> Result<Option<usize>> {
        let value = self.gguf.metadata().u64(&self.key(suffix))?;
        Ok(value.map(|v| usize::try_from(v).unwrap_or(usize::MAX)))
    }

    pub(crate) fn usize(&self, suffix: &str) -> Result<usize> {
        self.opt_usize(suffix)?.ok_or_else(|| self.missing(suffix))
    }

    /// A count that must lie in `1..=max`: a hostile header must not make the executor allocate without bound.
    pub(crate) fn count(&self, suffix: &str, max: usize) -> Result<usize> {
        let value = self.usize(suffix)?;
        self.bounded(suffix, value, max)
    }

    fn bounded(&self, suffix: &str, value: usize, max: usize) -> Result<usize> {
        if value == 0 || value > max {
            return Err(self.bad(suffix, value, &format!("it must lie in 1..={max}")));
        }
        Ok(value)
    }

    /// Hidden width of an expert, by its key or as a share of the dense width.
    pub(crate) fn expert_width(&self) -> Result<usize> {
        if self.opt_usize("expert_feed_forward_length")?.unwrap_or(0) > 0 {
            return self.count("expert_feed_forward_length", MAX_WIDTH);
        }
        let n_ff = self.count("feed_forward_length", MAX_WIDTH)?;
        let n_expert_used = self.count("expert_used_count", n_ff)?;
        Ok(n_ff / n_expert_used)
    }

    /// How the router's scores become probabilities.
    pub(crate) fn gating(&self) -> Result<Gating> {
        const KEY: &str = "expert_gating_func";
        match self.usize(KEY)? {
            1 => Ok(Gating::Softmax),
            2 => Ok(Gating::Sigmoid),
            3 => Ok(Gating::SoftmaxOfChosen),
            other => Err(self.bad(
                KEY,
                other,
                "supported are 1 (softmax), 2 (sigmoid) and 3 (softmax of the chosen)",
            )),
        }
    }

    /// Factor on the weights of the chosen experts; zero is a file's way to say that there is none.
    pub(crate) fn weights_scale(&self) -> Result<f32> {
        let scale = self.f32_or("expert_weights_scale", 1.0)?;
        Ok(if scale == 0.0 { 1.0 } else { scale })
    }

    pub(crate) fn count_or(&self, suffix: &str, default: usize, max: usize) -> Result<usize> {
        match self.opt_usize(suffix)? {
            Some(value) => self.bounded(suffix, value, max),
            None => Ok(default),
        }
    }

    pub(crate) fn f32_or(&self, suffix: &str, default: f32) -> Result<f32> {
        Ok(self
            .gguf
            .metadata()
            .f32(&self.key(suffix))?
            .unwrap_or(default))
    }

    pub(crate) fn f32(&self, suffix: &str) -> Result<f32> {
        self.gguf
            .metadata()
            .f32(&self.key(suffix))?
            .ok_or_else(|| self.missing(suffix))
    }

    pub(crate) fn bool_or(&self, suffix: &str, default: bool) -> Result<bool> {
        let value = self.gguf.metadata().bool(&self.key(suffix))?;
        Ok(value.unwrap_or(default))
    }

    pub(crate) fn opt_str(&self, suffix: &str) -> Result<Option<&'g str>> {
        Ok(self.gguf.metadata().str(&self.key(suffix))?)
    }
}

/// Hyper-parameters of a decoder with mixture-of-experts layers.
#[derive(Debug, Clone)]
pub struct HParams {
    /// Architecture name (`general.architecture`).
    pub arch: String,
    /// Layers (`block_count`).
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
    /// Experts that each token uses (top-k).
    pub n_expert_used: usize,
    /// Hidden width of one expert.
    pub n_ff_exp: usize,
    /// Groups that experts are chosen from.
    pub expert_groups: Option<Groups>,
    /// Tokens in the vocabulary.
    pub n_vocab: usize,
    /// Epsilon of the RMS norms.
    pub rms_eps: f32,
    /// Rotary embedding.
    pub rope: Rope,
    /// Rotary embedding of the layers that see a window.
    pub rope_swa: Rope,
    /// Width of the sliding attention window, where the architecture has one.
    pub n_swa: Option<usize>,
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
    /// Which elements are turned together; no key tells it, the architecture does.
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
    /// YaRN's fast and slow rotation bounds.
    pub beta: (f32, f32),
}

/// Largest width of a vector inside the model.
pub(crate) const MAX_WIDTH: usize = 1 << 20;

impl HParams {
    /// Reads what all architectures have. Where the width of an expert stands is told by the architecture.
    pub(crate) fn read(keys: &Keys, n_ff_exp: usize) -> Result<HParams> {
        let gguf = keys.gguf;
        let n_embd = keys.count("embedding_length", MAX_WIDTH)?;
        let n_head = keys.count("attention.head_count", 1 << 14)?;
        let head_dim = keys.count_or("attention.key_length", n_embd / n_head, 1 << 14)?;
        if keys.count_or("attention.value_length", head_dim, 1 << 14)? != head_dim {
            return Err(keys.bad(
                "attention.value_length",
                "different from the key length",
                "both must be equal",
            ));
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
        let n_expert_used = keys.count("expert_used_count", n_expert)?;
        let n_ctx_train = keys.count("context_length", 1 << 30)?;
        let file = || gguf.files()[0].path.clone();
        let embd = gguf
            .tensor("token_embd.weight")
            .ok_or_else(|| Error::MissingTensor {
                file: file(),
                tensor: "token_embd.weight".into(),
                arch: keys.arch().into(),
            })?;
        let rope = Rope::read(keys, head_dim, n_ctx_train)?;
        Ok(HParams {
            arch: keys.arch().to_owned(),
            n_layer: keys.count("block_count", 1 << 12)?,
            n_ctx_train,
            n_embd,
            n_head,
            n_head_kv,
            head_dim,
            n_expert,
            n_expert_used,
            n_ff_exp,
            expert_groups: read_groups(keys, n_expert)?,
            n_vocab: embd.ne[1] as usize,
            rms_eps: keys.f32("attention.layer_norm_rms_epsilon")?,
            rope,
            rope_swa: Rope {
                freq_base: keys.f32_or("rope.freq_base_swa", rope.freq_base)?,
                ..rope
            },
            n_swa: keys
                .opt_usize("attention.sliding_window")?
                .filter(|&n| n > 0),
        })
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
        let n_dims = keys.count_or("rope.dimension_count", head_dim, head_dim)?;
        if n_dims % 2 != 0 {
            return Err(keys.bad("rope.dimension_count", n_dims, "it must be even"));
        }
        // Files from before the key had another name for the factor, and scaled linearly.
        let scaling = keys.opt_str("rope.scaling.type")?.unwrap_or("linear");
        let old_factor = keys.f32_or("rope.scale_linear", 0.0)?;
        let factor = keys.f32_or("rope.scaling.factor", old_factor)?;
        let (freq_scale, ext_factor) = match scaling {
            "none" => (1.0, 0.0),
            "linear" | "yarn" => (
                if factor > 0.0 { 1.0 / factor } else { 1.0 },
                if scaling == "yarn" { 1.0 } else { 0.0 },
            ),
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
            beta: (
                keys.f32_or("rope.scaling.yarn_beta_fast", 32.0)?,
                keys.f32_or("rope.scaling.yarn_beta_slow", 1.0)?,
            ),
        })
    }
}
