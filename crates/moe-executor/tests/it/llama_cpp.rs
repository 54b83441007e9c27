//! What llama.cpp did with the fixtures, held against this executor fed the same tokens.
//!
//! The bounds come from llama.cpp's own spread, told in `fixtures/README.md`: on an F16 model rounding hardly matters;
//! on a quantized one the rounding of activations makes near ties fall either way.

use moe_executor::Model;
use moe_gguf::{GgmlType, Gguf, Value};
use moe_synth::write;
use moe_testkit::fixture;

use crate::reference::{
    Bounds, Distance, F16, GPT_OSS, PROMPTS, QWEN3MOE, Ran, Reference, distances, host, reference,
    run,
};

fn compare(file: &str, bounds: &Bounds) {
    let gguf = Gguf::open(fixture(file)).unwrap();
    let stem = file.trim_end_matches(".gguf");
    compare_with(&gguf, stem, &PROMPTS, bounds);
}

fn compare_with(gguf: &Gguf, stem: &str, prompts: &[&str], bounds: &Bounds) {
    let of_prompts = distances(gguf, stem, prompts, &host, &|_| None);
    if stem.contains("F16") {
        for distance in &of_prompts {
            let all = distance.all;
            assert!(all.is_within(bounds), "{stem}: {all}");
        }
    }
    // The near ties of a quantized model fall either way, by the order in which a processor's instructions sum, and each
    // changes the tokens after it; so they are counted over all prompts.
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

/// The model of a fixture with the keys and tensors of a reference added.
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

/// What a header can ask for and no fixture does: scaled rotations, divisors of their frequencies, groups of experts.
#[test]
fn keys_that_change_a_model() {
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
fn a_tensor_that_would_be_left_out_is_refused() {
    let mut reference = reference("random-llama-F16.factors.python");
    let factors = reference.tensors.remove("rope_freqs.weight").unwrap();
    let name = "blk.1.attn_q.scale";
    reference.tensors.insert(name.into(), factors);
    let gguf = changed("random-llama-F16.gguf", &reference);
    let error = Model::load(&gguf).err().unwrap().to_string();
    assert!(
        error.contains(name) && error.contains("not known in llama models"),
        "{error}"
    );
}

#[test]
fn an_unknown_architecture_names_the_known_ones() {
    let mut reference = reference("random-llama-F16.kernel");
    reference
        .overrides
        .insert("general.architecture".into(), "bert".into());
    let gguf = changed("random-llama-F16.gguf", &reference);
    let error = Model::load(&gguf).err().unwrap().to_string();
    assert!(
        error.ends_with("`bert` is not supported; this executor runs dots1, gpt-oss, llama, olmoe, qwen2moe, qwen3moe"),
        "{error}"
    );
}

/// A prompt cut into small batches gives the same result as in one, and routes the last layer of qwen3moe only where
/// logits are wanted.
#[test]
fn batches_do_not_change_the_result() {
    let reference = reference("random-qwen3moe-F16.long");
    let gguf = Gguf::open(fixture("random-qwen3moe-F16.gguf")).unwrap();
    let model = Model::load(&gguf).unwrap();
    let [whole, cut] = [512, 100].map(|batch| run(&model, &reference, batch, &host, &|_| None));
    let logits = |ran: &Ran| ran.logits.concat();
    for (a, b) in logits(&whole).iter().zip(logits(&cut)) {
        assert!((a - b).abs() < 1e-3, "{a} {b}");
    }
    let last = cut.routed.last().unwrap();
    assert_eq!(last.len(), 65);
    let n_prompt = reference.prompt_tokens.len();
    assert_eq!(last[0].position as usize, n_prompt - 1);
    assert_eq!(cut.routed[0].len(), n_prompt + 64);
}
