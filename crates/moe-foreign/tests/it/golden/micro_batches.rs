//! Training steps with several micro-batches, and lines that activation recomputation repeats.

use moe_testkit::fixture;

use super::slots::read;
use super::*;

fn steps(name: &str) -> (Collected, Summary) {
    read(&fixture("foreign/megatron-steps").join(name))
}

/// `(layer, token)` of all rows, in order.
fn tokens(rows: &Collected) -> Vec<(u16, u32)> {
    let mut tokens: Vec<_> = rows
        .routing
        .iter()
        .map(|row| (row.layer_id.0, row.token_id.0))
        .collect();
    tokens.dedup();
    tokens
}

#[test]
fn micro_batches_of_a_step_are_different_tokens() {
    let (as_steps, summary) = steps("steps.jsonl");
    assert_eq!(summary.rows, 4 * 3 * 5 * 4);
    assert_eq!(steps("microbatches.jsonl").0, as_steps);
}

#[test]
fn skips_recomputed_lines() {
    let (rows, summary) = steps("recompute.jsonl");
    let expected: Vec<_> = (0..3)
        .flat_map(|layer| (0..5).map(move |t| (layer, t)))
        .collect();
    assert_eq!(tokens(&rows), expected);
    assert_eq!(rows.routing.len(), 3 * 5 * 4);
    assert!(
        summary.notes[0].starts_with("skipped 3 lines equal to an earlier line"),
        "{:?}",
        summary.notes
    );
}

fn line(rank: u32, step: u64, layer: u16, experts: &[[i64; 2]]) -> String {
    format!(
        "{{\"step\":{step},\"layer\":{layer},\"rank\":{rank},\"num_tokens\":{},\"topk\":2,\"top_indices\":{experts:?}}}\n",
        experts.len()
    )
}

fn read_lines(lines: &[String]) -> (Collected, Summary) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("router_trace_rank0.jsonl");
    std::fs::write(&path, lines.concat()).unwrap();
    read(&path)
}

/// Two micro-batches of one token, on two ranks, in the order of three pipeline schedules. In the third, the first micro-batch is
/// recomputed after the second. Then a second step follows.
#[test]
fn tokens_do_not_depend_on_the_pipeline_schedule() {
    let first = |rank, layer: u16| line(rank, 0, layer, &[[1, 2 + i64::from(layer)]]);
    let second = |rank, layer: u16| line(rank, 0, layer, &[[3, 4 + i64::from(layer)]]);
    let next = |rank, layer| line(rank, 1, layer, &[[5, 6]]);
    let both = |of: &dyn Fn(u32, u16) -> String, layer| [of(0, layer), of(1, layer)].concat();
    let expected = || -> Vec<(u16, u32, u32)> {
        let mut rows = Vec::new();
        for layer in [0, 1] {
            for (token, experts) in [[1, 2 + u32::from(layer)], [3, 4 + u32::from(layer)], [5, 6]]
                .into_iter()
                .enumerate()
            {
                rows.extend(experts.map(|expert| (layer, token as u32, expert)));
            }
        }
        rows
    };
    let schedules = [
        vec![
            both(&first, 0),
            both(&first, 1),
            both(&second, 0),
            both(&second, 1),
        ],
        // Interleaved schedule: layer 1 is in another virtual stage of the same rank.
        vec![
            both(&first, 0),
            both(&second, 0),
            both(&first, 1),
            both(&second, 1),
        ],
        vec![
            both(&first, 0),
            both(&first, 1),
            both(&second, 0),
            both(&second, 1),
            both(&first, 1),
            both(&first, 0),
        ],
    ];
    for schedule in schedules {
        let lines = [schedule, vec![both(&next, 0), both(&next, 1)]].concat();
        let (rows, _) = read_lines(&lines);
        for rank in [0, 1] {
            let mut found: Vec<_> = rows
                .routing
                .iter()
                .filter(|row| row.sequence_id == Some(rank))
                .map(|row| (row.layer_id.0, row.token_id.0, row.expert_id.0))
                .collect();
            found.sort_unstable();
            assert_eq!(found, expected(), "rank {rank}, {lines:?}");
        }
    }
}

#[test]
fn equal_lines_of_two_steps_are_different_tokens() {
    let (rows, summary) = read_lines(&[line(0, 0, 0, &[[1, 2]]), line(0, 1, 0, &[[1, 2]])]);
    assert_eq!(tokens(&rows), [(0, 0), (0, 1)]);
    assert!(
        !summary
            .notes
            .iter()
            .any(|note| note.contains("equal to an earlier line"))
    );
}

/// The micro-batches of one step, as lists of the first expert by layer. The lines are in the order of layers.
fn read_step(layers: &[&[i64]]) -> (Vec<Vec<(u32, u32)>>, Summary) {
    let mut lines = Vec::new();
    for (layer, experts) in (0..).zip(layers) {
        lines.extend(
            experts
                .iter()
                .map(|&first| line(0, 0, layer, &[[first, 9]])),
        );
    }
    let (rows, summary) = read_lines(&lines);
    let of_layer = |layer: usize| -> Vec<(u32, u32)> {
        let rows = rows.routing.iter();
        rows.filter(|row| usize::from(row.layer_id.0) == layer && row.slot == 0)
            .map(|row| (row.token_id.0, row.expert_id.0))
            .collect()
    };
    ((0..layers.len()).map(of_layer).collect(), summary)
}

/// Two micro-batches may have the same experts in one layer.
#[test]
fn equal_lines_of_one_layer_are_different_tokens() {
    let (rows, summary) = read_step(&[&[1, 1, 0], &[3, 5, 1]]);
    let expected = [[(0, 1), (1, 1), (2, 0)], [(0, 3), (1, 5), (2, 1)]];
    assert_eq!(rows, expected);
    let has_skipped = |note: &String| note.contains("equal to an earlier line");
    assert!(
        !summary.notes.iter().any(has_skipped),
        "{:?}",
        summary.notes
    );
}

#[test]
fn skips_recomputed_lines_of_all_layers() {
    for (layers, expected) in [
        // Both micro-batches have the same experts in the first layer; then each is recomputed.
        (
            vec![&[1, 1, 1, 1][..], &[3, 3, 5, 5]],
            vec![[(0, 1), (1, 1)], [(0, 3), (1, 5)]],
        ),
        (
            vec![&[1, 1, 1, 1][..], &[3, 5, 3, 5]],
            vec![[(0, 1), (1, 1)], [(0, 3), (1, 5)]],
        ),
        // Interleaved schedule: the second layer is in another virtual stage.
        (
            vec![&[1, 2, 1, 2][..], &[3, 3, 5, 5]],
            vec![[(0, 1), (1, 2)], [(0, 3), (1, 5)]],
        ),
        // Only the first layer is recomputed.
        (
            vec![&[1, 1, 2, 2][..], &[3, 5]],
            vec![[(0, 1), (1, 2)], [(0, 3), (1, 5)]],
        ),
    ] {
        let (rows, summary) = read_step(&layers);
        assert_eq!(rows, expected, "{layers:?}");
        let n_lines: usize = layers.iter().map(|layer| layer.len()).sum();
        let note = format!("skipped {} lines equal to an earlier line", n_lines - 4);
        assert!(summary.notes[0].starts_with(&note), "{:?}", summary.notes);
    }
}

#[test]
fn rejects_a_step_in_which_recomputed_lines_are_ambiguous() {
    for layers in [
        vec![vec![1, 1, 1, 1], vec![3, 5, 3, 5], vec![6, 6, 7, 7]],
        vec![vec![1, 1, 2, 2], vec![3, 4, 5]],
    ] {
        let mut text = line(0, 6, 0, &[[1, 2]]);
        for (layer, experts) in (0..).zip(&layers) {
            for &first in experts {
                text += &line(0, 7, layer, &[[first, 9]]);
            }
        }
        let error = error_of("megatron", &text, &ImportOptions::default()).to_string();
        assert!(error.contains("line 2: step 7: "), "{error}");
        assert!(
            error.contains("cannot be distinguished from tokens"),
            "{error}"
        );
    }
}

/// moe-balance writes one line per device for a batch of several devices.
#[test]
fn further_lines_of_a_batch_continue_its_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace.jsonl");
    let line = |batch: u32, layer: u16, experts: &str| {
        format!("{{\"layer\":{layer},\"batch_id\":{batch},\"topk_experts\":{experts}}}\n")
    };
    let lines = [
        line(3, 0, "[[1],[2]]"),
        line(3, 0, "[[3]]"),
        line(4, 0, "[[4]]"),
        line(3, 1, "[[5],[6],[7]]"),
    ];
    std::fs::write(&path, lines.concat()).unwrap();
    let (rows, _) = read(&path);
    let places: Vec<_> = rows
        .routing
        .iter()
        .map(|row| {
            (
                row.layer_id.0,
                row.sequence_id,
                row.token_id.0,
                row.expert_id.0,
            )
        })
        .collect();
    let (a, b) = (Some(3), Some(4));
    assert_eq!(
        places,
        [
            (0, a, 0, 1),
            (0, a, 1, 2),
            (0, a, 2, 3),
            (0, b, 0, 4),
            (1, a, 0, 5),
            (1, a, 1, 6),
            (1, a, 2, 7)
        ]
    );
}
