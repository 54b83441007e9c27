//! Files with unusual layouts that can be opened: truncated data, gaps, overlaps, rare types, and all layouts of experts.
//! Several cases are from bug reports against other readers.

use std::io::ErrorKind;
use std::path::Path;

use moe_gguf::check::{Refusal, check};
use moe_gguf::map::{Category, OffsetMap, Projection};
use moe_gguf::{Error, ExpertId, GgmlType, Gguf};
use moe_testkit::gguf::{F32, Raw};

use crate::opened::Opened;

// --- data ---

#[test]
fn reports_data_past_the_end_of_the_file() {
    let gguf = Raw::new(1, 0)
        .tensor("t", &[8], F32, 0)
        .data(32, 31)
        .open()
        .unwrap();
    let error = gguf.data(&gguf.tensors()[0]).unwrap_err();
    assert!(matches!(error, Error::Truncated { .. }), "{error}");
    let report = check(&gguf);
    assert_eq!(
        (report.past_end.len(), report.past_end[0].missing_bytes),
        (1, 1)
    );
    let text = report.past_end[0].describe(&gguf);
    assert!(text.contains("\"t\"") && text.contains("1 byte "), "{text}");
}

/// sparkinfer#25, lucebox#438: the last tensor may end at the end of the file, without padding.
#[test]
fn accepts_a_last_tensor_without_padding() {
    let gguf = Raw::new(2, 0)
        .tensor("a", &[8], F32, 0)
        .tensor("b", &[3], F32, 32)
        .data(32, 44)
        .open()
        .unwrap();
    let report = check(&gguf);
    assert!(report.is_sound() && report.llama_cpp_refuses.is_empty());
    assert_eq!(report.trailing_bytes, 0);
}

/// huggingface.js#1076, gguf-parser-go#38: no padding follows a header whose size is a multiple of the alignment.
#[test]
fn does_not_pad_an_aligned_header() {
    // 24 bytes of magic, version and counts; the tensor has 8 + len + 4 + 8 + 4 + 8 bytes.
    let name = "x".repeat(64 - 56 % 32);
    let raw = Raw::new(1, 0).tensor(&name[..8], &[8], F32, 0);
    assert_eq!(raw.bytes.len() % 32, 0);
    let gguf = raw.data(32, 32).open().unwrap();
    assert_eq!(gguf.files()[0].data_offset, gguf.files()[0].header_size);
    assert_eq!(check(&gguf).padding_bytes, 0);
}

#[test]
fn respects_general_alignment() {
    let gguf = Raw::new(2, 1)
        .kv_u32("general.alignment", 256)
        .tensor("a", &[8], F32, 0)
        .tensor("b", &[8], F32, 256)
        .data(256, 288)
        .open()
        .unwrap();
    assert_eq!(gguf.files()[0].data_offset, 256);
    assert_eq!(gguf.tensors()[1].offset, 512);
    assert!(check(&gguf).is_sound() && check(&gguf).llama_cpp_refuses.is_empty());
}

/// The tensors are aligned to 32 bytes, but `general.alignment` is 64.
#[test]
fn reports_tensors_with_inconsistent_alignment() {
    let gguf = Raw::new(2, 1)
        .kv_u32("general.alignment", 64)
        .tensor("a", &[8], F32, 0)
        .tensor("b", &[8], F32, 32)
        .data(64, 64)
        .open()
        .unwrap();
    let report = check(&gguf);
    assert_eq!(report.llama_cpp_refuses.len(), 1);
    assert!(report.overlaps.is_empty() && report.gaps.is_empty());
}

#[test]
fn reports_overlapping_tensors() {
    let gguf = Raw::new(3, 0)
        .tensor("a", &[16], F32, 0)
        .tensor("b", &[8], F32, 32)
        .tensor("c", &[8], F32, 64)
        .data(32, 96)
        .open()
        .unwrap();
    let report = check(&gguf);
    assert_eq!(report.overlaps.len(), 1);
    let overlap = &report.overlaps[0];
    assert_eq!(
        (overlap.first, overlap.second, overlap.size_bytes),
        (0, 1, 32)
    );
    assert_eq!(overlap.offset, gguf.tensors()[1].offset);
}

/// llama.cpp#8264, #9613: two files concatenated with `cat`.
#[test]
fn counts_trailing_bytes_but_accepts_the_file() {
    let one = Raw::new(1, 0).tensor("t", &[8], F32, 0).data(32, 32);
    let gguf = one.clone().raw(&one.bytes).open().unwrap();
    let report = check(&gguf);
    assert!(report.is_sound());
    assert_eq!(report.trailing_bytes, one.bytes.len() as u64);
}

/// ram-coffers#708.
#[test]
fn accepts_tensor_offset_0() {
    let gguf = Raw::new(1, 0)
        .tensor("t", &[8], F32, 0)
        .data(32, 32)
        .open()
        .unwrap();
    assert_eq!(gguf.tensors()[0].offset, gguf.files()[0].data_offset);
    assert!(check(&gguf).is_sound());
}

// --- types and experts ---

/// gguf-parser-go#38, mistral.rs#2117: readers without the newest types.
#[test]
fn sizes_tensors_of_types_above_38() {
    for (id, ne0, bytes) in [(39, 32, 17), (40, 64, 36), (41, 128, 18), (42, 64, 18)] {
        let gguf = Raw::new(1, 0)
            .tensor("t", &[ne0], id, 0)
            .data(32, bytes)
            .open()
            .unwrap();
        assert_eq!(gguf.tensors()[0].size_bytes, bytes as u64);
        assert!(check(&gguf).is_sound());
    }
}

/// ik_llama.cpp#432: each of the 1024 rows has 4 bytes of metadata in addition to its blocks.
#[test]
fn tensor_sizes_include_row_metadata() {
    let size = (136 + 4) * 1024;
    let gguf = Raw::new(2, 0)
        .tensor("a", &[256, 1024], 144, 0) // IQ4_KS
        .tensor("b", &[8], F32, size)
        .data(32, size as usize + 32)
        .open()
        .unwrap();
    let report = check(&gguf);
    assert!(report.is_sound());
    let refusal = Refusal::IkType {
        file: 0,
        tensor: 0,
        ty: GgmlType::IQ4_KS,
    };
    assert_eq!(report.llama_cpp_refuses, [refusal]);
}

/// mistral.rs#352: experts in a stacked tensor, with fused gate and up, or with one tensor per expert.
#[test]
fn maps_stacked_fused_and_single_experts() {
    let gguf = Raw::new(4, 0)
        .tensor("blk.0.ffn_down_exps.weight", &[8, 2, 3], F32, 0)
        .tensor("blk.0.ffn_gate_up_exps.weight", &[8, 4, 3], F32, 192)
        .tensor("blk.1.ffn_gate.2.weight", &[8, 2], F32, 576)
        .tensor("blk.1.ffn_up_exps.7.weight", &[8, 2], F32, 640)
        .data(32, 704)
        .open()
        .unwrap();
    assert!(check(&gguf).is_sound());
    let map = OffsetMap::new(&gguf);
    let rows: Vec<_> = map
        .rows
        .iter()
        .map(|r| (r.tensor_idx, r.expert_id, r.size_bytes))
        .collect();
    let stacked = (0..3)
        .map(|e| (0, Some(ExpertId(e)), 64))
        .chain((0..3).map(|e| (1, Some(ExpertId(e)), 128)));
    let expected: Vec<_> = stacked
        .chain([(2, Some(ExpertId(2)), 64), (3, Some(ExpertId(7)), 64)])
        .collect();
    assert_eq!(rows, expected);
    assert!(map.rows.iter().all(|row| row.category == Category::Expert));
    assert_eq!(map.rows[3].projection, Some(Projection::GateUp));
}

// --- paths ---

#[test]
fn rejects_a_directory() {
    let directory = env!("CARGO_MANIFEST_DIR");
    let error = Gguf::open(directory).unwrap_err();
    assert!(
        matches!(&error, Error::Io { path, source, .. }
            if path == Path::new(directory) && source.kind() == ErrorKind::InvalidInput),
        "{error}"
    );
}

#[test]
fn reports_the_path_of_a_missing_file() {
    let error = Gguf::open("no/such.gguf").unwrap_err();
    assert!(
        matches!(&error, Error::Io { path, source, .. }
            if path == Path::new("no/such.gguf") && source.kind() == ErrorKind::NotFound),
        "{error}"
    );
}
