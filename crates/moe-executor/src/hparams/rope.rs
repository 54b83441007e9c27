//! Rotary position embedding.

use super::{Keys, Layout, MAX_WIDTH, Rotated};
use crate::error::Result;

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

impl Rope {
    pub(super) fn read(
        keys: &Keys,
        head_dim: usize,
        n_ctx_train: usize,
        layout: &Layout,
    ) -> Result<Rope> {
        const N_DIMS: &str = "rope.dimension_count";
        let n_dims = keys.count_or(N_DIMS, head_dim, MAX_WIDTH)?;
        if n_dims > head_dim {
            let reason = format!("it must be at most the width of a head, {head_dim}");
            return Err(keys.bad(N_DIMS, n_dims, &reason));
        }
        if n_dims != head_dim && layout.rotated == Rotated::Head {
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
            "longrope" if layout.longrope => (Rope::train_scale(keys)?, 0.0),
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
    pub(super) fn train_scale(keys: &Keys) -> Result<f32> {
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
}
