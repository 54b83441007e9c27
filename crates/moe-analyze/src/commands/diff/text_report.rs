//! The report to read: a verdict, then a table for each compared part.

use std::io::{self, Write};
use std::path::Path;

use moe_analysis::diff::{
    BytesDiff, DiffReport, LayerBytes, LayerRouting, OperationsDiff, RangeDifference, RoutingDiff,
    RoutingDifference, RoutingDifferenceKind,
};
use moe_files::text::counted;
use moe_trace::Expert;
use moe_trace::Phase;

use super::rows::{range_kind, routing_kind};
use crate::output::{Format, Table, fixed, human_bytes, message};

/// Returns the result in one sentence.
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
            format!("routing ({})", counted(total.tokens[0], "routed token")),
            format!("routing ({})", differing_tokens(&total)),
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

/// Lists the nonzero numbers with their names.
fn list<const N: usize>(counts: [(u64, &str); N]) -> String {
    let counts = counts.iter().filter(|(n, _)| *n > 0);
    let texts: Vec<String> = counts.map(|(n, what)| format!("{n} {what}")).collect();
    texts.join(", ")
}

fn differing_tokens(total: &LayerRouting) -> String {
    let in_both = list([
        (total.different_experts, "with different experts"),
        (total.different_order, "in a different order"),
        (total.different_weights, "with different weights"),
    ]);
    let in_one = list([(total.only[0], "only in A"), (total.only[1], "only in B")]);
    let tokens = counted(total.in_both(), "routed token");
    let parts = [format!("{tokens} in both runs"), in_both, in_one];
    let parts: Vec<String> = parts.into_iter().filter(|part| !part.is_empty()).collect();
    parts.join(", ")
}

fn differing_operations(operations: &OperationsDiff) -> String {
    list([
        (operations.only[0].n, "only in A"),
        (operations.only[1].n, "only in B"),
        (operations.n_different_sources, "with different sources"),
        (operations.different_order, "in a different order"),
    ])
}

fn differing_ranges(total: &LayerBytes) -> String {
    let differing = list([
        (total.only[0], "only in A"),
        (total.only[1], "only in B"),
        (total.different_size, "of a different size"),
        (total.different_offset, "at a different offset"),
        (total.different_reads, "read a different number of times"),
    ]);
    format!("ranges: {differing}")
}

/// Writes the verdict and the tables.
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
        message::line(&paths[0].display().to_string()),
        message::line(&paths[1].display().to_string())
    )?;
    if !report.manifest.is_empty() {
        writeln!(out)?;
        Table::of(&report.manifest)
            .shown("manifest", |difference| difference.name)
            .shown("A", |difference| difference.a.as_deref())
            .shown("B", |difference| difference.b.as_deref())
            .write(out, Format::Table)?;
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

fn write_routing(out: &mut dyn Write, routing: &RoutingDiff) -> io::Result<()> {
    let total = routing.total();
    let layers = routing.layers.iter();
    let layers = layers.map(|(layer, counts)| (layer.to_string(), counts));
    writeln!(out)?;
    Table::of(layers.chain([("all".to_owned(), &total)]))
        .shown("routing of layer", |(layer, _)| layer.clone())
        .shown("tokens A", |(_, counts)| counts.tokens[0])
        .shown("tokens B", |(_, counts)| counts.tokens[1])
        .shown("only in A", |(_, counts)| counts.only[0])
        .shown("only in B", |(_, counts)| counts.only[1])
        .shown("different experts", |(_, counts)| counts.different_experts)
        .shown("different order", |(_, counts)| counts.different_order)
        .shown("same experts (%)", |(_, counts)| {
            fixed(counts.share_same_experts().map(|share| 100.0 * share), 2)
        })
        .shown("weight difference, max", |(_, counts)| {
            counts.mean_weight_difference()?;
            Some(format!("{:.1e}", counts.max_weight_difference))
        })
        .shown("weight difference, mean", |(_, counts)| {
            let mean = counts.mean_weight_difference();
            mean.map(|mean| format!("{mean:.1e}"))
        })
        .write(out, Format::Table)?;
    if routing.first.is_empty() {
        return Ok(());
    }
    let side = |row: &&RoutingDifference, side: usize| {
        let rounded = row.kind != RoutingDifferenceKind::Weights;
        experts(&row.experts[side], rounded)
    };
    writeln!(out)?;
    Table::of(&routing.first)
        .shown("routing difference", |row| {
            described(routing_kind(row.kind))
        })
        .shown("sequence", |row| row.sequence_id)
        .shown("phase", |row| phase(row.phase))
        .shown("token", |row| row.token_id)
        .shown("layer", |row| row.layer)
        .shown("experts A", move |row| side(row, 0))
        .shown("experts B", move |row| side(row, 1))
        .write(out, Format::Table)
}

fn write_operations(
    out: &mut dyn Write,
    operations: &OperationsDiff,
    limit: usize,
) -> io::Result<()> {
    for (only, header) in operations.only.iter().zip(["only in A", "only in B"]) {
        if only.n == 0 {
            continue;
        }
        writeln!(out)?;
        Table::of(only.sorted().into_iter().take(limit))
            .shown("operation", |((op, _), _)| op.as_str())
            .shown("result", |((_, dst_name), _)| dst_name.as_str())
            .shown(header, |&(_, n)| n)
            .write(out, Format::Table)?;
    }
    if operations.sources.is_empty() {
        return Ok(());
    }
    writeln!(out)?;
    Table::of(operations.sorted_sources().into_iter().take(limit))
        .shown("operation", |(source, _)| source.op.as_str())
        .shown("result", |(source, _)| source.dst_name.as_str())
        .shown("differs in", |(source, _)| source.aspect.to_string())
        .shown("A", |(source, _)| source.a.as_deref())
        .shown("B", |(source, _)| source.b.as_deref())
        .shown("operations", |&(_, n)| n)
        .write(out, Format::Table)
}

fn write_bytes(out: &mut dyn Write, bytes: &BytesDiff) -> io::Result<()> {
    let layers = bytes.layers.iter().map(|(layer, counts)| {
        let name = layer.map_or("none".to_owned(), |layer| layer.to_string());
        (name, *counts)
    });
    writeln!(out)?;
    Table::of(layers.chain([("all".to_owned(), bytes.total())]))
        .shown("bytes of layer", |(layer, _)| layer.clone())
        .shown("read A (bytes)", |(_, counts)| counts.read[0])
        .shown("read B (bytes)", |(_, counts)| counts.read[1])
        .shown("ranges A", |(_, counts)| counts.ranges[0])
        .shown("ranges B", |(_, counts)| counts.ranges[1])
        .shown("only in A", |(_, counts)| counts.only[0])
        .shown("only in B", |(_, counts)| counts.only[1])
        .shown("different size", |(_, counts)| counts.different_size)
        .shown("different offset", |(_, counts)| counts.different_offset)
        .shown("different number of reads", |(_, counts)| {
            counts.different_reads
        })
        .write(out, Format::Table)?;
    if !bytes.split_experts {
        writeln!(
            out,
            "(ranges are entire expert tensors, because a run has no gguf-map.parquet)"
        )?;
    }
    if bytes.first.is_empty() {
        return Ok(());
    }
    let side = |range: &&RangeDifference, side: usize| {
        let reads = range.reads[side].as_ref()?;
        Some(format!(
            "{} at {} × {}",
            reads.size_bytes, reads.file_offset, reads.n
        ))
    };
    writeln!(out)?;
    Table::of(&bytes.first)
        .shown("range difference", |range| {
            described(range_kind(range.kind))
        })
        .shown("tensor", |range| range.tensor.as_str())
        .shown("expert", |range| range.expert_id)
        .shown("A: bytes at offset × reads", move |range| side(range, 0))
        .shown("B: bytes at offset × reads", move |range| side(range, 1))
        .write(out, Format::Table)
}

/// Returns the description of a kind of difference whose name in rows is `kind`.
fn described(kind: &str) -> String {
    match kind {
        "other reads" => "different number of reads".to_owned(),
        _ => kind.replace("other", "different"),
    }
}

/// Returns the phase's name in the tables.
pub fn phase(phase: Option<Phase>) -> String {
    phase.map_or_else(|| "unknown".to_owned(), |phase| phase.name().to_lowercase())
}

/// Returns the experts with their weights, the highest first.
pub fn experts(experts: &[Expert], rounded: bool) -> String {
    let one = |expert: &Expert| match expert.weight {
        Some(weight) if rounded => format!("{}:{weight:.4}", expert.expert_id),
        Some(weight) => format!("{}:{weight}", expert.expert_id),
        None => expert.expert_id.to_string(),
    };
    experts.iter().map(one).collect::<Vec<_>>().join(" ")
}
