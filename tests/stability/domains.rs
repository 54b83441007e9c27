//! Labels of inputs and of sequences.

use std::fs;

use serde_json::Value;

use super::rows;
use crate::hotness::{Fixture, close};
use crate::support::{arg, args, fail, moe_analyze, run};

/// Four tokens of each of two sequences. Sequence 4 selects the experts 0 and 1, sequence 9 the experts 0 and 2.
fn trace(fixture: &Fixture) -> std::path::PathBuf {
    let line = |t: u32, seq: u32, other: u32| {
        format!("{{\"t\":{t},\"layer\":2,\"experts\":[0,{other}],\"seq\":{seq}}}\n")
    };
    let tokens = (0..8).map(|n| line(n % 4, if n < 4 { 4 } else { 9 }, if n < 4 { 1 } else { 2 }));
    let path = fixture.path("two.jsonl");
    fs::write(&path, tokens.collect::<String>()).unwrap();
    path
}

#[test]
fn labels_sequences() {
    let fixture = Fixture::new();
    let path = trace(&fixture);
    let labels = fixture.path("labels.csv");
    fs::write(&labels, "sequence,label\n4,code\n9,law\n").unwrap();
    let with_labels = ["--labels", arg(&labels)];

    let domains = rows(&path, &[&with_labels[..], &["--table", "domains"]].concat());
    assert_eq!(domains.len(), 2);
    for (row, label) in domains.iter().zip(["code", "law"]) {
        assert_eq!(
            (&row["label"], &row["layer_id"], &row["rows"]),
            (&label.into(), &2.into(), &4.into())
        );
        // Shares ½ ½ 0 and ½ 0 ½: half of the activations identify the domain.
        close(row, "information_bits", 0.5);
        close(row, "total_variation", 0.5);
        // All tokens select expert 0; with a uniform router, two of three would.
        assert_eq!(row["expert_id"], 0);
        close(row, "specialisation", 1.0);
        close(row, "over_uniform", 1.5);
    }

    // `hotness` splits the matrix by the same labels.
    let matrix = run!["--quiet", "hotness", path, with_labels, "--by", "label", "-o", "json"];
    let matrix: Vec<Value> = serde_json::from_str(&matrix).unwrap();
    let count = |label: &str, expert: u32| {
        let mut found = matrix
            .iter()
            .filter(|row| row["label"] == label && row["expert_id"] == expert);
        found.next().unwrap()["count"].as_u64().unwrap()
    };
    assert_eq!(
        [count("code", 1), count("code", 2), count("law", 1), count("law", 2)],
        [4, 0, 0, 4]
    );

    let split =
        rows(&path, &[&with_labels[..], &["--table", "split", "--split", "by-label"]].concat());
    for row in split.iter().filter(|row| row["percent"] == 50) {
        // Two of three experts, 0 and the other domain's.
        close(row, "in_sample", 1.0);
        close(row, "out_of_sample", 0.5);
        close(row, "uniform", 2.0 / 3.0);
    }
}

#[test]
fn labels_inputs_including_counts() {
    let fixture = Fixture::new();
    let (a, b) = (fixture.path("a.npy"), fixture.path("b.npy"));
    let header = |bytes: &[u64]| {
        let mut file = moe_foreign::npy_header_u64(&[1, 2]);
        file.extend(bytes.iter().flat_map(|n| n.to_le_bytes()));
        file
    };
    fs::write(&a, header(&[3, 1])).unwrap();
    fs::write(&b, header(&[2, 2])).unwrap();
    let text = run![
        "--quiet", "stability", a, b, "--top-k", "1", "--label", "code", "--label", "law",
        "--table", "domains", "-o", "csv"
    ];
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 3, "{text}");
    assert!(lines[1].starts_with("0,code,4,") && lines[2].starts_with("0,law,4,"), "{text}");
    // ¾ ¼ against ½ ½.
    assert!(lines[1].contains(",0.25,0,0.75,1.5"), "{text}");
}

/// Labels whose numbers start at another number than the trace's would assign the domain of the neighbouring sequence.
#[test]
fn warns_about_labels_of_missing_sequences() {
    let fixture = Fixture::new();
    let path = trace(&fixture);
    let labels = fixture.path("labels.csv");
    fs::write(&labels, "4,code\n11,law\n10,law\n").unwrap();
    let notes = |more: &[&str]| {
        let args = ["stability", arg(&path), "--labels", arg(&labels)];
        let assert = moe_analyze().args(args![args, more]).assert();
        String::from_utf8_lossy(&assert.success().get_output().stderr).into_owned()
    };
    let found = notes(&["--table", "domains"]);
    assert!(
        found.contains(
            "labels 2 sequences that two.jsonl does not contain; the first is sequence 10"
        ),
        "{found}"
    );
    fs::write(&labels, "4,code\n9,law\n").unwrap();
    assert!(!notes(&["--table", "domains"]).contains("does not contain"));
}

#[test]
fn rejects_labels_that_do_not_match() {
    let fixture = Fixture::new();
    let path = trace(&fixture);
    let path = arg(&path);
    let bad = fixture.path("bad.csv");
    fs::write(&bad, "4,code\n9\n").unwrap();
    for (more, expected) in [
        (&["--label", "a", "--label", "b"][..], "2 --label options for 1 input;"),
        (&["--split", "by-label"], "needs domain labels"),
        (&["--table", "domains"], "needs domain labels"),
        (&["--label", "a"], "no effect without --split by-label or --table domains"),
        (&["--labels", arg(&bad), "--table", "domains"], "line 2: no comma"),
        (&["--label", "a", "--table", "split", "--split", "by-label"], "only one label"),
    ] {
        let line = fail!["--quiet", "stability", path, more];
        assert!(line.contains(expected), "{line}");
    }
}
