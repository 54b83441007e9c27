//! What all formats of text share: a byte order mark before it, a last line that was cut.

use super::*;

const MARK: &[u8] = b"\xef\xbb\xbf";

/// Golden files of every importer of text.
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

/// What the importer that recognises `path` reads.
fn read(path: &Path) -> (&'static str, Collected) {
    let detected = moe_foreign::detect(path).unwrap();
    let detected = detected.unwrap_or_else(|| panic!("{} is not recognised", path.display()));
    let mut rows = Collected::default();
    let options = ImportOptions {
        top_k: Some(2),
        ..ImportOptions::default()
    };
    let summary =
        moe_foreign::import(detected.importer, &detected.source, &options, &mut rows).unwrap();
    (summary.format, rows)
}

/// Rows and notes of a golden file without its last `cut` bytes.
fn read_cut(name: &str, importer_name: &str, cut: usize) -> (Collected, Vec<String>) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace");
    let mut text = std::fs::read(fixture(name)).unwrap();
    text.truncate(text.len() - cut);
    std::fs::write(&path, text).unwrap();
    let mut rows = Collected::default();
    let source = Source::file(&path);
    let options = ImportOptions::default();
    let summary =
        moe_foreign::import(importer(importer_name), &source, &options, &mut rows).unwrap();
    (rows, summary.notes)
}

#[test]
fn a_byte_order_mark_changes_nothing() {
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
fn a_byte_order_mark_moves_no_place() {
    let options = ImportOptions::default();
    // The brace that should be a number is the sixth character of the text, and of the second line.
    let line = "{\"t\":}\n";
    let place = "(column 6)";
    let good = "{\"t\":0,\"layer\":0,\"experts\":[1]}\n";
    let first = refused("jsonl", [MARK, line.as_bytes()].concat(), &options);
    assert!(
        first.starts_with("trace: line 1: ") && first.contains(place),
        "{first}"
    );
    let text = [MARK, good.as_bytes(), line.as_bytes()].concat();
    let second = refused("jsonl", text, &options);
    assert!(
        second.starts_with("trace: line 2: ") && second.contains(place),
        "{second}"
    );
    // One mark is taken away, not two.
    let twice = refused("jsonl", [MARK, MARK, good.as_bytes()].concat(), &options);
    assert!(twice.starts_with("trace: line 1: "), "{twice}");
}

#[test]
fn skips_and_reports_a_truncated_last_line() {
    // Rows of the last line, by its format: two experts of a token, or one. The story has 20 rows.
    let cases = [
        ("jsonl/small.jsonl", "jsonl", 5, 18),
        ("lattice/small.jsonl", "lattice", 5, 18),
        ("colibri-trace/small.txt", "colibri-trace", 8, 18),
        ("bigmoeonedge/small.route.csv", "bigmoeonedge", 5, 19),
    ];
    for (name, importer, cut, n_rows) in cases {
        let (rows, notes) = read_cut(name, importer, cut);
        assert_eq!(rows.routing, routing(name)[..n_rows], "{name}");
        let n_lines = std::fs::read_to_string(fixture(name))
            .unwrap()
            .lines()
            .count();
        let expected = format!("what is left of line {n_lines} was left out");
        assert!(
            notes.iter().any(|note| note.contains(&expected)),
            "{name}: {notes:?}"
        );
        // Whole but for the end of the line, it is read.
        let (rows, notes) = read_cut(name, importer, 1);
        assert_eq!(rows.routing, routing(name), "{name}");
        assert!(
            !notes.iter().any(|note| note.contains("is cut")),
            "{name}: {notes:?}"
        );
    }
    // Without the whole weight; a shorter one would be a number too.
    let (rows, _) = read_cut("ds4-hotlist/small.hotlist", "ds4-hotlist", 9);
    let whole = import("ds4-hotlist/small.hotlist", &ImportOptions::default()).0;
    assert_eq!(rows.counts, whole.counts[..whole.counts.len() - 1]);
}

#[test]
fn a_damaged_line_that_ends_is_an_error() {
    let good = "{\"t\":0,\"layer\":0,\"experts\":[1]}\n";
    let options = ImportOptions::default();
    for text in [
        format!("{good}{{\"t\":1,\n"),
        format!("{good}{{\"t\":1,\n{good}"),
    ] {
        let error = refused("jsonl", text, &options);
        assert!(error.starts_with("trace: line 2: "), "{error}");
    }
    // Nothing before it says that it is of the format at all.
    let error = refused("jsonl", "{\"t\":1,", &options);
    assert!(error.starts_with("trace: line 1: "), "{error}");
}
