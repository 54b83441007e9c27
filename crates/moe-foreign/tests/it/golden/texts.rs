//! Behaviour of all text formats: byte order marks and truncated last lines.

use super::*;

const MARK: &[u8] = b"\xef\xbb\xbf";

/// Golden files of every importer of a text format.
const TEXTS: [&str; 16] = [
    "bigmoeonedge/small.route.csv",
    "coli-usage/small.coli_usage",
    "colibri-trace/small.txt",
    "ds4-hotlist/small.hotlist",
    "eplb/small.json",
    "expert-tracer/written.json",
    "jsonl/small.jsonl",
    "lattice/small.jsonl",
    "layer-expert/small.csv",
    "megatron",
    "mesh-llm",
    "moe-balance/small.jsonl",
    "sglang/logical.json",
    "sglang-response/small.json",
    "thesis-json",
    "vllm/lists.json",
];

/// The format of a file, and the rows that its importer reads.
fn read(path: &Path) -> (&'static str, Collected) {
    let detected = moe_foreign::detect(path).unwrap();
    let detected = detected.unwrap_or_else(|| panic!("{} is not recognized", path.display()));
    let mut rows = Collected::default();
    let options = ImportOptions {
        top_k: Some(2),
        ..ImportOptions::default()
    };
    let summary =
        moe_foreign::import(detected.importer, &detected.source, &options, &mut rows).unwrap();
    (summary.format, rows)
}

/// Rows and notes of a golden file without its last `n_removed` bytes.
fn read_truncated(name: &str, importer_name: &str, n_removed: usize) -> (Collected, Vec<String>) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace");
    let mut text = std::fs::read(fixture(name)).unwrap();
    text.truncate(text.len() - n_removed);
    std::fs::write(&path, text).unwrap();
    let mut rows = Collected::default();
    let source = Source::file(&path);
    let options = ImportOptions::default();
    let summary =
        moe_foreign::import(importer(importer_name), &source, &options, &mut rows).unwrap();
    (rows, summary.notes)
}

#[test]
fn ignores_a_byte_order_mark() {
    for name in TEXTS {
        let golden = fixture(name);
        let dir = tempfile::tempdir().unwrap();
        let mut files = vec![golden.clone()];
        if golden.is_dir() {
            let entries = std::fs::read_dir(&golden).unwrap();
            files = entries.map(|entry| entry.unwrap().path()).collect();
        }
        let marked = |file: &Path| dir.path().join(file.file_name().unwrap());
        for file in &files {
            let text = [MARK, &std::fs::read(file).unwrap()].concat();
            std::fs::write(marked(file), text).unwrap();
        }
        let (expected_format, expected) = read(&golden);
        let path = if golden.is_dir() {
            dir.path().to_owned()
        } else {
            marked(&golden)
        };
        let (format, found) = read(&path);
        assert_eq!(format, expected_format, "{name}");
        assert_eq!(found.routing, expected.routing, "{name}");
        assert_eq!(found.counts, expected.counts, "{name}");
    }
}

#[test]
fn locations_of_errors_do_not_count_a_byte_order_mark() {
    let options = ImportOptions::default();
    // The brace in place of a number is the sixth character of the line.
    let line = "{\"t\":}\n";
    let is_at_column_6 = |error: &JsonError| matches!(error, JsonError::Invalid { column: 6, .. });
    let good = "{\"t\":0,\"layer\":0,\"experts\":[1]}\n";
    let first = error_of("jsonl", [MARK, line.as_bytes()].concat(), &options);
    assert_eq!(first.location(), Some(&Location::Line(1)), "{first}");
    assert!(
        first.cause::<JsonError>().is_some_and(is_at_column_6),
        "{first}"
    );
    let text = [MARK, good.as_bytes(), line.as_bytes()].concat();
    let second = error_of("jsonl", text, &options);
    assert_eq!(second.location(), Some(&Location::Line(2)), "{second}");
    assert!(
        second.cause::<JsonError>().is_some_and(is_at_column_6),
        "{second}"
    );
    // Only one mark is removed.
    let twice = error_of("jsonl", [MARK, MARK, good.as_bytes()].concat(), &options);
    assert_eq!(twice.location(), Some(&Location::Line(1)), "{twice}");
}

#[test]
fn skips_and_reports_a_truncated_last_line() {
    // Bytes to remove, and rows that remain of 20. The last line contains one or two rows.
    let cases = [
        ("jsonl/small.jsonl", "jsonl", 5, 18),
        ("lattice/small.jsonl", "lattice", 5, 18),
        ("colibri-trace/small.txt", "colibri-trace", 8, 18),
        ("bigmoeonedge/small.route.csv", "bigmoeonedge", 5, 19),
    ];
    for (name, importer, n_removed, n_rows) in cases {
        let (rows, notes) = read_truncated(name, importer, n_removed);
        assert_eq!(rows.routing, routing(name)[..n_rows], "{name}");
        let n_lines = std::fs::read_to_string(fixture(name))
            .unwrap()
            .lines()
            .count();
        let expected = format!("is truncated; skipped its incomplete last line {n_lines}");
        assert!(
            notes.iter().any(|note| note.contains(&expected)),
            "{name}: {notes:?}"
        );
        // Without its line feed, the last line is complete.
        let (rows, notes) = read_truncated(name, importer, 1);
        assert_eq!(rows.routing, routing(name), "{name}");
        assert!(
            !notes.iter().any(|note| note.contains("truncated")),
            "{name}: {notes:?}"
        );
    }
    // Remove the complete weight, because a shorter one is a number too.
    let (rows, _) = read_truncated("ds4-hotlist/small.hotlist", "ds4-hotlist", 9);
    let complete = import("ds4-hotlist/small.hotlist", &ImportOptions::default()).0;
    assert_eq!(rows.counts, complete.counts[..complete.counts.len() - 1]);
}

#[test]
fn rejects_a_damaged_line_with_a_line_feed() {
    let good = "{\"t\":0,\"layer\":0,\"experts\":[1]}\n";
    let options = ImportOptions::default();
    for text in [
        format!("{good}{{\"t\":1,\n"),
        format!("{good}{{\"t\":1,\n{good}"),
    ] {
        let error = error_of("jsonl", text, &options);
        assert_eq!(error.location(), Some(&Location::Line(2)), "{error}");
    }
    // The only line of a file is not skipped.
    let error = error_of("jsonl", "{\"t\":1,", &options);
    assert_eq!(error.location(), Some(&Location::Line(1)), "{error}");
}
