//! Traces of other tools in `hotness`, `parquet` and `convert`. All golden files contain the same routing, as far as their format can
//! represent it.

mod conditions;
mod converting;
mod counting;
mod numbering;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use moe_trace::Phase;
use moe_trace::tables::read_routing;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde_json::Value;

use crate::support::{arg, fail, known_run, repository, run};

/// `(layer, expert)` → count of the routing in `fixtures/foreign/make/text.py`.
const COUNTS: [((u64, u64), u64); 9] = [
    ((0, 0), 1),
    ((0, 1), 2),
    ((0, 3), 2),
    ((0, 5), 4),
    ((0, 7), 1),
    ((1, 0), 1),
    ((1, 2), 2),
    ((1, 4), 2),
    ((1, 6), 5),
];

fn golden(name: &str) -> PathBuf {
    repository("fixtures/foreign").join(name)
}

/// Counts above 0 that `hotness -o json` prints, by layer and expert.
fn hotness(path: &Path, more: &[&str]) -> BTreeMap<(u64, u64), u64> {
    let args = ["--quiet", "hotness", arg(path), "-o", "json"];
    let rows: Vec<Value> = serde_json::from_str(&run![args, more]).unwrap();
    let number = |row: &Value, key: &str| row[key].as_u64().unwrap();
    rows.iter()
        .map(|row| {
            let place = (number(row, "layer_id"), number(row, "expert_id"));
            (place, number(row, "count"))
        })
        .filter(|&(_, count)| count > 0)
        .collect()
}

#[test]
fn hotness_counts_traces_of_every_tool() {
    for name in [
        "bigmoeonedge/small.route.csv", "learn/new.json", "learn/old.json",
        "coli-usage/small.coli_usage", "expert-tracer/written.json", "expert-tracer/planned.json",
        "ds4-hotlist/small.hotlist", "jsonl/small.jsonl", "layer-expert/small.csv", "megatron",
        "mesh-llm",
    ] {
        assert_eq!(hotness(&golden(name), &[]), BTreeMap::from(COUNTS), "{name}");
    }
    // A TensorAccessLog trace contains only the first token of each pass: 0, 3 and 4.
    let counts = hotness(&golden("thesis-json"), &[]);
    assert_eq!(counts[&(0, 5)], 2);
    assert_eq!(counts[&(1, 6)], 3);
    assert_eq!(counts.values().sum::<u64>(), 12);
}

#[test]
fn filters_by_phase_if_phases_are_recorded() {
    let route = golden("bigmoeonedge/small.route.csv");
    // Tokens 3 and 4.
    let generated = hotness(&route, &["--phase", "generate"]);
    let expected =
        [((0, 0), 1), ((0, 1), 1), ((0, 3), 1), ((0, 5), 1), ((1, 0), 1), ((1, 4), 1), ((1, 6), 2)];
    assert_eq!(generated, BTreeMap::from(expected));

    let unknown = golden("lattice/small.jsonl");
    let error = fail!["--quiet", "hotness", unknown, "--phase", "prompt"];
    assert!(error.contains("--phase all"), "{error}");
}

#[test]
fn reports_tokens_of_counts_only_with_top_k() {
    let usage = golden("coli-usage/small.coli_usage");
    let text = run!["--quiet", "hotness", usage];
    assert!(text.lines().nth(1) == Some("20 activations in 2 layers of 8 experts"), "{text}");
    let text = run!["--quiet", "hotness", usage, "--top-k", "2"];
    assert!(
        text.lines().nth(1)
            == Some("5 prompt and generated tokens in 2 layers, 2 of 8 experts per token"),
        "{text}"
    );
}

#[test]
fn parquet_writes_null_for_unknown_phases_and_timestamps() {
    let dir = tempfile::tempdir().unwrap();
    let lattice = golden("lattice/small.jsonl");
    run!["--quiet", "parquet", lattice, "--out", dir.path()];
    let batches: Vec<_> = read_routing(dir.path())
        .unwrap()
        .map(Result::unwrap)
        .collect();
    let [batch] = batches.as_slice() else {
        panic!("one batch");
    };
    assert_eq!(batch.len(), 20);
    assert!(batch.phase().iter().all(|phase| phase.is_none()));
    assert!(batch.timestamp_ns().iter().all(|&time| time == 0));
    assert_eq!(batch.expert_id()[..6], [5, 1, 3, 5, 5, 7]);
    assert_eq!(batch.token_id()[..6], [0, 0, 1, 1, 2, 2]);
    assert_eq!(batch.weight().value(1), 0.25);
    assert_eq!(hotness(dir.path(), &[]), BTreeMap::from(COUNTS));

    let error = fail!["--quiet", "parquet", lattice, "--out", dir.path()];
    assert!(error.contains("--force"), "{error}");
}

#[test]
fn a_dataset_contains_traces_of_several_tools() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["bigmoeonedge/small.route.csv", "jsonl/with-weights.jsonl"] {
        run!["--quiet", "parquet", golden(name), "--dataset", dir.path()];
    }
    let counts = hotness(dir.path(), &[]);
    let twice = COUNTS.map(|(place, count)| (place, 2 * count));
    assert_eq!(counts, BTreeMap::from(twice));
}

#[test]
fn parquet_writes_three_tables_of_a_tensor_access_log() {
    let dir = tempfile::tempdir().unwrap();
    let (binary, json) = (dir.path().join("binary"), dir.path().join("json"));
    run!["--quiet", "parquet", golden("thesis/small.bin"), "--out", binary];
    run!["--quiet", "parquet", golden("thesis-json"), "--out", json];
    for tables in [&binary, &json] {
        let batch = read_routing(tables).unwrap().next().unwrap().unwrap();
        // The routing excludes the warm-up pass; token_id is the position in the sequence.
        assert_eq!(batch.token_id(), [0, 0, 0, 0, 3, 3, 3, 3, 4, 4, 4, 4]);
        assert_eq!(batch.expert_id(), [5, 1, 2, 6, 1, 5, 6, 0, 0, 3, 6, 4]);
        assert_eq!(
            batch.phase(),
            [[Phase::Prompt; 4], [Phase::Generate; 4], [Phase::Generate; 4]]
                .concat()
                .into_iter()
                .map(Some)
                .collect::<Vec<_>>()
        );
        let info: Value =
            serde_json::from_str(&run!["info", tables.join("ops.parquet"), "-o", "json"]).unwrap();
        // Four passes of 17 operations, including the warm-up pass.
        assert!(info.to_string().contains("68"), "{info}");
        assert!(tables.join("accesses.parquet").exists());
    }
}

#[test]
fn model_is_compared_with_the_trace_and_its_map_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let model = repository("fixtures/tiny-qwen3moe-Q4_K_M.gguf");
    let route = golden("bigmoeonedge/small.route.csv");
    let error = fail!["--quiet", "hotness", route, "--model", model];
    assert!(error.contains("it has 2 layers") && error.contains("has 6"), "{error}");

    let trace = golden("jsonl/small.jsonl");
    let tables = dir.path().join("tables");
    run!["--quiet", "parquet", trace, "--model", model, "--out", tables];
    assert!(tables.join("gguf-map.parquet").exists());
    let text = run!["--quiet", "hotness", tables];
    assert!(text.contains("4 of 32 experts per token"), "{text}");
}

#[test]
fn mass_is_null_without_router_weights() {
    let dir = tempfile::tempdir().unwrap();
    let (run, learn) = (dir.path().join("run"), dir.path().join("learn.json"));
    known_run(&run);
    let to_learn = ["--to", "learn", "--out", arg(&learn)];
    run!["--quiet", "convert", run, to_learn];
    let rows = |args: &[&str]| -> Vec<Value> {
        let hotness = ["--quiet", "hotness", "-o", "json"];
        serde_json::from_str(&run![hotness, args]).unwrap()
    };
    // Expert 3 of layer 0: 16 tokens with ½.
    assert_eq!(rows(&[arg(&run)])[0]["mass"], 8.0);
    let counts = golden("coli-usage/small.coli_usage");
    for inputs in [&[arg(&counts)][..], &[arg(&learn)], &[arg(&run), arg(&learn)]] {
        let rows = rows(inputs);
        assert!(!rows.is_empty() && rows.iter().all(|row| row["mass"].is_null()));
    }
    assert_eq!(rows(&[arg(&run), arg(&learn)])[0]["count"], 32);

    let matrix = |name: &str, more: &[&str]| {
        let path = dir.path().join(name);
        let args = ["--quiet", "hotness", arg(&learn), "--matrix", arg(&path)];
        run![args, more];
        path
    };
    let json = fs::read_to_string(matrix("matrix.json", &[])).unwrap();
    let json: Vec<Value> = serde_json::from_str(&json).unwrap();
    assert!(json.len() == 6 * 32 && json.iter().all(|row| row["mass"].is_null()));
    let csv = fs::read_to_string(matrix("matrix.csv", &["--by", "label", "--label", "a"])).unwrap();
    assert!(csv.lines().nth(4).unwrap().starts_with("a,0,3,16,,"), "{csv}");
    let file = fs::File::open(matrix("matrix.parquet", &[])).unwrap();
    let mut batches = ParquetRecordBatchReaderBuilder::try_new(file)
        .unwrap()
        .build()
        .unwrap();
    let batch = batches.next().unwrap().unwrap();
    assert_eq!(batch.column_by_name("mass").unwrap().null_count(), 6 * 32);
    let out = dir.path().join("mass.npy");
    let args = ["--quiet", "hotness", arg(&learn), "--value", "mass", "--matrix", arg(&out)];
    assert!(fail![args].contains("router weights"));
}

#[test]
fn info_prints_the_format_and_its_missing_columns() {
    let text = run!["info", golden("ds4-hotlist/small.hotlist"), "-o", "json"];
    let info: Value = serde_json::from_str(&text).unwrap();
    let text = info.to_string();
    assert!(text.contains("ds4-hotlist") && text.contains("weight column"), "{text}");
}

/// The first 1024 bytes of the dump could be a record; those of the array could not.
#[test]
fn detects_formats_that_resemble_records() {
    for (name, format) in [("sglang-pt/stat.pt", "sglang-pt"), ("npy/counts.npy", "npy")] {
        let path = golden(name);
        let facts = run!["info", path, "-o", "json"];
        assert!(facts.contains(&format!("\"{format}\"")), "{facts}");
        for command in ["accesses", "graph"] {
            let error = fail!["--quiet", command, path];
            assert!(error.contains(&format!("has the format {format} (")), "{error}");
        }
    }
}

#[test]
fn reads_operation_numbers_from_a_table() {
    let dir = tempfile::tempdir().unwrap();
    let ops = dir.path().join("ops.csv");
    let trace = golden("thesis/small.bin");
    fs::write(&ops, "number,name\n31,MUL_MAT_ID\n").unwrap();
    let error = fail!["--quiet", "hotness", trace, "--ops", ops];
    assert!(error.contains("--ops"), "{error}");
    fs::write(&ops, "number,name\n30,MUL_MAT_ID\n").unwrap();
    assert_eq!(hotness(&trace, &["--ops", arg(&ops)]).values().sum::<u64>(), 12);
    // Quotes, spaces, another order of columns, unknown columns.
    for table in [
        "\"number\", \"name\"\n\"30\", \"MUL_MAT_ID\"\n",
        "30 , \"MUL_MAT_ID\"\n",
        "backend,name,number\r\ncpu,MUL_MAT_ID,30\r\n",
        "\u{feff}number,name,\"note\"\n\n30,MUL_MAT_ID,x\n",
    ] {
        fs::write(&ops, table).unwrap();
        let counts = hotness(&trace, &["--ops", arg(&ops)]);
        assert_eq!(counts.values().sum::<u64>(), 12, "{table}");
    }
    // Without a header a line must have two columns.
    for (table, line) in [
        ("30,MUL_MAT_ID,x\n29,MUL_MAT\n", 1),
        ("a,b\n30,MUL_MAT_ID,x\n", 2),
        ("300,MUL_MAT_ID\n30,MUL_MAT\n", 1),
    ] {
        fs::write(&ops, table).unwrap();
        let error = fail!["--quiet", "hotness", trace, "--ops", ops];
        let expected = format!("line {line}: expected `number,name`");
        assert!(error.contains(&expected), "{error}");
    }
    fs::write(&ops, "number,name\n300,MUL_MAT_ID\n").unwrap();
    let error = fail!["--quiet", "hotness", trace, "--ops", ops];
    assert!(error.contains("line 2"), "{error}");
}

/// Traces that BigMoeOnEdge published; the numbers of rows are those of `awk`.
#[test]
fn parquet_keeps_every_row_of_published_traces() {
    let Some(data) = moe_testkit::data("bigmoeonedge") else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    for (file, n_rows) in [("gptoss.route.csv", 10_560), ("qwen.route.csv", 44_766)] {
        let path = data.join(file);
        let tables = dir.path().join(file);
        run!["--quiet", "parquet", path, "--out", tables];
        let rows: usize = read_routing(&tables)
            .unwrap()
            .map(|batch| batch.unwrap().len())
            .sum();
        assert_eq!(rows, n_rows);
        let counts = hotness(&path, &[]);
        assert_eq!(counts.values().sum::<u64>(), n_rows as u64);
        assert_eq!(counts, hotness(&tables, &[]));
    }
}
