//! Results of llama.cpp: JSON files in `fixtures/reference`, compressed with zstd.

use std::fs;
use std::path::{Path, PathBuf};

use crate::fixture;

const EXTENSION: &str = ".json.zst";

fn path(name: &str) -> PathBuf {
    fixture(format!("reference/{name}{EXTENSION}"))
}

/// The names of all files, without their extension.
pub fn names() -> Vec<String> {
    let files = fs::read_dir(fixture("reference")).expect("the directory of references");
    let name = |file: fs::DirEntry| {
        let name = file.file_name().into_string().expect("UTF-8");
        name.strip_suffix(EXTENSION).map(str::to_owned)
    };
    files
        .filter_map(|file| name(file.expect("an entry of the directory")))
        .collect()
}

/// The JSON of a file.
#[track_caller]
pub fn read(name: &str) -> Vec<u8> {
    decompressed(&path(name))
}

/// The contents of a file that is compressed with zstd.
#[track_caller]
pub fn decompressed(path: &Path) -> Vec<u8> {
    let bytes = fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    zstd::decode_all(bytes.as_slice()).expect("a zstd file")
}

/// Replaces a file.
pub fn write(name: &str, json: &[u8]) {
    let bytes = zstd::encode_all(json, 19).expect("compression to memory");
    fs::write(path(name), bytes).expect("a writable directory");
}
