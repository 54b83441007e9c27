//! Files of another kind than an option needs: the error contains the kind of the file, the first error, and advice.

use std::fs;
use std::path::{Path, PathBuf};

use crate::support::{args, fail, known_run, repository};

/// `buffers` and `overlap` report the kind of other files, and damaged lines of their own files.
#[test]
fn distinguishes_files_of_a_run_from_other_files() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| -> PathBuf {
        let path = dir.path().join(name);
        fs::write(&path, text).unwrap();
        path
    };
    let run = dir.path().join("run");
    known_run(&run);
    let model = repository("fixtures/tiny-qwen3moe-Q4_K_M.gguf");
    let learn = write("learn.json", "{\n  \"schema\": \"x\",\n  \"layers\": []\n}\n");
    let csv = write("t.csv", "layer,expert\n0,1\n");
    let other = write("t.jsonl", "{\"t\":0,\"layer\":1,\"experts\":[5,1]}\n");
    for (command, file) in [("buffers", "buffers.jsonl"), ("overlap", "transfers.jsonl")] {
        let is_not = format!("not the {file} of a run: pass that file, or its run directory");
        for (path, reason) in [
            (&model, "it is a GGUF file"),
            (&run.join("trace.bin"), "line 1: it is not JSON"),
            (&run.join("gguf-map.parquet"), "it is a Parquet file"),
            (&learn, "line 1: the text ends within a JSON value"),
            (&csv, "line 1: it is not JSON"),
            (&other, "line 1: the key `"),
        ] {
            let message = fail![command, path];
            assert!(message.contains(reason) && message.contains(&is_not), "{command}: {message}");
        }
    }
}

#[test]
fn reports_invalid_key_of_a_model_description() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("model.gguf");
    let spec = dir.path().join("spec.json");
    let message = |spec: &Path| fail!["synth", "--spec", spec, "--out", out];
    for (text, expected) in [
        ("", "line 1, column 0: the text ends within a JSON value"),
        ("arch: qwen3moe", "line 1, column 1: it is not JSON"),
        ("[]", "0 elements instead of an object"),
        ("{\"arch\": \"qwen3moe\"}", "the key `n_layer` is missing"),
        ("{\"arch\": \"qwen9\"}", "the value `qwen9` is unknown; known are `gpt-oss`"),
        ("{\n\"arch\": \"olmoe\",\n\"n_layer\": \"2\"}", "line 3, column 14: \"2\" instead of a"),
        (
            "{\"arch\": \"olmoe\", \"n_layers\": 2}",
            "the key `n_layers` is unknown; known are `arch`",
        ),
        ("{\"arch\": \"olmoe\", \"n_layer\": NaN}", "NaN is not JSON (line 1, column "),
    ] {
        fs::write(&spec, text).unwrap();
        let message = message(&spec);
        assert!(message.contains("spec.json: ") && message.contains(expected), "{text}: {message}");
        assert!(
            message
                .trim_end()
                .ends_with("`moe-analyze synth --help` describes the keys")
        );
    }
    let message = message(&repository("fixtures/tiny-qwen3moe-Q4_K_M.gguf"));
    assert!(
        message.contains("it is a GGUF file, not a text file; `moe-analyze synth"),
        "{message}"
    );
    let missing = fail!["synth", "--spec", dir.path().join("missing.json"), "--out", out];
    assert!(missing.contains("cannot open ") && !missing.contains("--help"), "{missing}");
    assert!(!out.exists());
}

#[test]
fn errors_of_expert_orders_describe_both_formats() {
    let dir = tempfile::tempdir().unwrap();
    let (out, order) = (dir.path().join("r.gguf"), dir.path().join("order.json"));
    let model = repository("fixtures/tiny-qwen3moe-Q4_K_M.gguf");
    let message = |order: &Path, more: &[&str]| fail!["relayout", model, "--out", out, more, order];
    let hot_first = ["--order", "hot-first", "--hotness"];
    for (text, expected) in [
        ("{", "line 1, column 1: the text ends within a JSON value"),
        ("layer,expert\n0,1\n", "line 1, column 1: it is not JSON"),
        ("{\"layers\": [[0, 1]]}", "line 1, column "),
        ("{\"0\": 3}", "line 1, column 7: 3 instead of a list"),
    ] {
        fs::write(&order, text).unwrap();
        for more in [&hot_first[..], &["--permute-experts"]] {
            let message = message(&order, more);
            assert!(message.contains(&format!("order.json: {expected}")), "{text}: {message}");
            assert!(
                message.contains("pass a learn file, which `hotness --out` writes"),
                "{message}"
            );
        }
    }
    let message = message(&model, &hot_first);
    assert!(message.contains("it is a GGUF file, not a text file; pass a learn file"), "{message}");
}

#[test]
fn reports_empty_trace() {
    let dir = tempfile::tempdir().unwrap();
    known_run(dir.path());
    fs::write(dir.path().join("trace.bin"), "").unwrap();
    let message = fail!["--quiet", "accesses", dir.path()];
    assert!(
        message.contains("trace.bin: the trace has no records; record the run again"),
        "{message}"
    );
}

#[test]
fn errors_contain_the_range_of_numbers() {
    for (args, expected) in [
        (args!["record", "-n", "4294967296"], "out of range (0..=4294967295)"),
        (args!["record", "-n", "-1"], "expected an integer of at least 0"),
        (args!["record", "-n", "many"], "expected an integer of at least 0"),
        (
            args!["replay", "x", "--model", "y", "--repetitions", "99999999999"],
            "out of range (1..=4294967295)",
        ),
        (args!["bench", "-r", "18446744073709551615"], "out of range (1..=4294967295)"),
    ] {
        let message = fail![args];
        assert!(message.contains(expected), "{message}");
    }
}
