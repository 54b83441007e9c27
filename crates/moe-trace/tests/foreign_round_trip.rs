//! What is exported and imported again is the same, as far as the format can hold it.

mod common;

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use common::{expert_layer, gpt_oss, manifest};
use moe_trace::foreign::{
    self, CountRow, Counts, EXPORTERS, Export, ExportError, Exporter, FILES_EXPORTERS, Facts,
    IMPORTERS, Importer, Input, Options, Phase, RoutingRow, Sink, SinkError, Source,
};
use moe_trace::record::{PHASE_GENERATE, lane};
use moe_trace::{Run, RunOptions, RunWriter};

/// A trace that tells everything: two layers, a prompt of two tokens, two generated ones.
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
    facts: Facts,
}

impl Sink for Kept {
    fn facts(&mut self, facts: &Facts) -> Result<(), SinkError> {
        self.facts = facts.clone();
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
    *found.unwrap_or_else(|| panic!("no importer is called {name}"))
}

fn exporter(name: &str) -> &'static dyn Exporter {
    let found = EXPORTERS.iter().find(|exporter| exporter.name() == name);
    *found.unwrap_or_else(|| panic!("no exporter is called {name}"))
}

fn detected(path: &Path) -> Input {
    let detected = foreign::detect(path, IMPORTERS).unwrap();
    Input::Foreign(detected.expect("a format that is known"))
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
    options: &Options,
    path: &Path,
) -> Result<Vec<String>, ExportError> {
    let mut out = File::create(path).unwrap();
    exporter.export(&Export::new(input, options)?, &mut out)
}

fn read(input: &Input, options: &Options) -> Kept {
    let mut kept = Kept::default();
    input.read(options, &mut kept).unwrap();
    kept
}

/// Reads what was exported, which must be recognised as what it is.
fn read_again(path: &Path, format: &str, options: &Options) -> Kept {
    let Input::Foreign(found) = detected(path) else {
        panic!("a foreign trace");
    };
    assert_eq!(found.importer.name(), format);
    read(&Input::Foreign(found), options)
}

/// Counts of both phases, by layer and expert.
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
            totals.push((layer, expert, tally.count, mass));
        }
    }
    totals
}

#[test]
fn formats_of_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let input = input(dir.path(), FULL);
    let original = read(&input, &Options::default());
    assert_eq!(original.rows.len(), 14);
    // What each format does not hold, and which of its layers are counted anew.
    type Forget = fn(&mut RoutingRow);
    let formats: [(&str, Forget); 3] = [
        ("bigmoeonedge", |_| {}),
        ("jsonl", |row| row.lane = None),
        ("npy", |row| {
            row.lane = None;
            row.sequence_id = None;
            row.phase = None;
            row.weight = None;
        }),
    ];
    for (name, forget) in formats {
        let path = dir.path().join(name);
        export(&input, exporter(name), &Options::default(), &path).unwrap();
        // An array of NumPy counts the layers with experts, which the model then tells.
        let options = Options {
            model: Some(original.facts.clone()).filter(|_| name == "npy"),
            ..Options::default()
        };
        let mut expected = original.rows.clone();
        expected.iter_mut().for_each(forget);
        let mut again = read_again(&path, name, &options).rows;
        // It also goes through them token by token.
        let order = |row: &RoutingRow| (row.token_id, row.layer_id, row.slot);
        expected.sort_by_key(order);
        again.sort_by_key(order);
        assert_eq!(again, expected, "{name}");
    }
}

#[test]
fn an_exact_copy() {
    let dir = tempfile::tempdir().unwrap();
    let input = input(dir.path(), FULL);
    let path = dir.path().join("copy");
    export(&input, exporter("bigmoeonedge"), &Options::default(), &path).unwrap();
    assert_eq!(fs::read_to_string(path).unwrap(), FULL);
}

#[test]
fn published_traces_come_out_as_they_went_in() {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data/bigmoeonedge");
    let dir = tempfile::tempdir().unwrap();
    for file in ["gptoss.route.csv", "qwen.route.csv"] {
        let path = data.join(file);
        if !path.exists() {
            eprintln!("{} is not there: not tested", path.display());
            continue;
        }
        let copy = dir.path().join(file);
        let options = Options::default();
        export(&detected(&path), exporter("bigmoeonedge"), &options, &copy).unwrap();
        // Of the preamble the bytes of a layer's dense part are lost.
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
fn formats_of_counts_from_tokens_and_from_counts() {
    let dir = tempfile::tempdir().unwrap();
    for text in [FULL, COUNTS] {
        let input = input(dir.path(), text);
        let original = totals(&read(&input, &Options::default()), false);
        assert_eq!(original.len(), 7);
        for (name, format) in [
            ("coli-usage", "coli-usage"),
            ("ds4-hotlist", "ds4-hotlist"),
            ("eplb", "eplb"),
            ("npy-counts", "npy"),
            ("sglang", "sglang"),
        ] {
            let path = dir.path().join(name);
            let losses = export(&input, exporter(name), &Options::default(), &path).unwrap();
            let told = losses.iter().any(|loss| loss.contains("order"));
            assert_eq!(told, text == FULL, "{name}: {losses:?}");
            let again = read_again(&path, format, &Options::default());
            assert_eq!(totals(&again, false), original, "{name}");
        }
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
        "eplb-csv", // in the test of what is written: nothing reads it, as nothing in it tells what it is
        "jsonl",
        "npy",
        "npy-counts",
        "sglang",
    ];
    assert_eq!(names, tested);
    let names: Vec<&str> = FILES_EXPORTERS
        .iter()
        .map(|exporter| exporter.name())
        .collect();
    assert_eq!(names, ["mesh-llm", "thesis-json"]);
}

#[test]
fn what_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let input = input(dir.path(), FULL);
    let written = |name: &str| {
        let path = dir.path().join(name);
        export(&input, exporter(name), &Options::default(), &path).unwrap();
        fs::read_to_string(path).unwrap()
    };
    // Counted by hand from the text above.
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

/// What a format of several files writes, by name.
fn export_files(input: &Input, name: &str, dir: &Path) -> Result<Vec<String>, ExportError> {
    let exporter = FILES_EXPORTERS
        .iter()
        .find(|exporter| exporter.name() == name);
    fs::create_dir(dir).unwrap();
    let mut create = |name: &str| -> io::Result<Box<dyn Write>> {
        Ok(Box::new(File::create_new(dir.join(name))?))
    };
    let options = Options::default();
    exporter
        .unwrap()
        .export(&Export::new(input, &options)?, &mut create)
}

#[test]
fn a_ranking_for_each_layer() {
    let dir = tempfile::tempdir().unwrap();
    for (text, has_masses) in [(FULL, true), (COUNTS, false)] {
        let input = input(dir.path(), text);
        let out = dir.path().join(format!("masses-{has_masses}"));
        let losses = export_files(&input, "mesh-llm", &out).unwrap();
        assert_eq!(
            losses.iter().any(|loss| loss.contains("weighs 1")),
            !has_masses
        );
        let ranking = fs::read_to_string(out.join("layer-001.csv")).unwrap();
        // What Mesh-LLM's reader makes of it: the first column of every line that is neither comment nor header.
        let experts: Vec<u32> = ranking
            .lines()
            .filter(|line| !line.starts_with('#') && !line.starts_with("expert"))
            .filter_map(|line| line.split(',').next()?.parse().ok())
            .collect();
        assert_eq!(experts, [5, 3, 0, 1]);
        let again = read_again(&out, "mesh-llm", &Options::default());
        let original = totals(&read(&input, &Options::default()), true);
        assert_eq!(totals(&again, true), original);
    }
}

#[test]
fn what_needs_an_order_refuses_counts() {
    let dir = tempfile::tempdir().unwrap();
    let input = input(dir.path(), COUNTS);
    for name in ["bigmoeonedge", "jsonl", "npy"] {
        let path = dir.path().join(name);
        let error = export(&input, exporter(name), &Options::default(), &path).unwrap_err();
        let message = error.to_string();
        assert!(
            message.contains("counts alone") && message.contains(name),
            "{message}"
        );
    }
    let error = export_files(&input, "thesis-json", &dir.path().join("thesis")).unwrap_err();
    assert!(error.to_string().contains("run"), "{error}");
}

#[test]
fn what_a_format_must_have_is_not_made_up() {
    let dir = tempfile::tempdir().unwrap();
    let input = input(dir.path(), "{\"t\":0,\"layer\":0,\"experts\":[3,1]}\n");
    let path = dir.path().join("out");
    let error = export(&input, exporter("bigmoeonedge"), &Options::default(), &path).unwrap_err();
    assert!(error.to_string().contains("phases"), "{error}");

    // Weights that are not known are no number, and are read as not known again.
    let text = "{\"t\":0,\"layer\":0,\"experts\":[3,1],\"phase\":\"decode\"}\n";
    fs::write(dir.path().join("input"), text).unwrap();
    let losses = export(&input, exporter("bigmoeonedge"), &Options::default(), &path).unwrap();
    assert!(losses.iter().any(|loss| loss.contains("nan")), "{losses:?}");
    let again = read_again(&path, "bigmoeonedge", &Options::default());
    assert_eq!(again.rows.len(), 2);
    assert!(again.rows.iter().all(|row| row.weight.is_none()));
}

#[test]
fn an_array_holds_one_sequence() {
    let dir = tempfile::tempdir().unwrap();
    let line = |seq: &str| format!("{{\"t\":0,\"layer\":0,\"experts\":[3,1]{seq}}}\n");
    for text in [
        line(",\"seq\":0") + &line(",\"seq\":1"),
        line("") + &line(""), // not told apart
    ] {
        let input = input(dir.path(), &text);
        let path = dir.path().join("out.npy");
        let error = export(&input, exporter("npy"), &Options::default(), &path).unwrap_err();
        assert!(error.to_string().contains("sequences"), "{error}");
    }
}

#[test]
fn a_claimed_number_of_layers_is_not_written_out() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("input");
    for header in ["-1 4294967295 8", "-1 2 4294967295"] {
        fs::write(&path, format!("{header}\n0 3 1\n")).unwrap();
        let error = detected(&path).read(&Options::default(), &mut Kept::default());
        let message = error.unwrap_err().to_string();
        assert!(
            message.contains("4294967295") && message.contains("more than any model"),
            "{message}"
        );
    }
}

/// A run with a prompt of two tokens and two generated ones, in two layers.
fn run(dir: &Path) -> Run {
    let (gguf, map) = gpt_oss();
    let path = dir.join("run");
    let options = RunOptions::default();
    let mut writer = RunWriter::create(&path, manifest(), &map, options).unwrap();
    let prompt: [&[i32]; 2] = [&[5, 1], &[3, 5]];
    let mut records = expert_layer(&gguf, 1000, 0, 0, &prompt);
    records.extend(expert_layer(&gguf, 2000, 1, 0, &prompt));
    for (token, time) in [(2, 3000), (3, 5000)] {
        for layer in 0..2 {
            let mut more = expert_layer(
                &gguf,
                time + 500 * u64::from(layer),
                layer,
                token,
                &[&[7, 2]],
            );
            more.iter_mut()
                .for_each(|record| record.phase = PHASE_GENERATE);
            records.extend(more);
        }
    }
    for record in &mut records {
        // The input has a row for each token.
        record.set_source_size(1, 1024 * u64::from(record.n_tokens.get()));
        *writer.next_record().unwrap() = *record;
    }
    writer.finish().unwrap();
    Run::open(&path).unwrap()
}

#[test]
fn the_thesis_json_of_a_run() {
    let dir = tempfile::tempdir().unwrap();
    let input = Input::Run(Box::new(run(dir.path())));
    let out = dir.path().join("tokens");
    let losses = export_files(&input, "thesis-json", &out).unwrap();
    assert!(
        losses.iter().any(|loss| loss.contains("first token")),
        "{losses:?}"
    );

    let json = |name: &str| -> serde_json::Value {
        serde_json::from_slice(&fs::read(out.join(name)).unwrap()).unwrap()
    };
    // Three products a layer: four layers' worth of the prompt and the first pass after it, two of the second.
    let first = json("token-00000.json");
    assert_eq!(first["token_id"], 0);
    assert_eq!(first["metadata"]["total_entries"], 12);
    assert_eq!(first["metadata"]["timestamp_start_ns"], 1000);
    assert_eq!(first["metadata"]["duration_ms"], 0.002502);
    let entry = &first["entries"][0];
    assert_eq!(entry["operation_type"], "MUL_MAT_ID");
    assert_eq!(entry["phase"], "PROMPT");
    assert_eq!(entry["expert_ids"], serde_json::json!([5, 1]));
    assert_eq!(entry["num_sources"], 3);
    assert_eq!(entry["sources"][0]["name"], "blk.0.ffn_gate_exps.weight");
    assert_eq!(entry["sources"][0]["memory_source"], "DISK");
    let (gguf, _) = gpt_oss();
    let offset = gguf.tensor("blk.0.ffn_gate_exps.weight").unwrap().offset;
    assert_eq!(entry["sources"][0]["disk_offset"], offset);
    assert_eq!(entry["sources"][2]["buffer_id"], 8);
    assert_eq!(first["entries"][6]["phase"], "GENERATE");
    assert_eq!(first["entries"][11]["entry_id"], 11);

    // Of the prompt's two tokens the first comes back, of the passes after it all.
    let short = |row: &RoutingRow| {
        (
            row.token_id,
            row.phase,
            row.layer_id,
            row.slot,
            row.expert_id,
        )
    };
    let mut expected = read(&input, &Options::default()).rows;
    expected.retain(|row| row.token_id != 1);
    let again = read_again(&out, "thesis-json", &Options::default());
    let (expected, again): (Vec<_>, Vec<_>) = (
        expected.iter().map(short).collect(),
        again.rows.iter().map(short).collect(),
    );
    assert_eq!(again, expected);
    assert_eq!(again.len(), 12);

    let second = json("token-00001.json");
    assert_eq!(second["metadata"]["total_entries"], 6);
    assert_eq!(second["entries"][0]["timestamp_relative_ms"], 0.0);
    assert_eq!(second["entries"][3]["layer_id"], 1);
    assert_eq!(fs::read_dir(&out).unwrap().count(), 2);
}

#[test]
fn a_run_goes_out_and_comes_back() {
    let dir = tempfile::tempdir().unwrap();
    let input = Input::Run(Box::new(run(dir.path())));
    let original = read(&input, &Options::default());
    assert_eq!(original.rows.len(), 16);
    assert_eq!(original.rows[0].lane, Some(lane::CPU));
    let path = dir.path().join("out.jsonl");
    export(&input, exporter("jsonl"), &Options::default(), &path).unwrap();
    let again = read_again(&path, "jsonl", &Options::default());
    let mut expected = original.rows;
    for row in &mut expected {
        row.lane = None;
        row.timestamp_ns = None;
    }
    assert_eq!(again.rows, expected);
    assert_eq!(again.rows[8].phase, Some(Phase::Generate));

    let path = dir.path().join("out.npy");
    export(&input, exporter("npy"), &Options::default(), &path).unwrap();
    let source = Source::file(&path);
    let mut kept = Kept::default();
    foreign::import(importer("npy"), &source, &Options::default(), &mut kept).unwrap();
    assert_eq!(totals(&kept, false).len(), totals(&again, false).len());
}
