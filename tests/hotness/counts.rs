//! The matrix and the summary.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use moe_trace::record::{PHASE_GENERATE, PHASE_PROMPT};
use serde_json::Value;

use super::Fixture;
use crate::support::{
    ALL, N_EXPERT, N_EXPERT_USED, N_GENERATED, N_LAYER, N_PROMPT, WEIGHTS, experts_of,
    known_counts, run, tokens_of,
};

type Matrix = BTreeMap<(u32, u32), (u64, f64)>;

/// The matrix of `hotness -o json`, without unused experts.
fn matrix(path: &Path, phase: &str) -> Matrix {
    let rows: Vec<Value> =
        serde_json::from_str(&run!["hotness", path, "--phase", phase, "-o", "json"]).unwrap();
    let id = |row: &Value, key: &str| row[key].as_u64().unwrap() as u32;
    rows.iter()
        .map(|row| {
            let tally = (row["count"].as_u64().unwrap(), row["mass"].as_f64().unwrap());
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
fn counts_and_mass_are_correct_for_every_phase_and_source() {
    let fixture = Fixture::new();
    let phases: [(&str, &[u8]); 3] =
        [("all", &ALL), ("prompt", &[PHASE_PROMPT]), ("generate", &[PHASE_GENERATE])];
    for (name, phases) in phases {
        let masses = known_mass(phases);
        let known: Matrix = known_counts(phases)
            .into_iter()
            .map(|(cell, count)| (cell, (count, masses[&cell])))
            .collect();
        for source in ["run", "run/trace.bin", "tables", "tables/routing.parquet"] {
            assert_eq!(matrix(&fixture.path(source), name), known, "{name} from {source}");
        }
    }
}

#[test]
fn layer_counts_sum_to_tokens_times_experts_used() {
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
    let csv = run!["hotness", fixture.path("run"), "-o", "csv"];
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
        assert_eq!((layer[0].1, layer[0].3), (3, 0.25), "expert 3 is in every choice");
        assert!(layer.is_sorted_by_key(|row| (std::cmp::Reverse(row.2), row.1)));
        assert!((layer.iter().map(|row| row.3).sum::<f64>() - 1.0).abs() < 1e-12);
    }
}

#[test]
fn summary_starts_with_stability_and_tokens() {
    let fixture = Fixture::new();
    let summary = run!["hotness", fixture.path("run")];
    assert!(summary.starts_with("too_short: "), "{summary}");
    let first = summary.lines().nth(1).unwrap();
    assert_eq!(first, "16 prompt and generated tokens in 6 layers, 4 of 32 experts per token");
    let layer_5 = summary.lines().last().unwrap();
    let cells: Vec<&str> = layer_5.split_whitespace().collect();
    assert_eq!(cells[..2], ["5", &(1 + N_GENERATED).to_string()]);
    assert!(layer_5.contains("3 (25.0)"), "{layer_5}");
    assert!(
        run!["hotness", fixture.path("run"), "--phase", "prompt"]
            .contains(&format!("\n{N_PROMPT} prompt tokens in 6 layers"))
    );
}

#[test]
fn uses_singular_for_one() {
    let fixture = Fixture::new();
    let trace = fs::read(fixture.path("run/trace.bin")).unwrap();
    // The last layer computes one token of the prompt.
    let last = trace
        .chunks(1024)
        .filter(|record| record[17] == PHASE_PROMPT && u32::from(record[12]) == N_LAYER - 1);
    let one = fixture.path("one.bin");
    fs::write(&one, last.flatten().copied().collect::<Vec<u8>>()).unwrap();
    let summary = run!["hotness", one, "--phase", "prompt"];
    assert!(
        summary.contains("\n1 prompt token in 1 layer, 4 of 23 experts per token\n"),
        "{summary}"
    );
}
