//! Descriptions of published models.
//!
//! Shapes are from the published configurations (`config.json`). The modules `keys` and `tensors` derive key-values and tensors
//! from them. Numbers of tokens and merges, ids of special tokens and names of pre-tokenizers are those that llama.cpp prints
//! for the published GGUF files. The total size of vocabulary texts is known only for gpt-oss, whose data offset is published;
//! for other models it differs from the published files.

use super::spec::{Arch, LinearAttention, Spec, VocabModel, VocabSpec, Yarn};

impl Spec {
    /// The names that [`Spec::like`] accepts.
    pub const PRESETS: [&str; 7] = [
        "gpt-oss-20b",
        "gpt-oss-120b",
        "qwen3-30b-a3b",
        "qwen3-next-80b",
        "qwen3-next-80b-a3b",
        "mixtral-8x7b",
        "olmoe-1b-7b",
    ];

    /// Returns the description of the published model with this name in [`Spec::PRESETS`].
    pub fn like(name: &str) -> Option<Spec> {
        Some(match name {
            "gpt-oss-20b" => gpt_oss("Gpt-Oss-20B", "20B", 24, 32),
            "gpt-oss-120b" => gpt_oss("Gpt-Oss-120B", "120B", 36, 128),
            "qwen3-30b-a3b" => qwen3_30b(),
            "qwen3-next-80b" | "qwen3-next-80b-a3b" => qwen3_next(),
            "mixtral-8x7b" => mixtral(),
            "olmoe-1b-7b" => olmoe(),
            _ => return None,
        })
    }
}

/// Returns a description with defaults. Fields with the value 0 must be overwritten.
fn base(arch: Arch, name: &str, size_label: &str, vocab: VocabSpec) -> Spec {
    Spec {
        arch,
        name: Some(name.to_owned()),
        size_label: size_label.to_owned(),
        n_layer: 0,
        n_embd: 0,
        n_head: 0,
        n_head_kv: None,
        head_dim: None,
        n_expert: 0,
        n_expert_used: 0,
        n_ff_exp: 0,
        n_ff: None,
        n_ff_shexp: None,
        context_length: 0,
        rope_freq_base: 10_000.0,
        rope_dims: None,
        yarn: None,
        rms_eps: 1e-6,
        sliding_window: 128,
        linear_attention: None,
        quant: "Q4_K_M".to_owned(),
        vocab,
    }
}

/// gpt-oss, from `config.json` of openai/gpt-oss-20b and openai/gpt-oss-120b. The published 20B file with MXFP4 experts and F16
/// otherwise has 37 keys, 459 tensors and data offset 13,008,832.
fn gpt_oss(name: &str, size_label: &str, n_layer: u32, n_expert: u64) -> Spec {
    let vocab = VocabSpec {
        n_tokens: 201_088,
        model: VocabModel::Gpt2,
        pre: "gpt-4o".to_owned(),
        n_merges: Some(446_189),
        n_special: 1_090,
        text_bytes: Some(6_996_576),
        bos: Some(199_998),
        eos: Some(200_002),
        pad: Some(200_017),
    };
    Spec {
        n_layer,
        n_embd: 2880,
        n_head: 64,
        n_head_kv: Some(8),
        head_dim: Some(64),
        n_expert,
        n_expert_used: 4,
        n_ff_exp: 2880,
        context_length: 131_072,
        rope_freq_base: 150_000.0,
        yarn: Some(Yarn {
            factor: 32.0,
            original_context_length: 4096,
        }),
        rms_eps: 1e-5,
        quant: "MXFP4".to_owned(),
        ..base(Arch::GptOss, name, size_label, vocab)
    }
}

/// The vocabulary of Qwen2, 2.5 and 3: 151,643 words and 26 control tokens; the rest is unused.
fn qwen_vocab() -> VocabSpec {
    VocabSpec {
        n_tokens: 151_936,
        model: VocabModel::Gpt2,
        pre: "qwen2".to_owned(),
        n_merges: Some(151_387),
        n_special: 293,
        text_bytes: None,
        bos: Some(151_643),
        eos: Some(151_645),
        pad: Some(151_643),
    }
}

fn qwen3_30b() -> Spec {
    Spec {
        n_layer: 48,
        n_embd: 2048,
        n_head: 32,
        n_head_kv: Some(4),
        head_dim: Some(128),
        n_expert: 128,
        n_expert_used: 8,
        n_ff_exp: 768,
        n_ff: Some(6144),
        context_length: 40_960,
        rope_freq_base: 1_000_000.0,
        ..base(Arch::Qwen3Moe, "Qwen3 30B A3B", "30B-A3B", qwen_vocab())
    }
}

fn qwen3_next() -> Spec {
    Spec {
        n_layer: 48,
        n_embd: 2048,
        n_head: 16,
        n_head_kv: Some(2),
        head_dim: Some(256),
        n_expert: 512,
        n_expert_used: 10,
        n_ff_exp: 512,
        n_ff: Some(5120),
        context_length: 262_144,
        rope_freq_base: 10_000_000.0,
        rope_dims: Some(64),
        linear_attention: Some(LinearAttention {
            conv_kernel: 4,
            state_size: 128,
            group_count: 16,
            time_step_rank: 32,
            full_attention_interval: 4,
        }),
        ..base(
            Arch::Qwen3Next,
            "Qwen3 Next 80B A3B",
            "80B-A3B",
            qwen_vocab(),
        )
    }
}

fn mixtral() -> Spec {
    let vocab = VocabSpec {
        n_tokens: 32_000,
        model: VocabModel::Llama,
        pre: "default".to_owned(),
        n_merges: None,
        n_special: 3,
        text_bytes: None,
        bos: Some(1),
        eos: Some(2),
        pad: None,
    };
    Spec {
        n_layer: 32,
        n_embd: 4096,
        n_head: 32,
        n_head_kv: Some(8),
        n_expert: 8,
        n_expert_used: 2,
        n_ff_exp: 14_336,
        context_length: 32_768,
        rope_freq_base: 1_000_000.0,
        rms_eps: 1e-5,
        ..base(Arch::Llama, "Mixtral 8x7B", "8x7B", vocab)
    }
}

fn olmoe() -> Spec {
    let vocab = VocabSpec {
        n_tokens: 50_304,
        model: VocabModel::Gpt2,
        pre: "olmo".to_owned(),
        n_merges: Some(50_009),
        n_special: 25,
        text_bytes: None,
        bos: None,
        eos: Some(50_279),
        pad: Some(1),
    };
    Spec {
        n_layer: 16,
        n_embd: 2048,
        n_head: 16,
        n_expert: 64,
        n_expert_used: 8,
        n_ff_exp: 1024,
        context_length: 4096,
        rms_eps: 1e-5,
        ..base(Arch::Olmoe, "OLMoE 1B 7B", "1B-7B", vocab)
    }
}
