//! The key-values of each architecture.
//!
//! The keys are those that llama.cpp reads (`src/llama-arch.cpp` and `src/models/*.cpp` in its source tree), in the order of
//! its converter.

use moe_gguf::{Array, Fault, Value, ValueType};

use crate::write::Header;

use super::quant::Quant;
use super::spec::{Arch, Spec, VocabModel, VocabSpec};
use super::vocab::Vocab;

/// Returns a header with all key-values of a model.
pub(super) fn header(spec: &Spec, quant: &Quant, vocab: Vocab) -> Result<Header, Fault> {
    let mut header = Header::new();
    general(&mut header, spec)?;
    hyper_parameters(&mut header, spec, quant)?;
    tokenizer(&mut header, &spec.vocab, vocab)?;
    Ok(header)
}

fn general(header: &mut Header, spec: &Spec) -> Result<(), Fault> {
    let name = spec.name.as_deref().unwrap_or(spec.arch.name());
    for (key, value) in [
        ("architecture", spec.arch.name()),
        ("type", "model"),
        ("name", name),
        ("basename", name),
        ("quantized_by", "moe-analyze synth"),
        ("size_label", &spec.size_label),
        ("license", "none: the weights are random"),
        ("repo_url", ""),
    ] {
        header.set(&format!("general.{key}"), &text(value))?;
    }
    let tags = ["synthetic", "text-generation"].map(text);
    header.set("general.tags", &array(ValueType::String, tags))
}

fn hyper_parameters(header: &mut Header, spec: &Spec, quant: &Quant) -> Result<(), Fault> {
    let arch = spec.arch.name();
    let mut set = |key: &str, value: Value| header.set(&format!("{arch}.{key}"), &value);
    let n = |n: u64| Value::U32(n as u32); // `Spec::check` limits all values to 30 bits.

    set("block_count", n(spec.n_layer.into()))?;
    set("context_length", n(spec.context_length.into()))?;
    set("embedding_length", n(spec.n_embd))?;
    set("feed_forward_length", n(spec.n_ff()))?;
    set("attention.head_count", n(spec.n_head))?;
    set("attention.head_count_kv", n(spec.n_head_kv()))?;
    set("rope.freq_base", Value::F32(spec.rope_freq_base))?;
    set("attention.layer_norm_rms_epsilon", Value::F32(spec.rms_eps))?;
    set("expert_count", n(spec.n_expert))?;
    set("expert_used_count", n(spec.n_expert_used))?;
    let usual_heads = spec.n_head * spec.head_dim() == spec.n_embd;
    if !(usual_heads && matches!(spec.arch, Arch::Llama | Arch::Olmoe)) {
        set("attention.key_length", n(spec.head_dim()))?;
        set("attention.value_length", n(spec.head_dim()))?;
    }
    header.set("general.file_type", &Value::U32(quant.file_type))?;

    let mut set = |key: &str, value: Value| header.set(&format!("{arch}.{key}"), &value);
    match spec.arch {
        Arch::GptOss => {
            set("attention.sliding_window", n(spec.sliding_window.into()))?;
            set("expert_feed_forward_length", n(spec.n_ff_exp))?;
        }
        Arch::Qwen3Moe => set("expert_feed_forward_length", n(spec.n_ff_exp))?,
        Arch::Qwen3Next => {
            set("expert_feed_forward_length", n(spec.n_ff_exp))?;
            set("expert_shared_feed_forward_length", n(spec.n_ff_shexp()))?;
        }
        Arch::Llama => set("vocab_size", n(spec.vocab.n_tokens.into()))?,
        Arch::Olmoe => {}
    }
    if let Some(linear) = spec.linear_attention {
        set("ssm.conv_kernel", n(linear.conv_kernel))?;
        set("ssm.state_size", n(linear.state_size))?;
        set("ssm.group_count", n(linear.group_count))?;
        set("ssm.time_step_rank", n(linear.time_step_rank))?;
        set(
            "ssm.inner_size",
            n(linear.state_size * linear.time_step_rank),
        )?;
        set(
            "full_attention_interval",
            n(linear.full_attention_interval.into()),
        )?;
    }
    if spec.rope_dims.is_some() || spec.arch == Arch::Llama {
        let dims = spec.rope_dims.map_or(spec.head_dim(), u64::from);
        set("rope.dimension_count", n(dims))?;
    }
    if let Some(yarn) = spec.yarn {
        set("rope.scaling.type", text("yarn"))?;
        set("rope.scaling.factor", Value::F32(yarn.factor))?;
        let before = yarn.original_context_length;
        set("rope.scaling.original_context_length", Value::U32(before))?;
    }
    header.set("general.quantization_version", &Value::U32(2))
}

/// Sets the keys of a vocabulary.
pub(super) fn tokenizer(header: &mut Header, spec: &VocabSpec, vocab: Vocab) -> Result<(), Fault> {
    let is_bpe = spec.model == VocabModel::Gpt2;
    let mut set = |key: &str, value: Value| header.set(&format!("tokenizer.{key}"), &value);
    set("ggml.model", text(if is_bpe { "gpt2" } else { "llama" }))?;
    set("ggml.pre", text(&spec.pre))?;
    let n_tokens = vocab.tokens.len();
    let tokens = vocab.tokens.into_iter().map(Value::String);
    set("ggml.tokens", array(ValueType::String, tokens))?;
    if !is_bpe {
        // SentencePiece merges the pair with the highest score first: earlier tokens have higher scores.
        let scores = (0..n_tokens).map(|i| Value::F32(-(i as f32)));
        set("ggml.scores", array(ValueType::F32, scores))?;
    }
    let types = vocab.types.into_iter().map(Value::I32);
    set("ggml.token_type", array(ValueType::I32, types))?;
    if is_bpe {
        let merges = vocab.merges.into_iter().map(Value::String);
        set("ggml.merges", array(ValueType::String, merges))?;
    }
    let eos = spec.eos.unwrap_or(vocab.first_special);
    let ids = [
        ("bos_token_id", spec.bos),
        ("eos_token_id", Some(eos)),
        ("unknown_token_id", (!is_bpe).then_some(0)),
        ("padding_token_id", spec.pad),
    ];
    for (key, id) in ids {
        if let Some(id) = id {
            set(&format!("ggml.{key}"), Value::U32(id))?;
        }
    }
    let template = "{% for message in messages %}{{ message['content'] }}{% endfor %}";
    set("chat_template", text(template))
}

fn text(text: &str) -> Value {
    Value::String(text.to_owned())
}

/// Returns an array. All elements must have the type `ty`.
fn array(ty: ValueType, elements: impl IntoIterator<Item = Value>) -> Value {
    Value::Array(Box::new(
        Array::new(ty, elements).expect("all elements have the same type"),
    ))
}
