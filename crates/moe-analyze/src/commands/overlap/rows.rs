//! The rows of the analysis.

use moe_analysis::overlap::{Figures, OverlapReport};
use moe_trace::manifest::Gpu;
use moe_trace::{LayerId, Phase};

use super::{phase_names, scratchpad_share};
use crate::output::Table;

/// Figures of a layer, or of all layers, in a phase.
#[derive(Clone, Copy)]
pub struct Row<'a> {
    /// `None`: all layers.
    layer: Option<LayerId>,
    phase: Phase,
    figures: &'a Figures,
    gpu: Option<&'a Gpu>,
}

/// Returns a table with one row per layer, then a row without a layer for all layers, for each phase. The scratchpad is that of the
/// first GPU.
pub fn table<'a>(
    reports: &'a [(Phase, OverlapReport)],
    gpu: Option<&'a Gpu>,
) -> Table<'a, impl Iterator<Item = Row<'a>> + Clone> {
    let rows = reports.iter().flat_map(move |(phase, report)| {
        let layers = report.layers.iter();
        let layers = layers.map(|(&layer, figures)| (Some(layer), figures));
        let all = layers.chain([(None, &report.all)]);
        all.map(move |(layer, figures)| Row {
            layer,
            phase: *phase,
            figures,
            gpu,
        })
    });
    Table::of(rows)
        .column("layer_id", "layer", |row| row.layer)
        .column("phase", "phase", |row| phase_names(row.phase).1)
        .column("runs", "executions", |row| row.figures.runs)
        .column("transfers", "transfers", |row| row.figures.transfer.n)
        .column("window_mean_us", "gate and up, mean (µs)", |row| {
            us(row.figures.window.mean_ns())
        })
        .column("window_p95_us", "gate and up, p95 (µs)", |row| {
            us(row.figures.window.p95_ns)
        })
        .column("transfer_mean_us", "transfer, mean (µs)", |row| {
            us(row.figures.transfer.mean_ns())
        })
        .column("transfer_p95_us", "transfer, p95 (µs)", |row| {
            us(row.if_transferred(row.figures.transfer.p95_ns))
        })
        .column("overlap_mean_us", "overlap, mean (µs)", |row| {
            us(row.figures.mean_overlap_ns())
        })
        .column("hidden_pct", "hidden (%)", |row| {
            percent(row.figures.hidden_share())
        })
        .column("hideable_pct", "hideable (%)", |row| {
            percent(row.figures.hideable_share())
        })
        .column("fitting_pct", "shorter than gate and up (%)", |row| {
            percent(row.figures.fitting_share())
        })
        .column("delay_mean_us", "delay, mean (µs)", |row| {
            us(row.figures.mean_delay_ns())
        })
        .column("stall_mean_us", "stall, mean (µs)", |row| {
            us(row.figures.stall.mean_ns())
        })
        .column("stall_p95_us", "stall, p95 (µs)", |row| {
            us(row.if_transferred(row.figures.stall.p95_ns))
        })
        .column("product_mean_us", "down product, mean (µs)", |row| {
            us(row.figures.product.mean_ns())
        })
        .column("experts", "selected experts", |row| row.figures.n_experts)
        .column("fallback_pct", "computed on the CPU (%)", |row| {
            percent(row.figures.fallback_rate())
        })
        .column("bytes", "transferred (bytes)", |row| row.figures.bytes)
        .column("link_gb_s", "PCIe (GB/s)", |row| {
            gb_s(row.figures.link_bytes_per_s())
        })
        .column("gate_up_gb_s", "read by gate and up (GB/s)", |row| {
            gb_s(row.figures.gate_up_bytes_per_s())
        })
        .column("memory_pct", "memory bandwidth (%)", |row| {
            percent(row.figures.memory_share())
        })
        .column(
            "memory_with_transfers_pct",
            "memory bandwidth, transfers included (%)",
            |row| percent(row.figures.memory_share_with_transfers()),
        )
        .column("scratchpad_bytes", "scratchpad (bytes)", |row| {
            row.gpu.and_then(|gpu| gpu.scratchpad_bytes)
        })
        .column("scratchpad_pct", "scratchpad (% of GPU memory)", |row| {
            percent(row.gpu.and_then(scratchpad_share))
        })
        .column("verdict", "verdict", |row| row.figures.verdict().word())
}

impl Row<'_> {
    /// Returns the time in nanoseconds, or `None` without a transfer.
    fn if_transferred(&self, ns: f64) -> Option<f64> {
        Some(ns).filter(|_| self.figures.transfer.n > 0)
    }
}

fn us(ns: impl Into<Option<f64>>) -> Option<f64> {
    ns.into().map(|ns| ns * 1e-3)
}

fn percent(share: Option<f64>) -> Option<f64> {
    share.map(|share| share * 100.0)
}

fn gb_s(bytes_per_s: Option<f64>) -> Option<f64> {
    bytes_per_s.map(|rate| rate * 1e-9)
}
