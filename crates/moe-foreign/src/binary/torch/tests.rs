use std::io::Write;

use rawzip::ZipArchiveWriter;

use super::*;

/// An archive of these entries.
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

/// A file of that tensor, its storage holding the numbers 0 to 5.
fn file(pickle: &[u8]) -> Vec<u8> {
    let storage: Vec<u8> = (0i32..6).flat_map(i32::to_le_bytes).collect();
    archive(&[
        ("x/data.pkl", pickle, CompressionMethod::STORE),
        ("x/data/0", &storage, CompressionMethod::STORE),
    ])
}

/// What is wrong with the tensor that a file holds.
fn refused(bytes: &[u8]) -> String {
    let fault = match TorchFile::open(bytes) {
        Err(fault) => fault,
        Ok(file) => file.tensor(file.pickle().root()).unwrap().unwrap_err(),
    };
    assert!(fault.offset < bytes.len() as u64);
    fault.reason
}

#[test]
fn a_tensor_is_a_view_of_the_file() {
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
fn the_order_of_bytes_is_the_files() {
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
fn shapes_that_the_storage_does_not_hold_are_refused() {
    for (offset, size, stride) in [
        (0, &[7][..], &[1][..]),
        (0, &[2, 3], &[6, 1]),
        (0, &[1 << 40, 1 << 40], &[1, 1]),
        (0, &[1 << 40], &[0]), // one number shown a trillion times
        (7, &[1], &[1]),
        (1 << 62, &[1], &[1]),
        (0, &[2, 2], &[1]),
    ] {
        refused(&file(&tensor(b'0', offset, size, stride)));
    }
    assert!(refused(&file(&tensor(b'7', 0, &[1], &[1]))).contains("\"7\""));
    // Negative sizes, and something else in place of the storage.
    refused(&file(&tensor(b'0', 0, &[u64::MAX], &[1])));
    refused(&file(
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(NK\0))tR.",
    ));
}

#[test]
fn what_is_compressed_is_not_unpacked() {
    let bomb = archive(&[("x/data.pkl", b"\x03\0", CompressionMethod::DEFLATE)]);
    assert!(refused(&bomb).contains("compressed"));
}

#[test]
fn other_archives_are_refused() {
    let other = archive(&[("a.npy", b"N.", CompressionMethod::STORE)]);
    assert!(!is_applicable(&other));
    assert!(refused(&other).contains("no data.pkl"));
    assert!(refused(b"PK\x03\x04").contains("cut off"));
    assert!(refused(OLD).contains("before 1.6"));
    assert!(is_applicable(OLD));
    let run = archive(&[(
        "x/data.pkl",
        b"\x80\x02cbuiltins\neval\n(X\x02\0\0\x001+tR.",
        CompressionMethod::STORE,
    )]);
    assert!(refused(&run).contains("\"builtins.eval\""));
}

#[test]
fn storages_cannot_be_shown_without_end() {
    let bytes = file(&tensor(b'0', 0, &[6], &[1]));
    let file = TorchFile::open(&bytes).unwrap();
    let mut views = std::iter::repeat_with(|| file.tensor(file.pickle().root()).unwrap());
    let most = bytes.len() * MAX_VIEWS / 6;
    assert!(views.by_ref().take(most).all(|view| view.is_ok()));
    assert!(views.next().unwrap().is_err());
}
