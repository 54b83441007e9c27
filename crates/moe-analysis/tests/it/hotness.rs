//! Hotness of traces with special shapes, from records and from tables.

use std::path::Path;

use moe_analysis::Phases;
use moe_analysis::hotness::{Error, Hotness};
use moe_gguf::map::OffsetMap;
use moe_trace::manifest::Model;
use moe_trace::record::{EXT_V1, FLAG_CONTINUATION, MAX_EXPERTS, set_name};
use moe_trace::tables::{TableOptions, write_tables};
use moe_trace::{LayerId, Manifest, Phase, Run, RunOptions, RunWriter, TensorAccessLog, ops};

const PROMPT: Phases = Phases::Only(Phase::Prompt);
const GENERATE: Phases = Phases::Only(Phase::Generate);

/// One pass of a layer. Experts of a token have the weights 1 / (slot + 1).
struct WrittenPass {
    layer: u16,
    phase: u8,
    tokens: Vec<Vec<i32>>,
}

fn pass(layer: u16, phase: u8, tokens: &[&[i32]]) -> WrittenPass {
    WrittenPass {
        layer,
        phase,
        tokens: tokens.iter().map(|token| token.to_vec()).collect(),
    }
}

/// Writes passes as a run of a model with `n_expert` experts (0: unknown). Each pass has the operations `projections`.
fn write_run(dir: &Path, n_expert: u32, projections: &[&str], passes: &[WrittenPass]) -> Run {
    let n_expert_used = passes
        .iter()
        .flat_map(|pass| &pass.tokens)
        .map(Vec::len)
        .max()
        .unwrap_or(1);
    let model = Model {
        n_expert,
        n_expert_used: n_expert_used as u32,
        ..Model::default()
    };
    let manifest = Manifest {
        model,
        ..Manifest::default()
    };
    let map = OffsetMap { rows: Vec::new() };
    let mut writer = RunWriter::create(dir, manifest, &map, RunOptions::default()).unwrap();
    let mut clock = 0;
    for pass in passes {
        for projection in projections {
            clock += 10;
            for (token, experts) in (0..).zip(&pass.tokens) {
                for (part, experts) in experts.chunks(MAX_EXPERTS).enumerate() {
                    let slot = writer.next_record().unwrap();
                    *slot = record(pass, projection, clock, token, part * MAX_EXPERTS, experts);
                }
            }
        }
    }
    writer.finish().unwrap();
    Run::open(dir).unwrap()
}

fn record(
    pass: &WrittenPass,
    projection: &str,
    clock: u64,
    token: u32,
    base: usize,
    experts: &[i32],
) -> TensorAccessLog {
    let mut record = TensorAccessLog {
        operation_type: ops::MUL_MAT_ID,
        phase: pass.phase,
        ext_version: EXT_V1,
        flags: if base > 0 { FLAG_CONTINUATION } else { 0 },
        expert_slot_base: base as u8,
        num_experts: experts.len() as u8,
        ..Default::default()
    };
    record.timestamp_ns.set(clock);
    record.token_id.set(token);
    record.layer_id.set(pass.layer);
    record.n_tokens.set(pass.tokens.len() as u32);
    set_name(
        &mut record.dst_name,
        &format!("ffn_moe_{projection}-{}", pass.layer),
    );
    for (i, expert) in experts.iter().enumerate() {
        record.expert_ids[i].set(*expert);
        record.expert_weights[i].set(1.0 / (base + i + 1) as f32);
    }
    record
}

/// Counts the run from records and from tables; the results must be equal.
fn count(dir: &Path, run: &Run) -> Hotness {
    let tables = dir.join("tables");
    write_tables(run, &tables, TableOptions::default()).unwrap();
    let from_table = Hotness::from_routing_table(&tables, None).unwrap();
    let from_run = Hotness::from_run(run, None).unwrap();
    assert_eq!(from_run, from_table);
    from_run
}

fn counts(hotness: &Hotness, layer: u16, phases: Phases) -> Vec<u64> {
    hotness
        .experts(LayerId(layer), phases)
        .iter()
        .map(|tally| tally.count)
        .collect()
}

#[test]
fn counts_single_layer_and_separates_phases() {
    let dir = tempfile::tempdir().unwrap();
    let passes = [
        pass(2, 0, &[&[0, 1], &[0, 3], &[0, 1]]),
        pass(2, 1, &[&[4, 0]]),
        pass(2, 1, &[&[4, 1]]),
    ];
    let run = write_run(&dir.path().join("run"), 6, &["gate_up", "down"], &passes);
    let hotness = count(dir.path(), &run);

    assert_eq!((hotness.n_expert(), hotness.n_expert_used()), (6, 2));
    assert_eq!(hotness.layers(Phases::All), [LayerId(2)]);
    assert_eq!(counts(&hotness, 2, PROMPT), [3, 2, 0, 1, 0, 0]);
    assert_eq!(counts(&hotness, 2, GENERATE), [1, 1, 0, 0, 2, 0]);
    assert_eq!(counts(&hotness, 2, Phases::All), [4, 3, 0, 1, 2, 0]);
    let rows =
        [PROMPT, GENERATE, Phases::All].map(|phases| hotness.routed_tokens(LayerId(2), phases));
    assert_eq!(rows, [3, 2, 5]);
    let calls = [PROMPT, GENERATE, Phases::All].map(|phases| hotness.calls(LayerId(2), phases));
    assert_eq!(calls, [1, 2, 3]);
    // Expert 0: slot 0 of three prompt tokens, slot 1 of one generated token.
    assert_eq!(hotness.experts(LayerId(2), Phases::All)[0].mass, 3.5);
    assert_eq!(hotness.routed_tokens(LayerId(1), Phases::All), 0);
    assert_eq!(hotness.routed_tokens(LayerId(99), Phases::All), 0);
}

#[test]
fn tokens_with_continuation_records_count_once() {
    let dir = tempfile::tempdir().unwrap();
    let experts: Vec<i32> = (0..20).map(|i| 39 - 2 * i).collect();
    let passes = [pass(0, 0, &[&experts, &experts]), pass(1, 0, &[&experts])];
    let run = write_run(
        &dir.path().join("run"),
        40,
        &["gate", "up", "down"],
        &passes,
    );
    let hotness = count(dir.path(), &run);
    assert_eq!(hotness.n_expert_used(), 20);
    assert_eq!(
        (
            hotness.routed_tokens(LayerId(0), Phases::All),
            hotness.routed_tokens(LayerId(1), Phases::All)
        ),
        (2, 1)
    );
    assert_eq!(counts(&hotness, 0, Phases::All).iter().sum::<u64>(), 40);
    assert_eq!(hotness.experts(LayerId(0), Phases::All)[39].mass, 2.0);
    assert_eq!(hotness.tokens(Phases::All), 2);
}

#[test]
fn numbers_of_experts_are_derived_without_a_model() {
    let dir = tempfile::tempdir().unwrap();
    let run = write_run(
        &dir.path().join("run"),
        0,
        &["up", "down"],
        &[pass(0, 0, &[&[5, 2, 7]])],
    );
    let hotness = count(dir.path(), &run);
    assert_eq!((hotness.n_expert(), hotness.n_expert_used()), (8, 3));
}

#[test]
fn merges_only_runs_of_one_model() {
    let dir = tempfile::tempdir().unwrap();
    let one = write_run(&dir.path().join("a"), 4, &["up"], &[pass(0, 0, &[&[0, 1]])]);
    let two = write_run(
        &dir.path().join("b"),
        4,
        &["up"],
        &[pass(1, 0, &[&[0, 2]]), pass(0, 1, &[&[1, 0]])],
    );
    let other = write_run(&dir.path().join("c"), 5, &["up"], &[pass(0, 0, &[&[0, 1]])]);
    let mut sum = Hotness::from_run(&one, None).unwrap();
    sum.merge(&Hotness::from_run(&two, None).unwrap()).unwrap();
    assert_eq!(counts(&sum, 0, Phases::All), [2, 2, 0, 0]);
    assert_eq!(counts(&sum, 1, Phases::All), [1, 0, 1, 0]);
    assert_eq!(sum.calls(LayerId(0), Phases::All), 2);
    let error = sum
        .merge(&Hotness::from_run(&other, None).unwrap())
        .unwrap_err();
    assert!(
        matches!(
            error,
            Error::Mixed {
                left: 4,
                right: 5,
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn ranking_is_sorted_by_count_then_id() {
    let dir = tempfile::tempdir().unwrap();
    let passes = [
        pass(0, 0, &[&[3, 1], &[3, 1], &[3, 2]]),
        pass(1, 1, &[&[0, 1]]),
    ];
    let run = write_run(&dir.path().join("run"), 4, &["gate", "up"], &passes);
    let hotness = count(dir.path(), &run);
    let ranked = hotness.ranked(Phases::All);
    let places: Vec<_> = ranked.iter().map(|e| (e.layer.0, e.expert.0)).collect();
    assert_eq!(
        places,
        [
            (0, 3),
            (0, 1),
            (0, 2),
            (0, 0),
            (1, 0),
            (1, 1),
            (1, 2),
            (1, 3)
        ]
    );
    assert_eq!(ranked[0].share, 0.5);
    // Only layers with tokens in the phase.
    assert_eq!(hotness.ranked(GENERATE).len(), 4);
}

#[test]
fn rejects_empty_runs_and_ids_out_of_range() {
    let dir = tempfile::tempdir().unwrap();
    let empty = write_run(&dir.path().join("empty"), 4, &["up"], &[]);
    assert!(matches!(
        Hotness::from_run(&empty, None),
        Err(Error::Empty { .. })
    ));
    let tables = dir.path().join("tables");
    write_tables(&empty, &tables, TableOptions::default()).unwrap();
    assert!(matches!(
        Hotness::from_routing_table(&tables, None),
        Err(Error::Empty { .. })
    ));

    let unknown = write_run(
        &dir.path().join("unknown"),
        4,
        &["up"],
        &[pass(0, 0, &[&[0, 4]])],
    );
    let error = Hotness::from_run(&unknown, None).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Id {
                what: "expert",
                id: 4,
                limit: 4,
                ..
            }
        ),
        "{error}"
    );
    let bare = write_run(
        &dir.path().join("bare"),
        0,
        &["up"],
        &[pass(5000, 0, &[&[0, 1]])],
    );
    let error = Hotness::from_run(&bare, None).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Id {
                what: "layer",
                id: 5000,
                ..
            }
        ),
        "{error}"
    );
    let bare = write_run(
        &dir.path().join("huge"),
        0,
        &["up"],
        &[pass(0, 0, &[&[i32::MAX, 1]])],
    );
    assert!(matches!(
        Hotness::from_run(&bare, None),
        Err(Error::Id { .. })
    ));

    let prompt_only = write_run(
        &dir.path().join("prompt"),
        4,
        &["up"],
        &[pass(0, 0, &[&[0, 1]])],
    );
    let hotness = Hotness::from_run(&prompt_only, None).unwrap();
    assert!(matches!(
        hotness.learn_file(GENERATE),
        Err(Error::Empty { .. })
    ));
    hotness.learn_file(Phases::All).unwrap();
}
