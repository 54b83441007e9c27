//! The short description of a model.

use moe_gguf::map::MAX_EXPERT_ROWS;
use serde::Deserialize;

use super::Error;

/// An architecture whose keys and tensors are known here, by llama.cpp's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[non_exhaustive]
pub enum Arch {
    /// OpenAI's gpt-oss.
    #[serde(rename = "gpt-oss")]
    GptOss,
    /// Qwen3's mixtures of experts.
    #[serde(rename = "qwen3moe")]
    Qwen3Moe,
    /// Qwen3-Next: three layers of linear attention to one of full attention, and a shared expert.
    #[serde(rename = "qwen3next")]
    Qwen3Next,
    /// Mixtral, which llama.cpp counts among the Llamas.
    #[serde(rename = "llama")]
    Llama,
    /// OLMoE.
    #[serde(rename = "olmoe")]
    Olmoe,
}

impl Arch {
    /// The name in `general.architecture`, and before the keys.
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

/// A model in a few numbers. As JSON, keys with a default may be left out, and no others may be
/// there.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spec {
    /// Architecture.
    pub arch: Arch,
    /// `general.name`; the architecture's by default.
    #[serde(default)]
    pub name: Option<String>,
    /// `general.size_label`, such as 20B; empty by default.
    #[serde(default)]
    pub size_label: String,
    /// Layers.
    pub n_layer: u32,
    /// Width of the residual stream.
    pub n_embd: u64,
    /// Query heads.
    pub n_head: u64,
    /// Key and value heads; as many as query heads by default.
    #[serde(default)]
    pub n_head_kv: Option<u64>,
    /// Width of a head; `n_embd / n_head` by default.
    #[serde(default)]
    pub head_dim: Option<u64>,
    /// Experts of a layer.
    pub n_expert: u64,
    /// Experts that a token uses.
    pub n_expert_used: u64,
    /// Hidden width of an expert.
    pub n_ff_exp: u64,
    /// Hidden width of dense blocks, which is only told; that of an expert by default.
    #[serde(default)]
    pub n_ff: Option<u64>,
    /// Hidden width of the shared expert (qwen3next); that of an expert by default.
    #[serde(default)]
    pub n_ff_shexp: Option<u64>,
    /// Context length of the training; 4096 by default.
    #[serde(default = "default_context")]
    pub context_length: u32,
    /// Base of the rotary embedding's frequencies; 10000 by default.
    #[serde(default = "default_freq_base")]
    pub rope_freq_base: f32,
    /// Dimensions of a head that are rotated; all by default.
    #[serde(default)]
    pub rope_dims: Option<u32>,
    /// YaRN scaling of the rotary embedding; none by default.
    #[serde(default)]
    pub yarn: Option<Yarn>,
    /// Epsilon of the RMS norms; 1e-6 by default.
    #[serde(default = "default_rms_eps")]
    pub rms_eps: f32,
    /// Width of the sliding window (gpt-oss); 128 by default.
    #[serde(default = "default_window")]
    pub sliding_window: u32,
    /// Linear attention; needed for qwen3next.
    #[serde(default)]
    pub linear_attention: Option<LinearAttention>,
    /// Types of the weights: a type's name, `Q4_K`, or a mix of llama.cpp's, `Q4_K_M`, `Q5_K_M`,
    /// `MXFP4_MOE`. `MXFP4` and `NVFP4` are those of experts, with F16 elsewhere. F16 by default.
    #[serde(default = "default_quant")]
    pub quant: String,
    /// Vocabulary.
    pub vocab: VocabSpec,
}

/// YaRN scaling.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Yarn {
    /// How much longer the context is made.
    pub factor: f32,
    /// Context length before.
    pub original_context_length: u32,
}

/// Gated delta-net layers, in llama.cpp's terms for state space models.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinearAttention {
    /// Width of the convolution.
    pub conv_kernel: u64,
    /// Width of a head.
    pub state_size: u64,
    /// Key heads.
    pub group_count: u64,
    /// Value heads.
    pub time_step_rank: u64,
    /// Every how many layers one has full attention.
    pub full_attention_interval: u32,
}

/// A vocabulary of made-up words.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VocabSpec {
    /// Tokens in all.
    pub n_tokens: u32,
    /// `gpt2` (byte-level BPE) or `llama` (SentencePiece); `gpt2` by default.
    #[serde(default)]
    pub model: VocabModel,
    /// Rule that cuts text into words (`tokenizer.ggml.pre`); `gpt-2` by default.
    #[serde(default = "default_pre")]
    pub pre: String,
    /// Merges of byte-level BPE; by default one for each word.
    #[serde(default)]
    pub n_merges: Option<u32>,
    /// Control tokens, which are the last ones; 1 by default. Not for `llama`, which has three.
    #[serde(default = "default_special")]
    pub n_special: u32,
    /// Bytes that the texts of all tokens and merges have together; by default as they come.
    #[serde(default)]
    pub text_bytes: Option<u64>,
    /// Token that begins a text; none by default.
    #[serde(default)]
    pub bos: Option<u32>,
    /// Token that ends a text; the first control token by default.
    #[serde(default)]
    pub eos: Option<u32>,
    /// Padding token; none by default.
    #[serde(default)]
    pub pad: Option<u32>,
}

/// How a vocabulary works.
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

fn default_quant() -> String {
    "F16".to_owned()
}

fn default_pre() -> String {
    "gpt-2".to_owned()
}

fn default_special() -> u32 {
    1
}

/// The largest width of anything. Products of two widths, and a few such products, fit 64 bits.
const MAX_WIDTH: u64 = 1 << 24;

/// The largest number of tokens.
const MAX_TOKENS: u32 = 1 << 20;

impl Spec {
    /// Key and value heads.
    pub fn n_head_kv(&self) -> u64 {
        self.n_head_kv.unwrap_or(self.n_head)
    }

    /// Width of a head.
    pub fn head_dim(&self) -> u64 {
        self.head_dim
            .unwrap_or_else(|| self.n_embd.checked_div(self.n_head).unwrap_or(0))
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

    /// Refuses what makes no model.
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
            let most = match key {
                "n_layer" => 1 << 12,
                "n_expert" => 1 << 14,
                "context_length" => 1 << 30,
                _ => MAX_WIDTH,
            };
            if width == 0 || width > most {
                return bad(key, format!("it is {width}, but must lie in 1..={most}"));
            }
        }
        if self.n_expert_used > self.n_expert {
            let problem = format!(
                "it is {}, but there are {}",
                self.n_expert_used, self.n_expert
            );
            return bad("n_expert_used", problem);
        }
        if !self.n_head.is_multiple_of(self.n_head_kv()) {
            return bad(
                "n_head_kv",
                format!("it does not divide the {} heads", self.n_head),
            );
        }
        let heads = self.n_head * self.head_dim();
        if heads > MAX_WIDTH {
            return bad(
                "head_dim",
                format!("the heads are {heads} wide, at most {MAX_WIDTH}"),
            );
        }
        // Rotary position encoding turns elements in pairs.
        if !self.head_dim().is_multiple_of(2) {
            let problem = format!("it is {}, but must be even", self.head_dim());
            return bad("head_dim", problem);
        }
        if let Some(dims) = self.rope_dims.map(u64::from) {
            let most = self.head_dim();
            if dims == 0 || dims > most || !dims.is_multiple_of(2) {
                let problem =
                    format!("it is {dims}, but must be even and lie in 2..={most} (head_dim)");
                return bad("rope_dims", problem);
            }
        }
        if self.arch == Arch::Olmoe && heads != self.n_embd {
            return bad(
                "head_dim",
                format!("the heads are {heads} wide, olmoe wants n_embd"),
            );
        }
        if (self.arch == Arch::Qwen3Next) != self.linear_attention.is_some() {
            return bad(
                "linear_attention",
                "qwen3next must have it, the others not".to_owned(),
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
                let problem = format!("its widths must lie in 1..={MAX_WIDTH}");
                return bad("linear_attention", problem);
            }
            if self.n_layer < full_attention_interval {
                let problem = format!(
                    "it is {}, but must be {full_attention_interval} (full_attention_interval) or more: no layer would have full attention",
                    self.n_layer
                );
                return bad("n_layer", problem);
            }
        }
        // The most that a model may have for all its tools: three stacked matrices a layer.
        let n_rows = 3 * u64::from(self.n_layer) * self.n_expert;
        if n_rows > MAX_EXPERT_ROWS {
            let problem = format!(
                "{} layers of 3 × {} experts are {n_rows}, at most {MAX_EXPERT_ROWS} can be read: take fewer experts or layers",
                self.n_layer, self.n_expert
            );
            return bad("n_expert", problem);
        }
        self.vocab.check()
    }
}

impl VocabSpec {
    /// Control tokens: the last ones, or SentencePiece's three first.
    pub(super) fn n_special(&self) -> u32 {
        match self.model {
            VocabModel::Gpt2 => self.n_special,
            VocabModel::Llama => 3,
        }
    }

    fn check(&self) -> Result<(), Error> {
        let bad = |key, problem: String| Err(Error::Spec { key, problem });
        // The 256 bytes have a token each.
        let least = self.n_special().saturating_add(256);
        if self.n_tokens < least || self.n_tokens > MAX_TOKENS {
            let n = self.n_tokens;
            return bad(
                "vocab.n_tokens",
                format!("it is {n}, but must lie in {least}..={MAX_TOKENS}"),
            );
        }
        let ids = [
            ("vocab.bos", self.bos),
            ("vocab.eos", self.eos),
            ("vocab.pad", self.pad),
        ];
        for (key, id) in ids {
            if let Some(id) = id.filter(|&id| id >= self.n_tokens) {
                return bad(
                    key,
                    format!("it is {id}, but there are {} tokens", self.n_tokens),
                );
            }
        }
        Ok(())
    }
}
