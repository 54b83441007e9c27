//! The figures as rows of named columns.

use moe_analysis::overlap::{Figures, OverlapReport};
use moe_trace::manifest::Gpu;

use super::{phase_names, scratchpad_share};
use crate::output::Cell;

/// Names of the columns. Times are in microseconds, rates in 10^9 bytes per second.
pub const COLUMNS: [&str; 26] = [
    "layer_id",
    "phase",
    "runs",
    "transfers",
    "window_mean_us",
    "window_p95_us",
    "transfer_mean_us",
    "transfer_p95_us",
    "overlap_mean_us",
    "hidden_pct",
    "hideable_pct",
    "fitting_pct",
    "delay_mean_us",
    "stall_mean_us",
    "stall_p95_us",
    "product_mean_us",
    "experts",
    "fallback_pct",
    "bytes",
    "link_gb_s",
    "gate_up_gb_s",
    "memory_pct",
    "memory_with_transfers_pct",
    "scratchpad_bytes",
    "scratchpad_pct",
    "verdict",
];

/// A row a layer, then one without a layer for all of them; prompt before generated tokens. The scratchpad is the first
/// GPU's.
pub fn rows(reports: &[(u8, OverlapReport)], gpu: Option<&Gpu>) -> Vec<Vec<Cell<'static>>> {
    let rows = reports.iter().flat_map(|(phase, report)| {
        let layers = report.layers.iter();
        let layers = layers.map(|(&layer, figures)| (Some(layer), figures));
        let all = layers.chain([(None, &report.all)]);
        all.map(|(layer, figures)| row(layer, *phase, figures, gpu))
    });
    rows.collect()
}

fn row(layer: Option<u16>, phase: u8, figures: &Figures, gpu: Option<&Gpu>) -> Vec<Cell<'static>> {
    let scratchpad = gpu.and_then(|gpu| gpu.scratchpad_bytes);
    let us = |ns: Option<f64>| ns.map(|ns| ns * 1e-3).into();
    let percent = |share: Option<f64>| share.map(|share| share * 100.0).into();
    let gb_s = |rate: Option<f64>| rate.map(|rate| rate * 1e-9).into();
    let of_transfers = |ns: f64| Some(ns).filter(|_| figures.transfer.n > 0);
    vec![
        layer.into(),
        phase_names(phase).1.into(),
        figures.runs.into(),
        figures.transfer.n.into(),
        us(figures.window.mean_ns()),
        us(Some(figures.window.p95_ns)),
        us(figures.transfer.mean_ns()),
        us(of_transfers(figures.transfer.p95_ns)),
        us(figures.mean_overlap_ns()),
        percent(figures.hidden_share()),
        percent(figures.hideable_share()),
        percent(figures.fitting_share()),
        us(figures.mean_delay_ns()),
        us(figures.stall.mean_ns()),
        us(of_transfers(figures.stall.p95_ns)),
        us(figures.product.mean_ns()),
        figures.n_experts.into(),
        percent(figures.fallback_rate()),
        figures.bytes.into(),
        gb_s(figures.link_bytes_per_s()),
        gb_s(figures.gate_up_bytes_per_s()),
        percent(figures.memory_share()),
        percent(figures.memory_share_with_transfers()),
        scratchpad.into(),
        percent(gpu.and_then(scratchpad_share)),
        figures.verdict().word().into(),
    ]
}
