//! The rows, in every format and in files.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use moe_gguf::Gguf;
use serde_json::Value;

use super::MODELS;
use crate::support::{fail, repository, run};

const HEADER: &str = "file,tensor,tensor_idx,expert_id,layer_id,projection,category,type,ne0,ne1,ne2,ne3,file_offset,size_bytes";

fn rows_of(model: &Path) -> Vec<Value> {
    serde_json::from_str(&run!["gguf-map", model, "-o", "json"]).unwrap()
}

#[test]
fn rows_of_a_tensor_tile_it() {
    for model in MODELS.map(repository) {
        let gguf = Gguf::open(&model).unwrap();
        let mut ranges: BTreeMap<u64, Vec<(u64, u64)>> = BTreeMap::new();
        for row in rows_of(&model) {
            let range = (row["file_offset"].as_u64().unwrap(), row["size_bytes"].as_u64().unwrap());
            ranges
                .entry(row["tensor_idx"].as_u64().unwrap())
                .or_default()
                .push(range);
        }
        assert_eq!(ranges.len(), gguf.tensors().len());
        for (tensor, ranges) in gguf.tensors().iter().zip(ranges.values()) {
            let mut next = tensor.offset;
            for &(offset, size) in ranges {
                assert_eq!(offset, next, "{}", tensor.name);
                next += size;
            }
            assert_eq!(next, tensor.offset + tensor.size_bytes, "{}", tensor.name);
        }
    }
}

#[test]
fn each_expert_has_a_row() {
    let rows = rows_of(&repository("fixtures/tiny-qwen3moe-Q4_K_M.gguf"));
    let is = |row: &Value, name: &str| row["tensor"] == name;
    let gate: Vec<&Value> = rows
        .iter()
        .filter(|row| is(row, "blk.3.ffn_gate_exps.weight"))
        .collect();
    assert_eq!(gate.len(), 32);
    for (expert, row) in gate.iter().enumerate() {
        assert_eq!(row["expert_id"], expert);
        assert_eq!(row["layer_id"], 3);
        assert_eq!(row["projection"], "gate");
        assert_eq!(row["category"], "expert");
        assert_eq!(row["ne2"], 1);
    }
    let norm = rows
        .iter()
        .find(|row| is(row, "output_norm.weight"))
        .unwrap();
    assert!(
        norm["expert_id"].is_null() && norm["layer_id"].is_null() && norm["projection"].is_null()
    );
    assert_eq!(norm["category"], "norm");
    assert_eq!(norm["type"], "F32");
}

#[test]
fn all_formats_contain_equal_rows() {
    let model = repository("fixtures/tiny-gpt-oss-MXFP4.gguf");
    let rows = rows_of(&model);
    let print = |format| run!["gguf-map", model, "-o", format];

    let lines: Vec<Value> = print("jsonl")
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(lines, rows);

    let csv = print("csv");
    let mut lines = csv.lines();
    assert_eq!(lines.next(), Some(HEADER));
    for (line, row) in lines.by_ref().zip(&rows) {
        let row = row.as_object().unwrap();
        assert_eq!(row.keys().map(String::as_str).collect::<Vec<_>>().join(","), HEADER);
        let text = |value: &Value| match value {
            Value::Null => String::new(),
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        assert_eq!(line, row.values().map(text).collect::<Vec<_>>().join(","));
    }
    assert_eq!(csv.lines().count(), rows.len() + 1);
    assert_eq!(print("table").lines().count(), rows.len() + 1);
    assert_eq!(print("md").lines().count(), rows.len() + 2);
}

#[test]
fn files_equal_stdout() {
    let model = repository("fixtures/tiny-gpt-oss-MXFP4.gguf");
    let dir = tempfile::tempdir().unwrap();
    for format in ["csv", "json", "jsonl", "md"] {
        let out = dir.path().join(format!("map.{format}"));
        assert_eq!(run!["gguf-map", model, "--out", out], "");
        assert_eq!(fs::read_to_string(&out).unwrap(), run!["gguf-map", model, "-o", format]);
    }

    let out = dir.path().join("map.parquet");
    run!["gguf-map", model, "--out", out];
    let map = moe_trace::map_table::read(&out).unwrap();
    assert_eq!(map, moe_gguf::map::OffsetMap::new(&Gguf::open(&model).unwrap()));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 5, "no temporary file is left");
}

#[test]
fn keeps_existing_output_without_force() {
    let model = repository("fixtures/random-qwen3moe-F16.gguf");
    let dir = tempfile::tempdir().unwrap();
    for name in ["map.csv", "map.parquet"] {
        let out = dir.path().join(name);
        fs::write(&out, "precious").unwrap();
        let line = fail!["gguf-map", model, "--out", out];
        assert!(line.contains("exists") && line.contains("--force"), "{line}");
        assert_eq!(fs::read_to_string(&out).unwrap(), "precious");
        run!["gguf-map", model, "--out", out, "--force"];
        assert_ne!(fs::read(&out).unwrap(), b"precious");
    }
}

#[test]
fn rejects_impossible_outputs() {
    let model = repository("fixtures/random-qwen3moe-F16.gguf");
    let dir = tempfile::tempdir().unwrap();
    let absent = dir.path().join("absent/map.csv");
    assert!(fail!["gguf-map", model, "--out", absent].contains("does not exist"));
    let unknown = dir.path().join("map.xlsx");
    assert!(fail!["gguf-map", model, "--out", unknown].contains(".parquet"));
    let directory = dir.path().join("map.csv");
    fs::create_dir(&directory).unwrap();
    let line = fail!["gguf-map", model, "--out", directory, "--force"];
    assert!(line.contains("is a directory"), "{line}");
}
