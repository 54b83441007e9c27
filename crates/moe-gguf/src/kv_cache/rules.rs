//! Rules of llama.cpp that depend on the architecture: which layers have a sliding window, and which are recurrent.
//!
//! Source: `load_arch_hparams` of each architecture in llama.cpp's `src/models/`, and `llama_model::create_memory`
//! (llama-cpp-sys-2 0.1.161).

use super::{Header, KvError};
use crate::per_layer::PerLayer;

/// Architectures with a cache of another structure: compressed caches, other linear attention, layers that share or repeat, or
/// no cache.
pub(super) const UNKNOWN: &[&str] = &[
    "arwkv7",
    "bailingmoe3",
    "deepseek4",
    "dots3note",
    "gemma3n",
    "glm5-next",
    "graniteswitch",
    "kimi-k3",
    "llada-moe",
    "mamba",
    "mamba2",
    "minimax-01",
    "nanbeige",
    "plamo2",
    "qwen4exp",
    "rnd1",
    "rwkv6",
    "rwkv6qwen2",
    "rwkv7",
];

/// Which layers of an architecture have a sliding window, and its length.
pub(super) struct WindowRule {
    /// Period of the pattern without `attention.sliding_window_pattern`; `None` if the key is required.
    period: Option<u64>,
    /// Whether the first layer of a period has no window, instead of the last.
    dense_first: bool,
    /// Length of the window instead of the value of `attention.sliding_window`, if that is not 0.
    fixed: Option<u64>,
    /// Value of `attention.sliding_window` if the key is missing.
    default: u64,
}

/// The windowed layers of a model.
pub(super) struct WindowLayers {
    pub(super) n_positions: u64,
    /// By layer, whether it has the window.
    pub(super) layers: Vec<bool>,
}

impl WindowRule {
    /// Returns the rule of an architecture, if it has a window.
    pub(super) fn of(arch: &str) -> Option<WindowRule> {
        let rule = |period| WindowRule {
            period,
            dense_first: false,
            fixed: None,
            default: 0,
        };
        Some(match arch {
            "gemma4" | "mimo2" | "step35" => rule(None),
            "gpt-oss" => rule(Some(2)),
            "gemma2" => WindowRule {
                default: 4096,
                ..rule(Some(2))
            },
            "afmoe" | "cohere2" | "exaone-moe" | "mellum" | "olmo2" => rule(Some(4)),
            "gemma3" => rule(Some(6)),
            "llama4" => WindowRule {
                fixed: Some(8192),
                default: 8192,
                ..rule(Some(4))
            },
            "cohere2moe" | "laguna" => WindowRule {
                dense_first: true,
                ..rule(Some(4))
            },
            "smallthinker" => WindowRule {
                dense_first: true,
                fixed: Some(4096),
                ..rule(Some(4))
            },
            _ => return None,
        })
    }

    /// Returns the windowed layers, or `None` if the window has the length 0.
    pub(super) fn read(
        &self,
        header: &Header,
        n_layer: u64,
    ) -> Result<Option<WindowLayers>, KvError> {
        const PATTERN: &str = "attention.sliding_window_pattern";
        let n = header
            .number("attention.sliding_window")?
            .unwrap_or(self.default);
        if n == 0 {
            return Ok(None);
        }
        let pattern = match (header.flags(PATTERN)?, self.period) {
            (Some(pattern), _) => pattern,
            (None, Some(period)) => PerLayer::Same(period),
            (None, None) => return Err(header.missing(PATTERN)),
        };
        let is_windowed = |layer: u64| match &pattern {
            PerLayer::Same(0) => true,
            PerLayer::Same(period) if self.dense_first => !layer.is_multiple_of(*period),
            PerLayer::Same(period) => layer % period < period - 1,
            PerLayer::Each(flags) => {
                let flag = usize::try_from(layer)
                    .ok()
                    .and_then(|layer| flags.get(layer));
                flag.is_some_and(|&flag| flag != 0)
            }
        };
        Ok(Some(WindowLayers {
            n_positions: self.fixed.unwrap_or(n),
            layers: (0..n_layer).map(is_windowed).collect(),
        }))
    }
}

/// Which layers of a model are recurrent.
pub(super) enum Recurrence {
    /// No layer.
    Attention,
    /// By layer. The others have attention.
    Layers(Vec<bool>),
    /// By layer, whether it is recurrent, has attention, or neither.
    Separate(Vec<[bool; 2]>),
    /// All layers, which also have attention.
    Both,
}

impl Recurrence {
    pub(super) fn read(header: &Header, n_layer: u64) -> Result<Recurrence, KvError> {
        let layers = 0..usize::try_from(n_layer).unwrap_or(0);
        let zero = |values: &Option<PerLayer>, layer| {
            let value = values.as_ref().and_then(|values| values.get(layer));
            value.unwrap_or(0) == 0
        };
        Ok(match header.arch {
            "falcon-h1" => Recurrence::Both,
            "granitehybrid" | "jamba" | "kimi-linear" | "lfm2" | "lfm2moe" => {
                let heads = header.values("attention.head_count_kv")?;
                Recurrence::Layers(layers.map(|layer| zero(&heads, layer)).collect())
            }
            "nemotron_h" | "nemotron_h_moe" => {
                let heads = header.values("attention.head_count_kv")?;
                let widths = header.values("feed_forward_length")?;
                let kinds = layers.map(|layer| {
                    let is_mixer = zero(&widths, layer);
                    let is_recurrent = is_mixer && zero(&heads, layer);
                    [is_recurrent, is_mixer && !is_recurrent]
                });
                Recurrence::Separate(kinds.collect())
            }
            "qwen35" | "qwen35moe" | "qwen3next" => {
                let flags = match header.flags("attention.recurrent_layers")? {
                    Some(flags) => flags,
                    None => {
                        let interval = header.number("full_attention_interval")?.unwrap_or(4);
                        let is_recurrent =
                            |layer: usize| !(layer as u64 + 1).is_multiple_of(interval);
                        let flags = layers.clone().map(|layer| u64::from(is_recurrent(layer)));
                        PerLayer::Each(flags.collect())
                    }
                };
                let flags = Some(flags);
                Recurrence::Layers(layers.map(|layer| !zero(&flags, layer)).collect())
            }
            _ => Recurrence::Attention,
        })
    }

    pub(super) fn is_recurrent(&self, layer: usize) -> bool {
        match self {
            Recurrence::Attention => false,
            Recurrence::Layers(layers) => layers.get(layer).is_some_and(|&is| is),
            Recurrence::Separate(layers) => layers.get(layer).is_some_and(|&[is, _]| is),
            Recurrence::Both => true,
        }
    }

    pub(super) fn has_attention(&self, layer: usize) -> bool {
        match self {
            Recurrence::Attention | Recurrence::Both => true,
            Recurrence::Layers(_) => !self.is_recurrent(layer),
            Recurrence::Separate(layers) => layers.get(layer).is_some_and(|&[_, has]| has),
        }
    }
}
