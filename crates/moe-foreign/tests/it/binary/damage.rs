//! Truncated files, and files with changed bytes.

use std::fs;
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;

use super::{FILES, Kept, fixtures, options};

/// Imports a damaged file. An error must be one line with the path and a location.
fn must_not_panic(path: &Path) {
    let Some(detected) = moe_foreign::detect(path).unwrap() else {
        return;
    };
    let mut kept = Kept::default();
    if let Err(error) =
        moe_foreign::import(detected.importer, &detected.source, &options(), &mut kept)
    {
        let message = error.to_string();
        assert!(message.contains(path.to_str().unwrap()), "{message}");
        assert_eq!(message.lines().count(), 1, "{message}");
        let places = [
            "byte",
            "line",
            "record",
            "element",
            "no routing",
            "more than the limit of",
            "tensor",
        ];
        assert!(
            places.iter().any(|place| message.contains(place)),
            "{message}"
        );
    }
}

#[test]
fn truncated_files_do_not_panic() {
    let dir = tempfile::tempdir().unwrap();
    for name in FILES {
        let path = dir.path().join("trace");
        let size = fs::copy(fixtures().join(name), &path).unwrap();
        let file = fs::File::options().write(true).open(&path).unwrap();
        for end in (0..size).rev() {
            file.set_len(end).unwrap();
            must_not_panic(&path);
        }
    }
}

#[test]
fn changed_bytes_do_not_panic() {
    let dir = tempfile::tempdir().unwrap();
    for name in FILES {
        let complete = fs::read(fixtures().join(name)).unwrap();
        let path = dir.path().join("trace");
        fs::write(&path, &complete).unwrap();
        let mut file = fs::File::options().write(true).open(&path).unwrap();
        let mut write = |at: usize, byte: u8| {
            file.seek(SeekFrom::Start(at as u64)).unwrap();
            file.write_all(&[byte]).unwrap();
        };
        for (at, &byte) in complete.iter().enumerate() {
            for change in [0x01, 0x80, 0xff] {
                write(at, byte ^ change);
                must_not_panic(&path);
            }
            write(at, byte);
        }
    }
}
