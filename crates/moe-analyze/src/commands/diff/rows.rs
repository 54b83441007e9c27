//! The differences as rows: one table for all parts.

use std::slice;

use moe_analysis::diff::{
    BytesDiff, DiffReport, LayerBytes, LayerRouting, OperationsDiff, RangeDifferenceKind,
    RoutingDiff, RoutingDifferenceKind,
};
use moe_trace::LayerId;

use super::text_report::{experts, phase};
use crate::output::{Cell, Table};

/// A row, identified by `part` and `what`. Columns that do not apply are empty. `value` belongs to both runs, `a` and `b` to one.
#[derive(Default)]
pub struct Row<'a> {
    part: &'static str,
    what: Cell<'a>,
    sequence_id: Cell<'a>,
    phase: Cell<'a>,
    token_id: Cell<'a>,
    layer_id: Cell<'a>,
    op: Cell<'a>,
    name: Cell<'a>,
    expert_id: Cell<'a>,
    value: Cell<'a>,
    a: Cell<'a>,
    b: Cell<'a>,
}

impl<'a> Row<'a> {
    fn new(part: &'static str, what: impl Into<Cell<'a>>) -> Row<'a> {
        Row {
            part,
            what: what.into(),
            ..Row::default()
        }
    }

    fn layer(self, layer: Option<LayerId>) -> Row<'a> {
        Row {
            layer_id: layer.into(),
            ..self
        }
    }

    fn value(self, value: impl Into<Cell<'a>>) -> Row<'a> {
        Row {
            value: value.into(),
            ..self
        }
    }

    fn pair<T: Into<Cell<'a>>>(self, [a, b]: [T; 2]) -> Row<'a> {
        Row {
            a: a.into(),
            b: b.into(),
            ..self
        }
    }
}

/// Returns the table of the rows.
pub fn table<'a>(rows: &'a [Row<'a>]) -> Table<'a, slice::Iter<'a, Row<'a>>> {
    Table::of(rows)
        .column("part", "part", |row| row.part)
        .column("what", "what", |row| row.what.clone())
        .column("sequence_id", "sequence", |row| row.sequence_id.clone())
        .column("phase", "phase", |row| row.phase.clone())
        .column("token_id", "token", |row| row.token_id.clone())
        .column("layer_id", "layer", |row| row.layer_id.clone())
        .column("op", "operation", |row| row.op.clone())
        .column("name", "name", |row| row.name.clone())
        .column("expert_id", "expert", |row| row.expert_id.clone())
        .column("value", "value", |row| row.value.clone())
        .column("a", "A", |row| row.a.clone())
        .column("b", "B", |row| row.b.clone())
}

/// Returns the rows of a report, with at most `limit` examples of each kind.
pub fn rows(report: &DiffReport, limit: usize) -> Vec<Row<'_>> {
    let mut rows = Vec::new();
    for difference in &report.manifest {
        rows.push(
            Row::new("manifest", manifest_key(difference.name))
                .pair([difference.a.as_deref(), difference.b.as_deref()]),
        );
    }
    if let Some(routing) = &report.routing {
        push_routing(&mut rows, routing);
    }
    if let Some(operations) = &report.operations {
        push_operations(&mut rows, operations, limit);
    }
    if let Some(bytes) = &report.bytes {
        push_bytes(&mut rows, bytes);
    }
    rows
}

fn push_routing<'a>(rows: &mut Vec<Row<'a>>, routing: &'a RoutingDiff) {
    for (layer, counts) in &routing.layers {
        push_routing_counts(rows, "routing", Some(*layer), counts);
    }
    push_routing_counts(rows, "routing_total", None, &routing.total());
    for row in &routing.first {
        rows.push(Row {
            sequence_id: row.sequence_id.into(),
            phase: phase(row.phase).into(),
            token_id: row.token_id.into(),
            layer_id: row.layer.into(),
            ..Row::new("routing_row", key(routing_kind(row.kind)))
                .pair([&row.experts[0], &row.experts[1]].map(|side| experts(side, false)))
        });
    }
}

fn push_routing_counts(
    rows: &mut Vec<Row<'_>>,
    part: &'static str,
    layer: Option<LayerId>,
    counts: &LayerRouting,
) {
    let row = |what| Row::new(part, what).layer(layer);
    rows.push(row("rows").pair(counts.tokens));
    rows.push(row("only").pair(counts.only));
    rows.push(row("other_experts").value(counts.different_experts));
    rows.push(row("other_order").value(counts.different_order));
    rows.push(row("other_weights").value(counts.different_weights));
    if let Some(share) = counts.share_same_experts() {
        rows.push(row("share_same_experts").value(share));
    }
    if let Some(mean) = counts.mean_weight_difference() {
        rows.push(row("max_weight_difference").value(counts.max_weight_difference));
        rows.push(row("mean_weight_difference").value(mean));
    }
}

fn push_operations<'a>(rows: &mut Vec<Row<'a>>, operations: &'a OperationsDiff, limit: usize) {
    let [a, b] = &operations.only;
    rows.push(Row::new("operations", "operations").pair(operations.n));
    rows.push(Row::new("operations", "only").pair([a.n, b.n]));
    rows.push(Row::new("operations", "other_sources").value(operations.n_different_sources));
    rows.push(Row::new("operations", "other_order").value(operations.different_order));
    for (only, what) in [(a, "only_in_A"), (b, "only_in_B")] {
        for ((op, dst_name), n) in only.sorted().into_iter().take(limit) {
            rows.push(Row {
                op: op.as_str().into(),
                name: dst_name.as_str().into(),
                ..Row::new("operation", what).value(n)
            });
        }
    }
    for (source, n) in operations.sorted_sources().into_iter().take(limit) {
        rows.push(Row {
            op: source.op.as_str().into(),
            name: source.dst_name.as_str().into(),
            ..Row::new("operation", key(&source.aspect.to_string()))
                .value(n)
                .pair([source.a.as_deref(), source.b.as_deref()])
        });
    }
}

fn push_bytes<'a>(rows: &mut Vec<Row<'a>>, bytes: &'a BytesDiff) {
    for (layer, counts) in &bytes.layers {
        push_byte_counts(rows, "bytes", *layer, counts);
    }
    push_byte_counts(rows, "bytes_total", None, &bytes.total());
    for range in &bytes.first {
        let text = range.reads.map(|reads| {
            reads.map(|r| {
                format!(
                    "file {} offset {} bytes {} reads {}",
                    r.file, r.file_offset, r.size_bytes, r.n
                )
            })
        });
        rows.push(Row {
            name: range.tensor.as_str().into(),
            expert_id: range.expert_id.into(),
            ..Row::new("range", range_key(range.kind))
                .layer(range.layer)
                .pair(text)
        });
    }
}

fn push_byte_counts(
    rows: &mut Vec<Row<'_>>,
    part: &'static str,
    layer: Option<LayerId>,
    counts: &LayerBytes,
) {
    let row = |what| Row::new(part, what).layer(layer);
    rows.push(row("read").pair(counts.read));
    rows.push(row("ranges").pair(counts.ranges));
    rows.push(row("only").pair(counts.only));
    rows.push(row("other_size").value(counts.different_size));
    rows.push(row("other_place").value(counts.different_offset));
    rows.push(row("other_reads").value(counts.different_reads));
}

/// Returns a text as a machine-readable key.
fn key(text: &str) -> String {
    text.replace(' ', "_")
}

/// Returns the machine-readable name of a manifest field.
fn manifest_key(name: &str) -> String {
    match name {
        "cpu" => "processor".to_owned(),
        _ => key(name),
    }
}

/// Returns the machine-readable name of how a byte range differs.
fn range_key(kind: RangeDifferenceKind) -> String {
    match kind {
        RangeDifferenceKind::Offset => "other_place".to_owned(),
        _ => key(range_kind(kind)),
    }
}

/// Describes how a routed token differs.
pub fn routing_kind(kind: RoutingDifferenceKind) -> &'static str {
    match kind {
        RoutingDifferenceKind::Experts => "other experts",
        RoutingDifferenceKind::OnlyA => "only in A",
        RoutingDifferenceKind::OnlyB => "only in B",
        RoutingDifferenceKind::Order => "other order",
        RoutingDifferenceKind::Weights => "other weights",
    }
}

/// Describes how a byte range differs.
pub fn range_kind(kind: RangeDifferenceKind) -> &'static str {
    match kind {
        RangeDifferenceKind::OnlyA => "only in A",
        RangeDifferenceKind::OnlyB => "only in B",
        RangeDifferenceKind::Size => "other size",
        RangeDifferenceKind::Offset => "other offset",
        RangeDifferenceKind::Reads => "other reads",
    }
}
