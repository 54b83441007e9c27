//! Exported traces are equal after importing them again, except for what the format cannot represent.

mod runs;
mod unknown;

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use moe_foreign::{
    Counts, EXPORTERS, Export, ExportError, Exporter, FILES_EXPORTERS, ForeignError, IMPORTERS,
    ImportOptions, Importer, Input, UnsupportedTrace,
};
use moe_trace::{CountRow, ModelInfo, RoutingRow, Sink, SinkError};

/// A trace with all values: two layers, a prompt of two tokens and two generated tokens.
const FULL: &str = "\
# route_trace v1
# model=small.gguf arch=qwen3moe n_layer=3 n_expert=8 n_expert_used=2
# layer=1 expert_bytes=1000
# layer=2 expert_bytes=2000
turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
4,0,0,1,0,5,0.75,0,1000
4,0,0,1,1,1,0.25,0,1000
4,0,1,1,0,3,0.5,0,1000
4,0,1,1,1,5,0.5,0,0
4,0,1,2,0,6,0.625,0,2000
4,0,1,2,1,2,0.375,0,2000
4,1,2,1,0,5,0.875,1,0
4,1,2,1,1,3,0.125,1,0
4,1,2,2,0,7,0.625,0,2000
4,1,2,2,1,6,0.375,1,0
4,1,3,1,0,0,0.5,0,1000
4,1,3,1,1,5,0.5,1,0
4,1,3,2,0,6,1,1,0
4,1,3,2,1,2,0,1,0
";

/// The same counts without order, phases and weights.
const COUNTS: &str =
    "[[0, 0, 0, 0, 0, 0, 0, 0], [1, 1, 0, 2, 0, 4, 0, 0], [0, 0, 2, 0, 0, 0, 3, 1]]";

#[derive(Debug, Default, Clone, PartialEq)]
struct Kept {
    rows: Vec<RoutingRow>,
    counts: Vec<CountRow>,
    model_info: ModelInfo,
}

impl Sink for Kept {
    fn model_info(&mut self, model_info: &ModelInfo) -> Result<(), SinkError> {
        self.model_info = model_info.clone();
        Ok(())
    }

    fn routing(&mut self, row: &RoutingRow) -> Result<(), SinkError> {
        self.rows.push(*row);
        Ok(())
    }

    fn count(&mut self, row: &CountRow) -> Result<(), SinkError> {
        self.counts.push(*row);
        Ok(())
    }
}

fn importer(name: &str) -> &'static dyn Importer {
    let found = IMPORTERS.iter().find(|importer| importer.name() == name);
    *found.unwrap_or_else(|| panic!("no importer {name}"))
}

fn exporter(name: &str) -> &'static dyn Exporter {
    let found = EXPORTERS.iter().find(|exporter| exporter.name() == name);
    *found.unwrap_or_else(|| panic!("no exporter {name}"))
}

fn detected(path: &Path) -> Input {
    let detected = moe_foreign::detect(path).unwrap();
    Input::Foreign(detected.expect("a known format"))
}

/// Writes `text` as a file and opens it as a foreign trace.
fn input(dir: &Path, text: &str) -> Input {
    let path = dir.join("input");
    fs::write(&path, text).unwrap();
    detected(&path)
}

fn export(
    input: &Input,
    exporter: &dyn Exporter,
    options: &ImportOptions,
    path: &Path,
) -> Result<Vec<String>, ExportError> {
    let mut out = File::create(path).unwrap();
    exporter.export(&Export::new(input, options)?, &mut out)
}

fn read(input: &Input, options: &ImportOptions) -> Kept {
    let mut kept = Kept::default();
    input.read(options, &mut kept).unwrap();
    kept
}

/// Reads an exported file, which must be recognized as `format`.
fn read_again(path: &Path, format: &str, options: &ImportOptions) -> Kept {
    let Input::Foreign(found) = detected(path) else {
        panic!("a foreign trace");
    };
    assert_eq!(found.importer.name(), format);
    read(&Input::Foreign(found), options)
}

/// Counts summed over the phases: layer, expert, count and mass.
fn totals(kept: &Kept, with_masses: bool) -> Vec<(u16, u32, u64, Option<f64>)> {
    let mut counts = Counts::default();
    kept.rows
        .iter()
        .for_each(|row| counts.routing(row).unwrap());
    kept.counts
        .iter()
        .for_each(|row| counts.count(row).unwrap());
    let mut totals = Vec::new();
    for (layer, counts) in counts.layers() {
        for (expert, tally) in counts.experts {
            let mass = tally.mass.filter(|_| with_masses);
            totals.push((layer.0, expert.0, tally.count, mass));
        }
    }
    totals
}

#[test]
fn formats_of_routing_keep_rows() {
    let dir = tempfile::tempdir().unwrap();
    let input = input(dir.path(), FULL);
    let original = read(&input, &ImportOptions::default());
    assert_eq!(original.rows.len(), 14);
    // Removes what the format cannot represent.
    type Remove = fn(&mut RoutingRow);
    let formats: [(&str, Remove); 3] = [
        ("bigmoeonedge", |_| {}),
        ("jsonl", |row| row.lane = None),
        ("npy", |row| {
            row.lane = None;
            row.sequence_id = None;
            row.phase = None;
            row.weight = None;
        }),
    ];
    for (name, remove) in formats {
        let path = dir.path().join(name);
        export(&input, exporter(name), &ImportOptions::default(), &path).unwrap();
        let options = ImportOptions::default();
        let mut expected = original.rows.clone();
        expected.iter_mut().for_each(remove);
        let mut again = read_again(&path, name, &options).rows;
        // Arrays are ordered by token, not by pass.
        let order = |row: &RoutingRow| (row.token_id.0, row.layer_id.0, row.slot);
        expected.sort_by_key(order);
        again.sort_by_key(order);
        assert_eq!(again, expected, "{name}");
    }
}

#[test]
fn route_csv_is_copied_exactly() {
    let dir = tempfile::tempdir().unwrap();
    let input = input(dir.path(), FULL);
    let path = dir.path().join("copy");
    export(
        &input,
        exporter("bigmoeonedge"),
        &ImportOptions::default(),
        &path,
    )
    .unwrap();
    assert_eq!(fs::read_to_string(path).unwrap(), FULL);
}

#[test]
fn published_route_csv_is_copied_except_for_dense_bytes() {
    let Some(data) = moe_testkit::data("bigmoeonedge") else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    for file in ["gptoss.route.csv", "qwen.route.csv"] {
        let path = data.join(file);
        let copy = dir.path().join(file);
        let options = ImportOptions::default();
        export(&detected(&path), exporter("bigmoeonedge"), &options, &copy).unwrap();
        // The format supports the dense bytes of a layer, but `ModelInfo` does not contain them.
        let without_dense = |path: &Path| -> Vec<String> {
            let text = fs::read_to_string(path).unwrap();
            let lines = text.lines();
            let kept = lines.map(|line| line.split(" dense_bytes=").next().unwrap().to_owned());
            kept.collect()
        };
        assert!(without_dense(&copy) == without_dense(&path), "{file}");
    }
}

#[test]
fn formats_of_counts_keep_counts() {
    let dir = tempfile::tempdir().unwrap();
    for text in [FULL, COUNTS] {
        let input = input(dir.path(), text);
        let original = totals(&read(&input, &ImportOptions::default()), false);
        assert_eq!(original.len(), 7);
        for (name, format) in [
            ("coli-usage", "coli-usage"),
            ("ds4-hotlist", "ds4-hotlist"),
            ("eplb", "eplb"),
            ("npy-counts", "npy"),
            ("sglang", "sglang"),
        ] {
            let path = dir.path().join(name);
            let losses = export(&input, exporter(name), &ImportOptions::default(), &path).unwrap();
            let has_order = losses.iter().any(|loss| loss.contains("order"));
            assert_eq!(has_order, text == FULL, "{name}: {losses:?}");
            let again = read_again(&path, format, &ImportOptions::default());
            assert_eq!(totals(&again, false), original, "{name}");
        }
    }
}

#[test]
fn learn_file_keeps_counts() {
    let dir = tempfile::tempdir().unwrap();
    for text in [FULL, COUNTS] {
        let input = input(dir.path(), text);
        let original = totals(&read(&input, &ImportOptions::default()), false);
        let path = dir.path().join("learn");
        export(&input, exporter("learn"), &ImportOptions::default(), &path).unwrap();
        let again = read_again(&path, "learn", &ImportOptions::default());
        assert_eq!(totals(&again, false), original);
    }
}

#[test]
fn every_exporter_is_tested() {
    let names: Vec<&str> = EXPORTERS.iter().map(|exporter| exporter.name()).collect();
    let tested = [
        "bigmoeonedge",
        "coli-usage",
        "ds4-hotlist",
        "eplb",
        "eplb-csv", // has no importer: nothing in the file identifies the format
        "jsonl",
        "npy",
        "npy-counts",
        "sglang",
        "learn",
        "perfetto", // has no importer; unit tests of the exporter
    ];
    assert_eq!(names, tested);
    let names: Vec<&str> = FILES_EXPORTERS
        .iter()
        .map(|exporter| exporter.name())
        .collect();
    assert_eq!(names, ["mesh-llm", "thesis-json"]);
}

#[test]
fn writes_the_expected_text() {
    let dir = tempfile::tempdir().unwrap();
    let input = input(dir.path(), FULL);
    let written = |name: &str| {
        let path = dir.path().join(name);
        export(&input, exporter(name), &ImportOptions::default(), &path).unwrap();
        fs::read_to_string(path).unwrap()
    };
    // Counted by hand in FULL.
    let matrix = COUNTS.to_owned();
    assert_eq!(written("eplb"), format!("{matrix}\n"));
    assert_eq!(
        written("sglang"),
        format!("{{\"logical_count\": {matrix}}}\n")
    );
    assert_eq!(
        written("eplb-csv"),
        "0,0,0,0,0,0,0,0\n1,1,0,2,0,4,0,0\n0,0,2,0,0,0,3,1\n"
    );
    assert_eq!(
        written("coli-usage"),
        "-1 3 8\n1 0 1\n1 1 1\n1 3 2\n1 5 4\n2 2 2\n2 6 3\n2 7 1\n"
    );
    assert_eq!(
        written("ds4-hotlist"),
        "# ds4 expert hotlist v1\n# model small.gguf\n# layers 3\n# experts 8\n# layer_records 7\n# selections 14\n\
         # columns: layer expert hits weight\n1 5 4 2.625000\n2 6 3 2.000000\n1 3 2 0.625000\n2 2 2 0.375000\n\
         2 7 1 0.625000\n1 0 1 0.500000\n1 1 1 0.250000\n"
    );
    assert!(written("jsonl").starts_with(
        "{\"t\":0,\"layer\":1,\"experts\":[5,1],\"weights\":[0.75,0.25],\"phase\":\"prefill\",\"seq\":4}\n"
    ));
}

/// Writes `input` to the directory `dir` with the exporter `name`.
fn export_files(input: &Input, name: &str, dir: &Path) -> Result<Vec<String>, ExportError> {
    let exporter = FILES_EXPORTERS
        .iter()
        .find(|exporter| exporter.name() == name);
    fs::create_dir(dir).unwrap();
    let mut create = |name: &str| -> io::Result<Box<dyn Write>> {
        Ok(Box::new(File::create_new(dir.join(name))?))
    };
    let options = ImportOptions::default();
    exporter
        .unwrap()
        .export(&Export::new(input, &options)?, &mut create)
}

#[test]
fn mesh_llm_writes_one_ranking_per_layer() {
    let dir = tempfile::tempdir().unwrap();
    for (text, has_masses) in [(FULL, true), (COUNTS, false)] {
        let input = input(dir.path(), text);
        let out = dir.path().join(format!("masses-{has_masses}"));
        let losses = export_files(&input, "mesh-llm", &out).unwrap();
        assert_eq!(
            losses
                .iter()
                .any(|loss| loss.contains("counts as weight 1")),
            !has_masses
        );
        let ranking = fs::read_to_string(out.join("layer-001.csv")).unwrap();
        // Mesh-LLM reads the first column of every line that is not a comment or the header.
        let experts: Vec<u32> = ranking
            .lines()
            .filter(|line| !line.starts_with('#') && !line.starts_with("expert"))
            .filter_map(|line| line.split(',').next()?.parse().ok())
            .collect();
        assert_eq!(experts, [5, 3, 0, 1]);
        let again = read_again(&out, "mesh-llm", &ImportOptions::default());
        let original = totals(&read(&input, &ImportOptions::default()), true);
        assert_eq!(totals(&again, true), original);
    }
}

#[test]
fn formats_of_routing_reject_counts() {
    let dir = tempfile::tempdir().unwrap();
    let input = input(dir.path(), COUNTS);
    for name in ["bigmoeonedge", "jsonl", "npy"] {
        let path = dir.path().join(name);
        let error = export(&input, exporter(name), &ImportOptions::default(), &path).unwrap_err();
        let is_expected = matches!(
            error,
            ExportError::NoOrder { format, from: "eplb" } if format == name
        );
        assert!(is_expected, "{error}");
    }
    let error = export_files(&input, "thesis-json", &dir.path().join("thesis")).unwrap_err();
    assert!(matches!(error, ExportError::Missing { .. }), "{error}");
}

/// The cause of [`ExportError::Unsupported`].
fn unsupported(error: &ExportError) -> Option<&UnsupportedTrace> {
    match error {
        ExportError::Unsupported { source, .. } => source.downcast_ref(),
        _ => None,
    }
}

#[test]
fn route_csv_needs_phases_and_sequences() {
    let dir = tempfile::tempdir().unwrap();
    let input = input(dir.path(), "{\"t\":0,\"layer\":0,\"experts\":[3,1]}\n");
    let path = dir.path().join("out");
    let options = ImportOptions::default();
    let export = || export(&input, exporter("bigmoeonedge"), &options, &path);
    let error = export().unwrap_err();
    let is_expected = matches!(error, ExportError::Missing { what: "phases", .. });
    assert!(is_expected, "{error}");

    // Unknown weights are written as nan, and unknown again when they are read.
    let text = "{\"t\":0,\"layer\":0,\"experts\":[3,1],\"phase\":\"decode\"}\n";
    fs::write(dir.path().join("input"), text).unwrap();
    let losses = export().unwrap();
    assert!(losses.iter().any(|loss| loss.contains("nan")), "{losses:?}");
    let again = read_again(&path, "bigmoeonedge", &ImportOptions::default());
    assert_eq!(again.rows.len(), 2);
    assert!(again.rows.iter().all(|row| row.weight.is_none()));

    // Each row needs a turn, so a token without a sequence would be counted in turn 0.
    let sequences = [text, &text.replace('}', ",\"seq\":0}")].concat();
    fs::write(dir.path().join("input"), sequences).unwrap();
    let error = export().unwrap_err();
    assert_eq!(
        unsupported(&error),
        Some(&UnsupportedTrace::MixedSequences),
        "{error}"
    );
}

#[test]
fn arrays_reject_several_sequences() {
    let dir = tempfile::tempdir().unwrap();
    let line = |seq: &str| format!("{{\"t\":0,\"layer\":0,\"experts\":[3,1]{seq}}}\n");
    for text in [
        line(",\"seq\":0") + &line(",\"seq\":1"),
        line("") + &line(""), // several sequences without identifiers
    ] {
        let input = input(dir.path(), &text);
        let path = dir.path().join("out.npy");
        let error = export(&input, exporter("npy"), &ImportOptions::default(), &path).unwrap_err();
        let is_expected = matches!(
            unsupported(&error),
            Some(UnsupportedTrace::Sequences { .. } | UnsupportedTrace::RepeatedToken { .. })
        );
        assert!(is_expected, "{error}");
    }
}

#[test]
fn rejects_an_impossible_number_of_layers_or_experts() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("input");
    for header in ["-1 4294967295 8", "-1 2 4294967295"] {
        fs::write(&path, format!("{header}\n0 3 1\n")).unwrap();
        let error = detected(&path).read(&ImportOptions::default(), &mut Kept::default());
        assert!(matches!(error, Err(ForeignError::File { .. })), "{error:?}");
    }
}
