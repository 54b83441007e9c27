//! The differences between the attention of architectures.

use moe_gguf::LayerId;

use super::LatentSpec;
use crate::error::Result;
use crate::hparams::Keys;
use crate::weights::Bias;

/// Elements over which the norm of queries and keys is computed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum QkNorm {
    /// The elements of one head.
    Head,
    /// The elements of one head, after RoPE.
    HeadAfterRope,
    /// The elements of one head, after RoPE and without weights. Layers without RoPE have no norm.
    PlainAfterRope,
    /// The elements of all heads of a token.
    Row,
}

/// Layers whose queries and keys are rotated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RopeLayers {
    /// All layers.
    All,
    /// No layers.
    None,
    /// Layers with a sliding window.
    Windowed,
    /// Layers with a sliding window, and the first layers.
    WindowedAndFirst(u32),
    /// All layers except the last of each period.
    ExceptLastOf(u32),
    /// All layers except the first of each period.
    ExceptFirstOf(u32),
}

impl RopeLayers {
    /// All layers or none: Granite has RoPE unless `rope.scaling.finetuned` is false.
    pub(crate) fn of_granite(keys: &Keys) -> Result<RopeLayers> {
        let has_rope = keys.bool_or("rope.scaling.finetuned", true)?;
        Ok(if has_rope {
            RopeLayers::All
        } else {
            RopeLayers::None
        })
    }

    /// Whether a layer is one of them.
    pub(super) fn contain(self, layer: LayerId, is_windowed: bool) -> bool {
        match self {
            RopeLayers::All => true,
            RopeLayers::None => false,
            RopeLayers::Windowed => is_windowed,
            RopeLayers::WindowedAndFirst(n) => is_windowed || u32::from(layer.0) < n,
            RopeLayers::ExceptLastOf(n) => !(u32::from(layer.0) + 1).is_multiple_of(n),
            RopeLayers::ExceptFirstOf(n) => !u32::from(layer.0).is_multiple_of(n),
        }
    }
}

/// Names of the nodes of queries and keys.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QkNames {
    /// Result of the norm.
    pub normed: [&'static str; 2],
    /// Result of the norm in a layer without RoPE.
    pub not_rotated: [&'static str; 2],
    /// Result of RoPE.
    pub rotated: [&'static str; 2],
}

impl QkNames {
    /// The names of most architectures.
    pub const USUAL: QkNames = QkNames {
        normed: ["Qcur_normed", "Kcur_normed"],
        not_rotated: ["Qcur", "Kcur"],
        rotated: ["Qcur", "Kcur"],
    };
}

/// A gate of the heads' output: it is multiplied by the sigmoid of a product of the layer's normed input (`attn_gate`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Gate {
    /// Whether the gate has one value per head. Otherwise it has one per element. Layers may lack a gate with one value per head.
    pub per_head: bool,
    /// Names of the product, the sigmoid and the result.
    pub names: [&'static str; 3],
}

/// Queries and gates of the heads' output in one matrix (`attn_q`), for each head in turn: the output is multiplied by the sigmoid of the
/// gates.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GatedQueries {
    /// Name of their product.
    pub product: &'static str,
    /// Name of the gates.
    pub gates: &'static str,
    /// Whether llama.cpp names the view of the gates instead of its copy.
    pub names_view: bool,
    /// Names of the sigmoid of the gates, and of the result.
    pub gated: [&'static str; 2],
}

/// Factors on queries that grow with their position: `1 + scale · ln(1 + ⌊(position + offset) / length⌋)`, like in llama.cpp
/// (`llm_graph_input_attn_temp`).
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Temperature {
    /// Factor on the logarithm.
    pub scale: f32,
    /// Number of consecutive positions with the same factor.
    pub length: usize,
    /// Added to the positions.
    pub offset: u32,
}

impl Temperature {
    /// The factor of a position.
    pub(super) fn factor(&self, position: u32) -> f32 {
        let periods = (position as f32 + self.offset as f32) / self.length as f32;
        ((f64::from(periods.floor()) + 1.0).ln() * f64::from(self.scale) + 1.0) as f32
    }
}

/// The attention of an architecture.
#[derive(Clone, Copy)]
pub struct AttentionSpec {
    /// Name of the norm of the input.
    pub norm: &'static str,
    /// Biases of queries, keys and values.
    pub qkv_bias: Bias,
    /// Bias of the output.
    pub output_bias: Bias,
    /// Name of the output.
    pub output: &'static str,
    /// Norm of queries and keys.
    pub qk_norm: Option<QkNorm>,
    /// Names of their nodes.
    pub names: QkNames,
    /// Layers with RoPE.
    pub rope_layers: RopeLayers,
    /// Whether a file may contain divisors of the RoPE frequencies: `rope_freqs.weight`, or `rope_factors_short.weight` and
    /// `rope_factors_long.weight` for contexts up to and beyond the original context length.
    pub rope_factors: bool,
    /// Twice the number of divisors in the file; `None` for the rotated dimensions of layers without a window.
    pub rope_factor_dims: Option<usize>,
    /// Whether the divisors also apply to layers with a sliding window.
    pub rope_factors_in_windows: bool,
    /// Whether the values of a layer without `attn_v` are its keys before norm and RoPE. Then `value_norm` must be set.
    pub values_from_keys: bool,
    /// Name of the values after an RMS norm without weights per head; `None` without this norm.
    pub value_norm: Option<&'static str>,
    /// Whether the nodes that read the products of queries, keys and values read them under the name of a reshape, or of a view if they
    /// are columns of one product.
    pub reshaped: [bool; 3],
    /// Whether llama.cpp's graph copies the columns of a product with queries, keys and values (`attn_qkv`), instead of viewing them.
    pub copies_columns: bool,
    /// Limit of the absolute values of queries, keys and values, which must be in one matrix (`attn_qkv`).
    pub clamp: Option<f32>,
    /// Factor on the scores; `None` for the inverse root of the width of a head.
    pub scale: Option<f32>,
    /// Bound of the absolute values of the scores.
    pub softcap: Option<f32>,
    /// Whether the queries are multiplied by the inverse root of the width of a head, in an operation of its own. `scale` is then 1.
    pub scales_queries: bool,
    /// Factors on the queries of layers without RoPE.
    pub temperature: Option<Temperature>,
    /// Whether each head has an attention sink: a score in the softmax without a value.
    pub sinks: bool,
    /// Whether layers of a file may lack the sinks.
    pub optional_sinks: bool,
    /// Factor on the output, in an operation of its own.
    pub output_scale: Option<f32>,
    /// Gate of the heads' output.
    pub gate: Option<Gate>,
    /// Whether llama.cpp's graph has the steps of the attention as nodes, and the values transposed: it has no flash attention for the
    /// architecture. There are no sinks then.
    pub in_steps: bool,
    /// Gates of the heads' output next to the queries.
    pub gated_queries: Option<GatedQueries>,
    /// Latent attention, in which keys and values are products of compressed rows. Norms of queries and keys, factors of frequencies,
    /// limits and sinks do not occur with it.
    pub latent: Option<LatentSpec>,
}

impl AttentionSpec {
    /// Grouped-query attention with RoPE in all layers, and without norms of queries and keys, limits, sinks, gates and compression.
    pub const PLAIN: AttentionSpec = AttentionSpec {
        norm: "attn_norm",
        qkv_bias: Bias::Optional,
        output_bias: Bias::None,
        output: "attn_out",
        qk_norm: None,
        names: QkNames::USUAL,
        rope_layers: RopeLayers::All,
        rope_factors: false,
        rope_factor_dims: None,
        rope_factors_in_windows: true,
        values_from_keys: false,
        value_norm: None,
        reshaped: [false; 3],
        copies_columns: false,
        clamp: None,
        scale: None,
        softcap: None,
        scales_queries: false,
        temperature: None,
        sinks: false,
        optional_sinks: false,
        output_scale: None,
        gate: None,
        in_steps: false,
        gated_queries: None,
        latent: None,
    };

    /// Columns of `attn_q` for each element of a query.
    pub(super) fn per_query(&self) -> usize {
        1 + usize::from(self.gated_queries.is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::Temperature;

    #[test]
    fn temperature_grows_after_each_period() {
        for (offset, cases) in [
            (0, [(0, 0.0), (8191, 0.0), (8192, 1.0), (100_000, 12.0)]),
            (1, [(0, 0.0), (8190, 0.0), (8191, 1.0), (100_000, 12.0)]),
        ] {
            let temperature = Temperature {
                scale: 0.1,
                length: 8192,
                offset,
            };
            for (position, periods) in cases {
                let want = 1.0 + 0.1 * (1.0f64 + periods).ln();
                let got = f64::from(temperature.factor(position));
                assert!((got - want).abs() < 1e-6, "{got} {want} at {position}");
            }
        }
    }
}
