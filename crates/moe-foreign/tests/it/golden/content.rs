//! Files that look like traces of 1024-byte records.

use moe_testkit::fixture;
use moe_trace::is_trace;

/// A tar archive with one file.
fn tar(content: &[u8]) -> Vec<u8> {
    let mut header = vec![0; 512];
    header[..9].copy_from_slice(b"trace.bin");
    header[100..108].copy_from_slice(b"0000644\0");
    let size = format!("{:011o}\0", content.len());
    header[124..136].copy_from_slice(size.as_bytes());
    header[148..156].copy_from_slice(b"        ");
    header[156] = b'0';
    header[257..265].copy_from_slice(b"ustar\x0000");
    let sum: u32 = header.iter().map(|&byte| u32::from(byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    [&header, content, &[0; 1024]].concat()
}

/// A database with one table: pages of 4096 bytes, which are filled from the end.
fn sqlite() -> Vec<u8> {
    let mut page = b"SQLite format 3\0\x10\0\x01\x01\0\x40\x20\x20".to_vec();
    page.resize(4096, 0);
    page[100..108].copy_from_slice(&[13, 0, 0, 0, 1, 15, 200, 0]);
    page[4040..4063].copy_from_slice(b"CREATE TABLE t (x TEXT)");
    let mut leaf = vec![0; 4096];
    leaf[..8].copy_from_slice(&[13, 0, 0, 0, 9, 1, 0, 0]);
    leaf[256..].fill(b'x');
    [page, leaf.clone(), leaf].concat()
}

#[test]
fn recognizes_no_trace_in_containers_and_shifted_files() {
    let trace = std::fs::read(fixture("foreign/thesis/small.bin")).unwrap();
    let gguf = std::fs::read(fixture("foreign/imatrix/small.gguf")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    let cases = [
        ("tar of a trace", tar(&trace)),
        ("tar of a model", tar(&gguf)),
        ("shifted GGUF", [b"\x01\0\0\0\0\0\0\0", &gguf[..]].concat()),
        (
            "shifted trace",
            [b"\x01\0\0\0\0\0\0\0", &trace[..]].concat(),
        ),
        (
            "safetensors",
            [&200u64.to_le_bytes()[..], b"{\"a\":1}", &[b' '; 4096]].concat(),
        ),
        ("gzip", [b"\x1f\x8b\x08\0\0\0\0\0", &[0; 4096][..]].concat()),
        ("one number", [&[1][..], &[0; 1023], &[7; 4096]].concat()),
        (
            "one record",
            [&trace[..1024], &[0; 1024], &[7; 4096]].concat(),
        ),
        ("SQLite", sqlite()),
    ];
    let magics = [
        &b"Obj\x01"[..],
        b"ORC",
        b"RIFF\x88\x13\0\0WAVEfmt ",
        b"\xd4\xc3\xb2\xa1\x02\0\x04",
    ];
    let starts = magics.map(|magic| (magic, [magic, &[0; 5000]].concat()));
    let starts = starts.map(|(magic, bytes)| (magic.escape_ascii().to_string(), bytes));
    let cases = cases.map(|(name, bytes)| (name.to_owned(), bytes));
    let cases = cases.into_iter().chain(starts);
    for (name, bytes) in cases {
        assert!(
            !is_trace(&bytes[..bytes.len().min(moe_foreign::SAMPLE_SIZE)]),
            "{name}"
        );
        std::fs::write(&path, bytes).unwrap();
        let detected = moe_foreign::detect(&path).unwrap();
        assert_eq!(detected.map(|d| d.importer.name()), None, "{name}");
    }
}

/// `info` reports the errors of a damaged trace, so a trace with some damaged records is still recognized.
#[test]
fn recognizes_a_trace_with_damaged_records() {
    let trace = std::fs::read(fixture("foreign/thesis/small.bin")).unwrap();
    assert!(is_trace(&trace));
    let mut damaged = trace.clone();
    damaged[5 * 1024 + 17] = 77; // its phase
    assert!(is_trace(&damaged));
    damaged[17] = 77;
    assert!(!is_trace(&damaged));
    // Unused space at the end of a preallocated file.
    assert!(is_trace(&[&trace[..1024], &[0; 8192]].concat()));
    // A block of the file was lost.
    assert!(is_trace(
        &[&trace[..8192], &[0; 8192], &trace[16384..]].concat()
    ));
    assert!(!is_trace(&[]));
    assert!(!is_trace(&trace[..1023]));
}
