//! Attention windows.

use super::heads::MAX_HEADS;
use super::{HParams, Keys, Rope};
use crate::error::Result;

/// An attention window.
#[derive(Debug, Clone)]
pub struct Window {
    /// Maximum number of positions that a token attends to, including its own.
    pub n_positions: usize,
    /// By layer, whether its attention is limited to the window.
    pub layers: Vec<bool>,
    /// Where the window starts.
    pub kind: WindowKind,
    /// Rotary position embedding of these layers.
    pub rope: Rope,
}

/// Where the attention window of a token starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WindowKind {
    /// At a constant distance: the window has the same length for all tokens.
    Sliding,
    /// At a multiple of its length: a token attends to positions of its own chunk.
    Chunked,
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
    /// That of the other layers with the base `rope.freq_base_swa`, or 10,000 without this key, and without the context scaling factor.
    Independent,
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
    pub kind: WindowKind,
    /// Whether the header must list the windowed layers: `attention.sliding_window_pattern` is then a list.
    pub listed: bool,
    /// Whether heads of windowed layers may have other widths than those of other layers.
    pub own_widths: bool,
    /// Whether RoPE may rotate another number of dimensions in windowed layers than in other layers.
    pub own_rotation: bool,
    pub rope: WindowRope,
}

impl WindowRules {
    /// A window in every second layer.
    pub(crate) const ALTERNATING: WindowRules = WindowRules {
        period: 2,
        dense_first: false,
        fixed: None,
        optional: false,
        kind: WindowKind::Sliding,
        listed: false,
        own_widths: false,
        own_rotation: false,
        rope: WindowRope::Own,
    };

    /// A window in the layers that the header lists.
    pub(crate) const LISTED: WindowRules = WindowRules {
        listed: true,
        rope: WindowRope::Independent,
        ..WindowRules::ALTERNATING
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
        if rules.listed {
            keys.require_window_list()?;
        }
        let layers = keys.window_layers(self.n_layer, rules.period, rules.dense_first)?;
        let n_dims = self.read_window_widths(keys, rules, &layers)?;
        let rope = match rules.rope {
            WindowRope::Own => self.rope.windowed(keys)?,
            WindowRope::Same => self.rope,
            WindowRope::Unscaled => self.rope.unscaled(),
            WindowRope::Independent => self.rope.independent(keys)?,
        };
        self.window = Some(Window {
            n_positions: match rules.fixed {
                Some(n_positions) => n_positions,
                None => keys.count(LENGTH, 1 << 30)?,
            },
            layers,
            kind: rules.kind,
            rope: Rope { n_dims, ..rope },
        });
        Ok(())
    }

    /// Reads the widths of the heads of windowed layers. Returns the number of dimensions that RoPE rotates there.
    ///
    /// # Errors
    /// A width is out of range, or not that of the other layers although `rules` require it.
    fn read_window_widths(
        &mut self,
        keys: &Keys,
        rules: WindowRules,
        layers: &[bool],
    ) -> Result<usize> {
        const N_DIMS: &str = "rope.dimension_count_swa";
        let first = self.heads[0];
        let width = |suffix: &str, other: usize, is_own: bool| -> Result<usize> {
            let own = keys.count_or(suffix, other, MAX_HEADS)?;
            if own != other && !is_own {
                let reason = format!(
                    "a width other than that of the other layers ({other}) is not supported"
                );
                return Err(keys.bad(suffix, own, &reason));
            }
            Ok(own)
        };
        let k_dim = width("attention.key_length_swa", first.k_dim, rules.own_widths)?;
        let v_dim = width("attention.value_length_swa", first.v_dim, rules.own_widths)?;
        let n_dims = width(N_DIMS, self.rope.n_dims, rules.own_rotation)?;
        if n_dims > k_dim || n_dims % 2 != 0 {
            let reason = format!("it must be even and at most the width of a head, {k_dim}");
            return Err(keys.bad(N_DIMS, n_dims, &reason));
        }
        for (heads, _) in self.heads.iter_mut().zip(layers).filter(|(_, w)| **w) {
            heads.k_dim = k_dim;
            heads.v_dim = v_dim;
        }
        Ok(n_dims)
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

    fn independent(self, keys: &Keys) -> Result<Rope> {
        Ok(Rope {
            freq_base: keys.f32_or("rope.freq_base_swa", 10_000.0)?,
            freq_scale: 1.0,
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
