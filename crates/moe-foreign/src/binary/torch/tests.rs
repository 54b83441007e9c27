use std::io::Write;

use rawzip::ZipArchiveWriter;

use super::*;

/// A ZIP archive of `entries`.
fn archive(entries: &[(&str, &[u8], CompressionMethod)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut archive = ZipArchiveWriter::new(&mut bytes);
    for (name, data, method) in entries {
        let file = archive.new_file(*name).compression_method(*method);
        let (mut entry, config) = file.start().unwrap();
        let mut writer = config.wrap(&mut entry);
        writer.write_all(data).unwrap();
        let (_, descriptor) = writer.finish().unwrap();
        entry.finish(descriptor).unwrap();
    }
    archive.finish().unwrap();
    bytes
}

fn number(n: u64) -> Vec<u8> {
    let mut step = vec![0x8a, 8]; // LONG1
    step.extend(n.to_le_bytes());
    step
}

fn numbers(all: &[u64]) -> Vec<u8> {
    let inner: Vec<u8> = all.iter().flat_map(|&n| number(n)).collect();
    [&b"("[..], &inner, b"t"].concat()
}

/// The pickle of a tensor of 32-bit integers in storage `key`.
fn tensor(key: u8, offset: u64, size: &[u64], stride: &[u64]) -> Vec<u8> {
    [
        &b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nIntStorage\nX\x01\0\0\0"[..],
        &[key],
        b"X\x03\0\0\0cpuK\x06tQ",
        &number(offset),
        &numbers(size),
        &numbers(stride),
        b"\x89ccollections\nOrderedDict\n)RtR.",
    ]
    .concat()
}

/// A file of that pickle, with storage 0 = the integers 0 to 5.
fn file(pickle: &[u8]) -> Vec<u8> {
    let storage: Vec<u8> = (0i32..6).flat_map(i32::to_le_bytes).collect();
    archive(&[
        ("x/data.pkl", pickle, CompressionMethod::STORE),
        ("x/data/0", &storage, CompressionMethod::STORE),
    ])
}

/// The error of the file or of its tensor.
fn error_of(bytes: &[u8]) -> String {
    let error = match TorchFile::open(bytes) {
        Err(error) => error,
        Ok(file) => file.tensor(file.pickle().root()).unwrap().unwrap_err(),
    };
    assert!(error.offset < bytes.len() as u64);
    error.reason
}

#[test]
fn reads_a_tensor_with_offset_and_strides() {
    let bytes = file(&tensor(b'0', 1, &[2, 2], &[1, 3]));
    assert!(is_applicable(&bytes));
    let file = TorchFile::open(&bytes).unwrap();
    let tensor = file.tensor(file.pickle().root()).unwrap().unwrap();
    assert_eq!(tensor.shape(), [2, 2]);
    let at = |i, j| tensor.integer(&[i, j]).unwrap();
    assert_eq!([at(0, 0), at(0, 1), at(1, 0), at(1, 1)], [1, 4, 2, 5]);
    assert!(file.tensor(Value::Int(1)).is_none());
}

#[test]
fn reads_big_endian_tensors() {
    let storage: Vec<u8> = (0i32..6).flat_map(i32::to_be_bytes).collect();
    let pickle = tensor(b'0', 0, &[6], &[1]);
    let bytes = archive(&[
        ("x/data.pkl", &pickle, CompressionMethod::STORE),
        ("x/byteorder", b"big", CompressionMethod::STORE),
        ("x/data/0", &storage, CompressionMethod::STORE),
    ]);
    let file = TorchFile::open(&bytes).unwrap();
    let tensor = file.tensor(file.pickle().root()).unwrap().unwrap();
    assert_eq!(tensor.integer(&[5]), Some(5));
}

#[test]
fn rejects_shapes_that_exceed_the_storage() {
    for (offset, size, stride) in [
        (0, &[7][..], &[1][..]),
        (0, &[2, 3], &[6, 1]),
        (0, &[1 << 40, 1 << 40], &[1, 1]),
        (0, &[1 << 40], &[0]), // one element repeated 2^40 times
        (7, &[1], &[1]),
        (1 << 62, &[1], &[1]),
        (0, &[2, 2], &[1]),
    ] {
        error_of(&file(&tensor(b'0', offset, size, stride)));
    }
    assert!(error_of(&file(&tensor(b'7', 0, &[1], &[1]))).contains("\"7\""));
    // A negative size, and an object that is not a storage.
    error_of(&file(&tensor(b'0', 0, &[u64::MAX], &[1])));
    error_of(&file(
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(NK\0))tR.",
    ));
}

#[test]
fn rejects_compressed_entries() {
    let bomb = archive(&[("x/data.pkl", b"\x03\0", CompressionMethod::DEFLATE)]);
    assert!(error_of(&bomb).contains("compressed"));
}

#[test]
fn rejects_other_archives_and_unknown_globals() {
    let other = archive(&[("a.npy", b"N.", CompressionMethod::STORE)]);
    assert!(!is_applicable(&other));
    assert!(error_of(&other).contains("no data.pkl"));
    assert!(error_of(b"PK\x03\x04").contains("truncated"));
    assert!(error_of(LEGACY).contains("before 1.6"));
    assert!(is_applicable(LEGACY));
    let call = archive(&[(
        "x/data.pkl",
        b"\x80\x02cbuiltins\neval\n(X\x02\0\0\x001+tR.",
        CompressionMethod::STORE,
    )]);
    assert!(error_of(&call).contains("\"builtins.eval\""));
}

#[test]
fn limits_the_number_of_views_of_a_storage() {
    let bytes = file(&tensor(b'0', 0, &[6], &[1]));
    let file = TorchFile::open(&bytes).unwrap();
    let mut views = std::iter::repeat_with(|| file.tensor(file.pickle().root()).unwrap());
    let max = bytes.len() * MAX_VIEWS / 6;
    assert!(views.by_ref().take(max).all(|view| view.is_ok()));
    assert!(views.next().unwrap().is_err());
}
