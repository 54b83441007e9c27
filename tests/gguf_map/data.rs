//! `--verify`: hashes, manifests, and values that are not finite.

use std::fs;
use std::path::Path;

use moe_gguf::Gguf;
use serde_json::{Value, json};

use super::{MODELS, output_of, write};
use crate::support::{Arg, arg, args, fail, moe_analyze, repository, run};
use moe_testkit::gguf::{F32, Raw};

/// Type I8: any byte is a valid value.
const I8: u32 = 24;

/// Three bytes with published XXH3 and SHA-256 values.
fn abc() -> Raw {
    Raw::new(1, 0)
        .tensor("t", &[3], I8, 0)
        .data(32, 0)
        .raw(b"abc")
}

const XXH3: &str = "xxh3  78af5f94892f3950  test.gguf:t\n";
const SHA256: &str =
    "sha256  ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad  test.gguf:t\n";

fn verify(model: &Path, more: impl Arg) -> (i32, String, String) {
    output_of(args!["gguf-map", model, "--verify", more])
}

#[test]
fn sound_models_pass_verify() {
    for model in MODELS.map(repository) {
        let n_tensors = Gguf::open(&model).unwrap().tensors().len();
        let (code, out, _) = verify(&model, args![]);
        assert_eq!(code, 0, "{out}");
        let lines: Vec<&str> = out.lines().collect();
        assert!(lines[lines.len() - 2].starts_with("sound: 0 overlaps"), "{out}");
        assert_eq!(
            lines[lines.len() - 1],
            format!(
                "sound data: {n_tensors} tensors read, 0 of them with values that are not finite"
            )
        );
    }
}

#[test]
fn manifest_contains_published_hashes() {
    let dir = tempfile::tempdir().unwrap();
    let model = write(dir.path(), abc());
    for (hash, expected) in
        [(&[][..], XXH3), (&["--hash", "xxh3"], XXH3), (&["--hash", "sha256"], SHA256)]
    {
        let manifest = dir.path().join("manifest");
        let (code, _, err) = verify(&model, args![hash, "--manifest-out", manifest, "--force"]);
        assert_eq!(code, 0, "{err}");
        assert!(err.contains("wrote ") && err.contains("manifest"), "{err}");
        assert_eq!(fs::read_to_string(&manifest).unwrap(), expected);

        // The manifest contains its hash algorithm. Editors can add a byte order mark.
        for mark in ["", "\u{feff}"] {
            fs::write(&manifest, format!("{mark}{expected}")).unwrap();
            let (code, out, err) = verify(&model, args!["--check-manifest", manifest]);
            assert_eq!(code, 0, "{err}");
            let last = out.lines().last().unwrap();
            let name = expected.split_once(' ').unwrap().0;
            assert!(last.ends_with(&format!("0 differences from the manifest ({name})")), "{last}");
        }
    }
}

#[test]
fn reports_changed_tensor() {
    let dir = tempfile::tempdir().unwrap();
    let whole = repository("fixtures/tiny-qwen3moe-Q4_K_M.gguf");
    let manifest = dir.path().join("manifest");
    run!["gguf-map", whole, "--verify", "--manifest-out", manifest];

    let gguf = Gguf::open(&whole).unwrap();
    let changed = gguf.tensor("blk.3.ffn_down_exps.weight").unwrap();
    let mut bytes = fs::read(&whole).unwrap();
    // A bit of a quant, not of a scale, so the value stays finite.
    bytes[(changed.offset + changed.size_bytes) as usize - 3] ^= 4;
    let model = dir.path().join("changed.gguf");
    fs::write(&model, bytes).unwrap();

    let (code, out, _) = verify(&model, args!["--check-manifest", manifest]);
    assert_eq!(code, 1);
    let found: Vec<&str> = out
        .lines()
        .filter(|line| line.starts_with("manifest: "))
        .collect();
    assert_eq!(found.len(), 1, "{out}");
    assert!(found[0].contains("\"blk.3.ffn_down_exps.weight\" has changed"), "{}", found[0]);
    let last = out.lines().last().unwrap();
    assert!(last.starts_with("FAULTY data: ") && last.contains("1 difference from"), "{last}");
}

#[test]
fn reports_a_manifest_of_another_model() {
    let dir = tempfile::tempdir().unwrap();
    let model = write(dir.path(), abc());
    let manifest = dir.path().join("manifest");
    fs::write(&manifest, "xxh3  0011223344556677  other.gguf:u\n").unwrap();
    let (code, out, _) = verify(&model, args!["--check-manifest", manifest]);
    assert_eq!(code, 1);
    assert!(out.contains("manifest: \"u\" is in the manifest, but not in the model"), "{out}");
    assert!(out.contains("manifest: \"t\" is in the model, but not in the manifest"), "{out}");
}

/// A manifest of llama.cpp's `gguf-hash --all`. xxh64, sha1 and hashes of files are not checked.
#[test]
fn checks_manifest_of_gguf_hash() {
    let dir = tempfile::tempdir().unwrap();
    let model = write(dir.path(), abc());
    let manifest = dir.path().join("manifest");
    let digest = SHA256.split_whitespace().nth(1).unwrap();
    let text = format!(
        "xxh64     44bc2cf5ad770999  test.gguf:t\nsha256    {digest}  test.gguf:t\nsha256    {:064}  test.gguf\n",
        0
    );
    fs::write(&manifest, text).unwrap();
    let (code, out, _) = verify(&model, args!["--check-manifest", manifest]);
    assert_eq!(code, 0, "{out}");
    assert!(out.ends_with("0 differences from the manifest (sha256)\n"), "{out}");
}

#[test]
fn rejects_unusable_manifests() {
    let dir = tempfile::tempdir().unwrap();
    let model = write(dir.path(), abc());
    let manifest = dir.path().join("manifest");
    let check = ["gguf-map", arg(&model), "--verify", "--check-manifest", arg(&manifest)];
    assert!(fail![check].contains("cannot read the manifest"));
    for (text, expected) in [
        ("", "neither xxh3 nor sha256"),
        ("xxh64  00  test.gguf:t\n", "neither xxh3 nor sha256"),
        ("xxh3  00  test.gguf:t\nmd5  00  test.gguf:t\n", "line 2 of the manifest"),
        ("nonsense\n", "line 1 of the manifest"),
    ] {
        fs::write(&manifest, text).unwrap();
        let line = fail![check];
        assert!(line.contains(expected) && line.contains(arg(&manifest)), "{line}");
    }
    fs::write(&manifest, XXH3).unwrap();
    let line = fail![check, "--hash", "sha256"];
    assert!(line.contains("no sha256") && line.contains("--hash xxh3"), "{line}");
    fs::write(&manifest, XXH3.repeat(10_000)).unwrap();
    assert!(fail![check].contains("longer than a manifest of 1 tensor can be"));
}

#[test]
fn keeps_existing_manifest_without_force() {
    let dir = tempfile::tempdir().unwrap();
    let model = write(dir.path(), abc());
    let manifest = dir.path().join("manifest");
    fs::write(&manifest, "precious").unwrap();
    let line = fail!["gguf-map", model, "--verify", "--manifest-out", manifest];
    assert!(line.contains("exists") && line.contains("--force"), "{line}");
    assert_eq!(fs::read_to_string(&manifest).unwrap(), "precious");
}

/// A name with a line break could forge lines of other tensors.
#[test]
fn rejects_line_breaks_in_manifests() {
    let dir = tempfile::tempdir().unwrap();
    let model = write(dir.path(), Raw::new(1, 0).tensor("t\nu", &[8], F32, 0).data(32, 32));
    let manifest = dir.path().join("manifest");
    let line = fail!["gguf-map", model, "--verify", "--manifest-out", manifest];
    assert!(line.contains(r#""t\nu""#) && line.contains("line break"), "{line}");
    assert!(!manifest.exists());
}

#[test]
fn reports_values_that_are_not_finite() {
    let dir = tempfile::tempdir().unwrap();
    // Q8_0, two blocks; the scale of the second is infinite. Then an F32 tensor with a NaN.
    let mut data = vec![0; 68];
    data[34..36].copy_from_slice(&[0x00, 0x7C]);
    let raw = Raw::new(2, 0)
        .tensor("q", &[64], 8, 0)
        .tensor("f", &[3], F32, 96)
        .data(32, 0)
        .raw(&data)
        .data(32, 0)
        .raw(&[0, 0, 0, 0, 0, 0, 0xC0, 0x7F, 0, 0, 0xC0, 0xFF]);
    let model = write(dir.path(), raw);
    let gguf = Gguf::open(&model).unwrap();
    let start = gguf.files()[0].data_offset;

    let (code, out, _) = verify(&model, args![]);
    assert_eq!(code, 1);
    for (name, count, at) in [("q", 1, start + 34), ("f", 2, start + 96 + 4)] {
        let line = format!(
            "not finite: \"{name}\" has {count} values or block scales that are not finite, the first at byte {at} of test.gguf"
        );
        assert!(out.lines().any(|found| found == line), "{line}: {out}");
    }
    assert!(
        out.ends_with("FAULTY data: 2 tensors read, 2 of them with values that are not finite\n"),
        "{out}"
    );

    let (code, out, _) = verify(&model, ["--format", "report"]);
    assert_eq!(code, 1);
    let report: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(report["data"]["hash"], "xxh3");
    assert_eq!(
        report["data"]["tensors"][0]["impossible"],
        json!({ "count": 1, "first_offset": start + 34 })
    );
    // Without --verify no data is read.
    moe_analyze()
        .args(args!["gguf-map", model, "--check-overlaps"])
        .assert()
        .code(0);
}

/// Truncated or overlapping data is a fault of the map, and is not hashed.
#[test]
fn does_not_read_overlapping_or_truncated_data() {
    let dir = tempfile::tempdir().unwrap();
    let manifest = dir.path().join("manifest");
    let mut truncated = abc();
    truncated.bytes.pop();
    let twice = Raw::new(2, 0)
        .tensor("a", &[8], F32, 0)
        .tensor("b", &[8], F32, 0)
        .data(32, 32);
    for raw in [truncated, twice] {
        let model = write(dir.path(), raw);
        let (code, out, err) = verify(&model, args!["--manifest-out", manifest]);
        assert_eq!(code, 1, "{out}");
        assert!(out.contains("\nFAULTY: "), "{out}");
        assert!(
            out.lines()
                .last()
                .unwrap()
                .starts_with("FAULTY data: not read"),
            "{out}"
        );
        assert!(!manifest.exists() && !err.contains("wrote"), "{err}");
    }
}

/// Options that need the data imply `--verify`.
#[test]
fn data_options_imply_verify() {
    let dir = tempfile::tempdir().unwrap();
    let model = write(dir.path(), abc());
    let manifest = dir.path().join("manifest");
    for option in [
        ["--hash", "sha256"],
        ["--manifest-out", arg(&manifest)],
        ["--check-manifest", arg(&manifest)],
    ] {
        let (code, out, err) = output_of(args!["gguf-map", model, option]);
        assert_eq!(code, 0, "{err}");
        assert!(out.contains("\nsound data: 1 tensor read"), "{out}");
    }
    assert_eq!(fs::read_to_string(&manifest).unwrap(), XXH3);
}

#[test]
fn quiet_prints_nothing_on_stderr() {
    let (code, _, err) = output_of(args!["--quiet", "gguf-map", repository(MODELS[0]), "--verify"]);
    assert_eq!((code, err.as_str()), (0, ""));
}
