//! Files from public bug reports, in commands.

use std::fs;
use std::path::Path;

use serde_json::Value;

use super::{golden, hotness};
use crate::support::{arg, args, fail, moe_analyze, run};

/// Rows of a table of `hotness`, as JSON.
fn table(path: &Path, name: &str) -> Vec<Value> {
    let args = ["--quiet", "hotness", arg(path), "--table", name, "-o", "json"];
    serde_json::from_str(&run![args]).unwrap()
}

/// According to NumPy, 191 of 200 tokens have an expert in each layer of this array.
#[test]
fn counts_tokens_with_an_empty_slot_0() {
    let dir = tempfile::tempdir().unwrap();
    let (dump, tables) = (golden("npy/expert-parallel-rank.npy"), dir.path().join("tables"));
    let args = ["--quiet", "parquet", arg(&dump), "--out", arg(&tables)];
    run![args];
    for path in [&dump, &tables] {
        let output = moe_analyze().args(args!["hotness", path]).output().unwrap();
        assert!(output.status.success());
        let text = String::from_utf8(output.stdout).unwrap();
        let warnings = String::from_utf8(output.stderr).unwrap();
        assert!(text.contains("191 prompt and generated tokens in 4 layers"), "{text}");
        assert!(!warnings.contains("twice"), "{warnings}");
        let rows = table(path, "measures");
        // The last row is for the entire model.
        assert_eq!(rows.len(), 5);
        for row in &rows[..4] {
            assert_eq!(row["rows"], 191, "{row}");
        }
    }
    assert_eq!(hotness(&dump, &[]), hotness(&tables, &[]));
}

#[test]
fn counts_dropped_experts_of_route_csv() {
    let counts = hotness(&golden("bigmoeonedge/dropped.route.csv"), &[]);
    // Six tokens × two layers × two experts, including dropped experts.
    assert_eq!(counts.values().sum::<u64>(), 24);
    assert_eq!(counts[&(0, 1)], 2);
}

#[test]
fn counts_micro_batches_like_steps() {
    let files = ["steps.jsonl", "microbatches.jsonl"];
    let [steps, micro] = files.map(|name| golden("megatron-steps").join(name));
    assert_eq!(hotness(&micro, &[]), hotness(&steps, &[]));
    assert_eq!(table(&micro, "measures"), table(&steps, "measures"));
    let recomputed = golden("megatron-steps/recompute.jsonl");
    assert_eq!(hotness(&recomputed, &[]).values().sum::<u64>(), 3 * 5 * 4);
    let output = moe_analyze().args(args!["hotness", recomputed]).output();
    let warnings = String::from_utf8(output.unwrap().stderr).unwrap();
    assert!(warnings.contains("skipped 3 lines equal to an earlier line"), "{warnings}");
}

#[test]
fn rejects_an_importance_matrix_converted_from_dat() {
    let error = fail!["--quiet", "hotness", golden("refused/imatrix-from-dat.gguf")];
    assert!(error.contains("one count for all experts") && error.contains(".dat"), "{error}");
}

/// A big-endian file without tensors, which is enough to detect the byte order.
#[test]
fn reports_a_big_endian_importance_matrix() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("imatrix.gguf");
    let mut bytes = b"GGUF".to_vec();
    bytes.extend(3u32.to_be_bytes());
    bytes.extend([0u64, 1].map(u64::to_be_bytes).concat());
    bytes.extend(12u64.to_be_bytes());
    bytes.extend(b"general.type");
    bytes.extend(8u32.to_be_bytes());
    bytes.extend(7u64.to_be_bytes());
    bytes.extend(b"imatrix");
    fs::write(&path, bytes).unwrap();
    for command in ["hotness", "info"] {
        let error = fail!["--quiet", command, path];
        assert!(error.contains("big-endian"), "{error}");
    }
}

#[test]
fn reports_the_format_of_files_that_are_not_traces() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    let gguf = fs::read(golden("imatrix/small.gguf")).unwrap();
    let mut tar = vec![0; 512];
    tar[..9].copy_from_slice(b"model.bin");
    tar[148..156].copy_from_slice(b"        ");
    let sum: u32 = tar.iter().map(|&byte| u32::from(byte)).sum();
    tar[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    tar.extend(&gguf);
    let cases: [(&[u8], &str); 9] = [
        (&tar, "is a tar archive"),
        (&[b"\x01\0\0\0\0\0\0\0", &gguf[..]].concat(), "with 8 bytes before its magic number"),
        (b"\x1f\x8b\x08\0\0\0\0\0\0\x03", "is a gzip archive"),
        (b"PK\x03\x04\x14\0\0\0\x08\0", "is a ZIP archive"),
        (b"\x28\xb5\x2f\xfd\x24\0", "is a zstd archive"),
        (b"\xff\xfe{\0\"\0t\0", "is text in UTF-16"),
        (b"version https://git-lfs.github.com/spec/v1\noid x\n", "is a Git LFS pointer"),
        (&[&9u64.to_le_bytes()[..], b"{\"a\":{}} "].concat(), "is a safetensors file"),
        (b"", "is empty"),
    ];
    for (bytes, expected) in cases {
        fs::write(&path, bytes).unwrap();
        for command in ["info", "hotness", "simulate"] {
            let error = fail!["--quiet", command, path];
            assert!(error.contains(expected), "{command}: {error}");
        }
    }
}

#[test]
fn reports_a_number_that_is_not_json() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace.jsonl");
    fs::write(&path, "{\"t\":0,\"layer\":0,\"experts\":[1],\"weights\":[NaN]}\n").unwrap();
    let error = fail!["--quiet", "hotness", path];
    assert!(error.contains("line 1: NaN is not JSON"), "{error}");
}
