//! Files that ggml's own tests refuse, and files of bug reports against other readers. Each is built
//! by hand, is named for its fault, and gives its own error.

mod common;

use common::{ARRAY, F32, Raw, STRING, U32};
use moe_gguf::check::{Refusal, check};
use moe_gguf::{Fault, GgmlType, TypeError, ValueType};

// --- header ---

#[test]
fn header_bad_magic() {
    let raw = Raw {
        bytes: b"GGML".to_vec(),
    }
    .u32(3)
    .u64(0)
    .u64(0);
    assert_eq!(
        raw.fault(),
        Fault::BadMagic {
            found: b"GGML".to_vec()
        }
    );
}

#[test]
fn header_bad_version_0() {
    let raw = Raw {
        bytes: b"GGUF".to_vec(),
    }
    .u32(0)
    .u64(0)
    .u64(0);
    assert_eq!(raw.fault(), Fault::BadVersion { version: 0 });
}

#[test]
fn header_bad_version_1() {
    let raw = Raw {
        bytes: b"GGUF".to_vec(),
    }
    .u32(1)
    .u32(0)
    .u32(0);
    assert_eq!(raw.fault(), Fault::Version1);
}

#[test]
fn header_bad_version_future() {
    let raw = Raw {
        bytes: b"GGUF".to_vec(),
    }
    .u32(4)
    .u64(0)
    .u64(0);
    assert_eq!(raw.fault(), Fault::BadVersion { version: 4 });
}

#[test]
fn header_version_2_is_read() {
    let raw = Raw {
        bytes: b"GGUF".to_vec(),
    }
    .u32(2)
    .u64(0)
    .u64(0);
    assert_eq!(raw.open().unwrap().version(), 2);
}

#[test]
fn header_byte_swapped() {
    let raw = Raw {
        bytes: b"GGUF".to_vec(),
    }
    .u32(3_u32.swap_bytes())
    .u64(0)
    .u64(0);
    assert_eq!(raw.fault(), Fault::BigEndian);
    assert!(raw.open().unwrap_err().to_string().contains("big-endian"));
}

#[test]
fn header_bad_n_tensors() {
    let fault = Raw::new(u64::MAX, 0).fault();
    assert_eq!(
        fault,
        Fault::TooMany {
            what: "tensors",
            count: u64::MAX,
            left: 8
        }
    );
}

#[test]
fn header_bad_n_kv() {
    let fault = Raw::new(0, u64::MAX).fault();
    assert_eq!(
        fault,
        Fault::TooMany {
            what: "key-values",
            count: u64::MAX,
            left: 0
        }
    );
}

#[test]
fn header_empty_is_valid() {
    let gguf = Raw::new(0, 0).open().unwrap();
    assert!(gguf.tensors().is_empty() && gguf.metadata().is_empty());
    assert!(check(&gguf).is_sound());
}

#[test]
fn header_of_no_bytes() {
    let raw = Raw { bytes: Vec::new() };
    assert_eq!(
        raw.fault(),
        Fault::Truncated {
            what: "the magic",
            needed: 4,
            left: 0
        }
    );
}

/// llama.cpp#6774, #6885: a truncated file must not be read beyond its end.
#[test]
fn header_cut_at_every_byte() {
    let whole = Raw::new(1, 2)
        .kv_u32("a", 1)
        .string("b")
        .u32(ARRAY)
        .u32(STRING)
        .u64(2)
        .string("x")
        .string("yz")
        .tensor("t", &[32, 2], F32, 0);
    assert!(whole.open().is_ok());
    for n in 0..whole.bytes.len() {
        let cut = Raw {
            bytes: whole.bytes[..n].to_vec(),
        };
        let fault = cut.fault();
        let expected = matches!(fault, Fault::Truncated { .. } | Fault::TooMany { .. });
        assert!(expected, "{n} bytes: {fault}");
    }
}

// --- key-values ---

#[test]
fn kv_bad_key_size() {
    let fault = Raw::new(0, 1).u64(u64::MAX).raw(&[0; 16]).fault();
    assert_eq!(
        fault,
        Fault::Truncated {
            what: "a metadata key",
            needed: u64::MAX,
            left: 16
        }
    );
}

#[test]
fn kv_empty_key() {
    assert_eq!(Raw::new(0, 1).kv_u32("", 1).fault(), Fault::EmptyKey);
}

#[test]
fn kv_key_not_utf8() {
    let fault = Raw::new(0, 1)
        .u64(2)
        .raw(&[0xC3, 0x28])
        .u32(U32)
        .u32(1)
        .fault();
    assert_eq!(
        fault,
        Fault::NotUtf8 {
            what: "a metadata key"
        }
    );
}

#[test]
fn kv_bad_type() {
    let fault = Raw::new(0, 1).string("k").u32(13).u32(1).fault();
    assert_eq!(
        fault,
        Fault::BadValueType {
            key: "k".into(),
            id: 13
        }
    );
}

#[test]
fn kv_bad_array_type() {
    let fault = Raw::new(0, 1).string("k").u32(ARRAY).u32(13).u64(0).fault();
    assert_eq!(
        fault,
        Fault::BadValueType {
            key: "k".into(),
            id: 13
        }
    );
}

#[test]
fn kv_array_of_arrays() {
    let fault = Raw::new(0, 1)
        .string("k")
        .u32(ARRAY)
        .u32(ARRAY)
        .u64(0)
        .fault();
    assert_eq!(fault, Fault::NestedArray { key: "k".into() });
}

/// llama.cpp#14595, #18674: sizes that would allocate more than the file holds.
#[test]
fn kv_array_too_long() {
    let fault = Raw::new(0, 1)
        .string("k")
        .u32(ARRAY)
        .u32(U32)
        .u64(1 << 62)
        .raw(&[0; 8])
        .fault();
    assert_eq!(
        fault,
        Fault::TooMany {
            what: "array elements",
            count: 1 << 62,
            left: 8
        }
    );
}

#[test]
fn kv_array_of_strings_too_long() {
    let raw = Raw::new(0, 1)
        .string("k")
        .u32(ARRAY)
        .u32(STRING)
        .u64(2)
        .string("a")
        .u64(9)
        .raw(b"short");
    let expected = Fault::Truncated {
        what: "a string of an array",
        needed: 9,
        left: 5,
    };
    assert_eq!(raw.fault(), expected);
}

#[test]
fn kv_duplicate_key() {
    let fault = Raw::new(0, 3)
        .kv_u32("a", 1)
        .kv_u32("b", 1)
        .kv_u32("a", 2)
        .fault();
    assert_eq!(fault, Fault::DuplicateKey { key: "a".into() });
}

#[test]
fn kv_bad_align() {
    for value in [0, 3, 33, u32::MAX] {
        let fault = Raw::new(0, 1).kv_u32("general.alignment", value).fault();
        assert_eq!(fault, Fault::BadAlignment { value });
    }
}

#[test]
fn kv_wrong_type_align() {
    let fault = Raw::new(0, 1)
        .string("general.alignment")
        .u32(10)
        .u64(32)
        .fault();
    assert_eq!(
        fault,
        Fault::AlignmentType {
            found: ValueType::U64
        }
    );
}

// --- tensor table ---

#[test]
fn tensors_bad_name_size() {
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

/// antirez/gguf-tools#33: more dimensions than the reader's array has.
#[test]
fn tensors_bad_n_dims() {
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
fn tensors_bad_shape() {
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
fn tensors_zero_dim_is_valid() {
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
fn tensors_no_dims_is_a_scalar() {
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
fn tensors_ne_too_big() {
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
fn tensors_nbytes_too_big() {
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

#[test]
fn tensors_bad_type() {
    for id in [43, 100, 1000, u32::MAX] {
        let raw = Raw::new(1, 0).tensor("t", &[256], id, 0).data(32, 1024);
        let source = TypeError::Unknown { id };
        assert_eq!(
            raw.fault(),
            Fault::BadType {
                tensor: "t".into(),
                source
            }
        );
        let text = raw.open().unwrap_err().to_string();
        assert!(
            text.contains("\"t\"") && text.contains(&id.to_string()),
            "{text}"
        );
    }
}

#[test]
fn tensors_removed_type() {
    let removed = [
        (4, "Q4_2"),
        (5, "Q4_3"),
        (37, "IQ4_NL_4_8"),
        (38, "IQ4_NL_8_8"),
    ];
    for (id, name) in removed {
        let raw = Raw::new(1, 0).tensor("t", &[256], id, 0).data(32, 1024);
        let source = TypeError::Removed { id, name };
        assert_eq!(
            raw.fault(),
            Fault::BadType {
                tensor: "t".into(),
                source
            }
        );
    }
}

#[test]
fn tensors_removed_type_that_ik_llama_cpp_uses() {
    let raw = Raw::new(1, 0).tensor("t", &[256], 36, 0).data(32, 1024);
    let text = raw.open().unwrap_err().to_string();
    for part in ["IQ4_NL_4_4", "removed", "ik_llama.cpp", "I2_S"] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn tensors_row_not_a_multiple_of_the_block() {
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
fn tensors_duplicate_name() {
    let raw = Raw::new(2, 0)
        .tensor("t", &[8], F32, 0)
        .tensor("t", &[8], F32, 32)
        .data(32, 64);
    assert_eq!(raw.fault(), Fault::DuplicateTensor { tensor: "t".into() });
}

/// A file that breaks only ggml's rule of offsets without holes is read; its report says so.
#[test]
fn tensors_bad_offset_is_read_and_told() {
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
    assert!(
        text.contains("llama.cpp will refuse") && text.contains("\"b\""),
        "{text}"
    );
    assert_eq!((report.gaps.len(), report.gaps[0].size_bytes), (1, 32));
}

/// ollama#5422, #5656: the order of the table need not be the order of the data.
#[test]
fn tensors_out_of_order_are_no_gap() {
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

/// llama.cpp#26978: a padded size that wraps to 0.
#[test]
fn tensors_padding_wraps() {
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

/// gguf-parser-go#12, #20: offsets that overflow into a negative seek.
#[test]
fn tensors_offset_overflows() {
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

/// llama.cpp#27349: fewer tensors than promised.
#[test]
fn tensors_fewer_than_promised() {
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
fn tensors_claim_more_experts_than_any_model() {
    let raw = Raw::new(1, 0).tensor("blk.0.ffn_up_exps.weight", &[1, 1, 1 << 40], 24, 0);
    assert!(matches!(
        raw.fault(),
        Fault::TooManyExperts {
            claimed: 1_099_511_627_776,
            ..
        }
    ));
}

#[test]
fn data_mem_size_overflow() {
    let ne = [1 << 60, 1, 1, 1];
    let raw = (0..16).fold(Raw::new(16, 0), |raw, i| {
        raw.tensor(&format!("t{i}"), &ne, 24, 0)
    });
    assert_eq!(raw.fault(), Fault::TotalOverflow);
}
