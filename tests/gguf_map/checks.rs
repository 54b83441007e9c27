//! Checks and their exit codes, rejections by llama.cpp, and the order of layers.

use std::fs;

use moe_gguf::Gguf;

use super::{MODELS, output_of, write};
use crate::support::{args, moe_analyze, repository, run};
use moe_testkit::gguf::{F32, Raw};

#[test]
fn sound_models_pass_check_overlaps() {
    for model in MODELS.map(repository) {
        let out = run!["gguf-map", model, "--check-overlaps"];
        assert!(
            out.lines()
                .last()
                .unwrap()
                .starts_with("sound: 0 overlaps, 0 gaps"),
            "{out}"
        );
    }
}

#[test]
fn findings_do_not_change_machine_readable_stdout() {
    let model = repository("fixtures/random-qwen3moe-F16.gguf");
    let assert = moe_analyze()
        .args(args!["--quiet", "gguf-map", model, "--check-overlaps", "-o", "csv"])
        .assert()
        .success();
    let output = assert.get_output();
    assert!(!String::from_utf8_lossy(&output.stdout).contains("sound"));
    assert!(String::from_utf8_lossy(&output.stderr).starts_with("sound: "));
}

/// A truncated model still has a map, and the check finds the missing tensors.
#[test]
fn detects_truncated_data() {
    let dir = tempfile::tempdir().unwrap();
    let truncated = dir.path().join("truncated.gguf");
    let whole = fs::read(repository("fixtures/random-qwen3moe-F16.gguf")).unwrap();
    fs::write(&truncated, &whole[..whole.len() - 1000]).unwrap();

    let rows = run!["gguf-map", truncated, "-o", "csv"];
    assert_eq!(
        rows,
        run!["gguf-map", repository("fixtures/random-qwen3moe-F16.gguf"), "-o", "csv"]
    );
    let assert = moe_analyze()
        .args(args!["gguf-map", truncated, "--check-overlaps"])
        .assert()
        .code(1);
    let out = String::from_utf8_lossy(&assert.get_output().stdout).into_owned();
    assert!(out.contains("past end: ") && out.contains(" past the end of the file"), "{out}");
    assert!(out.lines().last().unwrap().starts_with("FAULTY"), "{out}");
}

/// Moves a tensor in the header of a model: its offset in the data section becomes `offset`.
fn move_tensor(bytes: &mut [u8], name: &str, n_dims: usize, offset: u64) {
    let at = bytes
        .windows(name.len())
        .position(|window| window == name.as_bytes())
        .unwrap();
    // After the name: u32 n_dims, u64 ne[n_dims], u32 type, u64 offset.
    let field = at + name.len() + 4 + 8 * n_dims + 4;
    bytes[field..field + 8].copy_from_slice(&offset.to_le_bytes());
}

#[test]
fn detects_overlaps_and_gaps() {
    let model = repository("fixtures/random-qwen3moe-F16.gguf");
    let gguf = Gguf::open(&model).unwrap();
    let first = gguf
        .tensors()
        .iter()
        .min_by_key(|tensor| tensor.offset)
        .unwrap();
    let moved = gguf.tensor("blk.1.attn_norm.weight").unwrap();

    // At the offset of the first tensor: an overlap there, a gap at the old offset.
    let mut bytes = fs::read(&model).unwrap();
    move_tensor(&mut bytes, &moved.name, moved.n_dims as usize, 0);
    let dir = tempfile::tempdir().unwrap();
    let broken = dir.path().join("broken.gguf");
    fs::write(&broken, &bytes).unwrap();

    let assert = moe_analyze()
        .args(args!["gguf-map", broken, "--check-overlaps"])
        .assert()
        .code(1);
    let out = String::from_utf8_lossy(&assert.get_output().stdout).into_owned();
    let overlap = out
        .lines()
        .find(|line| line.starts_with("overlap: "))
        .unwrap();
    assert!(overlap.contains(&first.name) && overlap.contains(&moved.name), "{overlap}");
    let gap = out.lines().find(|line| line.starts_with("gap: ")).unwrap();
    assert!(
        gap.contains(&format!("{} bytes at offset {}", moved.size_bytes, moved.offset)),
        "{gap}"
    );
    // Without a check, only the map is printed, with a warning that the file has faults.
    let warns = |path: &std::path::Path| {
        let (code, _, stderr) = output_of(args!["gguf-map", path]);
        assert_eq!(code, 0, "{stderr}");
        stderr.contains("warning: the file has faults; pass --check-overlaps to print them\n")
    };
    assert!(warns(&broken));
    assert!(!warns(&model));
    fs::write(&broken, &fs::read(&model).unwrap()[..bytes.len() - 1000]).unwrap();
    assert!(warns(&broken));
}

/// More bytes after the last tensor are not a fault; they are counted.
#[test]
fn prints_trailing_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let raw = Raw::new(1, 0).tensor("t", &[6], F32, 0).data(32, 24);
    // Unpadded, padded, and with 100 additional bytes.
    for (n, expected) in [
        (0, "0 bytes after the last"),
        (8, "0 bytes after the last"),
        (108, "100 bytes after the last"),
    ] {
        let path = write(dir.path(), raw.clone().raw(&vec![7; n]));
        let (code, out, _) = output_of(args!["gguf-map", path, "--check-overlaps"]);
        assert_eq!(code, 0, "{out}");
        let last = out.lines().last().unwrap();
        assert!(last.starts_with("sound: ") && last.contains(expected), "{n}: {last}");
    }
}

/// A property that only llama.cpp rejects is a note, not a fault.
#[test]
fn reports_what_llama_cpp_refuses() {
    let dir = tempfile::tempdir().unwrap();
    let swapped = Raw::new(2, 0)
        .tensor("a", &[8], F32, 32)
        .tensor("b", &[8], F32, 0)
        .data(32, 64);
    let path = write(dir.path(), swapped);
    let (code, out, _) = output_of(args!["gguf-map", path, "--check-overlaps"]);
    assert_eq!(code, 0, "{out}");
    let note = out.lines().find(|line| line.starts_with("note: ")).unwrap();
    for part in ["llama.cpp rejects", "\"a\"", "offset 32", " 0"] {
        assert!(note.contains(part), "{part}: {note}");
    }

    // 137 is IQ2_K, without metadata per row: 76 bytes per block of 256.
    let path = write(dir.path(), Raw::new(1, 0).tensor("t", &[256], 137, 0).data(32, 76));
    let (code, out, _) = output_of(args!["gguf-map", path, "--check-overlaps"]);
    assert_eq!(code, 0, "{out}");
    assert!(out.contains("note: ") && out.contains("ik_llama.cpp"), "{out}");
    assert!(
        out.lines()
            .any(|line| line.contains(" IQ2_K ") && line.ends_with(" 76")),
        "{out}"
    );
}

/// Layers with one tensor of 32 bytes, in the given order.
fn layers(order: &[u16]) -> Raw {
    let raw = order
        .iter()
        .zip(0..)
        .fold(Raw::new(order.len() as u64, 0), |raw, (layer, i)| {
            raw.tensor(&format!("blk.{layer}.attn_q.weight"), &[8], F32, 32 * i)
        });
    raw.data(32, 32 * order.len())
}

#[test]
fn prints_the_layout_of_the_layers() {
    let dir = tempfile::tempdir().unwrap();
    for (order, line, called_out) in [
        (&[0, 1, 2, 3][..], "layers: 0-3, in order of execution, read without a seek", false),
        (
            &[0, 1, 10, 11, 2, 3, 4, 5, 6, 7, 8, 9],
            // Over 10 and 11, and from the end back to them.
            "layers: 0-1, 10-11, 2-9, sorted as strings; in order of execution read with 2 seeks over 384 B",
            true,
        ),
        (&[0, 2, 1], "layers: 0, 2, 1; in order of execution read with 2 seeks over 96 B", false),
    ] {
        let path = write(dir.path(), layers(order));
        let (code, out, notes) = output_of(args!["gguf-map", path, "--check-overlaps"]);
        assert_eq!(notes, "");
        assert_eq!(code, 0, "{out}");
        assert!(out.lines().any(|found| found == line), "{line}: {out}");
        let is_called_out = out
            .lines()
            .any(|line| line.starts_with("note: the layers are sorted as strings"));
        assert_eq!(is_called_out, called_out, "{out}");
    }
}

#[test]
fn sizes_of_categories_add_up() {
    let model = repository("fixtures/tiny-gpt-oss-MXFP4.gguf");
    let (_, _, notes) = output_of(args!["gguf-map", model, "-o", "csv"]);
    let share = |category: &str| {
        let line = notes.lines().find(|line| line.starts_with(category));
        let cells: Vec<&str> = line.unwrap().split_whitespace().collect();
        (
            cells[1].parse::<u32>().unwrap(),
            cells[2].parse::<u64>().unwrap(),
            cells.last().unwrap().parse::<f64>().unwrap(),
        )
    };
    // 6 layers × 3 matrices × 32 experts of 8704 bytes, of 9,019,232 bytes in all.
    assert_eq!(share("expert "), (18, 18 * 32 * 8704, 55.6));
    assert_eq!(share("embedding "), (1, 1_114_112, 12.4));
    assert_eq!(share("attention ").0, 54);
}
