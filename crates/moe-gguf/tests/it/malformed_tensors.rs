//! Malformed tensor tables, from ggml's tests and from bug reports against other readers. Each has its own error.

use moe_gguf::check::{Refusal, check};
use moe_gguf::{Fault, GgmlType, TypeError};
use moe_testkit::gguf::{F32, Raw};

use crate::opened::Opened;

#[test]
fn rejects_names_longer_than_63_bytes() {
    let raw = Raw::new(1, 0)
        .tensor(&"x".repeat(64), &[4], F32, 0)
        .data(32, 32);
    assert_eq!(raw.fault(), Fault::TensorNameTooLong { len: 64 });
    assert!(
        Raw::new(1, 0)
            .tensor(&"x".repeat(63), &[4], F32, 0)
            .data(32, 32)
            .open()
            .is_ok()
    );
}

/// antirez/gguf-tools#33: more dimensions than the array of the reader has elements.
#[test]
fn rejects_more_than_4_dimensions() {
    let raw = Raw::new(1, 0)
        .tensor("t", &[2, 2, 2, 2, 2], F32, 0)
        .data(32, 128);
    assert_eq!(
        raw.fault(),
        Fault::BadDimensions {
            tensor: "t".into(),
            n_dims: 5
        }
    );
}

#[test]
fn rejects_dimensions_above_i64() {
    let raw = Raw::new(1, 0)
        .tensor("t", &[4, u64::MAX], F32, 0)
        .data(32, 32);
    assert_eq!(
        raw.fault(),
        Fault::BadShape {
            tensor: "t".into(),
            dim: 1,
            ne: u64::MAX
        }
    );
}

/// llama.cpp#24263.
#[test]
fn accepts_dimensions_of_0() {
    let gguf = Raw::new(2, 0)
        .tensor("empty", &[32, 0], F32, 0)
        .tensor("t", &[8], F32, 0)
        .data(32, 32)
        .open()
        .unwrap();
    assert_eq!(
        (gguf.tensors()[0].size_bytes, gguf.tensors()[1].size_bytes),
        (0, 32)
    );
    assert!(gguf.data(&gguf.tensors()[0]).unwrap().is_empty());
    assert!(check(&gguf).is_sound() && check(&gguf).llama_cpp_refuses.is_empty());
}

#[test]
fn reads_tensors_without_dimensions_as_scalars() {
    let gguf = Raw::new(1, 0)
        .tensor("t", &[], F32, 0)
        .data(32, 4)
        .open()
        .unwrap();
    assert_eq!(
        (gguf.tensors()[0].ne, gguf.tensors()[0].size_bytes),
        ([1; 4], 4)
    );
}

/// llama.cpp#27203.
#[test]
fn rejects_too_many_elements() {
    let ne = [1 << 31, 1 << 31, 2, 1];
    let raw = Raw::new(1, 0).tensor("t", &ne, F32, 0).data(32, 32);
    assert_eq!(
        raw.fault(),
        Fault::TooManyElements {
            tensor: "t".into(),
            ne
        }
    );
}

#[test]
fn rejects_too_many_bytes() {
    let ne = [1 << 30, 1 << 31, 1, 1];
    let raw = Raw::new(1, 0).tensor("t", &ne, F32, 0).data(32, 32);
    assert_eq!(
        raw.fault(),
        Fault::TooManyBytes {
            tensor: "t".into(),
            ty: GgmlType::F32,
            ne
        }
    );
}

/// The error of a tensor with a type.
fn type_error(id: u32) -> TypeError {
    let raw = Raw::new(1, 0).tensor("t", &[256], id, 0).data(32, 1024);
    match raw.fault() {
        Fault::BadType { source, .. } => source,
        other => panic!("another fault: {other:?}"),
    }
}

#[test]
fn rejects_unknown_types() {
    for id in [43, 100, 1000, u32::MAX] {
        assert_eq!(type_error(id), TypeError::Unknown { id });
    }
}

#[test]
fn rejects_removed_types() {
    let removed = [
        (4, "Q4_2"),
        (5, "Q4_3"),
        (37, "IQ4_NL_4_8"),
        (38, "IQ4_NL_8_8"),
    ];
    for (id, name) in removed {
        assert_eq!(type_error(id), TypeError::Removed { id, name });
    }
}

#[test]
fn rejects_removed_types_whose_id_ik_llama_cpp_reuses() {
    assert_eq!(
        type_error(36),
        TypeError::RemovedButIk {
            id: 36,
            name: "IQ4_NL_4_4",
            ik: "I2_S",
        }
    );
}

#[test]
fn rejects_rows_that_are_not_a_multiple_of_the_block_size() {
    let raw = Raw::new(1, 0).tensor("t", &[255, 2], 12, 0).data(32, 1024);
    assert_eq!(
        raw.fault(),
        Fault::RowNotBlocks {
            tensor: "t".into(),
            ty: GgmlType::Q4_K,
            ne0: 255
        }
    );
}

/// llama.cpp#6836.
#[test]
fn rejects_duplicate_names() {
    let raw = Raw::new(2, 0)
        .tensor("t", &[8], F32, 0)
        .tensor("t", &[8], F32, 32)
        .data(32, 64);
    assert_eq!(raw.fault(), Fault::DuplicateTensor { tensor: "t".into() });
}

/// ggml requires that tensor offsets have no gaps. This crate opens such a file and reports it.
#[test]
fn reports_offsets_that_llama_cpp_rejects() {
    let gguf = Raw::new(2, 0)
        .tensor("a", &[8], F32, 0)
        .tensor("b", &[8], F32, 64)
        .data(32, 96)
        .open()
        .unwrap();
    let report = check(&gguf);
    let refusal = Refusal::Misplaced {
        file: 0,
        tensor: 1,
        offset: 64,
        expected: 32,
    };
    assert_eq!(report.llama_cpp_refuses, [refusal]);
    let text = report.llama_cpp_refuses[0].describe(&gguf);
    assert!(text.contains("\"b\""), "{text}");
    assert_eq!((report.gaps.len(), report.gaps[0].size_bytes), (1, 32));
}

/// ollama#5422, #5656: the order of the table may differ from the order of the data.
#[test]
fn reports_no_gap_for_tensors_out_of_order() {
    let gguf = Raw::new(2, 0)
        .tensor("a", &[8], F32, 32)
        .tensor("b", &[8], F32, 0)
        .data(32, 64)
        .open()
        .unwrap();
    let report = check(&gguf);
    assert!(report.is_sound());
    assert_eq!(report.llama_cpp_refuses.len(), 1);
}

/// llama.cpp#26978: a padded size that overflows to 0.
#[test]
fn rejects_padded_sizes_that_overflow() {
    let ne = [4, 1_073_741_823, 1_073_741_825, 1];
    let raw = Raw::new(2, 0)
        .tensor("a", &ne, 24, 0)
        .tensor("b", &[8], F32, 0)
        .data(32, 64);
    assert_eq!(
        raw.open().unwrap().tensors()[0].size_bytes,
        4_611_686_018_427_387_900
    );
    let raw = Raw::new(3, 0)
        .tensor("a", &ne, 24, 0)
        .tensor("b", &ne, 24, 0)
        .tensor("c", &[8], F32, 0);
    assert_eq!(raw.fault(), Fault::TotalOverflow);
}

/// gguf-parser-go#12, #20: offsets that overflow to a negative seek.
#[test]
fn rejects_offsets_that_overflow() {
    for offset in [u64::MAX, u64::MAX - 31, i64::MAX as u64] {
        let raw = Raw::new(1, 0).tensor("t", &[8], F32, offset).data(32, 32);
        assert_eq!(
            raw.fault(),
            Fault::OffsetOverflow {
                tensor: "t".into(),
                offset
            }
        );
    }
}

/// llama.cpp#27349: fewer tensors than declared.
#[test]
fn rejects_missing_tensors() {
    let fault = Raw::new(2, 0).tensor("t", &[8], F32, 0).fault();
    assert!(
        matches!(
            fault,
            Fault::TooMany {
                what: "tensors",
                ..
            } | Fault::Truncated { .. }
        ),
        "{fault}"
    );
}

#[test]
fn rejects_too_many_experts() {
    let raw = Raw::new(1, 0).tensor("blk.0.ffn_up_exps.weight", &[1, 1, 1 << 40], 24, 0);
    assert!(matches!(
        raw.fault(),
        Fault::TooManyExperts {
            claimed: 1_099_511_627_776,
            ..
        }
    ));
    // 107 layers with 3 × 1024 experts exceed the limit. The error contains the first tensor above it.
    let raw = (0..3 * 107).fold(Raw::new(3 * 107, 0), |raw, i| {
        let name = format!(
            "blk.{}.ffn_{}_exps.weight",
            i / 3,
            ["gate", "up", "down"][i % 3]
        );
        raw.tensor(&name, &[1, 1, 1024], 24, 0)
    });
    let expected = Fault::TooManyExperts {
        tensor: "blk.106.ffn_down_exps.weight".into(),
        claimed: 328_704,
        limit: 327_680,
    };
    assert_eq!(raw.fault(), expected);
}

#[test]
fn rejects_total_sizes_that_overflow() {
    let ne = [1 << 60, 1, 1, 1];
    let raw = (0..16).fold(Raw::new(16, 0), |raw, i| {
        raw.tensor(&format!("t{i}"), &ne, 24, 0)
    });
    assert_eq!(raw.fault(), Fault::TotalOverflow);
}
