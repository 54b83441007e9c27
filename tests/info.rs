//! `info`: descriptions, and faults that it detects.

mod hyperparameters;
#[cfg(unix)]
mod pipes;

use std::fs;
use std::path::Path;
use std::sync::Arc;

use arrow::array::{ArrayRef, Int64Array, ListArray, RecordBatch};
use arrow::datatypes::Int64Type;
use parquet::arrow::ArrowWriter;
use serde_json::Value;

use crate::support::{
    ALL, args, fail, known_counts, known_run, moe_analyze, repository, run, write_gguf,
};

/// `info -o json` of a path: its exit code, the object, and the faults.
fn info(path: &Path) -> (i32, Value, Vec<String>) {
    let output = moe_analyze()
        .args(args!["info", path, "-o", "json"])
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

/// Expects exactly one fault, which contains `expected`.
fn unsound(path: &Path, expected: &str) {
    let (code, facts, faults) = info(path);
    assert_eq!(code, 1, "{faults:?}");
    assert_eq!(fact(&facts, "sound"), false);
    assert_eq!(faults.len(), 1, "{faults:?}");
    assert!(faults[0].contains(expected), "{faults:?}");
}

/// JSON contains exact numbers, text contains sentences.
#[test]
fn json_values_have_types() {
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
    let line = run!["info", model, "-o", "jsonl"];
    assert_eq!(serde_json::from_str::<Value>(&line).unwrap(), facts);
    assert_eq!(line.lines().count(), 1);

    let csv = run!["info", model, "-o", "csv"];
    assert!(csv.contains(&format!("\nsize_bytes,{size}\n")), "{csv}");
    let table = run!["info", model];
    assert!(table.contains("\nexperts per layer") && table.contains(" MiB\n"), "{table}");
    assert!(!table.contains("size bytes"), "{table}");
}

#[test]
fn describes_and_checks_models() {
    let facts = sound(&repository("fixtures/tiny-qwen3moe-Q4_K_M.gguf"));
    assert_eq!(fact(&facts, "architecture"), "qwen3moe");
    assert_eq!(fact(&facts, "layers"), 6);
    assert_eq!(fact(&facts, "experts_per_layer"), 32);
    assert_eq!(fact(&facts, "experts_per_token"), 4);

    let dir = tempfile::tempdir().unwrap();
    let mtp = dir.path().join("mtp.gguf");
    let keys = [
        ("general.architecture", moe_gguf::Value::String("glm4moe".into())),
        ("glm4moe.block_count", moe_gguf::Value::U32(47)),
        ("glm4moe.nextn_predict_layers", moe_gguf::Value::U32(1)),
    ];
    write_gguf(&mtp, None, &keys, &[]);
    let facts = sound(&mtp);
    assert_eq!(fact(&facts, "layers"), 47);
    assert_eq!(fact(&facts, "nextn_layers"), 1);
    let table = run!["info", mtp];
    assert!(table.contains("nextn layers"), "{table}");

    let truncated = dir.path().join("short.gguf");
    let whole = fs::read(repository("fixtures/tiny-qwen3moe-Q4_K_M.gguf")).unwrap();
    fs::write(&truncated, &whole[..whole.len() - 64]).unwrap();
    unsound(&truncated, " past the end of the file");
    fs::write(&truncated, &whole[..1000]).unwrap();
    assert!(fail!["info", truncated].contains("short.gguf"));
}

#[test]
fn describes_and_checks_runs_and_traces() {
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
    unsound(&run, "start before");
    with(expert_record + 17, &[2]);
    unsound(&run, "phase");
    with(expert_record + 16, &[200]);
    unsound(&run, "operation");
    with(expert_record + 856, &[17]);
    unsound(&run, "more sources or experts");
    with(expert_record + 152 + 144, &7u64.to_le_bytes());
    unsound(&run, "outside the named tensor");

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

    let mut truncated = trace.clone();
    truncated.extend_from_slice(&trace[..100]);
    fs::write(&trace_file, truncated).unwrap();
    unsound(&run, "trace.bin is truncated: 100 bytes");
    fs::write(&trace_file, &trace[..trace.len() - 1024]).unwrap();
    unsound(&run, "declares");
    fs::write(&trace_file, &trace).unwrap();
    fs::remove_file(run.join("manifest.json")).unwrap();
    unsound(&run, "manifest.json is missing");
}

/// A recorder that was killed before its first record leaves neither a number of records nor a reason.
#[test]
fn reports_an_unfinished_run_without_records() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    known_run(&run);
    let path = run.join("manifest.json");
    let mut manifest: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    manifest["records"] = Value::Null;
    fs::write(&path, manifest.to_string()).unwrap();
    let facts = sound(&run);
    assert_eq!(fact(&facts, "state"), "incomplete: its recorder was killed, or the disk was full");
    fs::write(run.join("trace.bin"), "").unwrap();
    unsound(&run, "trace.bin contains no records");
}

#[test]
fn describes_and_checks_tables_and_datasets() {
    let dir = tempfile::tempdir().unwrap();
    let (run, tables, dataset) =
        (dir.path().join("run"), dir.path().join("tables"), dir.path().join("dataset"));
    known_run(&run);
    run!["parquet", run, "--out", tables, "--dataset", dataset];

    assert_eq!(fact(&sound(&tables), "kind"), "tables of one run");
    assert_eq!(fact(&sound(&dataset), "kind"), "dataset of tables, partitioned by run");
    let table = tables.join("routing.parquet");
    let facts = sound(&table);
    assert_eq!(fact(&facts, "kind"), "Parquet table");
    let rows = known_counts(&ALL).values().sum::<u64>();
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
        faults
            .iter()
            .any(|fault| fault.contains("the table ops is missing")),
        "{faults:?}"
    );
}

/// Tables of another program, without metadata.
#[test]
fn reads_routing_tables_like_other_commands() {
    let dir = tempfile::tempdir().unwrap();
    let table = dir.path().join("routing.parquet");
    let ints = |values: [i64; 2]| -> ArrayRef { Arc::new(Int64Array::from(values.to_vec())) };
    let columns = |experts: [i64; 2]| {
        vec![
            ("token_id", ints([0, 1])),
            ("layer_id", ints([0, 0])),
            ("slot", ints([0, 0])),
            ("expert_id", ints(experts)),
        ]
    };
    let write = |columns: Vec<(&str, ArrayRef)>| {
        let batch = RecordBatch::try_from_iter(columns).unwrap();
        let file = fs::File::create(&table).unwrap();
        let mut writer = ArrowWriter::try_new(file, batch.schema(), None).unwrap();
        writer.write(&batch).unwrap();
        writer.close().unwrap();
    };
    // An additional nested column is ignored.
    let lists = vec![Some(vec![Some(1)]), None];
    let lists: ArrayRef = Arc::new(ListArray::from_iter_primitive::<Int64Type, _, _>(lists));
    let mut more = columns([3, 5]);
    more.push(("more", lists));
    write(more);
    assert_eq!(fact(&sound(&table), "rows"), 2);
    run!["--quiet", "hotness", table];

    write(columns([-1, 5]));
    unsound(&table, "column expert_id: a value does not fit");
    let error = fail!["--quiet", "hotness", table];
    assert!(error.contains("column expert_id: a value does not fit"), "{error}");
}

#[test]
fn describes_and_checks_learn_files() {
    let dir = tempfile::tempdir().unwrap();
    let learn = dir.path().join("learn.json");
    let text = |layers: &str| {
        format!(r#"{{"schema":"llama.cpp.moe_layer_opt_perf.v1","layers":[{layers}]}}"#)
    };
    fs::write(&learn, text(r#"{"layer":0,"experts":[[12,100],[42,90]]}"#)).unwrap();
    let facts = sound(&learn);
    assert_eq!(fact(&facts, "activations"), 190);
    fs::write(&learn, text("")).unwrap();
    unsound(&learn, "contains no counts");
    fs::write(&learn, text(r#"{"layer":"0"}"#)).unwrap();
    assert!(fail!["info", learn].contains("layers[0]"));
    fs::write(&learn, text(r#"], "layers":["#)).unwrap();
    let model = repository("fixtures/tiny-qwen3moe-Q4_K_M.gguf");
    for error in [
        fail!["info", learn],
        fail!["--quiet", "plan", learn, "--model", model, "--budget-mib", "1"],
    ] {
        assert!(error.contains("the key \"layers\" appears twice"), "{error}");
    }
}

#[test]
fn describes_and_checks_plans() {
    let dir = tempfile::tempdir().unwrap();
    let (run, plan) = (dir.path().join("run"), dir.path().join("plan.json"));
    let model = repository("fixtures/random-olmoe-F16.gguf");
    run!["record", "--model", model, "--prompt", "plan", "-n", "4", "-t", "1", "--out", run];
    let made = run!["plan", run, "--model", model, "--budget-mib", "1", "-o", "json"];
    fs::write(&plan, &made).unwrap();
    let facts = sound(&plan);
    let made: Value = serde_json::from_str(&made).unwrap();
    let selected = made["selected"].as_array().unwrap();
    assert!(!selected.is_empty());
    assert_eq!(fact(&facts, "cached_experts"), selected.len());
    assert_eq!(fact(&facts, "budget_bytes"), &made["lanes"][0]["budget_bytes"]);
    assert_eq!(fact(&facts, "used_bytes"), &made["lanes"][0]["used_bytes"]);

    let mut small = made.clone();
    small["lanes"][0]["budget_bytes"] = 1.into();
    fs::write(&plan, small.to_string()).unwrap();
    unsound(&plan, "lane 0 uses ");
    let mut empty = made.clone();
    empty["selected"] = Value::Array(Vec::new());
    fs::write(&plan, empty.to_string()).unwrap();
    unsound(&plan, "contains no experts");
    let mut wrong = made;
    wrong["selected"][0]["lane"] = 5.into();
    fs::write(&plan, wrong.to_string()).unwrap();
    assert!(fail!["info", plan].contains("is in lane 5"));
}

#[test]
fn lists_architectures_of_both_engines() {
    let csv = run!["info", "--architectures", "-o", "csv"];
    let mut lines = csv.lines();
    assert_eq!(lines.next(), Some("architecture,cpu,gpu,llama_cpp"));
    let rows: Vec<&str> = lines.collect();
    for row in ["dbrx,yes,yes,yes", "kimi-k3,no,no,yes", "kimi-linear,yes,yes,yes"] {
        assert!(rows.contains(&row), "{row}: {csv}");
    }
    assert!(!csv.contains("\nbert,"), "{csv}");
    assert_eq!(rows.iter().filter(|row| row.contains(",yes,")).count(), 34);
    let json: Value = serde_json::from_str(&run!["info", "--architectures", "-o", "json"]).unwrap();
    assert_eq!(json.as_array().unwrap().len(), rows.len());
    for format in ["table", "md", "jsonl"] {
        let text = run!["info", "--architectures", "-o", format];
        assert!(text.contains("minimax-m2"), "{format}: {text}");
    }
    let model = repository("fixtures/random-olmoe-F16.gguf");
    assert!(fail!["info", "--architectures", model].contains("cannot be used with"));
    assert!(fail!["info"].contains("PATH"));
}

#[test]
fn unknown_formats_exit_with_2() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("notes.txt");
    fs::write(&file, "notes").unwrap();
    assert!(fail!["info", file].contains("has an unknown format"));
    fs::write(&file, "").unwrap();
    assert!(fail!["info", file].contains("is empty"));
    fs::write(&file, "{\"a\": 1}\n{\"a\": 2}\n").unwrap();
    assert!(fail!["info", file].contains("is JSON, but not a trace in a known format"));
    for (text, expected) in [
        ("{\"a\": NaN}", "NaN is not JSON (line 1, column 7); replace it with a number"),
        ("{\"a\": b}", "line 1, column 7: it is not valid JSON: expected value; get a new copy"),
        (
            "{\"a\": 1}\n{\"a\":",
            "line 2, column 5: it is not valid JSON: the text ends within a JSON value; get a new copy",
        ),
    ] {
        fs::write(&file, text).unwrap();
        for command in ["info", "hotness"] {
            let error = fail![command, file];
            assert!(error.contains(expected), "{command}: {error}");
        }
    }
    let events = dir.path().join("buffers.jsonl");
    fs::write(&events, "{}").unwrap();
    assert!(fail!["info", events].contains("pass the run directory"));
    assert!(fail!["info", dir.path()].contains("neither a run directory"));
    assert!(fail!["info", dir.path().join("absent")].contains("cannot open"));
}
