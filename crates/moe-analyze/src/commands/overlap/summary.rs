//! The summary of the analysis.

use std::io::{self, Write};

use moe_analysis::overlap::{DurationStats, OverlapReport};
use moe_files::text::counted;
use moe_trace::Phase;
use moe_trace::manifest::Gpu;

use super::{allowed_bytes, phase_names, scratchpad_share};
use crate::output::{Format, Table, fixed, human_bytes};

pub fn print(
    out: &mut dyn Write,
    reports: &[(Phase, OverlapReport)],
    gpus: &[Gpu],
) -> io::Result<()> {
    for (phase, report) in reports {
        print_phase(out, phase_names(*phase).0, report)?;
        writeln!(out)?;
    }
    let name = |gpu: &Gpu| match (&gpu.device, gpus.len()) {
        (Some(device), 2..) => format!("{device}, {}", gpu.name),
        _ => gpu.name.clone(),
    };
    gpus.iter()
        .try_for_each(|gpu| print_gpu(out, &name(gpu), gpu))
}

fn print_phase(out: &mut dyn Write, phase: &str, report: &OverlapReport) -> io::Result<()> {
    let all = &report.all;
    writeln!(out, "{phase} tokens: {}", all.verdict())?;
    writeln!(
        out,
        "{} × {}: {} transferred at {} GB/s; the CPU computed the down product of {} % of the selected experts",
        counted(report.passes, "pass"),
        counted(report.layers.len() as u64, "layer"),
        human_bytes(all.bytes),
        tenths(all.link_bytes_per_s().map(|rate| rate * 1e-9)),
        percent(all.fallback_rate()),
    )?;
    writeln!(
        out,
        "mean per layer: gate and up {}, transfer {}, down product on the GPU {}, stall {}",
        time(&all.window),
        time(&all.transfer),
        time(&all.product),
        time(&all.stall),
    )?;
    if let Some(rate) = all.gate_up_bytes_per_s() {
        write!(out, "gate and up read {:.1} GB/s", rate * 1e-9)?;
        if let Some(share) = all.memory_share() {
            write!(
                out,
                ", {:.1} % of the memory bandwidth; with concurrent transfers {} %",
                100.0 * share,
                percent(all.memory_share_with_transfers())
            )?;
        }
        writeln!(out)?;
    }
    writeln!(out)?;
    print_layers(out, report)
}

fn print_layers(out: &mut dyn Write, report: &OverlapReport) -> io::Result<()> {
    let mean_us = |times: &DurationStats| fixed(times.mean_ns().map(us), 1);
    let percent = |share: Option<f64>| fixed(share.map(|share| 100.0 * share), 1);
    let gb_s = |rate: Option<f64>| fixed(rate.map(|rate| rate * 1e-9), 1);
    Table::of(&report.layers)
        .shown("layer", |&(&layer, _)| layer)
        .shown("gate and up (µs)", move |(_, layer)| {
            mean_us(&layer.window)
        })
        .shown("transfer (µs)", move |(_, layer)| mean_us(&layer.transfer))
        .shown("hidden (%)", move |(_, layer)| {
            percent(layer.hidden_share())
        })
        .shown("hideable (%)", move |(_, layer)| {
            percent(layer.hideable_share())
        })
        .shown("stall (µs)", move |(_, layer)| mean_us(&layer.stall))
        .shown("computed on the CPU (%)", move |(_, layer)| {
            percent(layer.fallback_rate())
        })
        .shown("transferred", |(_, layer)| human_bytes(layer.bytes))
        .shown("PCIe (GB/s)", move |(_, layer)| {
            gb_s(layer.link_bytes_per_s())
        })
        .shown("verdict", |(_, layer)| layer.verdict().name())
        .write(out, Format::Table)
}

fn print_gpu(out: &mut dyn Write, name: &str, gpu: &Gpu) -> io::Result<()> {
    if let (Some(scratchpad), Some(share)) = (gpu.scratchpad_bytes, scratchpad_share(gpu)) {
        writeln!(
            out,
            "{name}: scratchpad {}, {:.2} % of {} of GPU memory",
            human_bytes(scratchpad),
            100.0 * share,
            human_bytes(allowed_bytes(gpu))
        )?;
    }
    if let Some(peak) = gpu.peak_bytes {
        writeln!(out, "{name}: peak memory {}", human_bytes(peak))?;
    }
    if let Some(fallbacks) = &gpu.fallbacks
        && let Some(first) = &fallbacks.first_error
    {
        writeln!(
            out,
            "{name}: the CPU ran {} instead of the GPU, and {} did not fit into GPU memory; first error: {first}",
            counted(fallbacks.operations, "operation"),
            counted(fallbacks.tensors, "tensor")
        )?;
    }
    Ok(())
}

fn us(ns: f64) -> f64 {
    ns * 1e-3
}

/// Formats the mean and the 95th percentile.
fn time(times: &DurationStats) -> String {
    match times.mean_ns() {
        Some(mean) => format!("{:.1} µs (p95 {:.1} µs)", us(mean), us(times.p95_ns)),
        None => "-".into(),
    }
}

fn tenths(value: Option<f64>) -> String {
    value.map_or("-".into(), |value| format!("{value:.1}"))
}

fn percent(share: Option<f64>) -> String {
    tenths(share.map(|share| 100.0 * share))
}
