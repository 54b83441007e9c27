//! Files that are mistaken for traces of 1024-byte records.

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

#[test]
fn other_files_are_not_traces() {
    let trace = std::fs::read(fixture("foreign/thesis/small.bin")).unwrap();
    let gguf = std::fs::read(fixture("foreign/imatrix/small.gguf")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    let cases = [
        ("tar of a trace", tar(&trace)),
        ("tar of a model", tar(&gguf)),
        (
            "displaced GGUF",
            [b"\x01\0\0\0\0\0\0\0", &gguf[..]].concat(),
        ),
        (
            "displaced trace",
            [b"\x01\0\0\0\0\0\0\0", &trace[..]].concat(),
        ),
        (
            "safetensors",
            [&200u64.to_le_bytes()[..], b"{\"a\":1}", &[b' '; 4096]].concat(),
        ),
        ("gzip", [b"\x1f\x8b\x08\0\0\0\0\0", &[0; 4096][..]].concat()),
        ("one number", [&[1][..], &[0; 1023], &[7; 4096]].concat()),
    ];
    for (what, bytes) in cases {
        assert!(
            !is_trace(&bytes[..bytes.len().min(moe_foreign::SAMPLE_SIZE)]),
            "{what}"
        );
        std::fs::write(&path, bytes).unwrap();
        let detected = moe_foreign::detect(&path).unwrap();
        assert_eq!(detected.map(|d| d.importer.name()), None, "{what}");
    }
}

/// `info` names the faults of a damaged trace, so that some damaged records do not hide what the file is.
#[test]
fn damaged_records_do_not_hide_a_trace() {
    let trace = std::fs::read(fixture("foreign/thesis/small.bin")).unwrap();
    assert!(is_trace(&trace));
    let mut damaged = trace.clone();
    damaged[5 * 1024 + 17] = 77; // its phase
    assert!(is_trace(&damaged));
    damaged[17] = 77;
    assert!(!is_trace(&damaged));
    // The unused space at the end of a file that was allocated at once.
    assert!(is_trace(&[&trace[..1024], &[0; 8192]].concat()));
    assert!(!is_trace(&[]));
    assert!(!is_trace(&trace[..1023]));
}
