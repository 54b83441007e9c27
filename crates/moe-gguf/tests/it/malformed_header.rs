//! Headers and key-values that ggml's own tests refuse, and those of bug reports against other readers.
//! Each is built by hand, is named for its fault, and gives its own error.

use moe_gguf::check::check;
use moe_gguf::{Fault, ValueType};
use moe_testkit::gguf::{ARRAY, F32, Raw, STRING, U32};

use crate::opened::Opened;

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

/// Every error says which file, what, where, and what to do, on one line.
#[test]
fn errors_say_what_to_do() {
    let empty_key = Raw::new(0, 1).string("").u32(U32).u32(1);
    let magic = Raw {
        bytes: b"GGML".to_vec(),
    };
    let version = Raw {
        bytes: b"GGUF".to_vec(),
    };
    for (raw, at, mend) in [
        (magic.u32(3).u64(0).u64(0), 0, "give a model as a GGUF file"),
        (version.u32(9).u64(0).u64(0), 4, "use a newer moe-analyze"),
        (
            Raw::new(u64::MAX, 0),
            8,
            "the file is damaged, fetch it again",
        ),
        (empty_key, 24, "convert the model again"),
    ] {
        let text = raw.open().unwrap_err().to_string();
        assert!(text.contains(&format!(" (at byte {at}); ")), "{text}");
        assert!(text.ends_with(mend), "{text}");
        assert_eq!(text.lines().count(), 1);
    }
}

#[test]
fn header_too_many_key_values() {
    let count = (1 << 16) + 1;
    let raw = Raw::new(0, count).raw(&vec![0; 14 * count as usize]);
    let limit = 1 << 16;
    assert_eq!(raw.fault(), Fault::TooManyKeyValues { count, limit });
}

#[test]
fn array_of_too_many_strings() {
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
