//! How the executor handles each `<arch>.*` key that llama.cpp knows.
//!
//! The list is that of `LLM_KV_NAMES` in llama.cpp's `src/llama-arch.cpp` (llama-cpp-sys-2 0.1.161). llama.cpp reads some keys
//! for every architecture (`llama_model_base::load_hparams`) and others in `load_arch_hparams` of an architecture. A key that
//! llama.cpp does not read for an architecture has no effect in llama.cpp and in the executor.

use moe_gguf::Value;

use super::Keys;
use crate::error::{Result, Warning};

/// How a key is handled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Use {
    /// It is read for all architectures.
    Read,
    /// It is read for these architectures. llama.cpp ignores it for the other supported architectures.
    ReadFor(&'static [&'static str]),
    /// The only supported value. Another value changes the results in llama.cpp, so it is an error.
    Must(bool),
    /// It does not change the results of a text model: names, embedding output, classifiers.
    Harmless,
    /// llama.cpp reads it only for architectures that the executor does not support.
    Ignored,
}

use Use::{Harmless, Ignored, Must, Read, ReadFor};

/// Architectures with leading dense layers.
const DENSE_FIRST: Use = ReadFor(&[
    "afmoe",
    "bailingmoe2",
    "cohere2moe",
    "deepseek2",
    "deepseek2-ocr",
    "dots1",
    "ernie4_5-moe",
    "exaone-moe",
    "glm4moe",
    "kimi-linear",
    "lfm2moe",
    "mistral4",
]);
/// Architectures whose header has the number of shared experts.
const SHARED: Use = ReadFor(&[
    "afmoe",
    "bailingmoe2",
    "cohere2moe",
    "deepseek2",
    "deepseek2-ocr",
    "dots1",
    "exaone-moe",
    "glm4moe",
    "kimi-linear",
    "mistral4",
    "nemotron_h_moe",
]);
/// Architectures whose header has a factor on the expert weights.
const WEIGHTS_SCALE: Use = ReadFor(&[
    "afmoe",
    "bailingmoe2",
    "cohere2moe",
    "deepseek2",
    "deepseek2-ocr",
    "dots1",
    "exaone-moe",
    "glm4moe",
    "kimi-linear",
    "mistral4",
    "nemotron_h_moe",
    "step35",
]);
/// Architectures whose header has whether the expert weights are normalized.
const WEIGHTS_NORM: Use = ReadFor(&[
    "afmoe",
    "bailingmoe2",
    "cohere2moe",
    "deepseek2",
    "deepseek2-ocr",
    "dots1",
    "exaone-moe",
    "glm4moe",
    "mistral4",
    "nemotron_h_moe",
    "step35",
]);
/// Architectures with latent attention.
const LATENT: Use = ReadFor(&["deepseek2", "kimi-linear", "mistral4"]);
/// Architectures with latent attention, YaRN and compressed queries.
const DEEPSEEK: Use = ReadFor(&["deepseek2", "mistral4"]);
const GEMMA: Use = ReadFor(&["gemma4"]);
const GRANITE: Use = ReadFor(&["granitehybrid", "granitemoe"]);
const GROK: Use = ReadFor(&["grok"]);
const STEP: Use = ReadFor(&["step35"]);
/// Architectures with gated delta nets.
const DELTA_NET: Use = ReadFor(&["qwen35moe", "qwen3next"]);
/// Architectures with gated delta nets or Mamba-2 layers.
const RECURRENT: Use = ReadFor(&["granitehybrid", "nemotron_h_moe", "qwen35moe", "qwen3next"]);
const KIMI: Use = ReadFor(&["kimi-linear"]);
const SCALED: Use = ReadFor(&["granitehybrid", "granitemoe", "grok"]);
/// Architectures with a sliding window.
const WINDOW: Use = ReadFor(&[
    "afmoe",
    "cohere2moe",
    "exaone-moe",
    "gemma4",
    "gpt-oss",
    "llama4",
    "mellum",
    "mimo2",
    "smallthinker",
    "step35",
]);

/// All keys, without the prefix of the architecture.
pub(super) const KEYS: &[(&str, Use)] = &[
    ("vocab_size", Harmless),
    ("context_length", Read),
    ("embedding_length", Read),
    ("embedding_length_out", Harmless),
    ("embedding_length_per_layer_input", GEMMA),
    ("features_length", Ignored),
    ("block_count", Read),
    ("leading_dense_block_count", DENSE_FIRST),
    ("attn_res.block_size", Ignored),
    ("activation.situ_beta", Ignored),
    ("activation.situ_linear_beta", Ignored),
    ("feed_forward_length", Read),
    (
        "expert_feed_forward_length",
        ReadFor(&[
            "afmoe",
            "bailingmoe2",
            "cohere2moe",
            "deepseek2",
            "deepseek2-ocr",
            "dots1",
            "ernie4_5-moe",
            "exaone-moe",
            "gemma4",
            "glm4moe",
            "gpt-oss",
            "grok",
            "hunyuan-moe",
            "kimi-linear",
            "lfm2moe",
            "llama4",
            "mellum",
            "mimo2",
            "minimax-m2",
            "mistral4",
            "nemotron_h_moe",
            "qwen2moe",
            "qwen35moe",
            "qwen3moe",
            "qwen3next",
            "smallthinker",
            "step35",
        ]),
    ),
    (
        "expert_shared_feed_forward_length",
        ReadFor(&[
            "bailingmoe2",
            "cohere2moe",
            "ernie4_5-moe",
            "exaone-moe",
            "granitehybrid",
            "granitemoe",
            "hunyuan-moe",
            "nemotron_h_moe",
            "qwen2moe",
            "qwen35moe",
            "qwen3next",
            "step35",
        ]),
    ),
    ("expert_chunk_feed_forward_length", Ignored),
    ("swiglu_clamp_exp", STEP),
    ("swiglu_clamp_shexp", STEP),
    ("use_parallel_residual", Ignored),
    ("tensor_data_layout", Harmless),
    ("expert_count", Read),
    ("expert_used_count", Read),
    ("expert_shared_count", SHARED),
    ("expert_group_count", Read),
    ("expert_group_used_count", Read),
    ("expert_weights_scale", WEIGHTS_SCALE),
    ("expert_weights_norm", WEIGHTS_NORM),
    ("expert_latent_length", Ignored),
    (
        "expert_gating_func",
        ReadFor(&[
            "afmoe",
            "bailingmoe2",
            "cohere2moe",
            "deepseek2",
            "deepseek2-ocr",
            "dots1",
            "exaone-moe",
            "glm4moe",
            "kimi-linear",
            "lfm2moe",
            "minimax-m2",
            "mistral4",
            "smallthinker",
            "step35",
        ]),
    ),
    ("expert_group_scale", Ignored),
    ("experts_per_group", Ignored),
    ("moe_every_n_layers", Ignored),
    ("moe_latent_size", ReadFor(&["nemotron_h_moe"])),
    ("nextn_predict_layers", Read),
    ("n_deepstack_layers", Ignored),
    ("deepstack_mapping", Ignored),
    ("hidden_activation", Ignored),
    ("pooling_type", Harmless),
    (
        "logit_scale",
        ReadFor(&["cohere2moe", "granitemoe", "grok"]),
    ),
    ("decoder_start_token_id", Ignored),
    ("decoder_block_count", Ignored),
    ("attn_logit_softcapping", GROK),
    ("router_logit_softcapping", GROK),
    ("final_logit_softcapping", ReadFor(&["gemma4", "grok"])),
    ("swin_norm", Ignored),
    ("rescale_every_n_layers", Ignored),
    ("time_mix_extra_dim", Ignored),
    ("time_decay_extra_dim", Ignored),
    ("residual_scale", GRANITE),
    ("embedding_scale", SCALED),
    ("adapters.count", Ignored),
    ("adapters.token_ids_activate", Ignored),
    ("adapters.token_ids_substitute", Ignored),
    ("adapters.lora_rank", Ignored),
    ("adapters.router_gain", Ignored),
    ("token_shift_count", Ignored),
    (
        "interleave_moe_layer_step",
        ReadFor(&["ernie4_5-moe", "llama4"]),
    ),
    ("full_attention_interval", DELTA_NET),
    ("num_loops", Ignored),
    ("skip_loop_final_norm", Ignored),
    ("hrm.layers_per_stack", Ignored),
    ("hrm.h_cycles", Ignored),
    ("hrm.l_cycles", Ignored),
    ("hrm.prefix_lm", Ignored),
    ("attention.head_count", Read),
    ("attention.head_count_kv", Read),
    ("attention.max_alibi_bias", Ignored),
    ("attention.clamp_kqv", ReadFor(&["dbrx"])),
    ("attention.key_length", Read),
    ("attention.value_length", Read),
    (
        "attention.layer_norm_epsilon",
        ReadFor(&["cohere2moe", "dbrx", "nemotron_h_moe"]),
    ),
    ("attention.layer_norm_rms_epsilon", Read),
    ("attention.group_norm_epsilon", Ignored),
    ("attention.group_norm_groups", Ignored),
    ("attention.causal", Must(true)),
    ("attention.q_lora_rank", DEEPSEEK),
    ("attention.kv_lora_rank", LATENT),
    ("attention.decay_lora_rank", Ignored),
    ("attention.iclr_lora_rank", Ignored),
    ("attention.value_residual_mix_lora_rank", Ignored),
    ("attention.gate_lora_rank", Ignored),
    ("attention.relative_buckets_count", Ignored),
    ("attention.sliding_window", WINDOW),
    ("attention.sliding_window_pattern", WINDOW),
    ("attention.rope_pattern", Ignored),
    ("attention.scale", GRANITE),
    ("attention.output_scale", GROK),
    ("attention.value_scale", ReadFor(&["mimo2"])),
    (
        "attention.temperature_length",
        ReadFor(&["deepseek2", "grok", "mistral4"]),
    ),
    ("attention.temperature_scale", DEEPSEEK),
    ("attention.key_length_mla", LATENT),
    ("attention.value_length_mla", LATENT),
    ("attention.key_length_swa", WINDOW),
    ("attention.value_length_swa", WINDOW),
    ("attention.key_length_mla_swa", Ignored),
    ("attention.value_length_mla_swa", Ignored),
    ("attention.kv_lora_rank_swa", Ignored),
    ("attention.indexer.head_count", Ignored),
    ("attention.indexer.key_length", Ignored),
    ("attention.indexer.top_k", Ignored),
    ("attention.indexer.block_size", Ignored),
    ("attention.indexer.local_blocks", Ignored),
    ("attention.indexer.types", Ignored),
    ("attention.indexer.kpool", Ignored),
    ("attention.indexer.kpool_select_tail", Ignored),
    ("attention.output_group_count", Ignored),
    ("attention.output_lora_rank", Ignored),
    ("attention.compress_rope_freq_base", Ignored),
    ("attention.compress_ratios", Ignored),
    ("attention.shared_kv_layers", GEMMA),
    ("attention.recurrent_layers", DELTA_NET),
    ("hyper_connection.count", Ignored),
    ("hyper_connection.sinkhorn_iterations", Ignored),
    ("hyper_connection.epsilon", Ignored),
    ("hyper_connection.magnitude", Ignored),
    ("hyper_connection.low_rank", Ignored),
    ("ple.layers", Ignored),
    ("ple.ngram_size", Ignored),
    ("ple.heads_per_ngram", Ignored),
    ("ple.conv_kernel", Ignored),
    ("ple.layer_multipliers", Ignored),
    ("ple.head_offsets", Ignored),
    ("ple.head_vocab_sizes", Ignored),
    ("ple.eos_token_id", Ignored),
    ("ple.image_token_id", Ignored),
    ("hash_layer_count", Ignored),
    ("rope.dimension_count", Read),
    ("rope.dimension_count_swa", WINDOW),
    (
        "rope.dimension_sections",
        ReadFor(&["glm4moe", "qwen35moe"]),
    ),
    ("rope.freq_base", Read),
    ("rope.freq_base_swa", WINDOW),
    ("rope.scale_linear", Read),
    ("rope.scaling.type", Read),
    ("rope.scaling.factor", Read),
    ("rope.scaling.alpha", Ignored),
    ("rope.scaling.attn_factor", Read),
    ("rope.scaling.original_context_length", Read),
    ("rope.scaling.finetuned", Read),
    ("rope.scaling.yarn_log_multiplier", DEEPSEEK),
    ("rope.scaling.yarn_ext_factor", GROK),
    ("rope.scaling.yarn_attn_factor", GROK),
    ("rope.scaling.yarn_beta_fast", GROK),
    ("rope.scaling.yarn_beta_slow", GROK),
    (
        "ssm.conv_kernel",
        ReadFor(&[
            "granitehybrid",
            "kimi-linear",
            "nemotron_h_moe",
            "qwen35moe",
            "qwen3next",
        ]),
    ),
    ("ssm.inner_size", RECURRENT),
    ("ssm.state_size", RECURRENT),
    ("ssm.time_step_rank", RECURRENT),
    ("ssm.group_count", RECURRENT),
    ("ssm.dt_b_c_rms", Ignored),
    ("kda.head_dim", KIMI),
    ("kda.safe_gate", Ignored),
    ("kda.gate_lower_bound", Ignored),
    ("wkv.head_size", Ignored),
    ("posnet.embedding_length", Ignored),
    ("posnet.block_count", Ignored),
    ("convnext.embedding_length", Ignored),
    ("convnext.block_count", Ignored),
    ("classifier.output_labels", Harmless),
    ("classifier.pooling_type", Harmless),
    ("decision.block_count", Ignored),
    ("decision.routing_block_count", Ignored),
    ("decision.head_count", Ignored),
    ("target_layers", Ignored),
    ("target_hidden_size", Ignored),
    ("norm_before_residual", Ignored),
    ("norm_before_fc", Ignored),
    ("block_size", Ignored),
    ("conv_kernel_size", Ignored),
    ("conv_group_size", Ignored),
    ("selector_rank", Ignored),
    ("selector_top_k", Ignored),
    ("shortconv.l_cache", ReadFor(&["lfm2moe"])),
    ("dense_2_feat_in", Harmless),
    ("dense_2_feat_out", Harmless),
    ("dense_3_feat_in", Harmless),
    ("dense_3_feat_out", Harmless),
];

/// Returns an error if a key selects a computation that the executor does not support.
pub(super) fn refuse_unsupported(keys: &Keys) -> Result<()> {
    for &(suffix, role) in KEYS {
        if let Must(supported) = role
            && keys.bool_or(suffix, supported)? != supported
        {
            let reason = format!("the only supported value is {supported}");
            return Err(keys.bad(suffix, !supported, &reason));
        }
    }
    Ok(())
}

/// Warnings for keys of the architecture that have no effect, in the executor like in llama.cpp, although they have values
/// that select something.
pub(crate) fn ignored(keys: &Keys) -> Vec<Warning> {
    let prefix = keys.key("");
    let mut warnings = Vec::new();
    for (key, value) in keys.gguf.metadata().iter() {
        let Some(suffix) = key.strip_prefix(&prefix) else {
            continue;
        };
        let known = KEYS.iter().find(|(name, _)| *name == suffix);
        let has_effect = match known.map(|(_, role)| role) {
            Some(Read | Must(_) | Harmless) => true,
            Some(ReadFor(archs)) => archs.contains(&keys.arch()),
            Some(Ignored) | None => false,
        };
        if !has_effect && !is_neutral(suffix, value) {
            warnings.push(Warning::IgnoredKey {
                key: key.to_owned(),
                arch: keys.arch().to_owned(),
            });
        }
    }
    warnings
}

/// Whether a value selects nothing: false, 0, a factor of 1, or llama.cpp's default.
fn is_neutral(suffix: &str, value: &Value) -> bool {
    let number = value.as_f64().or(value.as_i128().map(|v| v as f64));
    match (suffix, value, number) {
        (_, Value::Bool(value), _) => !value,
        ("rope.scaling.yarn_beta_fast", _, Some(value)) => value == 32.0,
        (_, _, Some(value)) => value == 0.0 || value == 1.0,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn lists_each_key_of_llama_cpp_once() {
        let names: HashSet<&str> = KEYS.iter().map(|(name, _)| *name).collect();
        assert_eq!(names.len(), KEYS.len());
        // `grep -c '"%s\.' src/llama-arch.cpp` of the version named above, within `LLM_KV_NAMES`.
        assert_eq!(KEYS.len(), N_KEYS);
    }

    const N_KEYS: usize = 175;

    #[test]
    fn names_supported_architectures_only() {
        let supported: Vec<&str> = crate::arch::names().collect();
        for (name, role) in KEYS {
            if let ReadFor(archs) = role {
                assert!(archs.iter().all(|arch| supported.contains(arch)), "{name}");
            }
        }
    }
}
