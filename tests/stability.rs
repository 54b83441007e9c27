//! `stability`: synthetic traces whose hotness does and does not generalize, and tables that need order.

mod domains;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::hotness::{Fixture, close};
use crate::support::{N_LAYER, fail, repository, run};

/// The rows of a table as JSON.
fn rows(path: &Path, more: &[&str]) -> Vec<Value> {
    serde_json::from_str(&run!["--quiet", "stability", path, "-o", "json", more]).unwrap()
}

/// Tokens of one layer as JSON lines: sequence and experts. Expert 15 implies 16 experts.
fn trace(fixture: &Fixture, name: &str, tokens: impl Iterator<Item = (u32, [u32; 2])>) -> PathBuf {
    let mut text = String::new();
    let mut position = [0; 8];
    for (sequence, [first, second]) in tokens {
        let t = &mut position[sequence as usize];
        writeln!(
            text,
            r#"{{"t":{t},"layer":0,"experts":[{first},{second}],"seq":{sequence},"phase":"decode"}}"#
        )
        .unwrap();
        *t += 1;
    }
    let path = fixture.path(name);
    fs::write(&path, text).unwrap();
    path
}

fn first_line(command: &str, path: &Path) -> String {
    let text = run!["--quiet", command, path];
    text.lines().next().unwrap().to_owned()
}

/// 60 tokens on the experts 0 to 3, 60 on 12 to 15: the training split says nothing about the held-out split.
#[test]
fn changing_hotness_does_not_generalize() {
    let fixture = Fixture::new();
    let tokens = (0..120).map(|t| {
        (
            0,
            if t < 60 {
                [t % 2, 2 + t % 2]
            } else {
                [12 + t % 2, 14 + t % 2]
            },
        )
    });
    let path = trace(&fixture, "moves.jsonl", tokens);
    let lines = ["hotness", "stability"].map(|command| first_line(command, &path));
    assert_eq!(lines[0], lines[1]);
    assert_eq!(
        lines[0],
        "does_not_generalize: the hottest 25 % of experts of the first 60 tokens cover 0.0 % of the activations of the other 60 \
         (in-sample 100.0 %, uniform router 25.0 %)",
        "all eight experts have 30 activations at the end; the lower ids remain the hot set"
    );

    let rows = rows(&path, &["--table", "split", "--split", "0.25"]);
    assert_eq!(rows.len(), 5);
    let quarter = &rows[3];
    assert_eq!((&quarter["rows_training"], &quarter["rows_tested"]), (&30.into(), &90.into()));
    close(quarter, "percent", 25.0);
    close(quarter, "in_sample", 1.0);
    // 30 of 90 tokens are still on the first experts.
    close(quarter, "out_of_sample", 1.0 / 3.0);
    close(quarter, "uniform", 0.25);
}

#[test]
fn stable_hotness_generalizes() {
    let fixture = Fixture::new();
    let tokens = (0..121).map(|t| {
        (
            0,
            if t == 120 {
                [0, 15]
            } else {
                [t % 2, 2 + t % 2]
            },
        )
    });
    let path = trace(&fixture, "stays.jsonl", tokens);
    let line = first_line("hotness", &path);
    assert!(line.starts_with("generalizes: the hottest 25 % of experts of the first 6"), "{line}");
    assert!(!line.contains("not converged"), "{line}");
    let summary = run!["--quiet", "stability", path];
    let lines: Vec<&str> = summary.lines().collect();
    assert_eq!((lines[0], lines.len()), (&*line, 4 + 5), "{summary}");
    assert!(lines[3].contains("coverage, out-of-sample"), "{summary}");
}

/// Three sequences, each with a different expert in addition to 15.
#[test]
fn splits_by_sequence() {
    let fixture = Fixture::new();
    let path = trace(&fixture, "sequences.jsonl", (0..60).map(|t| (t % 3, [15, t % 3])));
    let rows = rows(&path, &["--table", "split", "--split", "by-sequence"]);
    let tested: Vec<&str> = rows
        .iter()
        .map(|row| row["tested"].as_str().unwrap())
        .collect();
    assert_eq!(tested.iter().filter(|name| **name == "all").count(), 5);
    assert_eq!(rows.len(), 4 * 5);
    for row in rows.iter().filter(|row| row["percent"] == 25) {
        close(row, "in_sample", 1.0);
        close(row, "out_of_sample", 0.5);
    }
    // One sequence cannot be split.
    let one = trace(&fixture, "one.jsonl", (0..20).map(|t| (0, [15, t % 3])));
    for more in [&["--table", "split"][..], &[]] {
        let line = fail!["--quiet", "stability", one, "--split", "by-sequence", more];
        assert!(line.contains("only one sequence"), "{line}");
    }
}

#[test]
fn prints_drift_convergence_and_bootstrap_rows() {
    let fixture = Fixture::new();
    let run = fixture.path("run");
    let mut drift = BTreeMap::new();
    for row in rows(&run, &["--table", "drift"]) {
        let pair = ["from", "to"].map(|key| row[key].as_u64().unwrap());
        drift.insert((row["layer_id"].as_u64(), pair), row);
    }
    // From each of eight spans to the next, and from the first to the last.
    let pairs: Vec<[u64; 2]> = (0..7)
        .map(|from| [from, from + 1])
        .chain([[0, 7]])
        .collect();
    // Layer 5 has seven tokens, so seven spans; its last pair is from 0 to 6.
    let of_layer_5 = |pair: &[u64; 2]| pair[1] < 7;
    for &pair in &pairs {
        // Two tokens of a span are one of each kind: no drift.
        for layer in 0..5 {
            let row = &drift[&(Some(layer), pair)];
            close(row, "total_variation", 0.0);
            close(row, "jaccard", 1.0);
            close(row, "rows", 2.0);
        }
        let mut mean = 0.0;
        if of_layer_5(&pair) {
            // One token per span has only expert 3 of four in common.
            close(&drift[&(Some(5), pair)], "total_variation", 0.75);
            close(&drift[&(Some(5), pair)], "rows", 1.0);
            mean = 0.75 / 6.0;
        }
        close(&drift[&(None, pair)], "total_variation", mean);
    }
    // Tokens 0 and 6 are of one kind.
    close(&drift[&(Some(5), [0, 6])], "total_variation", 0.0);
    assert_eq!(drift.len(), 5 * 8 + 7 + 9);
    // After two tokens all seven experts have been used: eight may be hot.
    let convergence = rows(&run, &["--table", "convergence"]);
    assert_eq!(convergence.len() as u32, N_LAYER);
    for row in convergence {
        assert_eq!(row["converged_after"], 2, "{row}");
    }
    let bootstrap = ["--table", "bootstrap", "--resamples", "50", "--seed", "7"];
    let intervals = rows(&run, &bootstrap);
    assert_eq!(intervals, rows(&run, &bootstrap), "seeded");
    let measures: Vec<&Value> = intervals.iter().map(|row| &row["measure"]).collect();
    assert_eq!(measures.len(), 9);
    assert!(measures.contains(&&"held_out".into()));
}

#[test]
fn counts_without_order_have_only_domains() {
    let counts = repository("fixtures/foreign/imatrix/small.gguf");
    for asked in [
        &[][..],
        &["--table", "drift"],
        &["--table", "convergence"],
        &["--table", "bootstrap"],
        &["--table", "split"],
        &["--split", "0.5"],
        &["--split", "by-sequence"],
    ] {
        let line = fail!["--quiet", "stability", counts, asked];
        assert!(line.contains("order"), "{line}");
    }
    run!["--quiet", "stability", counts, "--label", "all", "--table", "domains"];
}

#[test]
fn rejects_impossible_splits() {
    let fixture = Fixture::new();
    let run = fixture.path("run");
    for split in ["0", "1", "1.5", "-0.5", "nan", "by-moon"] {
        let option = format!("--split={split}");
        let line = fail!["stability", run, option];
        let start = format!("moe-analyze: invalid value '{split}' for '--split <");
        assert!(line.starts_with(&start), "{line}");
        assert!(line.contains("between 0 and 1"), "{line}");
    }
}

#[test]
fn rejects_options_without_effect() {
    let fixture = Fixture::new();
    let run = fixture.path("run");
    for (more, expected) in [
        (
            &["--split", "0.5", "--table", "drift"][..],
            "--split applies only to the summary and to --table split",
        ),
        (&["--label", "a"], "--split by-label or --table domains"),
    ] {
        let line = fail!["stability", run, more];
        assert!(line.contains(expected), "{more:?}: {line}");
    }
    let split = |more: &[&str]| run!["stability", run, "-o", "csv", more];
    assert_eq!(split(&["--split", "0.25"]), split(&["--split", "0.25", "--table", "split"]));
}

#[test]
fn keeps_existing_plots_without_force() {
    let fixture = Fixture::new();
    let run = fixture.path("run");
    let plot = fixture.path("coverage.svg");
    run!["stability", run, "--plot", plot];
    let line = fail!["stability", run, "--plot", plot];
    assert!(line.contains("--force"), "{line}");
    assert!(fail!["stability", run, "--plot", fixture.path("coverage.gif")].contains(".png"));
}

/// Errors of options that are now in `stability` refer to that command.
#[test]
fn hotness_refers_to_stability_for_its_options() {
    let line = fail!["hotness", "run", "--split", "0.5"];
    assert!(line.contains("'--split'") && line.contains("stability"), "{line}");
}
