//! `parquet`: the tables of a known run, read like other programs read them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use arrow::array::{AsArray, RecordBatch};
use arrow::compute::{cast, concat_batches};
use arrow::datatypes::{DataType, UInt64Type};
use moe_gguf::map::OffsetMap;
use moe_gguf::{ExpertId, Gguf};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

use crate::support::{
    ALL, N_GENERATED, N_LAYER, arg, fail, known_counts, known_run, moe_analyze, repository, run,
    tokens_of,
};

/// Reads a table as one batch.
fn table(path: &Path) -> RecordBatch {
    let reader = ParquetRecordBatchReaderBuilder::try_new(fs::File::open(path).unwrap()).unwrap();
    let schema = reader.schema().clone();
    let batches: Vec<_> = reader.build().unwrap().map(Result::unwrap).collect();
    concat_batches(&schema, &batches).unwrap()
}

/// A column of numbers, with nulls.
fn numbers(batch: &RecordBatch, name: &str) -> Vec<Option<u64>> {
    let column = cast(batch.column_by_name(name).unwrap(), &DataType::UInt64).unwrap();
    column.as_primitive::<UInt64Type>().iter().collect()
}

/// A column of names.
fn names(batch: &RecordBatch, name: &str) -> Vec<String> {
    let column = cast(batch.column_by_name(name).unwrap(), &DataType::Utf8).unwrap();
    column
        .as_string::<i32>()
        .iter()
        .map(|name| name.unwrap_or_default().to_owned())
        .collect()
}

fn known_tables(dir: &Path) -> std::path::PathBuf {
    let (run, tables) = (dir.join("run"), dir.join("tables"));
    known_run(&run);
    run!["parquet", run, "--out", tables];
    tables
}

#[test]
fn routing_contains_each_selection_once() {
    let dir = tempfile::tempdir().unwrap();
    let routing = table(&known_tables(dir.path()).join("routing.parquet"));
    let mut counts: BTreeMap<(u32, u32), u64> = BTreeMap::new();
    for (layer, expert) in numbers(&routing, "layer_id")
        .into_iter()
        .zip(numbers(&routing, "expert_id"))
    {
        *counts
            .entry((layer.unwrap() as u32, expert.unwrap() as u32))
            .or_default() += 1;
    }
    assert_eq!(counts, known_counts(&ALL));
}

#[test]
fn operation_on_many_tokens_is_one_row() {
    let dir = tempfile::tempdir().unwrap();
    let ops = table(&known_tables(dir.path()).join("ops.parquet"));
    // In every pass and layer: an attention product, gate, up, down.
    assert_eq!(ops.num_rows() as u32, (1 + N_GENERATED) * N_LAYER * 4);
    let n_tokens: u64 = numbers(&ops, "n_tokens").into_iter().flatten().sum();
    let routed: usize = (0..N_LAYER)
        .flat_map(|layer| ALL.map(|phase| tokens_of(layer, phase).len()))
        .sum();
    assert_eq!(n_tokens, 4 * routed as u64);
}

#[test]
fn accesses_are_inside_their_map_entries() {
    let dir = tempfile::tempdir().unwrap();
    let known = known_tables(dir.path());
    check_ranges(&known, &repository("fixtures/tiny-qwen3moe-Q4_K_M.gguf"));
    for model in ["tiny-qwen3moe-Q4_K_M", "tiny-gpt-oss-MXFP4"] {
        let model = repository(&format!("fixtures/{model}.gguf"));
        let (run, tables) = (dir.path().join("recorded"), dir.path().join("recorded-tables"));
        let record = ["record", "--model", arg(&model), "-n", "3", "--out", arg(&run), "--force"];
        run![record];
        run!["parquet", run, "--out", tables, "--force"];
        check_ranges(&tables, &model);
    }
}

fn check_ranges(tables: &Path, model: &Path) {
    let accesses = table(&tables.join("accesses.parquet"));
    let map = OffsetMap::new(&Gguf::open(model).unwrap());
    let map: BTreeMap<(&str, Option<ExpertId>), (u64, u64)> = map
        .rows
        .iter()
        .map(|row| ((&*row.tensor, row.expert_id), (row.file_offset, row.size_bytes)))
        .collect();

    let tensors = names(&accesses, "tensor");
    let (experts, ops) = (numbers(&accesses, "expert_id"), numbers(&accesses, "op_index"));
    let (offsets, sizes) = (numbers(&accesses, "file_offset"), numbers(&accesses, "size_bytes"));
    let mut seen = BTreeSet::new();
    for row in 0..accesses.num_rows() {
        let Some(expert) = experts[row] else { continue };
        let tensor = tensors[row].as_str();
        // The biases of all experts are one entry.
        let entry = map
            .get(&(tensor, Some(ExpertId(expert as u32))))
            .or_else(|| map.get(&(tensor, None)));
        let (offset, size) = *entry.unwrap();
        let (begin, end) = (offsets[row].unwrap(), offsets[row].unwrap() + sizes[row].unwrap());
        assert!(offset <= begin && end <= offset + size, "{} expert {expert}", tensors[row]);
        assert!(seen.insert((ops[row], &tensors[row], expert)), "each expert of an operation once");
    }
    assert!(!seen.is_empty());
}

#[test]
fn dataset_contains_several_runs() {
    let dir = tempfile::tempdir().unwrap();
    let dataset = dir.path().join("dataset");
    for name in ["a", "b"] {
        let run = dir.path().join(name);
        known_run(&run);
        run!["parquet", run, "--dataset", dataset];
    }
    for table in ["ops", "accesses", "routing"] {
        let runs = fs::read_dir(dataset.join(table))
            .unwrap()
            .map(|run| run.unwrap());
        let runs: Vec<_> = runs.collect();
        assert_eq!(runs.len(), 2);
        for run in runs {
            assert!(run.file_name().to_str().unwrap().starts_with("run=2025"));
            assert!(run.path().join("part-0.parquet").is_file());
        }
    }
    let summary = run!["hotness", dataset];
    let counted = summary.lines().nth(1).unwrap();
    assert!(counted.starts_with("32 prompt and generated tokens"), "{summary}");
}

#[test]
fn keeps_existing_tables_without_force() {
    let dir = tempfile::tempdir().unwrap();
    let tables = known_tables(dir.path());
    let run = dir.path().join("run");
    fs::write(tables.join("accesses.parquet"), "precious").unwrap();
    let line = fail!["parquet", run, "--out", tables];
    assert!(line.contains("--force"), "{line}");
    assert_eq!(fs::read(tables.join("accesses.parquet")).unwrap(), b"precious");
    run!["parquet", run, "--out", tables, "--force"];
    assert!(table(&tables.join("accesses.parquet")).num_rows() > 0);
}

#[test]
fn checks_both_outputs_before_writing() {
    let dir = tempfile::tempdir().unwrap();
    let (run, dataset) = (dir.path().join("run"), dir.path().join("dataset"));
    let out = dir.path().join("tables");
    known_run(&run);
    run!["parquet", run, "--dataset", dataset];
    let both = ["--out", arg(&out), "--dataset", arg(&dataset)];
    let line = fail!["parquet", run, both];
    assert!(line.contains("part-0.parquet exists"), "{line}");
    assert!(!out.exists());
}

#[test]
fn warns_about_incomplete_run() {
    let dir = tempfile::tempdir().unwrap();
    let (run, out) = (dir.path().join("run"), dir.path().join("tables"));
    known_run(&run);
    let trace = fs::read(run.join("trace.bin")).unwrap();
    fs::write(run.join("trace.bin"), &trace[..trace.len() - 24]).unwrap();
    fs::remove_file(run.join("gguf-map.parquet")).unwrap();
    let parquet = ["parquet", arg(&run), "--out", arg(&out)];
    for (args, expected) in [
        (&parquet[..], "accesses are to entire expert tensors"),
        (&["hotness", arg(&run)][..], "states"),
    ] {
        let output = moe_analyze().args(args).assert().success();
        let warnings = String::from_utf8(output.get_output().stderr.clone()).unwrap();
        assert!(warnings.contains("truncated to 1000 bytes"), "{warnings}");
        assert!(warnings.contains(expected), "{warnings}");
    }
}

/// The tables and the map of a run without a map, for which `--model` provides the map.
#[test]
fn model_provides_the_missing_map_of_a_run() {
    let dir = tempfile::tempdir().unwrap();
    let (run, out) = (dir.path().join("run"), dir.path().join("tables"));
    run!["record", "-n", "1", "--out", run];
    fs::remove_file(run.join("gguf-map.parquet")).unwrap();
    let model = repository("fixtures/tiny-qwen3moe-Q4_K_M.gguf");
    run!["parquet", run, "--model", model, "--out", out];
    for name in ["ops", "accesses", "routing", "gguf-map"] {
        assert!(out.join(format!("{name}.parquet")).is_file(), "{name}");
    }
}

/// The Parquet library panics on this file.
#[test]
fn decoder_panic_is_one_line_and_exits_with_2() {
    let dir = tempfile::tempdir().unwrap();
    let [learn, jsonl] = ["learn.json", "x.jsonl"].map(|name| dir.path().join(name));
    let damaged = repository("fixtures/reliability/decoder-panic-routing.parquet");
    for args in [
        &["hotness", arg(&damaged)][..],
        &["hotness", arg(&damaged), "--out", arg(&learn)],
        &["convert", arg(&damaged), "--to", "jsonl", "--out", arg(&jsonl)],
    ] {
        let line = fail![args];
        assert!(
            line.contains("its pages are inconsistent") && line.contains(arg(&damaged)),
            "{line}"
        );
    }
    assert!(!learn.exists() && !jsonl.exists());
}

#[test]
fn invalid_input_is_one_line_and_exits_with_2() {
    let [dir, elsewhere] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let out = elsewhere.path().join("tables");
    let text = dir.path().join("text.bin");
    fs::write(&text, "no trace at all").unwrap();
    let model = repository("fixtures/random-qwen3moe-F16.gguf");
    for (input, expected) in [
        (dir.path().join("absent"), "cannot open"),
        (text, "has an unknown format"),
        (model, "is a model"),
        (dir.path().to_owned(), "neither a run directory"),
    ] {
        let line = fail!["parquet", input, "--out", out];
        assert!(line.contains(expected) && line.contains(arg(&input)), "{line}");
        assert!(!out.exists());
    }
}
