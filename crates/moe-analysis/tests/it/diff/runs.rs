//! Runs with different batches, sequences and operation numbers.

use super::*;

#[test]
fn reports_tokens_of_one_run() {
    let report = changed(&DiffOptions::default(), |records| {
        records.retain(|r| r.token_id.get() < 4);
    });
    let routing = report.routing.unwrap();
    let total = routing.total();
    assert_eq!(
        (total.tokens, total.only, total.in_both()),
        ([8, 6], [2, 0], 6)
    );
    assert_eq!(total.share_same_experts(), Some(1.0));
    assert_eq!(routing.first.len(), 2);
    assert!(
        routing
            .first
            .iter()
            .all(|token| token.kind == RoutingDifferenceKind::OnlyA && token.experts[1].is_empty())
    );
    assert_eq!(report.operations.unwrap().only[0].n, 8);
}

#[test]
fn routing_is_independent_of_batches_and_interleaving() {
    let (gguf, _) = gpt_oss();
    let dir = tempfile::tempdir().unwrap();
    let all: &[&[i32]] = &[&[0, 1, 2, 3], &[4, 5, 6, 7], &[8, 9, 10, 11]];
    let whole = pass(&gguf, 100, PHASE_PROMPT, 0, [all, all]);
    let halves = [
        pass(&gguf, 100, PHASE_PROMPT, 0, [&all[..2], &all[..2]]),
        pass(&gguf, 200, PHASE_PROMPT, 2, [&all[2..], &all[2..]]),
    ]
    .concat();
    let a = run_of(&dir.path().join("a"), &whole);
    let b = run_of(&dir.path().join("b"), &halves);
    let report = diff(&a, &b, &DiffOptions::default()).unwrap();
    let routing = report.routing.unwrap();
    assert!(routing.is_equal());
    assert_eq!(routing.total().tokens, [6, 6]);
    // The second pass of B has no match.
    let operations = report.operations.unwrap();
    assert_eq!((operations.only[1].n, operations.different_order), (8, 0));

    let other = |sequence: u32, records: &[TensorAccessLog]| {
        let mut records = records.to_vec();
        records
            .iter_mut()
            .for_each(|record| record.sequence_id.set(sequence));
        records
    };
    let [first, second] = [0, 1].map(|sequence| other(sequence, &known()));
    let passes = |records: &[TensorAccessLog]| -> Vec<Vec<TensorAccessLog>> {
        let by_token = |t: std::ops::Range<u32>| {
            records
                .iter()
                .filter(|r| t.contains(&r.token_id.get()))
                .copied()
                .collect()
        };
        vec![by_token(0..3), by_token(3..4), by_token(4..5)]
    };
    let in_turn: Vec<TensorAccessLog> = passes(&first)
        .into_iter()
        .zip(passes(&second))
        .flat_map(|(a, b)| [a, b].concat())
        .collect();
    let a = run_of(&dir.path().join("c"), &[first, second].concat());
    let b = run_of(&dir.path().join("d"), &in_turn);
    assert!(diff(&a, &b, &DiffOptions::default()).unwrap().is_equal());
}

#[test]
fn operations_match_despite_different_numbers() {
    let dir = tempfile::tempdir().unwrap();
    let records = known();
    let a = run_of(&dir.path().join("a"), &records);
    let b = moved_numbers(&dir.path().join("b"), &records);
    let report = diff(&a, &b, &DiffOptions::default()).unwrap();
    assert!(report.is_equal(), "{report:?}");
    let difference = ManifestDifference {
        name: "engine",
        a: Some("moe-analyze 0.1.0".into()),
        b: Some("other 7".into()),
    };
    assert_eq!(report.manifest, [difference]);
}

/// The records with the operation numbers of another engine.
fn moved_numbers(dir: &Path, records: &[TensorAccessLog]) -> Run {
    let (_, map) = gpt_oss();
    let mut manifest = Manifest {
        ops: moe_trace::ops::default_table()
            .iter()
            .map(|(n, name)| (n + 7, name.to_owned()))
            .collect(),
        ..manifest()
    };
    manifest.engine.name = "other".into();
    manifest.engine.version = "7".into();
    let mut writer = RunWriter::create(dir, manifest, &map, RunOptions::default()).unwrap();
    for record in records {
        let mut record = *record;
        record.operation_type += 7;
        *writer.next_record().unwrap() = record;
    }
    writer.finish().unwrap();
    Run::open(dir).unwrap()
}

#[test]
fn bare_traces_compare_entire_tensors() {
    let dir = tempfile::tempdir().unwrap();
    let a = run_of(&dir.path().join("a"), &known());
    let b = Run::open(dir.path().join("a/trace.bin")).unwrap();
    let report = diff(&a, &b, &DiffOptions::default()).unwrap();
    assert!(report.is_equal());
    assert!(
        report
            .manifest
            .iter()
            .all(|difference| difference.a.is_some() && difference.b.is_none())
    );
    let bytes = report.bytes.unwrap();
    assert!(!bytes.split_experts);
    assert_eq!(bytes.layers[&Some(LayerId(1))].ranges, [3, 3]);
}

#[test]
fn respects_parts_and_limit() {
    let options = DiffOptions {
        operations: false,
        bytes: false,
        limit: 2,
        ..DiffOptions::default()
    };
    let report = changed(&options, |records| {
        for record in records.iter_mut().filter(|r| r.num_experts > 0) {
            record.expert_ids[3].set(15);
        }
    });
    assert_eq!((report.operations, report.bytes), (None, None));
    let routing = report.routing.unwrap();
    assert_eq!(
        (routing.total().different_experts, routing.first.len()),
        (8, 2)
    );
    assert_eq!(LayerRouting::default().share_same_experts(), None);
}
