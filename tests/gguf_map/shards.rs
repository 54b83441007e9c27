//! Split models: any file opens the model, and errors identify missing, repeated or foreign files.

use std::fs;
use std::path::{Path, PathBuf};

use moe_gguf::{GgmlType, Value};
use moe_synth::write::{Header, Writer};
use serde_json::Value as Json;
use tempfile::TempDir;

use super::output_of;
use crate::support::{arg, args, fail, run};

fn path(dir: &TempDir, number: u16) -> PathBuf {
    dir.path().join(format!("model-{number:05}-of-00003.gguf"))
}

fn write(path: &Path, number: u16, n_tensors: i32, tensors: &[&str]) {
    let mut header = Header::new();
    header.set("split.no", &Value::U16(number - 1)).unwrap();
    header.set("split.count", &Value::U16(3)).unwrap();
    header
        .set("split.tensors.count", &Value::I32(n_tensors))
        .unwrap();
    for name in tensors {
        header.tensor(name, GgmlType::F32, &[8, 2, 4]).unwrap();
    }
    let mut writer = Writer::new(fs::File::create(path).unwrap(), header).unwrap();
    writer.write(&vec![0; 256 * tensors.len()]).unwrap();
    writer.finish().unwrap();
}

/// A model in three files; the first has no tensors, as `gguf-split --no-tensor-first-split` writes it.
fn model() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    write(&path(&dir, 1), 1, 3, &[]);
    write(&path(&dir, 2), 2, 3, &["token_embd.weight"]);
    write(&path(&dir, 3), 3, 3, &["blk.0.ffn_up_exps.weight", "output.weight"]);
    dir
}

#[test]
fn opens_model_from_any_shard() {
    let dir = model();
    let rows = |number| run!["gguf-map", path(&dir, number), "-o", "json"];
    let first = rows(1);
    assert!(first == rows(2) && first == rows(3));
    let rows: Vec<Json> = serde_json::from_str(&first).unwrap();
    let places: Vec<_> = rows
        .iter()
        .map(|row| (row["file"].as_u64().unwrap(), row["tensor_idx"].as_u64().unwrap()))
        .collect();
    assert_eq!(places, [(1, 0), (2, 1), (2, 1), (2, 1), (2, 1), (2, 2)]);
    // Offsets are relative to the row's file.
    assert!(rows[0]["file_offset"].as_u64().unwrap() < 512);
    assert_eq!(rows[5]["file_offset"], rows[1]["file_offset"].as_u64().unwrap() + 256);

    let (code, out, _) = output_of(args!["gguf-map", path(&dir, 2), "--verify"]);
    assert_eq!(code, 0, "{out}");
    assert!(out.contains("sound: ") && out.contains("sound data: 3 tensors"), "{out}");
    assert!(out.contains("\nfile 2: \"model-00003-of-00003.gguf\""), "{out}");
}

/// The formats of TensorAccessLog are for one file.
#[test]
fn formats_without_files_print_a_note() {
    let dir = model();
    for (form, warns) in [("memory-map", true), ("gguf-dump", true), ("rows", false)] {
        let (code, _, notes) = output_of(args!["gguf-map", path(&dir, 1), "--format", form]);
        assert_eq!(code, 0);
        assert_eq!(notes.contains("does not contain the file"), warns, "{form}: {notes}");
    }
}

#[test]
fn manifest_contains_the_files() {
    let dir = model();
    let manifest = dir.path().join("manifest");
    let model = path(&dir, 3);
    run!["gguf-map", model, "--verify", "--manifest-out", manifest];
    let text = fs::read_to_string(&manifest).unwrap();
    assert!(text.contains("  model-00002-of-00003.gguf:token_embd.weight\n"), "{text}");
    assert!(text.contains("  model-00003-of-00003.gguf:output.weight\n"), "{text}");
    run!["gguf-map", path(&dir, 1), "--verify", "--check-manifest", manifest];
}

#[test]
fn reports_missing_shard() {
    let dir = model();
    fs::remove_file(path(&dir, 2)).unwrap();
    let line = fail!["gguf-map", path(&dir, 3)];
    assert!(line.contains(arg(&path(&dir, 2))) && line.contains("missing"), "{line}");
}

#[test]
fn reports_repeated_shard() {
    let dir = model();
    fs::copy(path(&dir, 2), path(&dir, 3)).unwrap();
    let line = fail!["gguf-map", path(&dir, 1)];
    assert!(
        line.contains(arg(&path(&dir, 3))) && line.contains("it was copied or renamed"),
        "{line}"
    );
}

#[test]
fn reports_shard_of_another_model() {
    let dir = model();
    write(&path(&dir, 2), 2, 7, &["token_embd.weight"]);
    let line = fail!["gguf-map", path(&dir, 1)];
    assert!(line.contains(arg(&path(&dir, 2))) && line.contains("a different model"), "{line}");
    // The keys match, the tensors do not.
    write(&path(&dir, 2), 2, 3, &["a", "b"]);
    let line = fail!["gguf-map", path(&dir, 1)];
    assert!(line.contains("4 tensors") && line.contains("split.tensors.count is 3"), "{line}");
}

#[test]
fn reports_renamed_shard() {
    let dir = model();
    let renamed = dir.path().join("renamed.gguf");
    fs::rename(path(&dir, 2), &renamed).unwrap();
    let line = fail!["gguf-map", renamed];
    assert!(line.contains("shard 2 of 3") && line.contains("its name does not end with"), "{line}");
}
