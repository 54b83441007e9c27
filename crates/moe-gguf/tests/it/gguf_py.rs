//! Offsets and sizes compared with those of the Python package `gguf`, for all types that it supports.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use moe_gguf::{GgmlType, Gguf};
use moe_testkit::gguf::Raw;

/// Returns the offsets and sizes that the package reads, or `None` without a Python that has the package.
#[track_caller]
fn read_with_gguf_py(paths: &[PathBuf]) -> Option<String> {
    let python = moe_testkit::python("gguf")?;
    let script = moe_testkit::repository("crates/moe-gguf/tests/it/gguf_py.py");
    let output = Command::new(python)
        .arg(script)
        .args(paths)
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    Some(String::from_utf8(output.stdout).unwrap())
}

fn ours(paths: &[PathBuf]) -> String {
    let mut text = String::new();
    for gguf in paths.iter().map(|path| Gguf::open(path).unwrap()) {
        text += &format!("data {}\n", gguf.files()[0].data_offset);
        for t in gguf.tensors() {
            text += &format!("{} {} {}\n", t.name, t.offset, t.size_bytes);
        }
    }
    text
}

#[track_caller]
fn assert_agrees(paths: &[PathBuf]) {
    if let Some(theirs) = read_with_gguf_py(paths) {
        assert_eq!(ours(paths), theirs);
    }
}

/// Writes a file with three tensors of a type, and one F32 tensor that needs padding.
fn write(path: &Path, ty: GgmlType, alignment: u32) {
    let block = ty.block_size();
    let tensors: [(&str, GgmlType, &[u64]); 4] = [
        ("vector", ty, &[3 * block]),
        ("bias", GgmlType::F32, &[3]),
        ("matrix", ty, &[2 * block, 3]),
        ("blk.0.ffn_up_exps.weight", ty, &[block, 2, 5]),
    ];
    let mut raw = Raw::new(tensors.len() as u64, 2)
        .kv_string("general.architecture", "test")
        .kv_u32("general.alignment", alignment);
    let mut size = 0;
    for (name, ty, ne) in tensors {
        raw = raw.tensor(name, ne, ty.id(), size);
        let n_rows: u64 = ne[1..].iter().product();
        size += (ty.row_size(ne[0]).unwrap() * n_rows).next_multiple_of(alignment.into());
    }
    fs::write(path, raw.data(alignment as usize, size as usize).bytes).unwrap();
}

#[test]
fn agrees_with_gguf_py_on_fixtures() {
    let entries = fs::read_dir(moe_testkit::fixture(""))
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let paths: Vec<_> = entries
        .filter(|p| p.extension().is_some_and(|e| e == "gguf"))
        .collect();
    assert!(paths.len() >= 4);
    assert_agrees(&paths);
}

#[test]
fn agrees_with_gguf_py_on_all_types() {
    let dir = tempfile::tempdir().unwrap();
    // The package has 40 bytes for a block of Q8_1, ggml has 36. It does not support Q2_0.
    let wrong_or_unknown = [GgmlType::Q8_1, GgmlType::Q2_0];
    let mut paths = Vec::new();
    for &ty in GgmlType::ALL {
        if !ty.is_ik() && !wrong_or_unknown.contains(&ty) {
            paths.push(dir.path().join(format!("{ty}.gguf")));
            write(paths.last().unwrap(), ty, 32);
        }
    }
    for alignment in [8, 64, 4096] {
        paths.push(dir.path().join(format!("{alignment}.gguf")));
        write(paths.last().unwrap(), GgmlType::Q6_K, alignment);
    }
    assert_eq!(paths.len(), 33 + 3);
    assert_agrees(&paths);
}

/// A known error of the package. If this test fails, the error is fixed, and Q8_1 can be compared above.
#[test]
fn gguf_py_has_a_wrong_size_of_q8_1() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("Q8_1.gguf");
    write(&path, GgmlType::Q8_1, 32);
    let gguf = Gguf::open(&path).unwrap();
    assert_eq!(gguf.tensor("vector").unwrap().size_bytes, 3 * 36);
    // Additional bytes at the end: the package rejects a file that ends before the larger tensors do.
    fs::write(&path, [fs::read(&path).unwrap(), vec![0; 256]].concat()).unwrap();
    if let Some(theirs) = read_with_gguf_py(&[path]) {
        assert!(
            theirs.contains(&format!("vector {} {}\n", gguf.tensors()[0].offset, 3 * 40)),
            "{theirs}"
        );
    }
}
