//! Differences of selected experts and weights.

use moe_trace::{ExpertId, Phase, TokenId};

use super::*;

#[test]
fn reports_same_experts_in_different_order() {
    let report = changed(&DiffOptions::default(), |records| {
        for record in of_token(records, 1, 0) {
            record.expert_ids.swap(0, 1);
        }
    });
    let routing = report.routing.unwrap();
    let layer = &routing.layers[&LayerId(0)];
    assert_eq!(
        (
            layer.different_order,
            layer.different_experts,
            layer.different_weights
        ),
        (1, 0, 0)
    );
    // The weights 1 and 1/2 stay in their slots while the ids 4 and 5 are swapped: two of 20 weights differ by 1/2.
    assert_eq!(layer.max_weight_difference, 0.5);
    assert_eq!(layer.mean_weight_difference(), Some(0.05));
    assert!(routing.layers[&LayerId(1)].is_equal());
    let first = &routing.first[..];
    assert_eq!(first.len(), 1);
    assert_eq!(
        (first[0].kind, first[0].token_id, first[0].layer),
        (RoutingDifferenceKind::Order, TokenId(1), LayerId(0))
    );
    let ids = |side: usize| {
        first[0].experts[side]
            .iter()
            .map(|e| e.expert_id)
            .collect::<Vec<_>>()
    };
    assert_eq!(
        (ids(0), ids(1)),
        (
            [4, 5, 6, 7].map(ExpertId).into(),
            [5, 4, 6, 7].map(ExpertId).into()
        )
    );
    assert!(report.operations.unwrap().is_equal());
    assert!(report.bytes.unwrap().is_equal());
}

/// Plain v4 records do not contain sequence numbers. They match a run with one sequence of any number, but not a run with
/// several.
#[test]
fn unknown_sequence_matches_only_sequence_of_other_run() {
    let compare = |n_sequences: u32| {
        let dir = tempfile::tempdir().unwrap();
        let mut records = known();
        for (i, record) in records.iter_mut().enumerate() {
            record.sequence_id.set(5 + i as u32 % n_sequences);
        }
        let b = run_of(&dir.path().join("b"), &records);
        for record in &mut records {
            record.ext_version = EXT_NONE;
        }
        let a = run_of(&dir.path().join("a"), &records);
        diff(&a, &b, &DiffOptions::default())
    };
    let routing = compare(1).unwrap().routing.unwrap();
    assert!(routing.is_equal(), "{routing:?}");
    assert_eq!(routing.total().tokens, [8, 8]);
    let error = compare(2).unwrap_err();
    assert!(
        matches!(&error, moe_analysis::diff::Error::UnknownSequences { path, n_sequences: 2, .. } if path.ends_with("a")),
        "{error}"
    );
}

#[test]
fn reports_different_expert_in_routing_and_bytes() {
    let report = changed(&DiffOptions::default(), |records| {
        for record in of_token(records, 4, 1) {
            record.expert_ids[0].set(9);
        }
    });
    let routing = report.routing.unwrap();
    assert_eq!(routing.layers[&LayerId(1)].different_experts, 1);
    assert_eq!(
        routing.layers[&LayerId(1)].share_same_experts(),
        Some(2.0 / 3.0)
    );
    assert_eq!(routing.total().share_same_experts(), Some(7.0 / 8.0));
    assert_eq!(routing.first[0].kind, RoutingDifferenceKind::Experts);
    assert_eq!(routing.first[0].phase, Some(Phase::Generate));
    let bytes = report.bytes.unwrap();
    let layer = bytes.layers[&Some(LayerId(1))];
    // In three tensors: only B read expert 9; A read expert 3 twice and B once.
    assert_eq!((layer.only, layer.different_reads), ([0, 3], 3));
    let found = bytes
        .first
        .iter()
        .find(|r| r.kind == RangeDifferenceKind::OnlyB)
        .unwrap();
    assert_eq!(
        (found.expert_id, found.layer),
        (Some(ExpertId(9)), Some(LayerId(1)))
    );
    let (gguf, _) = gpt_oss();
    let tensor = gguf.tensor(&found.tensor).unwrap();
    let reads = found.reads[1].unwrap();
    assert_eq!(reads.size_bytes, tensor.size_bytes / 16);
    assert_eq!(
        reads.file_offset,
        tensor.offset + 9 * (tensor.size_bytes / 16)
    );
    let other = bytes
        .first
        .iter()
        .find(|r| r.kind == RangeDifferenceKind::Reads)
        .unwrap();
    assert_eq!(other.expert_id, Some(ExpertId(3)));
    assert_eq!(other.reads.map(|reads| reads.unwrap().n), [2, 1]);
}

#[test]
fn compares_weights_with_tolerance() {
    let change = |records: &mut Vec<TensorAccessLog>| {
        for record in of_token(records, 3, 0) {
            record.expert_weights[2].set(1.0 / 3.0 + 0.25);
        }
    };
    let routing = changed(&DiffOptions::default(), change).routing.unwrap();
    assert_eq!(routing.layers[&LayerId(0)].different_weights, 1);
    assert_eq!(routing.first[0].kind, RoutingDifferenceKind::Weights);
    assert!((routing.layers[&LayerId(0)].max_weight_difference - 0.25).abs() < 1e-6);
    let options = DiffOptions {
        weight_tolerance: 0.26,
        ..DiffOptions::default()
    };
    assert!(changed(&options, change).is_equal());
    // A NaN differs from every number.
    let nan = |records: &mut Vec<TensorAccessLog>| {
        of_token(records, 3, 0).for_each(|record| record.expert_weights[2].set(f32::NAN));
    };
    let routing = changed(&options, nan).routing.unwrap();
    assert_eq!(
        routing.layers[&LayerId(0)].max_weight_difference,
        f64::INFINITY
    );
}
