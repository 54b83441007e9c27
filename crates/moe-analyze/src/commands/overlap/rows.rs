//! The rows of the analysis.

use moe_analysis::overlap::{OverlapReport, OverlapStats};
use moe_trace::manifest::Gpu;
use moe_trace::{LayerId, Phase};

use super::{phase_names, scratchpad_share};
use crate::output::Table;

/// Statistics of a layer, or of all layers, in a phase.
#[derive(Clone, Copy)]
pub struct Row<'a> {
    /// `None`: all layers.
    layer: Option<LayerId>,
    phase: Phase,
    stats: &'a OverlapStats,
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
        let layers = layers.map(|(&layer, stats)| (Some(layer), stats));
        let all = layers.chain([(None, &report.all)]);
        all.map(move |(layer, stats)| Row {
            layer,
            phase: *phase,
            stats,
            gpu,
        })
    });
    Table::of(rows)
        .column("layer_id", "layer", |row| row.layer)
        .column("phase", "phase", |row| phase_names(row.phase).1)
        .column("runs", "executions", |row| row.stats.evaluations)
        .column("transfers", "transfers", |row| row.stats.transfer.n)
        .column("window_mean_us", "gate and up, mean (µs)", |row| {
            us(row.stats.window.mean_ns())
        })
        .column("window_p95_us", "gate and up, p95 (µs)", |row| {
            us(row.stats.window.p95_ns)
        })
        .column("transfer_mean_us", "transfer, mean (µs)", |row| {
            us(row.stats.transfer.mean_ns())
        })
        .column("transfer_p95_us", "transfer, p95 (µs)", |row| {
            us(row.if_transferred(row.stats.transfer.p95_ns))
        })
        .column("overlap_mean_us", "overlap, mean (µs)", |row| {
            us(row.stats.mean_overlap_ns())
        })
        .column("hidden_pct", "hidden (%)", |row| {
            percent(row.stats.hidden_share())
        })
        .column("hideable_pct", "hideable (%)", |row| {
            percent(row.stats.hideable_share())
        })
        .column("fitting_pct", "shorter than gate and up (%)", |row| {
            percent(row.stats.fitting_share())
        })
        .column("delay_mean_us", "delay, mean (µs)", |row| {
            us(row.stats.mean_delay_ns())
        })
        .column("stall_mean_us", "stall, mean (µs)", |row| {
            us(row.stats.stall.mean_ns())
        })
        .column("stall_p95_us", "stall, p95 (µs)", |row| {
            us(row.if_transferred(row.stats.stall.p95_ns))
        })
        .column("product_mean_us", "down product, mean (µs)", |row| {
            us(row.stats.product.mean_ns())
        })
        .column("experts", "selected experts", |row| row.stats.n_experts)
        .column("fallback_pct", "computed on the CPU (%)", |row| {
            percent(row.stats.fallback_rate())
        })
        .column("bytes", "transferred (bytes)", |row| row.stats.bytes)
        .column("link_gb_s", "PCIe (GB/s)", |row| {
            gb_s(row.stats.link_bytes_per_s())
        })
        .column("gate_up_gb_s", "read by gate and up (GB/s)", |row| {
            gb_s(row.stats.gate_up_bytes_per_s())
        })
        .column("memory_pct", "memory bandwidth (%)", |row| {
            percent(row.stats.memory_share())
        })
        .column(
            "memory_with_transfers_pct",
            "memory bandwidth, transfers included (%)",
            |row| percent(row.stats.memory_share_with_transfers()),
        )
        .column("scratchpad_bytes", "scratchpad (bytes)", |row| {
            row.gpu.and_then(|gpu| gpu.scratchpad_bytes)
        })
        .column("scratchpad_pct", "scratchpad (% of GPU memory)", |row| {
            percent(row.gpu.and_then(scratchpad_share))
        })
        .column("verdict", "verdict", |row| row.stats.verdict().name())
}

impl Row<'_> {
    /// Returns the time in nanoseconds, or `None` without a transfer.
    fn if_transferred(&self, ns: f64) -> Option<f64> {
        Some(ns).filter(|_| self.stats.transfer.n > 0)
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
