//! The differences between the decoders of architectures.

use crate::attention::AttentionSpec;
use crate::moe::MoeSpec;
use crate::recurrent::RecurrentSpec;
use crate::weights::Bias;

/// The layers of an architecture.
#[derive(Clone, Copy)]
pub struct DecoderSpec {
    /// Name of the embeddings, unless they are multiplied by a factor.
    pub embeddings: &'static str,
    /// Attention.
    pub attention: AttentionSpec,
    /// Layers with a recurrent state instead of attention.
    pub recurrent: Option<RecurrentSpec>,
    /// Whether the sum of residual stream and attention has the residual stream as its first source. Its output rows are then
    /// selected before the output of the attention.
    pub residual_before_attention: bool,
    /// Norm of the output of the attention.
    pub post_attention_norm: Option<LayerNorm>,
    /// Whether this norm follows the selection of the output rows.
    pub norms_output_rows: bool,
    /// Name of the sum of the residual stream and the output of the attention.
    pub ffn_inp: &'static str,
    /// Norm before the MoE or dense block.
    pub ffn_norm: LayerNorm,
    /// Norm of the output of the MoE or dense block.
    pub post_ffn_norm: Option<LayerNorm>,
    /// Whether the first node of this norm has a name without the layer.
    pub global_post_ffn_norm: bool,
    /// Number of dense layers, which come first.
    pub n_dense: usize,
    /// Period of the MoE layers, at least 1: among the other layers, only the last layer of each period is a MoE layer.
    pub moe_step: usize,
    /// MoE layers.
    pub moe: MoeSpec,
    /// The dense block of a MoE layer.
    pub dense_block: DenseBlock,
    /// Name of the residual stream after a layer with [`StreamNames::Output`].
    pub output: &'static str,
    /// Whether the sum of residual stream and block has the residual stream as its first source.
    pub residual_first: bool,
    /// Whether the MoE or dense block reads the normed input of the attention. Then there is no norm before the block, and its output and
    /// that of the attention are added to the residual stream together.
    pub parallel: bool,
    /// Whether the output of the attention of a MoE layer, after the selection of the output rows, has the name of the norm before the
    /// experts, whose node has none (Llama 4).
    pub output_named_norm: bool,
    /// Names of the residual stream between layers.
    pub stream_names: StreamNames,
    /// Where the output rows are selected.
    pub output_rows: OutputRows,
    /// Norm of the output.
    pub output_norm: LayerNorm,
    /// Whether a file must have `output.weight`. Otherwise, the token embeddings replace a missing one (tied embeddings).
    pub requires_output: bool,
    /// Bias of the logits (`output.bias`).
    pub logits_bias: Bias,
    /// Bound of the absolute values of the logits.
    pub logits_bound: Option<f32>,
    /// Factor on the embeddings, which llama.cpp's graph reads from an input with one value for each token.
    pub embedding_rows: Option<f32>,
    /// Whether a file may have factors on the results of layers (`layer_output_scale`).
    pub layer_scales: bool,
    /// Factors on parts of the residual stream and on the logits.
    pub scales: Scales,
}

/// A dense block in a MoE layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DenseBlock {
    /// MoE layers have no dense block.
    None,
    /// After the attention, while the experts read the input of the layer (Arctic). It has the width of the residual stream.
    BeforeExperts,
    /// With the input of the experts and the width of a dense layer; the sum of both is divided by √2 (Grok).
    WithExperts,
    /// With the width of a dense layer and norms of its own, like the experts; the router has a further norm (Gemma 4).
    Normed,
}

/// A norm of a layer: the name of its tensor and of its node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LayerNorm {
    /// Tensor, without layer and suffix.
    pub tensor: &'static str,
    /// Node.
    pub node: &'static str,
}

impl LayerNorm {
    /// A norm whose tensor and node have the same name.
    pub const fn named(name: &'static str) -> LayerNorm {
        LayerNorm {
            tensor: name,
            node: name,
        }
    }
}

/// Where llama.cpp's graph selects the rows of a prompt whose logits are wanted (`inp_out_ids`). Later operations compute
/// these rows only.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OutputRows {
    /// In the last layer, between attention and experts; the layer has both.
    InLastLayer,
    /// After the last layer.
    AfterLastLayer,
    /// After the norm of the output.
    AfterNorm,
}

/// Names of the residual stream between layers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StreamNames {
    /// As outputs of layers: [`DecoderSpec::embeddings`], then [`DecoderSpec::output`] of each layer.
    Output,
    /// As inputs of layers: `attn_norm_in` of the next layer, `h_nextn` after the last one.
    Input,
}

/// Constant factors.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Scales {
    /// On the embeddings, with the names of the embeddings and of the product.
    pub embedding: Option<(f32, [&'static str; 2])>,
    /// On the outputs of attention and block, before they are added to the residual stream.
    pub residual: Option<f32>,
    /// On the logits.
    pub logits: Option<f32>,
}

impl Scales {
    /// No factors.
    pub const NONE: Scales = Scales {
        embedding: None,
        residual: None,
        logits: None,
    };
}

impl DecoderSpec {
    /// Whether a layer is a MoE layer.
    pub fn is_moe(&self, layer: usize) -> bool {
        layer >= self.n_dense && (layer + 1).is_multiple_of(self.moe_step)
    }

    /// [`AttentionSpec::PLAIN`] and [`MoeSpec::PLAIN`] in all layers.
    pub const PLAIN: DecoderSpec = DecoderSpec {
        embeddings: "embd",
        attention: AttentionSpec::PLAIN,
        recurrent: None,
        residual_before_attention: false,
        post_attention_norm: None,
        norms_output_rows: false,
        ffn_inp: "ffn_inp",
        ffn_norm: LayerNorm::named("ffn_norm"),
        post_ffn_norm: None,
        global_post_ffn_norm: false,
        n_dense: 0,
        moe_step: 1,
        moe: MoeSpec::PLAIN,
        dense_block: DenseBlock::None,
        output: "l_out",
        residual_first: false,
        parallel: false,
        output_named_norm: false,
        stream_names: StreamNames::Output,
        output_rows: OutputRows::InLastLayer,
        output_norm: LayerNorm {
            tensor: "output_norm",
            node: "result_norm",
        },
        requires_output: false,
        logits_bias: Bias::None,
        logits_bound: None,
        embedding_rows: None,
        layer_scales: false,
        scales: Scales::NONE,
    };
}
