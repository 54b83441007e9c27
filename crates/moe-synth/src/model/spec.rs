//! The description of a synthetic model.

use moe_gguf::MAX_EXPERT_ROWS;
use serde::Deserialize;

use super::Error;

/// A supported architecture, by its name in llama.cpp.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[non_exhaustive]
pub enum Arch {
    /// gpt-oss of OpenAI.
    #[serde(rename = "gpt-oss")]
    GptOss,
    /// Mixture-of-experts models of Qwen3.
    #[serde(rename = "qwen3moe")]
    Qwen3Moe,
    /// Qwen3-Next: three layers with linear attention per layer with full attention, and a shared expert.
    #[serde(rename = "qwen3next")]
    Qwen3Next,
    /// Mixtral, which has the architecture `llama` in llama.cpp.
    #[serde(rename = "llama")]
    Llama,
    /// OLMoE.
    #[serde(rename = "olmoe")]
    Olmoe,
}

impl Arch {
    /// The name in `general.architecture` and in the prefix of keys.
    pub const fn name(self) -> &'static str {
        match self {
            Arch::GptOss => "gpt-oss",
            Arch::Qwen3Moe => "qwen3moe",
            Arch::Qwen3Next => "qwen3next",
            Arch::Llama => "llama",
            Arch::Olmoe => "olmoe",
        }
    }
}

/// The description of a model. In JSON, keys with a default are optional, and unknown keys are an error.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spec {
    /// Architecture.
    pub arch: Arch,
    /// `general.name`. Default: the name of the architecture.
    #[serde(default)]
    pub name: Option<String>,
    /// `general.size_label`, for example `20B`. Default: empty.
    #[serde(default)]
    pub size_label: String,
    /// Number of layers.
    pub n_layer: u32,
    /// Width of the residual stream.
    pub n_embd: u64,
    /// Number of query heads.
    pub n_head: u64,
    /// Number of key and value heads. Default: `n_head`.
    #[serde(default)]
    pub n_head_kv: Option<u64>,
    /// Width of a head. Default: `n_embd / n_head`.
    #[serde(default)]
    pub head_dim: Option<u64>,
    /// Number of experts per layer.
    pub n_expert: u64,
    /// Number of experts per token.
    pub n_expert_used: u64,
    /// Hidden width of an expert.
    pub n_ff_exp: u64,
    /// Hidden width of dense blocks. Only a key of the header: the model has no dense blocks. Default: `n_ff_exp`.
    #[serde(default)]
    pub n_ff: Option<u64>,
    /// Hidden width of the shared expert (qwen3next). Default: `n_ff_exp`.
    #[serde(default)]
    pub n_ff_shexp: Option<u64>,
    /// Context length of the training, in tokens. Default: 4096.
    #[serde(default = "default_context")]
    pub context_length: u32,
    /// Base frequency of RoPE. Default: 10000.
    #[serde(default = "default_freq_base")]
    pub rope_freq_base: f32,
    /// Number of dimensions of a head that RoPE rotates. Default: `head_dim`.
    #[serde(default)]
    pub rope_dims: Option<u32>,
    /// YaRN scaling of RoPE. Default: no scaling.
    #[serde(default)]
    pub yarn: Option<Yarn>,
    /// Epsilon of the RMS norms. Default: 1e-6.
    #[serde(default = "default_rms_eps")]
    pub rms_eps: f32,
    /// Size of the sliding window in tokens (gpt-oss). Default: 128.
    #[serde(default = "default_window")]
    pub sliding_window: u32,
    /// Linear attention. Required for qwen3next, not allowed for other architectures.
    #[serde(default)]
    pub linear_attention: Option<LinearAttention>,
    /// Type of the weights, for example `Q4_K`, or a mix of llama.cpp: `Q4_K_M`, `Q5_K_M`, `MXFP4_MOE`. `MXFP4` and `NVFP4` are
    /// the type of experts; other weights are F16. Default: `F16`.
    #[serde(default = "default_quant")]
    pub quant: String,
    /// Vocabulary.
    pub vocab: VocabSpec,
}

/// YaRN scaling.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Yarn {
    /// Scaling factor of the context length.
    pub factor: f32,
    /// Context length without scaling, in tokens.
    pub original_context_length: u32,
}

/// Gated DeltaNet layers. The fields have the names of llama.cpp's keys for state-space models.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinearAttention {
    /// Width of the convolution.
    pub conv_kernel: u64,
    /// Width of a head.
    pub state_size: u64,
    /// Number of key heads.
    pub group_count: u64,
    /// Number of value heads.
    pub time_step_rank: u64,
    /// Interval of layers with full attention: every N-th layer.
    pub full_attention_interval: u32,
}

/// A vocabulary of synthetic words.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VocabSpec {
    /// Total number of tokens.
    pub n_tokens: u32,
    /// `gpt2` (byte-level BPE) or `llama` (SentencePiece). Default: `gpt2`.
    #[serde(default)]
    pub model: VocabModel,
    /// Name of the pre-tokenizer (`tokenizer.ggml.pre`). Default: `gpt-2`.
    #[serde(default = "default_pre")]
    pub pre: String,
    /// Number of merges of byte-level BPE. Default: one per word.
    #[serde(default)]
    pub n_merges: Option<u32>,
    /// Number of control tokens at the end of the vocabulary. Default: 1. Ignored for `llama`, which has three at the start.
    #[serde(default = "default_special")]
    pub n_special: u32,
    /// Total size of the texts of all tokens and merges, in bytes. Default: the smallest possible size.
    #[serde(default)]
    pub text_bytes: Option<u64>,
    /// Id of the token at the start of a text (BOS). Default: no such token.
    #[serde(default)]
    pub bos: Option<u32>,
    /// Id of the token at the end of a text (EOS). Default: the first control token.
    #[serde(default)]
    pub eos: Option<u32>,
    /// Id of the padding token. Default: no such token.
    #[serde(default)]
    pub pad: Option<u32>,
}

/// The algorithm of a tokenizer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum VocabModel {
    /// Byte-level BPE.
    #[default]
    Gpt2,
    /// SentencePiece.
    Llama,
}

fn default_context() -> u32 {
    4096
}

fn default_freq_base() -> f32 {
    10_000.0
}

fn default_rms_eps() -> f32 {
    1e-6
}

fn default_window() -> u32 {
    128
}

pub(super) fn default_quant() -> String {
    "F16".to_owned()
}

fn default_pre() -> String {
    "gpt-2".to_owned()
}

fn default_special() -> u32 {
    1
}

/// Maximum of all widths. Sums of a few products of two widths fit 64 bits.
const MAX_WIDTH: u64 = 1 << 24;

/// Maximum number of tokens of a vocabulary.
const MAX_TOKENS: u32 = 1 << 20;

impl Spec {
    /// Number of key and value heads.
    pub fn n_head_kv(&self) -> u64 {
        self.n_head_kv.unwrap_or(self.n_head)
    }

    /// Width of a head.
    pub fn head_dim(&self) -> u64 {
        self.head_dim
            .unwrap_or_else(|| self.n_embd.checked_div(self.n_head).unwrap_or(0))
    }

    /// How [`Spec::head_dim`] is computed, in brackets; empty if the description contains it.
    fn head_dim_formula(&self) -> &'static str {
        match self.head_dim {
            Some(_) => "",
            None => " (n_embd / n_head)",
        }
    }

    /// Hidden width of dense blocks.
    pub fn n_ff(&self) -> u64 {
        self.n_ff.unwrap_or(self.n_ff_exp)
    }

    /// Hidden width of the shared expert.
    pub fn n_ff_shexp(&self) -> u64 {
        self.n_ff_shexp.unwrap_or(self.n_ff_exp)
    }

    /// Whether a layer has linear attention.
    pub fn is_linear(&self, layer: u32) -> bool {
        self.linear_attention.is_some_and(|linear| {
            !(layer + 1).is_multiple_of(linear.full_attention_interval.max(1))
        })
    }

    /// Checks the description.
    ///
    /// # Errors
    /// [`Error::Spec`] with the first invalid key.
    pub(super) fn check(&self) -> Result<(), Error> {
        let bad = |key, problem: String| Err(Error::Spec { key, problem });
        let widths = [
            ("n_layer", self.n_layer.into()),
            ("n_embd", self.n_embd),
            ("n_head", self.n_head),
            ("n_head_kv", self.n_head_kv()),
            ("head_dim", self.head_dim()),
            ("n_expert", self.n_expert),
            ("n_expert_used", self.n_expert_used),
            ("n_ff_exp", self.n_ff_exp),
            ("n_ff", self.n_ff()),
            ("n_ff_shexp", self.n_ff_shexp()),
            ("context_length", self.context_length.into()),
        ];
        for (key, width) in widths {
            let limit = match key {
                "n_layer" => 1 << 12,
                "n_expert" => 1 << 14,
                "context_length" => 1 << 30,
                _ => MAX_WIDTH,
            };
            if width == 0 || width > limit {
                let formula = match key {
                    "head_dim" => self.head_dim_formula(),
                    _ => "",
                };
                return bad(
                    key,
                    format!("{width}{formula} is out of range (1..={limit})"),
                );
            }
        }
        if self.n_expert_used > self.n_expert {
            let problem = format!(
                "{} is greater than n_expert ({})",
                self.n_expert_used, self.n_expert
            );
            return bad("n_expert_used", problem);
        }
        if !self.n_head.is_multiple_of(self.n_head_kv()) {
            return bad(
                "n_head_kv",
                format!("n_head ({}) is not a multiple of it", self.n_head),
            );
        }
        let heads = self.n_head * self.head_dim();
        if heads > MAX_WIDTH {
            return bad(
                "head_dim",
                format!("n_head * head_dim is {heads}, but at most {MAX_WIDTH} is supported"),
            );
        }
        // RoPE rotates pairs of elements.
        if !self.head_dim().is_multiple_of(2) {
            let problem = format!("{}{} is not even", self.head_dim(), self.head_dim_formula());
            return bad("head_dim", problem);
        }
        if let Some(dims) = self.rope_dims.map(u64::from) {
            let limit = self.head_dim();
            if dims == 0 || dims > limit || !dims.is_multiple_of(2) {
                let problem =
                    format!("{dims} is not an even number in the range 2..={limit} (head_dim)");
                return bad("rope_dims", problem);
            }
        }
        if self.arch == Arch::Olmoe && heads != self.n_embd {
            return bad(
                "head_dim",
                format!("n_head * head_dim is {heads}, but must be n_embd for olmoe"),
            );
        }
        if (self.arch == Arch::Qwen3Next) != self.linear_attention.is_some() {
            return bad(
                "linear_attention",
                "it is required for qwen3next, and not allowed for other architectures".to_owned(),
            );
        }
        if let Some(linear) = self.linear_attention {
            let LinearAttention {
                conv_kernel,
                state_size,
                group_count,
                time_step_rank,
                full_attention_interval,
            } = linear;
            let widths = [conv_kernel, state_size, group_count, time_step_rank];
            let fits = |n: u64| n > 0 && n <= MAX_WIDTH;
            let heads = group_count.max(time_step_rank);
            let fit = widths.into_iter().all(fits) && fits(state_size * heads);
            if !fit || full_attention_interval == 0 {
                let problem = format!("a width is out of range (1..={MAX_WIDTH})");
                return bad("linear_attention", problem);
            }
            if self.n_layer < full_attention_interval {
                let problem = format!(
                    "{} is less than full_attention_interval ({full_attention_interval}), so no layer would have full attention",
                    self.n_layer
                );
                return bad("n_layer", problem);
            }
        }
        // Each layer has three stacked tensors. `Gguf::open` rejects a model above the limit.
        let n_rows = 3 * u64::from(self.n_layer) * self.n_expert;
        if n_rows > MAX_EXPERT_ROWS {
            let problem = format!(
                "{} layers with 3 × {} expert slices have {n_rows}, but at most {MAX_EXPERT_ROWS} are supported; use fewer experts or layers",
                self.n_layer, self.n_expert
            );
            return bad("n_expert", problem);
        }
        self.vocab.check()
    }
}

impl VocabSpec {
    /// Number of control tokens: the last tokens, or the first three of SentencePiece.
    pub(super) fn n_special(&self) -> u32 {
        match self.model {
            VocabModel::Gpt2 => self.n_special,
            VocabModel::Llama => 3,
        }
    }

    pub(super) fn check(&self) -> Result<(), Error> {
        let bad = |key, problem: String| Err(Error::Spec { key, problem });
        // Each of the 256 bytes has a token.
        let min = self.n_special().saturating_add(256);
        if self.n_tokens < min || self.n_tokens > MAX_TOKENS {
            let n = self.n_tokens;
            return bad(
                "vocab.n_tokens",
                format!("{n} is out of range ({min}..={MAX_TOKENS})"),
            );
        }
        let ids = [
            ("vocab.bos", self.bos),
            ("vocab.eos", self.eos),
            ("vocab.pad", self.pad),
        ];
        for (key, id) in ids {
            if let Some(id) = id.filter(|&id| id >= self.n_tokens) {
                let last = self.n_tokens.saturating_sub(1);
                return bad(key, format!("{id} is out of range (0..={last})"));
            }
        }
        Ok(())
    }
}
