//! `--lora`: adapters of the commands that run a model. Results are compared with llama.cpp in `moe-llama-cpp`.

use std::path::{Path, PathBuf};

use moe_gguf::{Gguf, Value};
use moe_trace::{Manifest, Run, check};

use crate::support::{args, fail, repository, run, write_gguf};

const PROMPT: &str = "The kernel driver is responsible for";

fn tiny_qwen3moe() -> PathBuf {
    repository("fixtures/tiny-qwen3moe-Q4_K_M.gguf")
}

/// Writes an adapter of zeros for the queries, the router and an expert matrix of layer 1.
fn write_adapter(path: &Path, arch: &str) {
    let model = Gguf::open(tiny_qwen3moe()).unwrap();
    let text = |text: &str| Value::String(text.into());
    let keys = [
        ("general.type", text("adapter")),
        ("general.architecture", text(arch)),
        ("adapter.type", text("lora")),
    ];
    let mut tensors = Vec::new();
    for part in ["attn_q", "ffn_gate_inp", "ffn_down_exps"] {
        let name = format!("blk.1.{part}.weight");
        let tensor = model.tensor(&name).unwrap();
        let [n_in, n_out, n_expert, _] = tensor.ne;
        let n_dims = tensor.n_dims as usize;
        let (a, b) = ([n_in, 4, n_expert], [4, n_out, n_expert]);
        tensors.push((format!("{name}.lora_a"), a[..n_dims].to_vec()));
        tensors.push((format!("{name}.lora_b"), b[..n_dims].to_vec()));
    }
    write_gguf(path, None, &keys, &tensors);
}

#[test]
fn record_with_adapters_lists_them_in_the_manifest() {
    let dir = tempfile::tempdir().unwrap();
    let (adapter, plain, adapted) =
        (dir.path().join("adapter.gguf"), dir.path().join("plain"), dir.path().join("adapted"));
    write_adapter(&adapter, "qwen3moe");
    let how = ["--prompt", PROMPT, "--n-predict", "8", "--ignore-eos"];
    let record = args!["record", "--model", tiny_qwen3moe(), how];
    let scaled = format!("{}:-0.5", adapter.display());
    let lora = args!["--lora", &adapter, "--lora", &scaled];
    // Zeros do not change the text.
    let text = run![&record, "--out", &plain];
    assert_eq!(run![&record, &lora, "--out", &adapted], text);

    let manifest = Manifest::of_run(&adapted).unwrap().unwrap();
    let scales: Vec<f32> = manifest.adapters.iter().map(|a| a.scale).collect();
    assert_eq!(scales, [1.0, -0.5]);
    assert!(
        manifest
            .adapters
            .iter()
            .all(|a| Path::new(&a.path) == adapter)
    );
    let files: Vec<&str> = manifest
        .model
        .files
        .iter()
        .map(|f| f.name.as_str())
        .collect();
    assert_eq!(files[1..], ["adapter.gguf"; 2]);

    // The map of the model does not contain the adapters, that of the run does.
    let accesses = run!["accesses", &adapted];
    assert_eq!(run!["accesses", &adapted, "--model", tiny_qwen3moe()], accesses);

    let run = Run::open(&adapted).unwrap();
    assert_eq!(check::check(&run), []);
    assert_eq!(run.unresolved_warning(), None);
    let of_adapters = run.trace.records().iter().filter(|record| {
        let mut files = record.source_file.iter().take(record.sources().len());
        files.any(|file| file.get() > 0)
    });
    assert!(of_adapters.count() > 0);
}

#[test]
fn replay_and_bench_run_with_adapters() {
    let dir = tempfile::tempdir().unwrap();
    let (adapter, out) = (dir.path().join("adapter.gguf"), dir.path().join("run"));
    write_adapter(&adapter, "qwen3moe");
    let how = ["--prompt", PROMPT, "--n-predict", "4"];
    run!["record", "--model", tiny_qwen3moe(), how, "--out", &out];
    run!["replay", &out, "--model", tiny_qwen3moe(), "--lora", &adapter, "-r", "1"];
    let tests = ["-p", "8", "-n", "2", "-r", "1"];
    run!["bench", "--model", tiny_qwen3moe(), "--lora", &adapter, tests];
}

#[test]
fn rejects_adapters_that_do_not_fit() {
    let dir = tempfile::tempdir().unwrap();
    let (adapter, other) = (dir.path().join("a.gguf"), dir.path().join("other.gguf"));
    write_adapter(&adapter, "qwen3moe");
    write_adapter(&other, "olmoe");
    let out = dir.path().join("run");
    let record = args!["--quiet", "record", "--model", tiny_qwen3moe(), "--out", &out];
    let error = fail![&record, "--lora", &other];
    assert!(error.contains("other.gguf"), "{error}");
    assert!(error.contains("architecture `olmoe`"), "{error}");
    let error = fail![&record, "--lora", tiny_qwen3moe()];
    assert!(error.contains("is not an adapter"), "{error}");
    let cache = ["--policy", "dynamic", "--hot-cache-mib", "1"];
    let error = fail![&record, "--lora", &adapter, cache];
    assert!(error.contains("changes experts"), "{error}");
    assert!(!out.exists());
}
