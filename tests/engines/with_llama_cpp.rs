//! Both engines, with the feature `llama-cpp`.

use std::fs;

use moe_trace::Run;
use serde_json::Value;

use super::{PROMPT, record};
use crate::support::{Arg, arg, args, fail, repository, run, write_gguf};

fn json(args: impl Arg) -> Value {
    serde_json::from_str(&run![args]).unwrap()
}

/// An F16 model yields the same text and the same routing in both engines.
#[test]
fn engines_record_equal_routing() {
    let dir = tempfile::tempdir().unwrap();
    let model = repository("fixtures/random-gpt-oss-F16.gguf");
    let runs = ["native", "llama.cpp"].map(|engine| dir.path().join(engine));
    let texts =
        [run![record("native", &model, &runs[0])], run![record("llama.cpp", &model, &runs[1])]];
    assert_eq!(texts[0], texts[1]);
    let counts = runs.each_ref().map(|run| {
        run!["info", run];
        let rows = json(args!["hotness", run, "-o", "json"]);
        let count =
            |row: &Value| ["layer_id", "expert_id", "count"].map(|key| row[key].as_u64().unwrap());
        rows.as_array()
            .unwrap()
            .iter()
            .map(count)
            .collect::<Vec<_>>()
    });
    assert_eq!(counts[0], counts[1]);

    let run = Run::open(&runs[1]).unwrap();
    let manifest = run.manifest.as_ref().unwrap();
    assert_eq!(manifest.engine.name, "llama.cpp");
    assert!(manifest.engine.version.starts_with("llama-cpp-sys-2 "));
    assert_eq!(manifest.records, Some(run.trace.records().len() as u64));
    assert_eq!((manifest.model.n_layer, manifest.model.n_expert), (4, 16));
    assert_eq!(manifest.tokens.generated, 12);
    assert!(manifest.prompts.is_none() && !manifest.command.contains(&PROMPT.to_owned()));
    // names that are missing in the usual table follow its last name
    assert_eq!(run.ops().number("MUL_MAT_ID"), Some(30));
    assert!(run.ops().iter().count() > 95);

    let tables = dir.path().join("tables");
    run!["parquet", runs[1], "--out", tables];
    run!["info", tables];
}

/// Engines do not compute the blocks of an MTP head, but manifests count them.
#[test]
fn engines_count_the_blocks_of_an_mtp_head() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model.gguf");
    let like = repository("fixtures/random-qwen3moe-F16.gguf");
    let like = moe_gguf::Gguf::open(like).unwrap();
    let keys = [
        ("qwen3moe.block_count", moe_gguf::Value::U32(5)),
        ("qwen3moe.nextn_predict_layers", moe_gguf::Value::U32(1)),
    ];
    write_gguf(&model, Some(&like), &keys, &[]);
    for engine in ["native", "llama.cpp"] {
        let run = dir.path().join(engine);
        run![record(engine, &model, &run)];
        let manifest = Run::open(&run).unwrap().manifest.unwrap().model;
        let counts = (manifest.n_layer, manifest.n_nextn_layer);
        assert_eq!(counts, (5, 1), "{engine}");
        let counts = dir.path().join(format!("{engine}.json"));
        let eplb = ["convert", arg(&run), "--to", "eplb", "--out", arg(&counts)];
        run![eplb];
        let counts: Value = serde_json::from_slice(&fs::read(counts).unwrap()).unwrap();
        assert_eq!(counts.as_array().unwrap().len(), 4, "{engine}");
    }
}

#[test]
fn both_engines_record_linear_attention() {
    let dir = tempfile::tempdir().unwrap();
    let [spec, model] = ["spec.json", "model.gguf"].map(|name| dir.path().join(name));
    let description = r#"{"arch": "qwen3next", "n_layer": 4, "n_embd": 256, "n_head": 4, "n_head_kv": 2, "head_dim": 64,
        "n_expert": 16, "n_expert_used": 4, "n_ff_exp": 256, "rope_dims": 32, "quant": "Q8_0",
        "linear_attention": {"conv_kernel": 4, "state_size": 64, "group_count": 2, "time_step_rank": 4,
        "full_attention_interval": 4}, "vocab": {"n_tokens": 600, "pre": "qwen2", "n_merges": 200}}"#;
    fs::write(&spec, description).unwrap();
    run!["--quiet", "synth", "--spec", spec, "--out", model];
    for engine in ["native", "llama.cpp"] {
        let run = dir.path().join(engine);
        run![record(engine, &model, &run)];
        run!["info", run];
        let rows = json(args!["hotness", run, "-o", "json"]);
        let count = |row: &Value| row["count"].as_u64().unwrap();
        let layer = |layer: u64| {
            let rows = rows.as_array().unwrap().iter();
            rows.filter(move |row| row["layer_id"] == layer)
                .map(count)
                .sum::<u64>()
        };
        // Four experts of every token in every layer: a prompt of qwen3next is not pruned.
        let run = Run::open(&run).unwrap();
        let tokens = run.manifest.as_ref().unwrap().tokens;
        for il in 0..4 {
            assert_eq!(layer(il), 4 * (tokens.prompt + 12), "{engine}");
        }
    }
}

#[test]
fn records_only_expert_operations_of_several_sequences() {
    let dir = tempfile::tempdir().unwrap();
    let [prompts, run] = ["prompts.jsonl", "run"].map(|name| dir.path().join(name));
    fs::write(&prompts, "{\"tokens\":[5,6,7]}\n{\"tokens\":[9,8],\"n_predict\":2}\n").unwrap();
    let model = repository("fixtures/random-qwen3moe-F16.gguf");
    run![
        "--quiet", "record", "--engine", "llama.cpp", "--model", model, "--prompts", prompts,
        "--n-predict", "4", "--trace", "experts", "--ignore-eos", "--out", run
    ];
    let run = Run::open(&run).unwrap();
    // three layers route all tokens, the last layer the generated tokens and the last token of each prompt; gate, up, down
    let rows = [(0, 3 + 4, 1 + 4), (1, 2 + 2, 1 + 2)];
    for (sequence, all, last) in rows {
        let records = run.trace.records().iter();
        let n = records.filter(|r| r.sequence_id.get() == sequence).count();
        assert_eq!(n, 3 * (3 * all + last), "sequence {sequence}");
    }
}

#[test]
fn errors_of_llama_cpp_are_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let embedded = ["record", "--engine", "llama.cpp", "--out", arg(&out)];
    assert!(fail![embedded].contains("--model"));
    // a complete GGUF file without a key that llama.cpp requires
    let model = dir.path().join("model.gguf");
    let mut bytes = fs::read(repository("fixtures/random-qwen3moe-F16.gguf")).unwrap();
    let key = b"qwen3moe.attention.head_count_kv";
    let at = bytes.windows(key.len()).position(|w| w == key).unwrap();
    bytes[at] = b'Q';
    fs::write(&model, bytes).unwrap();
    let line = fail![record("llama.cpp", &model, &out)];
    assert!(line.contains("llama.cpp cannot load the model: "), "{line}");
    fail![record("llama.cpp", &dir.path().join("none.gguf"), &out)];
    assert!(!out.exists());
}

/// The K cache of type q8_0 needs a head size that is a multiple of 32.
#[test]
fn keeps_the_old_run_if_llama_cpp_cannot_create_its_context() {
    let dir = tempfile::tempdir().unwrap();
    let [out, new] = ["run", "new"].map(|name| dir.path().join(name));
    let model = repository("fixtures/random-qwen3moe-F16.gguf");
    run![record("native", &model, &out)];
    let trace = fs::read(out.join("trace.bin")).unwrap();
    let types = ["--cache-type-k", "q8_0", "--cache-type-v", "q8_0"];
    let line = fail![record("llama.cpp", &model, &out), types, "--force"];
    assert!(line.contains("does not divide n_embd_head_k=16"), "{line}");
    assert!(line.contains("or change --cache-type-k and --cache-type-v"), "{line}");
    assert!(fs::read(out.join("trace.bin")).unwrap() == trace);
    run!["info", out];
    fail![record("llama.cpp", &model, &new), types];
    assert!(!new.exists());
}

#[test]
fn bench_columns_do_not_depend_on_the_engine() {
    let model = repository("fixtures/random-gpt-oss-F16.gguf");
    let rows = |engine| {
        json(args![
            "--quiet", "bench", "--engine", engine, "--model", model, "-p", "32", "-n", "4", "-r",
            "2", "-t", "1", "-o", "json"
        ])
    };
    let [ours, theirs] = ["native", "llama.cpp"].map(rows);
    for (ours, theirs) in ours
        .as_array()
        .unwrap()
        .iter()
        .zip(theirs.as_array().unwrap())
    {
        let keys = |row: &Value| row.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
        assert_eq!(keys(ours), keys(theirs));
        for key in ["n_prompt", "n_gen", "n_threads", "weight_bytes_per_token"] {
            assert_eq!(ours[key], theirs[key], "{key}");
        }
        assert!(theirs["avg_ts"].as_f64().unwrap() > 0.0);
        assert_eq!(ours["engine"], "native");
        assert_eq!(theirs["engine"], "llama.cpp");
    }
}
