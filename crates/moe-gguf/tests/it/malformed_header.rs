//! Malformed headers and key-values, from ggml's tests and from bug reports against other readers. Each has its own error.

use moe_gguf::check::check;
use moe_gguf::{Fault, ValueType};
use moe_testkit::gguf::{ARRAY, F32, Raw, STRING, U32};

use crate::opened::Opened;

// --- header ---

/// A header without tensors and keys.
fn header(version: u32) -> Raw {
    let raw = Raw {
        bytes: b"GGUF".to_vec(),
    };
    raw.u32(version).u64(0).u64(0)
}

#[test]
fn rejects_another_magic_number() {
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
fn rejects_version_0() {
    let raw = header(0);
    assert_eq!(raw.fault(), Fault::BadVersion { version: 0 });
}

#[test]
fn rejects_version_1() {
    let raw = Raw {
        bytes: b"GGUF".to_vec(),
    }
    .u32(1)
    .u32(0)
    .u32(0);
    assert_eq!(raw.fault(), Fault::Version1);
}

#[test]
fn rejects_future_versions() {
    let raw = header(4);
    assert_eq!(raw.fault(), Fault::BadVersion { version: 4 });
}

#[test]
fn accepts_version_2() {
    let raw = header(2);
    assert_eq!(raw.open().unwrap().version(), 2);
}

#[test]
fn rejects_big_endian_files() {
    let raw = header(3_u32.swap_bytes());
    assert_eq!(raw.fault(), Fault::BigEndian);
}

#[test]
fn rejects_too_large_tensor_count() {
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
fn rejects_too_large_key_value_count() {
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
fn accepts_a_header_without_tensors_and_keys() {
    let gguf = Raw::new(0, 0).open().unwrap();
    assert!(gguf.tensors().is_empty() && gguf.metadata().is_empty());
    assert!(check(&gguf).is_sound());
}

#[test]
fn rejects_an_empty_file() {
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

/// llama.cpp#6774, #6885: a truncated file must not be read past its end.
#[test]
fn rejects_headers_truncated_at_every_byte() {
    let complete = Raw::new(1, 2)
        .kv_u32("a", 1)
        .string("b")
        .u32(ARRAY)
        .u32(STRING)
        .u64(2)
        .string("x")
        .string("yz")
        .tensor("t", &[32, 2], F32, 0);
    assert!(complete.open().is_ok());
    for n in 0..complete.bytes.len() {
        let truncated = Raw {
            bytes: complete.bytes[..n].to_vec(),
        };
        let fault = truncated.fault();
        let expected = matches!(fault, Fault::Truncated { .. } | Fault::TooMany { .. });
        assert!(expected, "{n} bytes: {fault}");
    }
}

// --- key-values ---

#[test]
fn rejects_too_large_key_length() {
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
fn rejects_empty_keys() {
    assert_eq!(Raw::new(0, 1).kv_u32("", 1).fault(), Fault::EmptyKey);
}

#[test]
fn rejects_keys_that_are_not_utf8() {
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
fn rejects_unknown_value_types() {
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
fn rejects_unknown_element_types() {
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
fn rejects_arrays_of_arrays() {
    let fault = Raw::new(0, 1)
        .string("k")
        .u32(ARRAY)
        .u32(ARRAY)
        .u64(0)
        .fault();
    assert_eq!(fault, Fault::NestedArray { key: "k".into() });
}

/// llama.cpp#14595, #18674: array lengths that would allocate more memory than the file has bytes.
#[test]
fn rejects_too_large_array_lengths() {
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
fn rejects_truncated_strings_in_arrays() {
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
fn rejects_duplicate_keys() {
    let fault = Raw::new(0, 3)
        .kv_u32("a", 1)
        .kv_u32("b", 1)
        .kv_u32("a", 2)
        .fault();
    assert_eq!(fault, Fault::DuplicateKey { key: "a".into() });
}

#[test]
fn rejects_alignments_that_are_not_a_power_of_two() {
    for value in [0, 3, 33, u32::MAX] {
        let fault = Raw::new(0, 1).kv_u32("general.alignment", value).fault();
        assert_eq!(fault, Fault::BadAlignment { value });
    }
}

#[test]
fn rejects_alignments_of_another_type() {
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

#[test]
fn error_messages_contain_offset_and_advice() {
    let empty_key = Raw::new(0, 1).string("").u32(U32).u32(1);
    let magic = Raw {
        bytes: b"GGML".to_vec(),
    };
    let version = Raw {
        bytes: b"GGUF".to_vec(),
    };
    for (raw, offset) in [
        (magic.u32(3).u64(0).u64(0), 0),
        (version.u32(9).u64(0).u64(0), 4),
        (Raw::new(u64::MAX, 0), 8),
        (empty_key, 24),
    ] {
        let text = raw.open().unwrap_err().to_string();
        assert!(text.contains(&format!(" (at byte {offset}); ")), "{text}");
        assert_eq!(text.lines().count(), 1);
    }
}

#[test]
fn rejects_too_many_key_values() {
    let count = (1 << 16) + 1;
    let raw = Raw::new(0, count).raw(&vec![0; 14 * count as usize]);
    let limit = 1 << 16;
    assert_eq!(raw.fault(), Fault::TooManyKeyValues { count, limit });
}

#[test]
fn rejects_arrays_of_too_many_strings() {
    let count = (1 << 22) + 1;
    let raw = Raw::new(0, 1).string("a").u32(ARRAY).u32(STRING).u64(count);
    let raw = raw.raw(&vec![0; 8 * count as usize]);
    assert_eq!(
        raw.fault(),
        Fault::TooManyStrings {
            key: "a".into(),
            count,
            limit: 1 << 22
        }
    );
}
