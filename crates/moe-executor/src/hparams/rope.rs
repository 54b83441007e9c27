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

    /// Reads YaRN's multiplier of DeepSeek models (`rope.scaling.yarn_log_multiplier`), adapts [`Rope::attn_factor`] to it, and returns
    /// the factor on the attention scores, in addition to the inverse root of the width of a head.
    ///
    /// DeepSeek multiplies rotated vectors by `m(mscale) / m(mscale_all_dim)` and scores by `m(mscale_all_dim)²`, where
    /// `m(x) = 1 + 0.1 · x · ln(factor)`; the key contains `0.1 · mscale_all_dim`. `mscale` is not in the header: it is 1, or
    /// `mscale_all_dim` if `is_uniform`. Source: llama.cpp's `llama-context.cpp` and `models/deepseek2.cpp`.
    pub(crate) fn read_multiplier(&mut self, keys: &Keys, is_uniform: bool) -> Result<f32> {
        let multiplier = keys.f32_or("rope.scaling.yarn_log_multiplier", 0.0)? / 0.1;
        Ok(self.apply_multiplier(multiplier, is_uniform))
    }

    /// Like [`Rope::read_multiplier`] for a multiplier; 0 is that of a header without the key.
    pub(crate) fn apply_multiplier(&mut self, multiplier: f32, is_uniform: bool) -> f32 {
        let log = (1.0 / self.freq_scale).ln();
        let magnitude = |multiplier: f32| 1.0 + 0.1 * multiplier * log;
        let has_yarn = self.ext_factor != 0.0;
        if has_yarn && self.freq_scale < 1.0 && multiplier != 0.0 {
            let rotated = if is_uniform { multiplier } else { 1.0 };
            // RoPE multiplies by `magnitude(1.0)` itself.
            self.attn_factor *= magnitude(rotated) / magnitude(multiplier) / magnitude(1.0);
        }
        let rotated = if has_yarn && self.freq_scale >= 1.0 {
            self.attn_factor
        } else {
            // Like llama.cpp, also with linear scaling.
            self.attn_factor * magnitude(1.0)
        };
        (rotated * magnitude(multiplier)).powi(2)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn scaled(factor: f32, ext_factor: f32) -> Rope {
        Rope {
            n_dims: 64,
            layout: RopeLayout::Neighbours,
            freq_base: 10_000.0,
            freq_scale: 1.0 / factor,
            ext_factor,
            attn_factor: 1.0,
            n_ctx_orig: 4096,
            beta: (32.0, 1.0),
        }
    }

    /// The factor on the scores, and the factor on the rotated vectors without that of YaRN.
    fn factors(mut rope: Rope, multiplier: f32, is_uniform: bool) -> [f32; 2] {
        let scores = rope.apply_multiplier(multiplier, is_uniform);
        [scores, rope.attn_factor]
    }

    #[track_caller]
    fn check(got: [f32; 2], want: [f64; 2]) {
        for (got, want) in got.into_iter().zip(want) {
            assert!((f64::from(got) - want).abs() < 1e-5, "{got} {want}");
        }
    }

    /// DeepSeek V2 Lite: factor 40, `mscale` and `mscale_all_dim` 0.707.
    #[test]
    fn uniform_multipliers_change_the_scores_only() {
        let log = 40f64.ln();
        let (m, yarn) = (1.0 + 0.0707 * log, 1.0 + 0.1 * log);
        // RoPE multiplies by `yarn`, so that the factor on the rotated vectors is 1.
        let want = [m * m, 1.0 / yarn];
        check(factors(scaled(40.0, 1.0), 0.707, true), want);
    }

    #[test]
    fn other_multipliers_also_change_the_rotated_vectors() {
        let log = 40f64.ln();
        let (m, yarn) = (1.0 + 0.0707 * log, 1.0 + 0.1 * log);
        let want = [yarn * yarn, 1.0 / m];
        check(factors(scaled(40.0, 1.0), 0.707, false), want);
    }

    #[test]
    fn without_scaling_all_factors_are_one() {
        for multiplier in [0.0, 0.707] {
            for ext_factor in [0.0, 1.0] {
                let got = factors(scaled(1.0, ext_factor), multiplier, true);
                check(got, [1.0, 1.0]);
            }
        }
    }

    #[test]
    fn without_a_multiplier_scores_have_the_factor_of_rope() {
        let yarn = 1.0 + 0.1 * 40f64.ln();
        for ext_factor in [0.0, 1.0] {
            let got = factors(scaled(40.0, ext_factor), 0.0, true);
            check(got, [yarn * yarn, 1.0]);
        }
    }
}
