//! Exports of runs.

use std::fs;
use std::path::Path;

use moe_foreign::{ImportOptions, Input, Source};
use moe_trace::record::{PHASE_GENERATE, lane};
use moe_trace::{Phase, RoutingRow, Run, RunOptions, RunWriter};

use super::{Kept, export, export_files, exporter, importer, read, read_again, totals};
use crate::common::{expert_layer, gpt_oss, manifest};

/// A run with two layers, a prompt of two tokens and two generated tokens.
fn run(dir: &Path) -> Run {
    let (gguf, map) = gpt_oss();
    let path = dir.join("run");
    let options = RunOptions::default();
    let mut writer = RunWriter::create(&path, manifest(), &map, options).unwrap();
    let prompt: [&[i32]; 2] = [&[5, 1], &[3, 5]];
    let mut records = expert_layer(&gguf, 1000, 0, 0, &prompt);
    records.extend(expert_layer(&gguf, 2000, 1, 0, &prompt));
    for (token, time) in [(2, 3000), (3, 5000)] {
        for layer in 0..2 {
            let mut more = expert_layer(
                &gguf,
                time + 500 * u64::from(layer),
                layer,
                token,
                &[&[7, 2]],
            );
            more.iter_mut()
                .for_each(|record| record.phase = PHASE_GENERATE);
            records.extend(more);
        }
    }
    for record in &mut records {
        // The input of an expert operation has one row per token.
        record.set_source_size(1, 1024 * u64::from(record.n_tokens.get()));
        *writer.next_record().unwrap() = *record;
    }
    writer.finish().unwrap();
    Run::open(&path).unwrap()
}

#[test]
fn exports_a_run_as_token_json() {
    let dir = tempfile::tempdir().unwrap();
    let input = Input::Run(Box::new(run(dir.path())));
    let out = dir.path().join("tokens");
    let losses = export_files(&input, "thesis-json", &out).unwrap();
    assert!(
        losses.iter().any(|loss| loss.contains("first token")),
        "{losses:?}"
    );

    let json = |name: &str| -> serde_json::Value {
        serde_json::from_slice(&fs::read(out.join(name)).unwrap()).unwrap()
    };
    // Three operations per layer: two layers of the prompt and two of the first decode pass; then two of the second.
    let first = json("token-00000.json");
    assert_eq!(first["token_id"], 0);
    assert_eq!(first["metadata"]["total_entries"], 12);
    assert_eq!(first["metadata"]["timestamp_start_ns"], 1000);
    assert_eq!(first["metadata"]["duration_ms"], 0.002502);
    let entry = &first["entries"][0];
    assert_eq!(entry["operation_type"], "MUL_MAT_ID");
    assert_eq!(entry["phase"], "PROMPT");
    assert_eq!(entry["expert_ids"], serde_json::json!([5, 1]));
    assert_eq!(entry["num_sources"], 3);
    assert_eq!(entry["sources"][0]["name"], "blk.0.ffn_gate_exps.weight");
    assert_eq!(entry["sources"][0]["memory_source"], "DISK");
    let (gguf, _) = gpt_oss();
    let offset = gguf.tensor("blk.0.ffn_gate_exps.weight").unwrap().offset;
    assert_eq!(entry["sources"][0]["disk_offset"], offset);
    assert_eq!(entry["sources"][2]["buffer_id"], 8);
    assert_eq!(first["entries"][6]["phase"], "GENERATE");
    assert_eq!(first["entries"][11]["entry_id"], 11);

    // Of the two tokens of the prompt, the format keeps the first.
    let short = |row: &RoutingRow| {
        (
            row.token_id.0,
            row.phase,
            row.layer_id.0,
            row.slot,
            row.expert_id.0,
        )
    };
    let mut expected = read(&input, &ImportOptions::default()).rows;
    expected.retain(|row| row.token_id.0 != 1);
    let again = read_again(&out, "thesis-json", &ImportOptions::default());
    let (expected, again): (Vec<_>, Vec<_>) = (
        expected.iter().map(short).collect(),
        again.rows.iter().map(short).collect(),
    );
    assert_eq!(again, expected);
    assert_eq!(again.len(), 12);

    let second = json("token-00001.json");
    assert_eq!(second["metadata"]["total_entries"], 6);
    assert_eq!(second["entries"][0]["timestamp_relative_ms"], 0.0);
    assert_eq!(second["entries"][3]["layer_id"], 1);
    assert_eq!(fs::read_dir(&out).unwrap().count(), 2);
}

#[test]
fn exports_a_run_as_jsonl_and_as_an_array() {
    let dir = tempfile::tempdir().unwrap();
    let input = Input::Run(Box::new(run(dir.path())));
    let original = read(&input, &ImportOptions::default());
    assert_eq!(original.rows.len(), 16);
    assert_eq!(original.rows[0].lane, Some(lane::CPU));
    let path = dir.path().join("out.jsonl");
    export(&input, exporter("jsonl"), &ImportOptions::default(), &path).unwrap();
    let again = read_again(&path, "jsonl", &ImportOptions::default());
    let mut expected = original.rows;
    for row in &mut expected {
        row.lane = None;
        row.timestamp_ns = None;
    }
    assert_eq!(again.rows, expected);
    assert_eq!(again.rows[8].phase, Some(Phase::Generate));

    let path = dir.path().join("out.npy");
    export(&input, exporter("npy"), &ImportOptions::default(), &path).unwrap();
    let source = Source::file(&path);
    let mut kept = Kept::default();
    moe_foreign::import(
        importer("npy"),
        &source,
        &ImportOptions::default(),
        &mut kept,
    )
    .unwrap();
    assert_eq!(totals(&kept, false).len(), totals(&again, false).len());
}
