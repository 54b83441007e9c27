//! Files with several consecutive runs, and traces of pipeline stages.

use std::collections::{BTreeMap, BTreeSet};

use moe_foreign::LayerError;

use super::slots::read;
use super::*;

fn write(dir: &Path, name: &str, text: &str) -> PathBuf {
    let path = dir.join(name);
    std::fs::write(&path, text).unwrap();
    path
}

/// Tokens of each sequence.
fn tokens(rows: &Collected) -> BTreeMap<Option<u32>, BTreeSet<u32>> {
    let mut tokens: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
    for row in &rows.routing {
        let of_sequence = tokens.entry(row.sequence_id).or_default();
        of_sequence.insert(row.token_id.0);
    }
    tokens
}

#[test]
fn concatenated_route_traces_have_separate_sequences() {
    let dir = tempfile::tempdir().unwrap();
    let preamble =
        "# route_trace v1\n# model=m arch=qwen3moe n_layer=2 n_expert=8 n_expert_used=1\n";
    let with_turns = "turn,step,layer,slot,expert\n0,0,0,0,1\n0,1,0,0,2\n2,0,0,0,3\n";
    let text = [preamble, with_turns].concat();
    let (rows, _) = read(&write(dir.path(), "trace", &text.repeat(2)));
    let one = || BTreeSet::from([0]);
    let expected = [
        (Some(0), [0, 1].into()),
        (Some(2), one()),
        (Some(3), [0, 1].into()),
        (Some(5), one()),
    ];
    assert_eq!(tokens(&rows), expected.into());
    // A run without turns, a run with another order of columns, and a run with turns.
    let text = format!(
        "step,layer,slot,expert\n0,0,0,1\nexpert,slot,layer,step,lat_us\n2,0,0,4,9.5\n{with_turns}"
    );
    let (rows, _) = read(&write(dir.path(), "trace", &text));
    let expected = [
        (None, one()),
        (Some(1), [4].into()),
        (Some(2), [0, 1].into()),
        (Some(4), one()),
    ];
    assert_eq!(tokens(&rows), expected.into());
    assert_eq!(rows.routing[1].expert_id.0, 2);
}

#[test]
fn route_trace_rows_with_an_empty_turn_have_no_sequence() {
    let dir = tempfile::tempdir().unwrap();
    let text = "turn,step,layer,slot,expert\n0,0,0,0,1\n,0,0,0,2\n";
    for (n_runs, sequences) in [(1, vec![None, Some(0)]), (2, vec![None, Some(0), Some(1)])] {
        let (rows, _) = read(&write(dir.path(), "trace", &text.repeat(n_runs)));
        let found: Vec<_> = tokens(&rows).into_keys().collect();
        assert_eq!(found, sequences);
    }
}

#[test]
fn megatron_lines_without_a_rank_have_no_sequence() {
    let dir = tempfile::tempdir().unwrap();
    let line = |rank: &str, expert: u32| {
        format!("{{\"step\":0,\"layer\":0,{rank}\"num_tokens\":1,\"top_indices\":[[{expert}]]}}\n")
    };
    let text = line("", 1) + &line("\"rank\":0,", 2) + &line("", 3);
    let (rows, _) = read(&write(dir.path(), "router_trace_rank0.jsonl", &text));
    let expected = [(None, [0, 1].into()), (Some(0), [0].into())];
    assert_eq!(tokens(&rows), expected.into());
}

#[test]
fn rejects_concatenated_route_traces_of_different_models() {
    let of = |n_expert: u32| {
        format!("# route_trace v1\n# n_expert={n_expert}\nstep,layer,slot,expert\n0,0,0,1\n")
    };
    let error = error_of("bigmoeonedge", of(8) + &of(16), &ImportOptions::default());
    assert!(matches!(error, ForeignError::OtherModel { .. }), "{error}");
}

/// Alternating lines of two source files.
#[test]
fn equal_batch_ids_of_two_source_files_are_different_sequences() {
    let dir = tempfile::tempdir().unwrap();
    let line = |source: &str, batch: u32, expert: u32| {
        format!("{{\"layer\":0,\"batch_id\":{batch},\"topk_experts\":[[{expert}]]{source}}}\n")
    };
    let (a, b) = (",\"source_file\":\"a\"", ",\"source_file\":\"b\"");
    let lines = [
        line(a, 0, 10),
        line(b, 0, 20),
        line(a, 1, 11),
        line(b, 1, 21),
        line(a, 0, 12),
        line("", 1, 31),
        // The highest possible batch id.
        line(a, u32::MAX, 13),
        line(b, u32::MAX, 23),
    ];
    let (rows, _) = read(&write(dir.path(), "trace.jsonl", &lines.concat()));
    let mut experts: BTreeMap<_, Vec<(u32, u32)>> = BTreeMap::new();
    for row in &rows.routing {
        let of_sequence = experts.entry(row.sequence_id.unwrap()).or_default();
        of_sequence.push((row.token_id.0, row.expert_id.0));
    }
    let mut found: Vec<_> = experts.into_values().collect();
    found.sort();
    let expected = [
        vec![(0, 10), (1, 12)],
        vec![(0, 11)],
        vec![(0, 13)],
        vec![(0, 20)],
        vec![(0, 21)],
        vec![(0, 23)],
        vec![(0, 31)],
    ];
    assert_eq!(found, expected);
}

/// A model of four layers in two pipeline stages, which both number their layers 0 and 1.
#[test]
fn rejects_pipeline_stages_with_fewer_layers_than_the_model() {
    let dir = tempfile::tempdir().unwrap();
    let line = |rank: u32, layer: u16| {
        format!(
            "{{\"step\":0,\"layer\":{layer},\"rank\":{rank},\"num_tokens\":1,\"topk\":1,\"top_indices\":[[{rank}]]}}\n"
        )
    };
    for rank in [0, 1] {
        let text = line(rank, 0) + &line(rank, 1);
        write(dir.path(), &format!("router_trace_rank{rank}.jsonl"), &text);
    }
    let import = |n_moe: u16| {
        let options = ImportOptions {
            model: Some(ModelInfo {
                n_layer: Some(n_moe.into()),
                moe_layers: (0..n_moe).map(LayerId).collect(),
                ..ModelInfo::default()
            }),
            ..ImportOptions::default()
        };
        let detected = moe_foreign::detect(dir.path()).unwrap().unwrap();
        let mut rows = Collected::default();
        moe_foreign::import(detected.importer, &detected.source, &options, &mut rows)
    };
    let ForeignError::Layers { source, .. } = import(4).unwrap_err() else {
        panic!("another error");
    };
    let expected = LayerError::Stages {
        n_layers: 2,
        n_moe: 4,
    };
    assert_eq!(source, expected);
    // Two ranks with all layers of the model, and no model.
    let notes = import(2).unwrap().notes;
    assert!(
        !notes.iter().any(|note| note.contains("stage")),
        "{notes:?}"
    );
    let (_, summary) = read(dir.path());
    let warning = "warning: each pipeline stage numbers its layers from 0";
    let is_warned = summary.notes.iter().any(|note| note.starts_with(warning));
    assert!(is_warned, "{:?}", summary.notes);
}

/// The second run starts in line 11.
#[test]
fn warns_of_concatenated_runs_without_sequences() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["jsonl", "lattice"] {
        let path = fixture(&format!("{name}/small.jsonl"));
        let text = std::fs::read_to_string(path).unwrap();
        let (_, once) = read(&write(dir.path(), name, &text));
        assert!(!once.notes.iter().any(|note| note.contains("returns")));
        let (_, twice) = read(&write(dir.path(), name, &text.repeat(2)));
        let warnings: Vec<_> = twice
            .notes
            .iter()
            .filter(|note| note.contains("returns"))
            .collect();
        assert_eq!(warnings.len(), 1, "{name}");
        assert!(
            warnings[0].starts_with("warning: line 11 returns to token 0 of layer 0"),
            "{warnings:?}"
        );
    }
}
