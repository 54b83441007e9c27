//! Differences of operations, their sources and the bytes read.

use super::*;

#[test]
fn reports_missing_and_renamed_operations() {
    let report = changed(&DiffOptions::default(), |records| {
        let at = records
            .iter()
            .rposition(|r| r.dst_name_bytes() == b"result_output");
        records.remove(at.unwrap());
        for record in named(records, "ffn_moe_up-1") {
            set_name(&mut record.dst_name, "ffn_up-1");
        }
    });
    let operations = report.operations.unwrap();
    assert_eq!(operations.n, [24, 23]);
    let kinds = |side: usize| -> Vec<(&str, &str, u64)> {
        let sorted = operations.only[side].sorted().into_iter();
        sorted
            .map(|((op, name), n)| (op.as_str(), name.as_str(), n))
            .collect()
    };
    assert_eq!(
        kinds(0),
        [
            ("MUL_MAT_ID", "ffn_moe_up-N", 3),
            ("MUL_MAT", "result_output", 1)
        ]
    );
    assert_eq!(kinds(1), [("MUL_MAT_ID", "ffn_up-N", 3)]);
    assert_eq!(
        (operations.n_different_sources, operations.different_order),
        (0, 0)
    );
    // Routing is derived from the gate operation.
    assert!(report.routing.unwrap().is_equal());
}

/// llama.cpp names an unnamed node by its index in the graph.
#[test]
fn unnamed_nodes_match_by_operation() {
    let unname = |records: &mut Vec<TensorAccessLog>| {
        for (i, record) in named(records, "ffn_moe_up-1").into_iter().enumerate() {
            set_name(&mut record.dst_name, &format!("node_{}", 31 + i));
        }
        for record in named(records, "ffn_moe_down-1") {
            set_name(&mut record.sources[1].name, "node_40 (reshaped)");
        }
    };
    let operations = changed(&DiffOptions::default(), unname).operations.unwrap();
    assert!(operations.is_equal(), "{operations:?}");

    // They do not match another operation.
    let operations = changed(&DiffOptions::default(), |records| {
        for record in named(records, "result_output") {
            record.operation_type = GET_ROWS;
            set_name(&mut record.dst_name, "node_7");
        }
    });
    let operations = operations.operations.unwrap();
    assert_eq!(operations.only[0].sorted()[0].0.1, "result_output");
    assert_eq!(
        operations.only[1].sorted(),
        [(&("GET_ROWS".into(), "node_N".into()), 3)]
    );
}

#[test]
fn reports_operations_in_different_order() {
    let report = changed(&DiffOptions::default(), |records| {
        let at = records
            .iter()
            .rposition(|r| r.dst_name_bytes() == b"ffn_moe_up-1")
            .unwrap();
        records.swap(at, at + 1); // up and down of the last pass, one record each
    });
    let operations = report.operations.unwrap();
    assert_eq!((operations.only[0].n, operations.only[1].n), (0, 0));
    assert_eq!(operations.different_order, 1);
    assert!(!operations.is_equal());
}

#[test]
fn reports_different_sources_of_matched_operations() {
    let report = changed(&DiffOptions::default(), |records| {
        for record in named(records, "result_output") {
            set_name(&mut record.sources[1].name, "norm");
            record.n_tokens.set(2);
        }
        for record in named(records, "ffn_moe_down-1") {
            record.set_source_size(1, 1);
            record.num_sources = 2;
        }
    });
    let operations = report.operations.unwrap();
    assert_eq!(operations.n_different_sources, 6);
    let found: Vec<_> = operations
        .sources
        .iter()
        .map(|(s, n)| {
            (
                s.dst_name.as_str(),
                s.aspect,
                s.a.as_deref(),
                s.b.as_deref(),
                *n,
            )
        })
        .collect();
    assert_eq!(
        found,
        [
            (
                "result_output",
                SourceAspect::Tokens,
                Some("1"),
                Some("2"),
                3
            ),
            (
                "result_output",
                SourceAspect::Name(1),
                Some("result_norm"),
                Some("norm"),
                3
            ),
            (
                "ffn_moe_down-N",
                SourceAspect::Name(2),
                Some("ffn_moe_topk-1"),
                None,
                3
            ),
            ("ffn_moe_down-N", SourceAspect::Size(1), None, None, 3),
        ]
    );
    assert!(report.bytes.unwrap().is_equal());
}

#[test]
fn reports_different_offsets_and_sizes() {
    let report = changed(&DiffOptions::default(), |records| {
        for record in named(records, "ffn_moe_gate-0") {
            let offset = record.sources[0].offset_or_buffer_id.get();
            record.sources[0].offset_or_buffer_id.set(offset + 32);
        }
        // One of three reads of the output has a different size.
        let at = records
            .iter()
            .rposition(|r| r.dst_name_bytes() == b"result_output")
            .unwrap();
        let size = records[at].source_size(0);
        records[at].set_source_size(0, size - 2);
    });
    let bytes = report.bytes.unwrap();
    // Twelve experts of one of the three tensors have different offsets.
    assert_eq!(
        bytes.layers[&Some(LayerId(0))],
        LayerBytes {
            different_offset: 12,
            ..clean(&bytes.layers[&Some(LayerId(0))])
        }
    );
    let output = bytes.layers[&None];
    assert_eq!((output.only, output.different_reads), ([0, 1], 1));
    assert_eq!(output.read[1], output.read[0] - 2);
    assert!(report.routing.unwrap().is_equal());
    let report = changed(&DiffOptions::default(), |records| {
        for record in named(records, "result_output") {
            record.set_source_size(0, 100);
        }
    });
    let bytes = report.bytes.unwrap();
    assert_eq!(bytes.layers[&None].different_size, 1);
    let sizes = bytes.first[0].reads.map(|reads| reads.unwrap().size_bytes);
    let (gguf, _) = gpt_oss();
    assert_eq!(
        sizes,
        [gguf.tensor("output.weight").unwrap().size_bytes, 100]
    );
}

/// The same layer without differences.
fn clean(layer: &LayerBytes) -> LayerBytes {
    LayerBytes {
        read: layer.read,
        ranges: layer.ranges,
        ..LayerBytes::default()
    }
}
