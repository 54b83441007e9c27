//! `hotness`: counts that are known beforehand, from traces and from tables, and every output.

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use moe_trace::record::{PHASE_GENERATE, PHASE_PROMPT};
use serde_json::Value;
use support::{
    ALL, N_EXPERT, N_EXPERT_USED, N_GENERATED, N_LAYER, N_PROMPT, WEIGHTS, arg, experts_of,
    failure_of, known_counts, known_run, moe_analyze, stdout_of, tokens_of,
};

struct Fixture {
    dir: tempfile::TempDir,
}

impl Fixture {
    /// The known run in `run`, its tables in `tables`.
    fn new() -> Fixture {
        let fixture = Fixture {
            dir: tempfile::tempdir().unwrap(),
        };
        known_run(&fixture.path("run"));
        stdout_of(&[
            "--quiet",
            "parquet",
            arg(&fixture.path("run")),
            "--out",
            arg(&fixture.path("tables")),
        ]);
        fixture
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.dir.path().join(name)
    }
}

type Matrix = BTreeMap<(u32, u32), (u64, f64)>;

/// The matrix that `hotness -o json` prints, without the experts that were never chosen.
fn matrix(path: &Path, phase: &str) -> Matrix {
    let rows: Vec<Value> = serde_json::from_str(&stdout_of(&[
        "hotness",
        arg(path),
        "--phase",
        phase,
        "-o",
        "json",
    ]))
    .unwrap();
    let id = |row: &Value, key: &str| row[key].as_u64().unwrap() as u32;
    rows.iter()
        .map(|row| {
            let tally = (
                row["count"].as_u64().unwrap(),
                row["mass"].as_f64().unwrap(),
            );
            ((id(row, "layer_id"), id(row, "expert_id")), tally)
        })
        .filter(|(_, (count, _))| *count > 0)
        .collect()
}

fn known_mass(phases: &[u8]) -> BTreeMap<(u32, u32), f64> {
    let mut masses = BTreeMap::new();
    for layer in 0..N_LAYER {
        for token in phases.iter().flat_map(|&phase| tokens_of(layer, phase)) {
            for (expert, weight) in experts_of(token, layer).into_iter().zip(WEIGHTS) {
                *masses.entry((layer, expert)).or_default() += f64::from(weight);
            }
        }
    }
    masses
}

#[test]
fn counts_and_mass_are_right_in_every_phase_and_from_every_source() {
    let fixture = Fixture::new();
    let phases: [(&str, &[u8]); 3] = [
        ("all", &ALL),
        ("prompt", &[PHASE_PROMPT]),
        ("generate", &[PHASE_GENERATE]),
    ];
    for (name, phases) in phases {
        let masses = known_mass(phases);
        let known: Matrix = known_counts(phases)
            .into_iter()
            .map(|(cell, count)| (cell, (count, masses[&cell])))
            .collect();
        for source in ["run", "run/trace.bin", "tables", "tables/routing.parquet"] {
            assert_eq!(
                matrix(&fixture.path(source), name),
                known,
                "{name} from {source}"
            );
        }
    }
}

#[test]
fn counts_of_a_layer_sum_to_rows_times_experts_used() {
    let fixture = Fixture::new();
    let matrix = matrix(&fixture.path("run"), "all");
    for layer in 0..N_LAYER {
        let rows: u64 = ALL
            .iter()
            .map(|&phase| tokens_of(layer, phase).len() as u64)
            .sum();
        let sum: u64 = matrix
            .range((layer, 0)..(layer + 1, 0))
            .map(|(_, (count, _))| count)
            .sum();
        assert_eq!(sum, rows * u64::from(N_EXPERT_USED), "layer {layer}");
    }
}

#[test]
fn matrix_is_ranked_and_complete() {
    let fixture = Fixture::new();
    let csv = stdout_of(&["hotness", arg(&fixture.path("run")), "-o", "csv"]);
    let mut lines = csv.lines();
    assert_eq!(lines.next(), Some("layer_id,expert_id,count,share,mass"));
    let rows: Vec<(u32, u32, u64, f64)> = lines
        .map(|line| {
            let cells: Vec<&str> = line.split(',').collect();
            (
                cells[0].parse().unwrap(),
                cells[1].parse().unwrap(),
                cells[2].parse().unwrap(),
                cells[3].parse().unwrap(),
            )
        })
        .collect();
    assert_eq!(rows.len() as u32, N_LAYER * N_EXPERT);
    for layer in rows.chunk_by(|a, b| a.0 == b.0) {
        assert_eq!(layer.len() as u32, N_EXPERT);
        assert_eq!(
            (layer[0].1, layer[0].3),
            (3, 0.25),
            "expert 3 is in every choice"
        );
        assert!(layer.is_sorted_by_key(|row| (std::cmp::Reverse(row.2), row.1)));
        assert!((layer.iter().map(|row| row.3).sum::<f64>() - 1.0).abs() < 1e-12);
    }
}

#[test]
fn summary_tells_the_tokens_first() {
    let fixture = Fixture::new();
    let summary = stdout_of(&["hotness", arg(&fixture.path("run"))]);
    let first = summary.lines().next().unwrap();
    assert_eq!(
        first,
        "16 prompt and generated tokens in 6 layers, 4 of 32 experts for a token"
    );
    let layer_5 = summary.lines().last().unwrap();
    let cells: Vec<&str> = layer_5.split_whitespace().collect();
    assert_eq!(cells[..2], ["5", &(1 + N_GENERATED).to_string()]);
    assert!(layer_5.contains("3 (25.0)"), "{layer_5}");
    assert!(
        stdout_of(&["hotness", arg(&fixture.path("run")), "--phase", "prompt"])
            .starts_with(&format!("{N_PROMPT} prompt tokens in 6 layers"))
    );
}

#[test]
fn one_is_not_many() {
    let fixture = Fixture::new();
    let trace = fs::read(fixture.path("run/trace.bin")).unwrap();
    // The prompt goes through the last layer with one token.
    let last = trace
        .chunks(1024)
        .filter(|record| record[17] == PHASE_PROMPT && u32::from(record[12]) == N_LAYER - 1);
    let one = fixture.path("one.bin");
    fs::write(&one, last.flatten().copied().collect::<Vec<u8>>()).unwrap();
    let summary = stdout_of(&["hotness", arg(&one), "--phase", "prompt"]);
    assert!(
        summary.starts_with("1 prompt token in 1 layer, 4 of 23 experts for a token\n"),
        "{summary}"
    );
}

#[test]
fn learn_file_is_the_runtimes() {
    let fixture = Fixture::new();
    let schema = fs::read_to_string(support::repository("schemas/learn.schema.json")).unwrap();
    let schema = jsonschema::validator_for(&serde_json::from_str(&schema).unwrap()).unwrap();

    let mut texts = Vec::new();
    for source in ["run", "tables"] {
        let out = fixture.path(&format!("{source}.json"));
        stdout_of(&["hotness", arg(&fixture.path(source)), "--out", arg(&out)]);
        texts.push(fs::read_to_string(out).unwrap());
    }
    assert_eq!(
        texts[0], texts[1],
        "a run and its tables give the same file"
    );
    assert!(!texts[0].contains([' ', '\n']));

    let learn: Value = serde_json::from_str(&texts[0]).unwrap();
    schema.validate(&learn).unwrap();
    assert_eq!(
        (&learn["n_expert"], &learn["n_expert_used"]),
        (&N_EXPERT.into(), &N_EXPERT_USED.into())
    );
    // One prompt pass and one for each generated token.
    assert_eq!(learn["updates"], 1 + N_GENERATED);
    assert_eq!(learn["summary"]["layer_calls"], N_LAYER * (1 + N_GENERATED));
    let counts = known_counts(&ALL);
    let layers = learn["layers"].as_array().unwrap();
    assert_eq!(layers.len() as u32, N_LAYER);
    for (layer, entry) in (0..).zip(layers) {
        assert_eq!(entry["layer"], layer);
        assert_eq!(entry["calls"], 1 + N_GENERATED);
        let known: Vec<(u32, u64)> = counts
            .range((layer, 0)..(layer + 1, 0))
            .map(|(cell, count)| (cell.1, *count))
            .collect();
        assert_eq!(entry["experts"], serde_json::json!(known));
        assert_eq!(entry["cold_experts"], entry["experts"]);
        assert_eq!(
            entry["cold_slots_total"],
            known.iter().map(|(_, count)| count).sum::<u64>()
        );
    }
    let observations = moe_placement::learn::parse_observations(&texts[0]).unwrap();
    assert!(moe_placement::learn::is_usable(&observations));
}

#[test]
fn files_are_written_whoever_reads_stdout() {
    let fixture = Fixture::new();
    let run = fixture.path("run");
    for (stdout, expected) in support::bad_stdouts() {
        let out = fixture.path(&format!("{expected}.json"));
        let plot = fixture.path(&format!("{expected}.png"));
        let args = [
            "hotness",
            arg(&run),
            "--out",
            arg(&out),
            "--plot",
            arg(&plot),
        ];
        assert_eq!(support::code_with_stdout(&args, stdout), expected);
        let learn = fs::read_to_string(&out).unwrap();
        assert!(learn.starts_with('{') && learn.ends_with('}'), "{learn}");
        assert!(fs::read(&plot).unwrap().ends_with(b"IEND\xaeB`\x82"));
    }
}

#[test]
fn a_learn_file_is_json() {
    let fixture = Fixture::new();
    for name in ["learn.txt", "learn", "learn.json.gz"] {
        let out = fixture.path(name);
        let line = failure_of(&["hotness", arg(&fixture.path("run")), "--out", arg(&out)]);
        assert!(line.contains(".json file"), "{line}");
        assert!(!out.exists());
    }
}

#[test]
fn several_runs_are_added() {
    let fixture = Fixture::new();
    let (tables, other) = (fixture.path("tables"), fixture.path("other"));
    known_run(&other);
    let both = stdout_of(&["hotness", arg(&tables), arg(&other)]);
    assert!(both.starts_with("32 prompt and generated tokens"), "{both}");

    // A bare trace does not tell its model, which is remarked.
    let trace = other.join("trace.bin");
    let assert = moe_analyze()
        .args(["hotness", arg(&tables), arg(&trace)])
        .assert()
        .success();
    let stderr = String::from_utf8_lossy(&assert.get_output().stderr).into_owned();
    assert!(
        stderr.starts_with("1 input does not tell the model"),
        "{stderr}"
    );
}

/// Adds a run to a dataset beside the fixture.
fn add_to_dataset(fixture: &Fixture, run: &str) {
    let (run, dataset) = (fixture.path(run), fixture.path("dataset"));
    stdout_of(&["--quiet", "parquet", arg(&run), "--dataset", arg(&dataset)]);
}

#[test]
fn a_run_counts_once() {
    let fixture = Fixture::new();
    add_to_dataset(&fixture, "run");
    fs::copy(fixture.path("run/trace.bin"), fixture.path("copy.bin")).unwrap();
    for pair in [
        ["run", "run"],
        ["run", "tables"],
        ["dataset", "tables/routing.parquet"],
        ["run/trace.bin", "copy.bin"],
    ] {
        let [left, right] = pair.map(|name| fixture.path(name));
        let line = failure_of(&["hotness", arg(&left), arg(&right)]);
        assert!(
            line.contains("is counted already") && line.contains(arg(&right)),
            "{pair:?}: {line}"
        );
    }
    // One run under two names in a dataset; but the parts of one directory are one run.
    let runs = fixture.path("dataset/routing");
    let run = fs::read_dir(&runs).unwrap().next().unwrap().unwrap().path();
    let part = fs::read_dir(&run).unwrap().next().unwrap().unwrap().path();
    fs::copy(&part, run.join("part-2.parquet")).unwrap();
    let parts = stdout_of(&["hotness", arg(&fixture.path("dataset"))]);
    assert!(parts.starts_with("32 prompt"), "{parts}");
    fs::create_dir(runs.join("run=other")).unwrap();
    fs::copy(&part, runs.join("run=other/part-0.parquet")).unwrap();
    assert!(failure_of(&["hotness", arg(&fixture.path("dataset"))]).contains("counted already"));
}

#[test]
fn runs_of_other_models_are_not_added() {
    let fixture = Fixture::new();
    let other = fixture.path("other");
    known_run(&other);
    let manifest = fs::read_to_string(other.join("manifest.json")).unwrap();
    let mut manifest: Value = serde_json::from_str(&manifest).unwrap();
    manifest["model"]["header_xxh3"] = "0123456789abcdef".into();
    manifest["model"]["path"] = "other.gguf".into();
    fs::write(other.join("manifest.json"), manifest.to_string()).unwrap();
    // The map is the known model's, and says so.
    fs::remove_file(other.join("gguf-map.parquet")).unwrap();
    add_to_dataset(&fixture, "run");
    add_to_dataset(&fixture, "other");
    let (run, dataset) = (fixture.path("run"), fixture.path("dataset"));
    for args in [
        &["hotness", arg(&run), arg(&other)][..],
        &["hotness", arg(&dataset)],
    ] {
        let line = failure_of(args);
        for part in [
            "of different models",
            "\"tiny-qwen3moe-Q4_K_M.gguf\"",
            "\"other.gguf\" (header hash 0123456789abcdef)",
        ] {
            assert!(line.contains(part), "{part}: {line}");
        }
    }
}

#[test]
fn other_tables_are_named_as_such() {
    let fixture = Fixture::new();
    for table in ["ops", "accesses"] {
        let table = fixture.path(&format!("tables/{table}.parquet"));
        let line = failure_of(&["hotness", arg(&table)]);
        assert!(
            line.contains("is not a table of routing") && line.contains(arg(&table)),
            "{line}"
        );
    }
    let map = fixture.path("run/gguf-map.parquet");
    assert!(failure_of(&["hotness", arg(&map)]).contains("not a table of routing"));
}

#[test]
fn pictures_are_drawn() {
    let fixture = Fixture::new();
    let (png, svg) = (fixture.path("hotness.png"), fixture.path("hotness.svg"));
    for picture in [&png, &svg] {
        stdout_of(&["hotness", arg(&fixture.path("run")), "--plot", arg(picture)]);
    }
    let png = fs::read(png).unwrap();
    assert!(png.starts_with(b"\x89PNG\r\n\x1a\n") && png.ends_with(b"IEND\xaeB`\x82"));
    let svg = fs::read_to_string(svg).unwrap();
    assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
    for text in [
        "layer",
        "expert",
        "How often each expert is chosen",
        "× even share",
    ] {
        assert!(svg.contains(text), "{text}");
    }
    assert!(svg.matches("<rect").count() as u32 > N_LAYER * N_EXPERT);
}

#[test]
fn outputs_are_not_overwritten() {
    let fixture = Fixture::new();
    let run = fixture.path("run");
    for (option, name) in [
        ("--out", "learn.json"),
        ("--plot", "plot.svg"),
        ("--plot", "plot.png"),
    ] {
        let out = fixture.path(name);
        fs::write(&out, "precious").unwrap();
        let line = failure_of(&["hotness", arg(&run), option, arg(&out)]);
        assert!(line.contains("--force"), "{line}");
        assert_eq!(fs::read(&out).unwrap(), b"precious");
        stdout_of(&["hotness", arg(&run), option, arg(&out), "--force"]);
        assert_ne!(fs::read(&out).unwrap(), b"precious");
    }
    let picture = fixture.path("plot.gif");
    assert!(failure_of(&["hotness", arg(&run), "--plot", arg(&picture)]).contains(".png"));
}

#[test]
fn without_routing_there_is_no_hotness() {
    let fixture = Fixture::new();
    let trace = fs::read(fixture.path("run/trace.bin")).unwrap();
    // An empty trace, and one in which nothing but the first operation, an attention product, was logged.
    for (name, bytes) in [("empty", &trace[..0]), ("dense", &trace[..1024])] {
        let run = fixture.path(name);
        fs::create_dir(&run).unwrap();
        fs::copy(fixture.path("run/manifest.json"), run.join("manifest.json")).unwrap();
        fs::write(run.join("trace.bin"), bytes).unwrap();
        let out = fixture.path("learn.json");
        let line = failure_of(&["--quiet", "hotness", arg(&run), "--out", arg(&out)]);
        assert!(line.contains("no token was routed"), "{line}");
        assert!(!out.exists());
    }
    // A run that only read a prompt has generated nothing.
    let records = trace
        .chunks(1024)
        .filter(|record| record[17] == PHASE_PROMPT);
    let prompt = fixture.path("prompt.bin");
    fs::write(&prompt, records.flatten().copied().collect::<Vec<u8>>()).unwrap();
    assert!(
        failure_of(&["hotness", arg(&prompt), "--phase", "generate"])
            .contains("no token was routed")
    );
    stdout_of(&["hotness", arg(&prompt), "--phase", "prompt"]);
}

#[test]
fn impossible_records_are_named() {
    let fixture = Fixture::new();
    let trace_file = fixture.path("run/trace.bin");
    let mut trace = fs::read(&trace_file).unwrap();
    let at = trace
        .chunks(1024)
        .position(|record| record[16] == moe_trace::ops::MUL_MAT_ID)
        .unwrap();
    trace[at * 1024 + 792..][..4].copy_from_slice(&77i32.to_le_bytes());
    fs::write(&trace_file, &trace).unwrap();
    let line = failure_of(&["hotness", arg(&fixture.path("run"))]);
    assert!(
        line.contains("expert 77") && line.contains(&format!("record {at}")),
        "{line}"
    );
}

#[test]
fn a_cut_trace_counts_its_whole_records() {
    let fixture = Fixture::new();
    let trace = fs::read(fixture.path("run/trace.bin")).unwrap();
    let cut = fixture.path("cut.bin");
    fs::write(&cut, &trace[..trace.len() - 100]).unwrap();
    let summary = stdout_of(&["hotness", arg(&cut)]);
    assert!(
        summary.starts_with("16 prompt and generated tokens"),
        "{summary}"
    );
}

#[test]
fn bad_input_is_one_line_and_exit_2() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        fs::write(&path, bytes).unwrap();
        path
    };
    let inputs = [
        (dir.path().join("absent"), "cannot open"),
        (file("empty.bin", b""), "is empty"),
        (
            file("text.bin", b"no trace at all"),
            "not a file that is known",
        ),
        (file("zeros.bin", &[0; 4096]), "not a file that is known"),
        (
            file("table.parquet", b"PAR1 and then nothing"),
            "table.parquet is damaged: Invalid Parquet file. Corrupt footer",
        ),
        (file("learn.json", b"{}"), "JSON"),
        (
            support::repository("fixtures/random-qwen3moe-F16.gguf"),
            "is a model",
        ),
        (dir.path().to_owned(), "neither a run directory"),
    ];
    for (path, expected) in &inputs {
        let line = failure_of(&["hotness", arg(path)]);
        assert!(
            line.contains(expected) && line.contains(arg(path)),
            "{expected}: {line}"
        );
    }
    moe_analyze().args(["hotness"]).assert().code(2);
}
