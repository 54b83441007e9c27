//! `info`: what things are, and the faults that it must find.

mod support;

use std::fs;
use std::path::Path;

use serde_json::Value;
use support::{arg, failure_of, known_run, moe_analyze, repository, stdout_of};

/// `info -o json` of a path: its exit code, the object, and the faults.
fn info(path: &Path) -> (i32, Value, Vec<String>) {
    let output = moe_analyze()
        .args(["info", arg(path), "-o", "json"])
        .output()
        .unwrap();
    let object: Value = serde_json::from_slice(&output.stdout).unwrap();
    let faults = serde_json::from_value(object["faults"].clone()).unwrap();
    (output.status.code().unwrap(), object, faults)
}

fn fact<'a>(facts: &'a Value, key: &str) -> &'a Value {
    facts.get(key).unwrap_or_else(|| panic!("{key} in {facts}"))
}

fn sound(path: &Path) -> Value {
    let (code, facts, faults) = info(path);
    assert_eq!((code, faults), (0, Vec::new()));
    assert_eq!(fact(&facts, "sound"), true);
    facts
}

/// Expects exactly one fault that says `expected`.
fn unsound(path: &Path, expected: &str) {
    let (code, facts, faults) = info(path);
    assert_eq!(code, 1, "{faults:?}");
    assert_eq!(fact(&facts, "sound"), false);
    assert_eq!(faults.len(), 1, "{faults:?}");
    assert!(faults[0].contains(expected), "{faults:?}");
}

/// A program gets exact numbers under keys, a person sentences.
#[test]
fn values_are_typed() {
    let model = repository("fixtures/tiny-qwen3moe-Q4_K_M.gguf");
    let size = fs::metadata(&model).unwrap().len();
    let facts = sound(&model);
    assert_eq!(fact(&facts, "size_bytes"), size);
    assert_eq!(fact(&facts, "version"), 3);
    assert_eq!(fact(&facts, "notes"), &serde_json::json!([]));
    assert_eq!(fact(&facts, "check")["past_end"], 0);
    let n_typed: u64 = fact(&facts, "tensor_types")
        .as_object()
        .unwrap()
        .values()
        .map(|n| n.as_u64().unwrap())
        .sum();
    assert_eq!(fact(&facts, "tensors"), n_typed);
    for key in facts.as_object().unwrap().keys() {
        let snake = |c: char| c.is_ascii_lowercase() || c == '_';
        assert!(key.chars().all(snake), "{key}");
    }
    let line = stdout_of(&["info", arg(&model), "-o", "jsonl"]);
    assert_eq!(serde_json::from_str::<Value>(&line).unwrap(), facts);
    assert_eq!(line.lines().count(), 1);

    let csv = stdout_of(&["info", arg(&model), "-o", "csv"]);
    assert!(csv.contains(&format!("\nsize_bytes,{size}\n")), "{csv}");
    let table = stdout_of(&["info", arg(&model)]);
    assert!(
        table.contains("\nexperts in a layer") && table.contains(" MiB\n"),
        "{table}"
    );
    assert!(!table.contains("size bytes"), "{table}");
}

#[test]
fn models() {
    let facts = sound(&repository("fixtures/tiny-qwen3moe-Q4_K_M.gguf"));
    assert_eq!(fact(&facts, "architecture"), "qwen3moe");
    assert_eq!(fact(&facts, "layers"), 6);
    assert_eq!(fact(&facts, "experts_in_a_layer"), 32);
    assert_eq!(fact(&facts, "experts_for_a_token"), 4);

    let dir = tempfile::tempdir().unwrap();
    let cut = dir.path().join("cut.gguf");
    let whole = fs::read(repository("fixtures/tiny-qwen3moe-Q4_K_M.gguf")).unwrap();
    fs::write(&cut, &whole[..whole.len() - 64]).unwrap();
    unsound(&cut, " lacks ");
    fs::write(&cut, &whole[..1000]).unwrap();
    assert!(failure_of(&["info", arg(&cut)]).contains("cut"));
}

#[test]
fn runs_and_traces() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    known_run(&run);
    let trace_file = run.join("trace.bin");
    let trace = fs::read(&trace_file).unwrap();
    let n_records = trace.len() / 1024;

    let facts = sound(&run);
    assert_eq!(fact(&facts, "kind"), "run directory");
    assert_eq!(fact(&facts, "records"), n_records);
    assert_eq!(fact(&facts, "architecture"), "qwen3moe");
    let facts = sound(&trace_file);
    assert_eq!(fact(&facts, "kind"), "trace without a run directory");
    assert_eq!(fact(&facts, "records"), n_records);

    let with = |at: usize, bytes: &[u8]| {
        let mut broken = trace.clone();
        broken[at..at + bytes.len()].copy_from_slice(bytes);
        fs::write(&trace_file, broken).unwrap();
    };
    let expert_record = 1024
        * trace
            .chunks(1024)
            .position(|record| record[856] == 4)
            .unwrap();
    with(expert_record + 792, &32i32.to_le_bytes());
    unsound(&run, "an expert that the model does not have");
    with(expert_record + 12, &6u16.to_le_bytes());
    unsound(&run, "a layer that the model does not have");
    with(expert_record, &1u64.to_le_bytes());
    unsound(&run, "begin before");
    with(expert_record + 17, &[2]);
    unsound(&run, "phase");
    with(expert_record + 16, &[200]);
    unsound(&run, "operation");
    with(expert_record + 856, &[17]);
    unsound(&run, "more sources or experts");
    with(expert_record + 152 + 144, &7u64.to_le_bytes());
    unsound(&run, "not the named tensor's");

    with(expert_record + 956, &[99]);
    unsound(&run, "expert_lane");
    with(expert_record + 859, &[255]);
    unsound(&run, "expert_slot_base");

    fs::write(&trace_file, &trace).unwrap();
    let manifest = fs::read(run.join("manifest.json")).unwrap();
    let lacking = br#"{"schema":"moe-analyze.run.v1"}"#;
    fs::write(run.join("manifest.json"), lacking).unwrap();
    let (code, facts, faults) = info(&run);
    assert_eq!(code, 1);
    assert!(faults[0].contains("lacks 27 keys"), "{faults:?}");
    assert!(facts.get("prompt_tokens").is_none());
    fs::write(run.join("manifest.json"), manifest).unwrap();

    let mut cut = trace.clone();
    cut.extend_from_slice(&trace[..100]);
    fs::write(&trace_file, cut).unwrap();
    unsound(&run, "a cut record of 100 bytes");
    fs::write(&trace_file, &trace[..trace.len() - 1024]).unwrap();
    unsound(&run, "promises");
    fs::write(&trace_file, &trace).unwrap();
    fs::remove_file(run.join("manifest.json")).unwrap();
    unsound(&run, "manifest.json is missing");
}

#[test]
fn tables_and_datasets() {
    let dir = tempfile::tempdir().unwrap();
    let (run, tables, dataset) = (
        dir.path().join("run"),
        dir.path().join("tables"),
        dir.path().join("dataset"),
    );
    known_run(&run);
    stdout_of(&[
        "parquet",
        arg(&run),
        "--out",
        arg(&tables),
        "--dataset",
        arg(&dataset),
    ]);

    assert_eq!(fact(&sound(&tables), "kind"), "tables of one run");
    assert_eq!(
        fact(&sound(&dataset), "kind"),
        "dataset of tables, partitioned by run"
    );
    let table = tables.join("routing.parquet");
    let facts = sound(&table);
    assert_eq!(fact(&facts, "kind"), "Parquet table");
    let rows = support::known_counts(&support::ALL).values().sum::<u64>();
    assert_eq!(fact(&facts, "rows"), rows);
    sound(&run.join("gguf-map.parquet"));

    let mut bytes = fs::read(&table).unwrap();
    bytes[4..60].fill(0xa5);
    fs::write(&table, &bytes).unwrap();
    unsound(&table, "routing.parquet");
    unsound(&tables, "routing.parquet");
    fs::remove_file(tables.join("ops.parquet")).unwrap();
    let (_, _, faults) = info(&tables);
    assert!(
        faults.iter().any(|fault| fault.contains("no table ops")),
        "{faults:?}"
    );
}

#[test]
fn learn_files() {
    let dir = tempfile::tempdir().unwrap();
    let learn = dir.path().join("learn.json");
    let text = |layers: &str| {
        format!(r#"{{"schema":"llama.cpp.moe_layer_opt_perf.v1","layers":[{layers}]}}"#)
    };
    fs::write(&learn, text(r#"{"layer":0,"experts":[[12,100],[42,90]]}"#)).unwrap();
    let facts = sound(&learn);
    assert_eq!(fact(&facts, "choices"), 190);
    fs::write(&learn, text("")).unwrap();
    unsound(&learn, "counts nothing");
    fs::write(&learn, text(r#"{"layer":"0"}"#)).unwrap();
    assert!(failure_of(&["info", arg(&learn)]).contains("layers[0]"));
}

#[test]
fn what_is_not_known_is_exit_2() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("notes.txt");
    fs::write(&file, "notes").unwrap();
    assert!(failure_of(&["info", arg(&file)]).contains("is in no known format"));
    fs::write(&file, "").unwrap();
    assert!(failure_of(&["info", arg(&file)]).contains("is empty"));
    assert!(failure_of(&["info", arg(dir.path())]).contains("neither a run directory"));
    assert!(failure_of(&["info", arg(&dir.path().join("absent"))]).contains("cannot open"));
}

/// Neither is waited for, nor told as something that it is not.
#[cfg(unix)]
#[test]
fn pipes_and_what_cannot_be_looked_at() {
    let dir = tempfile::tempdir().unwrap();
    let fifo = dir.path().join("fifo");
    let made = std::process::Command::new("mkfifo").arg(&fifo).status();
    assert!(made.unwrap().success());
    let out = dir.path().join("out");
    for args in [
        &["info", arg(&fifo)][..],
        &["hotness", arg(&fifo)],
        &["parquet", arg(&fifo), "--out", arg(&out)],
    ] {
        assert!(failure_of(args).contains("neither a regular file nor a directory"));
    }

    // A link to itself cannot be looked at even by root, whom permissions do not stop.
    let closed = dir.path().join("closed");
    fs::create_dir(&closed).unwrap();
    std::os::unix::fs::symlink("trace.bin", closed.join("trace.bin")).unwrap();
    for command in ["info", "hotness"] {
        let line = failure_of(&[command, arg(&closed)]);
        assert!(
            line.contains("cannot open") && line.contains("trace.bin"),
            "{line}"
        );
    }
}
