//! Results compared with llama.cpp for the fixtures.
//!
//! The bounds are derived from the differences between builds of llama.cpp (`fixtures/README.md`). With F16 models, rounding
//! hardly changes the results. With quantized models, the rounding of activations decides near ties.

use moe_executor::{Error, Model};
use moe_gguf::{GgmlType, Gguf, Value};
use moe_synth::write;
use moe_testkit::fixture;

use crate::reference::{
    Bounds, Distance, F16, GPT_OSS, ModelRun, PROMPTS, QWEN3MOE, Reference, as_is, distances, host,
    reference, run,
};

fn compare(file: &str, bounds: &Bounds) {
    let gguf = Gguf::open(fixture(file)).unwrap();
    let stem = file.trim_end_matches(".gguf");
    compare_with(&gguf, stem, &PROMPTS, bounds);
}

fn compare_with(gguf: &Gguf, stem: &str, prompts: &[&str], bounds: &Bounds) {
    let of_prompts = distances(gguf, stem, prompts, (&host, &as_is), &|_| None);
    if stem.contains("F16") {
        for distance in &of_prompts {
            let all = distance.all;
            assert!(all.is_within(bounds), "{stem}: {all}");
        }
    }
    // In quantized models, near ties depend on the order of summation, which depends on the instruction set, and each changes
    // the following tokens. So the bounds apply to all prompts together.
    let all = of_prompts.iter().map(|of_prompt| of_prompt.all);
    let all = all.fold(Distance::default(), Distance::and);
    assert!(all.is_within(bounds), "{stem}, all prompts: {all}");
}

#[test]
fn random_qwen3moe_f16() {
    compare("random-qwen3moe-F16.gguf", &F16);
}

#[test]
fn random_llama_f16() {
    compare("random-llama-F16.gguf", &F16);
}

#[test]
fn random_qwen2moe_f16() {
    compare("random-qwen2moe-F16.gguf", &F16);
}

#[test]
fn random_olmoe_f16() {
    compare("random-olmoe-F16.gguf", &F16);
}

#[test]
fn random_dots1_f16() {
    compare("random-dots1-F16.gguf", &F16);
}

#[test]
fn random_gpt_oss_f16() {
    compare("random-gpt-oss-F16.gguf", &F16);
}

#[test]
fn tiny_qwen3moe_q4_k_m() {
    compare("tiny-qwen3moe-Q4_K_M.gguf", &QWEN3MOE);
}

#[test]
fn tiny_gpt_oss_mxfp4() {
    compare("tiny-gpt-oss-MXFP4.gguf", &GPT_OSS);
}

/// A fixture with the keys and tensors of a reference added.
fn changed(file: &str, reference: &Reference) -> Gguf {
    let gguf = Gguf::open(fixture(file)).unwrap();
    let overridden = |key: &str| reference.overrides.contains_key(key);
    let mut header = write::Header::like(&gguf, overridden).unwrap();
    for (key, value) in &reference.overrides {
        let value = match (value.as_str(), value.as_u64(), value.as_f64()) {
            (Some(text), ..) => Value::String(text.to_owned()),
            (_, Some(n), _) => Value::U32(n as u32),
            (_, _, Some(x)) => Value::F32(x as f32),
            _ => panic!("{key} is {value}"),
        };
        header.set(key, &value).unwrap();
    }
    for t in gguf.tensors() {
        header
            .tensor(&t.name, t.ty, &t.ne[..t.n_dims as usize])
            .unwrap();
    }
    for (name, values) in &reference.tensors {
        header
            .tensor(name, GgmlType::F32, &[values.len() as u64])
            .unwrap();
    }
    let mut writer = write::Writer::new(Vec::new(), header).unwrap();
    for t in gguf.tensors() {
        writer.write(gguf.data(t).unwrap()).unwrap();
    }
    for value in reference.tensors.values().flatten() {
        writer.write(&value.to_le_bytes()).unwrap();
    }
    Gguf::from_bytes(file, writer.finish().unwrap()).unwrap()
}

/// Features that no fixture has: RoPE scaling, frequency divisors, expert groups.
#[test]
fn supports_rope_scaling_and_expert_groups() {
    for (model, change, prompts) in [
        ("random-gpt-oss-F16", "yarn", &["python", "long"][..]),
        ("random-gpt-oss-F16", "yarn-attn", &["python"]),
        ("random-llama-F16", "linear", &["python"]),
        ("random-llama-F16", "factors", &["python"]),
        ("random-dots1-F16", "groups", &["python", "long"]),
        ("random-olmoe-F16", "groups", &["python"]),
    ] {
        let stem = format!("{model}.{change}");
        let first = reference(&format!("{stem}.{}", prompts[0]));
        assert!(!(first.overrides.is_empty() && first.tensors.is_empty()));
        let gguf = changed(&format!("{model}.gguf"), &first);
        compare_with(&gguf, &stem, prompts, &F16);
    }
}

#[test]
fn rejects_unknown_tensors() {
    let mut reference = reference("random-llama-F16.factors.python");
    let factors = reference.tensors.remove("rope_freqs.weight").unwrap();
    let name = "blk.1.attn_q.scale";
    reference.tensors.insert(name.into(), factors);
    let gguf = changed("random-llama-F16.gguf", &reference);
    let error = Model::load(&gguf).err().unwrap();
    assert!(
        matches!(&error, Error::UnknownTensor { tensor, arch, .. } if tensor == name && arch == "llama"),
        "{error}"
    );
}

#[test]
fn rejects_unknown_architectures() {
    let mut reference = reference("random-llama-F16.kernel");
    reference
        .overrides
        .insert("general.architecture".into(), "bert".into());
    let gguf = changed("random-llama-F16.gguf", &reference);
    let error = Model::load(&gguf).err().unwrap();
    assert!(
        matches!(&error, Error::Architecture { arch, supported, .. }
            if arch == "bert" && supported.starts_with("afmoe, arctic, ") && supported.ends_with(", step35")),
        "{error}"
    );
}

/// The last layer of qwen3moe routes only the tokens whose logits are wanted, whatever the batch size.
#[test]
fn results_do_not_depend_on_the_batch_size() {
    let reference = reference("random-qwen3moe-F16.long");
    let gguf = Gguf::open(fixture("random-qwen3moe-F16.gguf")).unwrap();
    let model = Model::load(&gguf).unwrap();
    let [one, several] =
        [512, 100].map(|batch| run(&model, &reference, batch, (&host, &as_is), &|_| None));
    let logits = |ran: &ModelRun| ran.logits.concat();
    for (a, b) in logits(&one).iter().zip(logits(&several)) {
        assert!((a - b).abs() < 1e-3, "{a} {b}");
    }
    let last = several.routed.last().unwrap();
    assert_eq!(last.len(), 65);
    let n_prompt = reference.prompt_tokens.len();
    assert_eq!(last[0].position as usize, n_prompt - 1);
    assert_eq!(several.routed[0].len(), n_prompt + 64);
}
