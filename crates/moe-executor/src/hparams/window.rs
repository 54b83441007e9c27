//! Sliding attention windows.

use super::{HParams, Keys, Rope};
use crate::error::Result;

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

/// The rotary position embedding of windowed layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WindowRope {
    /// That of the other layers with the base `rope.freq_base_swa`. llama.cpp applies the context scaling factor there for every
    /// `rope.scaling.type`.
    Own,
    /// That of the other layers.
    Same,
    /// That of the other layers without context scaling.
    Unscaled,
}

/// Which layers of an architecture have a window.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WindowRules {
    /// Period of the pattern without `attention.sliding_window_pattern`.
    pub period: u64,
    /// Whether the first layer of a period has no window, instead of the last.
    pub dense_first: bool,
    /// Length of the window instead of the value of `attention.sliding_window`.
    pub fixed: Option<usize>,
    /// Whether a model without `attention.sliding_window` has no window. Otherwise the key is required.
    pub optional: bool,
    pub rope: WindowRope,
}

impl WindowRules {
    /// A window in every second layer.
    pub(crate) const ALTERNATING: WindowRules = WindowRules {
        period: 2,
        dense_first: false,
        fixed: None,
        optional: false,
        rope: WindowRope::Own,
    };
}

impl HParams {
    /// Reads the keys of an architecture with sliding-window layers.
    ///
    /// # Errors
    /// A key is missing, or the width of a head differs between windowed and other layers.
    pub(crate) fn read_window(&mut self, keys: &Keys, rules: WindowRules) -> Result<()> {
        const LENGTH: &str = "attention.sliding_window";
        if rules.optional && !keys.is_set(LENGTH)? {
            return Ok(());
        }
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
        let n_positions = keys.count(LENGTH, 1 << 30)?;
        self.window = Some(Window {
            n_positions: rules.fixed.unwrap_or(n_positions),
            layers: keys.window_layers(self.n_layer, rules.period, rules.dense_first)?,
            rope: match rules.rope {
                WindowRope::Own => self.rope.windowed(keys)?,
                WindowRope::Same => self.rope,
                WindowRope::Unscaled => self.rope.unscaled(),
            },
        });
        Ok(())
    }
}

impl Rope {
    fn windowed(self, keys: &Keys) -> Result<Rope> {
        Ok(Rope {
            freq_base: keys.f32_or("rope.freq_base_swa", self.freq_base)?,
            freq_scale: Rope::train_scale(keys)?,
            ..self
        })
    }

    fn unscaled(self) -> Rope {
        Rope {
            freq_scale: 1.0,
            ext_factor: 0.0,
            attn_factor: 1.0,
            ..self
        }
    }
}
