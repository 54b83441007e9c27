//! `synth`: synthetic models have the shapes of real models, run, and route with the given frequencies.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use moe_engine::Decode;
use moe_executor::cpu::quant::dequantize_row;
use moe_gguf::{Gguf, Tensor};
use moe_trace::Phase;
use serde_json::json;

use crate::support::{arg, fail, run};

/// Writes a model from a description.
fn synth(dir: &Path, spec: &serde_json::Value, args: &[&str]) -> PathBuf {
    let (file, out) = (dir.join("spec.json"), dir.join("model.gguf"));
    fs::write(&file, spec.to_string()).unwrap();
    let own = ["synth", "--spec", arg(&file), "--out", arg(&out), "--force"];
    run![own, args];
    out
}

fn small(arch: &str) -> serde_json::Value {
    json!({
        "arch": arch, "n_layer": 2, "n_embd": 512, "n_head": 4, "n_head_kv": 2, "head_dim": 64,
        "n_expert": 32, "n_expert_used": 4, "n_ff_exp": 256,
        "vocab": { "n_tokens": 3000, "pre": "gpt-4o" },
    })
}

fn values(gguf: &Gguf, tensor: &Tensor) -> Vec<f32> {
    let data = gguf.data(tensor).unwrap();
    let n: u64 = tensor.ne.iter().product();
    let mut values = vec![0.0; n as usize];
    let rows = values.chunks_exact_mut(tensor.ne[0] as usize);
    let row_size = tensor.ty.row_size(tensor.ne[0]).unwrap() as usize;
    for (bytes, row) in data.chunks_exact(row_size).zip(rows) {
        dequantize_row(tensor.ty, bytes, row).unwrap();
    }
    values
}

/// Mean and standard deviation.
fn moments(values: &[f32]) -> (f64, f64) {
    let n = values.len() as f64;
    let mean = values.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
    let square = values
        .iter()
        .map(|&v| (f64::from(v) - mean).powi(2))
        .sum::<f64>()
        / n;
    (mean, square.sqrt())
}

/// Every type that the executor runs.
const TYPES: [&str; 26] = [
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K",
    "Q6_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS",
    "TQ1_0", "TQ2_0", "MXFP4", "NVFP4",
];

#[test]
fn weights_of_every_type_preserve_the_scale_of_activations() {
    let dir = tempfile::tempdir().unwrap();
    for quant in TYPES {
        let gguf = Gguf::open(synth(dir.path(), &small("qwen3moe"), &["--quant", quant])).unwrap();
        let up = gguf.tensor("blk.1.ffn_up_exps.weight").unwrap();
        assert_eq!(up.ty.name(), quant);
        let (mean, std) = moments(&values(&gguf, up));
        let wanted = 1.0 / 512f64.sqrt();
        assert!((std / wanted - 1.0).abs() < 0.01, "{quant}: {std}, not {wanted}");
        assert!(mean.abs() < 0.01 * wanted, "{quant}: mean {mean}");

        // Every eighth block of the embeddings, from the first, has a mean other than 0.
        let embd = gguf.tensor("token_embd.weight").unwrap();
        let block = embd.ty.block_size() as usize;
        let is_lifted = |i: &usize| (i % 512 / block).is_multiple_of(8);
        let (lifted, plain): (Vec<_>, Vec<_>) = values(&gguf, embd)
            .into_iter()
            .enumerate()
            .partition(|(i, _)| is_lifted(i));
        let [lifted, plain] =
            [lifted, plain].map(|part| moments(&part.iter().map(|p| p.1).collect::<Vec<_>>()));
        assert!(lifted.0 > 0.5 && lifted.1 < 1.4, "{quant}: {lifted:?}");
        assert!(plain.0.abs() < 0.01 && (plain.1 - 1.0).abs() < 0.01, "{quant}: {plain:?}");
    }
}

/// Records a prompt of different tokens. Returns, for each layer, the fraction of tokens that select each expert.
fn shares(model: &Path, dir: &Path) -> BTreeMap<u64, Vec<f64>> {
    const N_TOKENS: u64 = 1000;
    let (prompts, run) = (dir.join("prompts.jsonl"), dir.join("run"));
    let tokens: Vec<u64> = (0..N_TOKENS).map(|i| i * 7 % 2900).collect();
    fs::write(&prompts, json!({ "tokens": tokens, "n_predict": 0 }).to_string()).unwrap();
    run!["record", "--model", model, "--prompts", prompts, "--out", run, "--force"];
    let rows = run!["hotness", run, "-o", "json"];
    let rows: Vec<serde_json::Value> = serde_json::from_str(&rows).unwrap();
    let mut shares: BTreeMap<u64, Vec<f64>> = BTreeMap::new();
    for row in rows {
        let layer = shares.entry(row["layer_id"].as_u64().unwrap()).or_default();
        layer.push(row["count"].as_f64().unwrap() / N_TOKENS as f64);
    }
    // The hottest expert of a layer is first.
    shares
}

/// The fractions of Zipf's law: `min(0.98, c / rank^zipf)`, which add up to the number of experts per token.
fn law(n_expert: usize, n_expert_used: usize, zipf: f64) -> Vec<f64> {
    let with = |c: f64| -> Vec<f64> {
        let ranks = (1..=n_expert).map(|rank| rank as f64);
        ranks.map(|rank| (c * rank.powf(-zipf)).min(0.98)).collect()
    };
    let mut c = 0.0;
    while with(c).iter().sum::<f64>() < n_expert_used as f64 {
        c += 1e-4;
    }
    with(c)
}

#[test]
fn activations_follow_the_zipf_law() {
    let dir = tempfile::tempdir().unwrap();
    for (arch, quant) in [("gpt-oss", "MXFP4"), ("qwen3moe", "Q4_K"), ("qwen3moe", "Q8_0")] {
        for zipf in [0.0, 0.5, 1.0, 1.5] {
            let args = ["--quant", quant, "--zipf", &zipf.to_string()];
            let model = synth(dir.path(), &small(arch), &args);
            let expected = law(32, 4, zipf);
            for (layer, shares) in shares(&model, dir.path()) {
                if layer == 1 && arch == "qwen3moe" {
                    continue; // its last layer routes the last token alone
                }
                for rank in [1, 2, 4, 8, 16] {
                    let (found, expected) = (shares[rank - 1], expected[rank - 1]);
                    let apart = (found - expected).abs();
                    assert!(
                        apart < 0.04 + 0.25 * expected,
                        "{arch} {quant}, zipf {zipf}, layer {layer}, rank {rank}: {found}, not {expected}"
                    );
                }
            }
        }
    }
}

#[test]
fn hottest_experts_differ_between_layers() {
    let dir = tempfile::tempdir().unwrap();
    let model = synth(dir.path(), &small("gpt-oss"), &[]);
    shares(&model, dir.path());
    let run = dir.path().join("run");
    let rows = run!["hotness", run, "-o", "json"];
    let rows: Vec<serde_json::Value> = serde_json::from_str(&rows).unwrap();
    assert_ne!(rows[0]["expert_id"], rows[32]["expert_id"]);
}

#[test]
fn logits_are_bounded_for_any_number_of_layers() {
    use moe_engine::Logits;
    use moe_executor::recorder::Recorder;
    let dir = tempfile::tempdir().unwrap();
    let threads = moe_executor::cpu::threads::Threads::new(2).unwrap();
    for (arch, quant) in
        [("gpt-oss", "MXFP4"), ("qwen3moe", "Q4_0"), ("qwen3moe", "Q4_K_M"), ("qwen3moe", "IQ1_S")]
    {
        let mut spec = small(arch);
        spec["n_layer"] = json!(30);
        let gguf = Gguf::open(synth(dir.path(), &spec, &["--quant", quant])).unwrap();
        let model = moe_executor::Model::load(&gguf).unwrap();
        let mut session = moe_executor::Session::new(
            &model,
            &threads,
            Recorder::new(None),
            moe_executor::CacheParams::new(64),
        )
        .unwrap();
        let tokens: Vec<u32> = (0..64).map(|i| 300 + 7 * i).collect();
        let logits = session
            .decode(&tokens, Phase::Prompt, Logits::Last)
            .unwrap();
        assert!(logits.iter().all(|logit| logit.is_finite()), "{arch} {quant}");
        let (_, std) = moments(logits);
        assert!((2.0..8.0).contains(&std), "{arch} {quant}: {std}");
    }
}

#[test]
fn gpt_oss_20b_equals_the_published_file_except_data() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("gpt-oss-20b.gguf");
    run!["synth", "--like", "gpt-oss-20b", "--sparse", "--out", out];
    let gguf = Gguf::open(&out).unwrap();
    assert_eq!(gguf.metadata().len(), 37);
    assert_eq!(gguf.files()[0].data_offset, 13_008_832);
    assert_eq!(gguf.files()[0].size_bytes, 13_008_832 + 13_779_630_336);
    let rows = run!["gguf-map", out, "--check-overlaps", "-o", "csv"];
    assert_eq!(rows.lines().count(), 1 + 2_691);
    #[cfg(unix)]
    {
        let blocks = std::os::unix::fs::MetadataExt::blocks(&fs::metadata(&out).unwrap());
        assert!(blocks * 512 < 64 << 20, "{blocks} blocks are not sparse");
    }

    // The vocabulary of full size is valid.
    let tokenizer = moe_executor::tokenizer::Tokenizer::from_gguf(gguf.metadata()).unwrap();
    assert_eq!(tokenizer.n_vocab(), 201_088);
    let text = "Kake ti sosu, wörld 123\n";
    let ids = tokenizer.encode(text, true, true).unwrap();
    assert_eq!(tokenizer.decode(&ids), text);
    assert!(ids.len() < text.len(), "merges are used: {ids:?}");
    assert!(tokenizer.is_eog(200_002));
}

#[test]
fn runs_a_shortened_model_of_every_architecture() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    for (arch, quant, n_tensors) in [
        ("gpt-oss", "MXFP4", 19 + 3),
        ("qwen3moe", "Q4_K_M", 12 + 3),
        ("llama", "Q4_K_M", 10 + 3),
        ("olmoe", "Q4_K_M", 12 + 3),
    ] {
        let mut spec = small(arch);
        if arch == "olmoe" {
            // every head has separate keys, with the total width of the residual stream
            (spec["n_head"], spec["n_head_kv"]) = (8.into(), 8.into());
            let heads = spec["n_head"].as_u64().unwrap();
            spec["head_dim"] = (spec["n_embd"].as_u64().unwrap() / heads).into();
        }
        let out = synth(dir.path(), &spec, &["--layers", "1", "--quant", quant]);
        assert_eq!(Gguf::open(&out).unwrap().tensors().len(), n_tensors);
        let model = ["--force", "--model", arg(&out), "--out", arg(&run)];
        let args = ["record", "--n-predict", "4", "--ignore-eos"];
        run![args, model];
    }
}

#[test]
fn output_depends_only_on_arguments() {
    let dir = tempfile::tempdir().unwrap();
    let make =
        |seed: &str| fs::read(synth(dir.path(), &small("qwen3moe"), &["--seed", seed])).unwrap();
    assert!(make("1") == make("1"));
    assert!(make("1") != make("2"));
}

#[test]
fn rejects_invalid_models() {
    let dir = tempfile::tempdir().unwrap();
    let (file, out) = (dir.path().join("spec.json"), dir.path().join("model.gguf"));
    let refused = |text: &str, args: &[&str], part: &str| {
        fs::write(&file, text).unwrap();
        let own = ["synth", "--spec", arg(&file), "--out", arg(&out)];
        let line = fail![own, args];
        assert!(line.contains(part), "{line}");
        assert!(!out.exists());
    };
    let spec = small("qwen3moe").to_string();
    refused(&spec, &["--quant", "Q8_K"], "MXFP4");
    refused(
        &spec,
        &["--layers", "0"],
        "invalid value '0' for '--layers <N>': out of range (1..=4096)",
    );
    refused(
        &spec,
        &["--zipf", "-1"],
        "invalid value '-1' for '--zipf <S>': expected a number of at least 0",
    );
    refused(
        &spec.replace("\"n_layer\":2", "\"n_layer\":0"),
        &[],
        "`n_layer` is invalid: 0 is out of range (1..=4096)",
    );
    refused("{", &[], "spec.json");
    refused("{\"arch\": \"bert\"}", &[], "bert");
    refused(&spec.replace("n_ff_exp", "n_ff_expert"), &[], "n_ff_expert");
    refused(&spec.replace("3000", "200"), &[], "vocab.n_tokens");
    refused(&spec.replace("\"n_expert_used\":4", "\"n_expert_used\":40"), &[], "n_expert_used");
    refused(&spec.replace("qwen3moe", "qwen3next"), &[], "linear_attention");
    let head = |dim: &str| spec.replace("\"head_dim\":64", dim);
    refused(&head("\"head_dim\":63"), &[], "spec.json: `head_dim` is invalid: 63 is not even");
    let computed = head("\"head_dim\":null");
    let odd = computed.replace("\"n_embd\":512", "\"n_embd\":252");
    refused(&odd, &[], "spec.json: `head_dim` is invalid: 63 (n_embd / n_head) is not even");
    let zero = computed.replace("\"n_embd\":512", "\"n_embd\":3");
    refused(&zero, &[], "`head_dim` is invalid: 0 (n_embd / n_head) is out of range (1..=");
    let quant = spec.replace("\"n_embd\":512", "\"n_embd\":512,\"quant\":\"Q9_X\"");
    refused(&quant, &[], "spec.json: weight type `Q9_X` is not supported");
    refused(&spec, &["--quant", "Q9_X"], "moe-analyze: weight type `Q9_X` is not supported");
    for dims in [0, 31, 66] {
        let with = head(&format!("\"head_dim\":64,\"rope_dims\":{dims}"));
        let part = format!("{dims} is not an even number in the range 2..=64 (head_dim)");
        refused(&with, &[], &part);
    }
    // 3 × 1024 × 107 experts exceed the limit of any model that is read.
    let many = spec.replace("\"n_expert\":32", "\"n_expert\":1024");
    refused(&many, &["--layers", "107"], "have 328704, but at most 327680 are supported");
    fs::write(&file, &spec).unwrap();
    let next = ["synth", "--like", "qwen3-next-80b", "--layers", "3", "--out", arg(&out)];
    let line = fail![next];
    assert!(line.contains("3 is less than full_attention_interval (4)"), "{line}");
    // 36 PiB exceed any disk.
    let huge = spec.replace("\"n_embd\":512", "\"n_embd\":1048576");
    let huge = huge.replace("\"n_ff_exp\":256", "\"n_ff_exp\":1048576");
    let huge = huge.replace("\"n_expert\":32", "\"n_expert\":16384");
    refused(&huge, &["--quant", "Q4_0", "--layers", "1"], "are free;");
}
