//! What was found, for a person: a verdict, then a table for each thing that was compared.

use std::io::{self, Write};
use std::path::Path;

use moe_analysis::diff::{
    BytesDiff, DiffReport, LayerBytes, LayerRouting, OperationsDiff, RoutingDiff, RowKind,
};
use moe_gguf::text::counted;
use moe_trace::Expert;
use moe_trace::tables::PHASES;

use super::rows::{range_kind, row_kind};
use crate::output::{Cell, Format, human_bytes, write_rows};

/// What was found, in one sentence.
pub fn verdict(report: &DiffReport) -> String {
    let mut same = Vec::new();
    let mut other = Vec::new();
    let mut add = |is_equal: bool, if_equal: String, if_not: String| {
        if is_equal {
            same.push(if_equal)
        } else {
            other.push(if_not)
        }
    };
    if let Some(routing) = &report.routing {
        let total = routing.total();
        add(
            routing.is_equal(),
            format!("routing ({})", counted(total.rows[0], "row")),
            format!("routing ({})", differing_rows(&total)),
        );
    }
    if let Some(operations) = &report.operations {
        add(
            operations.is_equal(),
            format!("operations ({})", operations.n[0]),
            format!("operations ({})", differing_operations(operations)),
        );
    }
    if let Some(bytes) = &report.bytes {
        let total = bytes.total();
        add(
            bytes.is_equal(),
            format!(
                "bytes ({} in {})",
                human_bytes(total.read[0]),
                counted(total.ranges[0], "range")
            ),
            format!("bytes ({})", differing_ranges(&total)),
        );
    }
    match (other.is_empty(), same.is_empty()) {
        (true, _) => format!("equal: {}", same.join(", ")),
        (false, true) => format!("different: {}", other.join(", ")),
        (false, false) => format!(
            "different: {}; equal: {}",
            other.join(", "),
            same.join(", ")
        ),
    }
}

/// Tells what numbers are not zero.
fn list<const N: usize>(counts: [(u64, &str); N]) -> String {
    let counts = counts.iter().filter(|(n, _)| *n > 0);
    let texts: Vec<String> = counts.map(|(n, what)| format!("{n} {what}")).collect();
    texts.join(", ")
}

fn differing_rows(total: &LayerRouting) -> String {
    let differing = list([
        (total.other_experts, "with other experts"),
        (total.other_order, "in another order"),
        (total.other_weights, "with other weights"),
        (total.only[0], "only in A"),
        (total.only[1], "only in B"),
    ]);
    format!(
        "of {} in both: {differing}",
        counted(total.in_both(), "row")
    )
}

fn differing_operations(operations: &OperationsDiff) -> String {
    list([
        (operations.only[0].n, "only in A"),
        (operations.only[1].n, "only in B"),
        (operations.n_other_sources, "with other sources"),
        (operations.other_order, "times in another order"),
    ])
}

fn differing_ranges(total: &LayerBytes) -> String {
    let differing = list([
        (total.only[0], "only in A"),
        (total.only[1], "only in B"),
        (total.other_size, "of another size"),
        (total.other_place, "in another place"),
        (total.other_reads, "read another number of times"),
    ]);
    format!("ranges: {differing}")
}

/// The verdict and the tables.
pub fn report(
    out: &mut dyn Write,
    report: &DiffReport,
    paths: [&Path; 2],
    limit: usize,
) -> io::Result<()> {
    writeln!(out, "{}", verdict(report))?;
    writeln!(
        out,
        "A is {}, B is {}",
        paths[0].display(),
        paths[1].display()
    )?;
    if !report.manifest.is_empty() {
        let facts = report.manifest.iter();
        let rows = facts.map(|fact| {
            vec![
                fact.name.into(),
                fact.a.as_deref().into(),
                fact.b.as_deref().into(),
            ]
        });
        table(out, &["manifest", "A", "B"], rows)?;
    }
    if let Some(routing) = &report.routing {
        write_routing(out, routing)?;
    }
    if let Some(operations) = report.operations.as_ref().filter(|found| !found.is_equal()) {
        write_operations(out, operations, limit)?;
    }
    if let Some(bytes) = &report.bytes {
        write_bytes(out, bytes)?;
    }
    Ok(())
}

/// A table behind an empty line.
fn table<'a>(
    out: &mut dyn Write,
    columns: &[&str],
    rows: impl Iterator<Item = Vec<Cell<'a>>> + Clone,
) -> io::Result<()> {
    writeln!(out)?;
    write_rows(out, Format::Table, columns, rows)
}

fn write_routing(out: &mut dyn Write, routing: &RoutingDiff) -> io::Result<()> {
    let total = ("all".to_owned(), routing.total());
    let layers = routing.layers.iter();
    let layers = layers.map(|(layer, counts)| (layer.to_string(), counts.clone()));
    let rows = layers.chain([total]).map(|(layer, counts)| -> Vec<Cell> {
        let difference = |value: f64| Cell::from(format!("{value:.1e}"));
        let mean = counts.mean_weight_difference();
        let share = counts.share_same_experts();
        vec![
            layer.into(),
            counts.rows[0].into(),
            counts.rows[1].into(),
            counts.only[0].into(),
            counts.only[1].into(),
            counts.other_experts.into(),
            counts.other_order.into(),
            share.map(|share| format!("{:.2} %", 100.0 * share)).into(),
            mean.map_or(Cell::Null, |_| difference(counts.max_weight_difference)),
            mean.map_or(Cell::Null, difference),
        ]
    });
    let columns = [
        "routing of layer",
        "rows A",
        "rows B",
        "only A",
        "only B",
        "other experts",
        "other order",
        "same experts",
        "weights: max",
        "mean difference",
    ];
    table(out, &columns, rows)?;
    if routing.first.is_empty() {
        return Ok(());
    }
    let rows = routing.first.iter().map(|row| -> Vec<Cell> {
        let rounded = row.kind != RowKind::Weights;
        vec![
            row_kind(row.kind).into(),
            row.sequence_id.into(),
            phase(row.phase).into(),
            row.token_id.into(),
            row.layer.into(),
            experts(&row.experts[0], rounded).into(),
            experts(&row.experts[1], rounded).into(),
        ]
    });
    let columns = [
        "first rows",
        "sequence",
        "phase",
        "token",
        "layer",
        "A",
        "B",
    ];
    table(out, &columns, rows)
}

fn write_operations(
    out: &mut dyn Write,
    operations: &OperationsDiff,
    limit: usize,
) -> io::Result<()> {
    for (only, place) in operations.only.iter().zip(["only in A", "only in B"]) {
        if only.n == 0 {
            continue;
        }
        let rows = only.sorted();
        let rows = rows
            .iter()
            .take(limit)
            .map(|&((op, dst_name), n)| -> Vec<Cell> {
                vec![op.as_str().into(), dst_name.as_str().into(), n.into()]
            });
        table(out, &["operation", "result", place], rows)?;
    }
    if operations.sources.is_empty() {
        return Ok(());
    }
    let sources = operations.sorted_sources();
    let rows = sources.iter().take(limit).map(|&(source, n)| -> Vec<Cell> {
        vec![
            source.op.as_str().into(),
            source.dst_name.as_str().into(),
            source.what.to_string().into(),
            source.a.as_deref().into(),
            source.b.as_deref().into(),
            n.into(),
        ]
    });
    let columns = ["operation", "result", "differs in", "A", "B", "times"];
    table(out, &columns, rows)
}

fn write_bytes(out: &mut dyn Write, bytes: &BytesDiff) -> io::Result<()> {
    let total = ("all".to_owned(), bytes.total());
    let layers = bytes.layers.iter().map(|(layer, counts)| {
        let name = layer.map_or("none".to_owned(), |layer| layer.to_string());
        (name, *counts)
    });
    let rows = layers.chain([total]).map(|(layer, counts)| -> Vec<Cell> {
        vec![
            layer.into(),
            counts.read[0].into(),
            counts.read[1].into(),
            counts.ranges[0].into(),
            counts.ranges[1].into(),
            counts.only[0].into(),
            counts.only[1].into(),
            counts.other_size.into(),
            counts.other_place.into(),
            counts.other_reads.into(),
        ]
    });
    let columns = [
        "bytes of layer",
        "read A",
        "read B",
        "ranges A",
        "ranges B",
        "only A",
        "only B",
        "other size",
        "other place",
        "other reads",
    ];
    table(out, &columns, rows)?;
    if !bytes.split_experts {
        writeln!(
            out,
            "(a run without gguf-map.parquet does not tell where each expert is: whole tensors)"
        )?;
    }
    if bytes.first.is_empty() {
        return Ok(());
    }
    let rows = bytes.first.iter().map(|range| -> Vec<Cell> {
        let [a, b] = range
            .reads
            .map(|reads| reads.map(|r| format!("{} at {} × {}", r.size_bytes, r.file_offset, r.n)));
        vec![
            range_kind(range.kind).into(),
            range.tensor.as_str().into(),
            range.expert_id.into(),
            a.into(),
            b.into(),
        ]
    });
    let columns = [
        "first ranges",
        "tensor",
        "expert",
        "A: bytes, offset, reads",
        "B",
    ];
    table(out, &columns, rows)
}

/// The phase as the tables name it.
pub fn phase(phase: u8) -> String {
    let name = PHASES.get(usize::from(phase));
    name.map_or_else(|| phase.to_string(), |name| name.to_lowercase())
}

/// Experts with their weights, best first.
pub fn experts(experts: &[Expert], rounded: bool) -> String {
    let one = |expert: &Expert| match expert.weight {
        Some(weight) if rounded => format!("{}:{weight:.4}", expert.expert_id),
        Some(weight) => format!("{}:{weight}", expert.expert_id),
        None => expert.expert_id.to_string(),
    };
    experts.iter().map(one).collect::<Vec<_>>().join(" ")
}
