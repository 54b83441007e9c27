//! Hostile headers: no format of the map needs more anonymous memory than 64 MiB + 8 × the header's size.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use moe_gguf::MAX_EXPERT_ROWS;

use crate::support::{Arg, arg, args};
use moe_testkit::gguf::{ARRAY, F32, Raw};

/// Runs the program with a limit of `limit_kib` on private writable memory.
fn limited(limit_kib: usize, args: impl Arg) -> Output {
    Command::new("sh")
        .args(["-c", "ulimit -d $0 && exec \"$@\" >/dev/null"])
        .arg(limit_kib.to_string())
        .arg(assert_cmd::cargo::cargo_bin!("moe-analyze"))
        .args(args![args])
        .output()
        .unwrap()
}

const FORMS: [&[&str]; 8] = [
    &["-o", "table"],
    &["-o", "csv"],
    &["-o", "json"],
    &["-o", "jsonl"],
    &["-o", "md"],
    &["--format", "report"],
    &["--format", "memory-map"],
    &["--format", "gguf-dump"],
];

/// `code` is the expected exit code of the checks.
fn assert_bounded(what: &str, dir: &Path, raw: Raw, code: i32, forms: &[&[&str]]) {
    let header = raw.bytes.len();
    let limit = (64 << 10) + 8 * header / 1024;
    let path = dir.join(format!("{what}.gguf"));
    fs::write(&path, raw.bytes).unwrap();
    let out = dir.join(format!("{what}.parquet"));
    let parquet: &[&str] = &["--out", arg(&out)];
    for form in forms.iter().chain(&[parquet]) {
        let own = ["--quiet", "gguf-map", arg(&path), "--check-overlaps"];
        let output = limited(limit, args![own, form]);
        let stderr = String::from_utf8_lossy(&output.stderr);
        let start: String = stderr.chars().take(200).collect();
        assert_eq!(
            output.status.code(),
            Some(code),
            "{what}, {form:?}: {limit} KiB for a header of {header} bytes: {start}"
        );
    }
}

/// A name of three to four bytes, different for every number.
fn short_name(i: u64) -> String {
    (0..4)
        .map(|digit| char::from(b'!' + (i / 85_u64.pow(digit) % 85) as u8))
        .collect()
}

#[test]
fn memory_is_proportional_to_the_header() {
    let dir = tempfile::tempdir().unwrap();

    // A hundred bytes that declare the maximum number of rows.
    let ne = [1, 1, MAX_EXPERT_ROWS];
    let experts = Raw::new(1, 0).tensor("blk.0.ffn_up_exps.weight", &ne, F32, 0);
    assert_bounded("experts", dir.path(), experts.clone(), 1, &FORMS);

    // The maximum number of tensors, all at the same offset: each is reported twice.
    let n = 1 << 18;
    let tensors = (0..n).fold(Raw::new(n, 0), |raw, i| raw.tensor(&short_name(i), &[8], F32, 0));
    assert_bounded("tensors", dir.path(), tensors.data(32, 32), 1, &FORMS[..1]);

    // The maximum number of layers, in reverse order.
    let n = 65_000;
    let layers = (0..n)
        .fold(Raw::new(n, 0), |raw, i| raw.tensor(&format!("blk.{}.x", n - i), &[8], F32, 32 * i));
    assert_bounded("layers", dir.path(), layers.data(32, 32 * n as usize), 0, &FORMS[5..6]);

    // The maximum number of key-values.
    let n = 1 << 16;
    let keys =
        (0..n).fold(Raw::new(0, n), |raw, i| raw.string(&short_name(i)).u32(ARRAY).u32(0).u64(0));
    assert_bounded("keys", dir.path(), keys, 0, &FORMS[..1]);

    // The limit is effective: 20 MB of rows do not fit into 16 MiB.
    let path = dir.path().join("experts.gguf");
    let output = limited(16 << 10, args!["gguf-map", path]);
    assert!(!output.status.success(), "no limit is kept here, so nothing was tested");
}
