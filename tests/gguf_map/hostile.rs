//! Bytes that are not a model, or an invalid model: a one-line error and exit 2.

use std::fs;

use super::output_of;
use crate::support::{arg, args, fail, file_of, repository};
use moe_testkit::gguf::{ARRAY, F32, Raw, STRING, U32};

#[test]
fn invalid_input_is_one_line_and_exits_with_2() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name, bytes: &[u8]| file_of(dir.path(), name, bytes);
    let whole = fs::read(repository("fixtures/random-qwen3moe-F16.gguf")).unwrap();
    let inputs = [
        (file("text.gguf", b"this is not a model"), "not a GGUF file"),
        (file("empty.gguf", b""), "empty.gguf"),
        (file("magic.gguf", b"GGUF"), "magic.gguf"),
        (file("header.gguf", &whole[..5000]), "the header declares"),
        (dir.path().join("absent.gguf"), "absent.gguf"),
        (dir.path().to_owned(), arg(dir.path())),
    ];
    for (path, expected) in &inputs {
        let line = fail!["gguf-map", path, "--check-overlaps"];
        assert!(line.contains(expected) && line.contains(arg(path)), "{expected}: {line}");
    }
}

fn begin(version: u32) -> Raw {
    let bytes = b"GGUF".to_vec();
    Raw { bytes }.u32(version).u64(0).u64(0)
}

/// A file with one tensor, and more data than the tensor needs.
fn tensor(name: &str, ne: &[u64], ty: u32, offset: u64) -> Raw {
    Raw::new(1, 0).tensor(name, ne, ty, offset).data(32, 4096)
}

/// The faults in ggml's list of malformed files, and more, with the expected error of each.
fn malformed() -> Vec<(&'static str, Raw, &'static [&'static str])> {
    let two = |a: &str, b: &str| {
        let raw = Raw::new(2, 0).tensor(a, &[8], F32, 0);
        raw.tensor(b, &[8], F32, 32).data(32, 64)
    };
    let key = |raw: &dyn Fn(Raw) -> Raw| raw(Raw::new(0, 1).string("some.key"));
    let big = [4, 1_073_741_823, 1_073_741_825, 1];
    vec![
        ("version 0", begin(0), &["version 0"]),
        ("version 1", begin(1), &["version 1"]),
        ("version of the future", begin(4), &["version 4"]),
        ("byte-swapped", begin(3 << 24), &["big-endian"]),
        ("tensors that are not there", Raw::new(u64::MAX, 0), &["tensors", "byte 8"]),
        ("keys that are not there", Raw::new(0, u64::MAX), &["key-values"]),
        ("key beyond the end", Raw::new(0, 1).u64(u64::MAX).raw(&[0; 16]), &["a metadata key"]),
        ("key empty", Raw::new(0, 1).kv_u32("", 1), &["key is empty"]),
        ("key twice", Raw::new(0, 2).kv_u32("a", 1).kv_u32("a", 1), &["\"a\"", "twice"]),
        ("value type", key(&|raw| raw.u32(13).u32(0)), &["some.key", "13"]),
        (
            "array of arrays",
            key(&|raw| raw.u32(ARRAY).u32(ARRAY).u64(0)),
            &["some.key", "array of arrays"],
        ),
        ("array too long", key(&|raw| raw.u32(ARRAY).u32(U32).u64(1 << 62)), &["array elements"]),
        (
            "strings too long",
            key(&|raw| raw.u32(ARRAY).u32(STRING).u64(1).u64(1 << 40)),
            &["a string of an array"],
        ),
        (
            "alignment 0",
            Raw::new(0, 1).kv_u32("general.alignment", 0),
            &["general.alignment", "power of two"],
        ),
        ("alignment 33", Raw::new(0, 1).kv_u32("general.alignment", 33), &["33", "power of two"]),
        ("name too long", tensor(&"x".repeat(64), &[8], F32, 0), &["64 bytes"]),
        ("name twice", two("t", "t"), &["\"t\"", "twice"]),
        ("dimensions", tensor("t", &[1; 5], F32, 0), &["\"t\"", "5 dimensions"]),
        ("negative dimension", tensor("t", &[4, u64::MAX], F32, 0), &["\"t\"", "ne[1]"]),
        ("elements overflow", tensor("t", &[1 << 31, 1 << 31, 2], F32, 0), &["\"t\"", "elements"]),
        ("bytes overflow", tensor("t", &[1 << 30, 1 << 31], F32, 0), &["\"t\"", "bytes"]),
        (
            "sizes add up to nothing",
            Raw::new(2, 0)
                .tensor("a", &big, 24, 0)
                .tensor("b", &big, 24, 0),
            &["the sum of"],
        ),
        ("offset overflows", tensor("t", &[8], F32, u64::MAX - 31), &["\"t\"", "offset"]),
        ("type unknown", tensor("t", &[256], 43, 0), &["\"t\"", "43"]),
        ("type of anything", tensor("t", &[256], u32::MAX, 0), &["\"t\"", "4294967295"]),
        ("type removed", tensor("t", &[256], 4, 0), &["\"t\"", "Q4_2", "removed"]),
        (
            "type removed, and ik's",
            tensor("t", &[256], 36, 0),
            &["\"t\"", "IQ4_NL_4_4", "ik_llama.cpp"],
        ),
        ("row of half a block", tensor("t", &[255], 12, 0), &["\"t\"", "255", "Q4_K"]),
        (
            "experts without end",
            tensor("blk.0.ffn_up_exps.weight", &[1, 1, 1 << 40], 24, 0),
            &["1099511627776"],
        ),
    ]
}

#[test]
fn rejects_malformed_files() {
    let dir = tempfile::tempdir().unwrap();
    for (fault, raw, expected) in malformed() {
        let path = dir.path().join(format!("{fault}.gguf"));
        fs::write(&path, raw.bytes).unwrap();
        let line = fail!["gguf-map", path, "--verify"];
        for part in expected.iter().chain(&[arg(&path)]) {
            assert!(line.contains(part), "{fault}: {part:?} in {line}");
        }
    }
}

/// For any bytes: one of the three exit codes, no panic, and one line if the exit code is 2.
#[test]
fn corrupt_files_never_panic() {
    let dir = tempfile::tempdir().unwrap();
    let raw = Raw::new(2, 3)
        .kv_u32("general.alignment", 32)
        .string("words")
        .u32(ARRAY)
        .u32(STRING)
        .u64(2)
        .string("x")
        .string("yz")
        .kv_u32("split.count", 1)
        .tensor("blk.0.ffn_up_exps.weight", &[32, 2, 4], 8, 0)
        .tensor("blk.10.attn_q.weight", &[8], F32, 288)
        .data(32, 320);
    let whole = raw.bytes;
    let n = whole.len();
    let truncated = (0..n).step_by(7).map(|n| whole[..n].to_vec());
    let flipped = (0..n - 320).step_by(3).map(|at| {
        let mut bytes = whole.clone();
        bytes[at] ^= [0xFF, 0x80, 0x01][at % 2 + at % 5 / 4];
        bytes
    });
    let mut codes = [0; 3];
    for bytes in truncated.chain(flipped).chain([whole.clone()]) {
        let path = dir.path().join("spoilt.gguf");
        fs::write(&path, &bytes).unwrap();
        let (code, out, err) = output_of(args!["--quiet", "gguf-map", path, "--verify"]);
        assert!(!err.contains("panicked"), "{bytes:?}: {err}");
        match code {
            2 => assert!(out.is_empty() && err.lines().count() == 1, "{bytes:?}: {out}{err}"),
            _ => assert!(err.is_empty() && !out.is_empty(), "{bytes:?}: {err}"),
        }
        codes[code as usize] += 1;
    }
    // All three exit codes must occur, otherwise the corruption is too strong or too weak.
    assert!(codes.iter().all(|&n| n > 0), "{codes:?}");
}

/// Names are data: escape sequences and line ends in names are not printed.
#[test]
fn tensor_names_cannot_control_the_terminal() {
    let dir = tempfile::tempdir().unwrap();
    let name = "a\u{1b}[2J\nb";
    let raw = Raw::new(2, 0)
        .tensor(name, &[8], F32, 0)
        .tensor("c", &[8], F32, 0);
    let path = dir.path().join("names.gguf");
    fs::write(&path, raw.data(32, 32).bytes).unwrap();
    let (code, out, err) = output_of(args!["gguf-map", path, "--check-overlaps"]);
    assert_eq!(code, 1);
    assert!(!out.contains('\u{1b}') && !err.contains('\u{1b}'), "{out}{err}");
    assert_eq!(out.lines().filter(|line| line.contains("[2J")).count(), 2, "{out}");
}
