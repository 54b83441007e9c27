//! `overlap`: the fraction of Post-Fetch's transfer time that is hidden behind the gate and up products, and its upper bound.

mod input;
mod rows;
mod summary;

use std::path::PathBuf;

use anyhow::{Context as _, bail};
use moe_analysis::overlap::{self, OverlapReport};
use moe_trace::Phase;
use moe_trace::manifest::Gpu;
use moe_trace::transfers::Transfer;

use crate::context::Context;
use crate::exit_status::ExitStatus;
use crate::files::{self, OutputPath};
use crate::option_values::positive;
use crate::output::{self, Format};
use crate::phase_choice::one_phase;
use crate::plot::{self, Figure};
use input::Input;

/// Analyze how much of Post-Fetch's transfer time is hidden behind the gate and up products
///
/// Reads a run recorded with --policy post-fetch (ernestuz-b/llama-prefetch.cpp): while the CPU computes gate and up, the down matrices
/// of the selected experts are copied to the GPU. Prints a summary with a verdict; with -o, for each phase, one row per layer
/// and one row without a layer for all layers. `hidden` is the percentage of the transfer time
/// during which gate and up run, `hideable` its upper bound.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  moe-analyze overlap runs/post-fetch --memory-gb-s 80 --plot pass.svg"
)]
pub struct Args {
    /// Run directory recorded with --policy post-fetch, or its transfers.jsonl
    run: PathBuf,
    /// Phase to analyze [default: both]
    #[arg(long, value_parser = one_phase())]
    phase: Option<Phase>,
    /// Measured CPU memory bandwidth in 10^9 bytes/s, above 0, such as bandwidth_gb_per_s of `bench`: adds the percentage that gate and
    /// up use
    #[arg(long, value_name = "GB/S", value_parser = positive)]
    memory_gb_s: Option<f64>,
    /// Model of the run, a GGUF file: provides the sizes of gate and up matrices for a run without gguf-map.parquet
    #[arg(long, value_name = "FILE.gguf")]
    model: Option<PathBuf>,
    /// Print one row per layer and phase in this format, instead of the summary
    #[arg(short, long = "output", value_name = "FORMAT")]
    output: Option<Format>,
    /// Plot a forward pass over time and the hidden fraction of each layer; the extension selects the format: png, svg
    #[arg(long, value_name = "FILE.png|svg")]
    plot: Option<OutputPath>,
    /// Index of the pass to plot, counted from 0 within the phase [default: the decode pass of median duration; without decode passes, the
    /// prompt pass of median duration]
    #[arg(long, value_name = "N", requires = "plot")]
    pass: Option<usize>,
    /// Replace the file of --plot if it exists
    #[arg(long)]
    force: bool,
}

/// Returns the name of a phase in the summary and in rows.
fn phase_names(phase: Phase) -> (&'static str, &'static str) {
    match phase {
        Phase::Prompt => ("prompt", phase.name()),
        Phase::Generate => ("generated", phase.name()),
    }
}

/// Returns the bytes of GPU memory that a run was allowed to use.
fn allowed_bytes(gpu: &Gpu) -> u64 {
    gpu.limit_bytes.unwrap_or(gpu.memory_bytes)
}

/// Returns the fraction of the allowed GPU memory that Post-Fetch's scratchpad takes.
fn scratchpad_share(gpu: &Gpu) -> Option<f64> {
    let share = |bytes| bytes as f64 / allowed_bytes(gpu).max(1) as f64;
    gpu.scratchpad_bytes.map(share)
}

pub fn run(args: Args, ctx: &Context) -> anyhow::Result<ExitStatus> {
    if let Some(plot) = &args.plot {
        plot::check_extension(plot)?;
        files::check_output(plot, args.force)?;
    }
    let mut input = Input::read(&args.run, args.model.as_deref(), args.memory_gb_s, ctx)?;
    if let Some(phase) = args.phase {
        input.transfers.retain(|transfer| transfer.phase == phase);
        if input.transfers.is_empty() {
            let (name, _) = phase_names(phase);
            bail!(
                "{} has no transfers of {name} tokens; omit --phase, or pass the other phase",
                args.run.display()
            );
        }
    }
    let reports: Vec<(Phase, OverlapReport)> = Phase::ALL
        .into_iter()
        .filter_map(|phase| {
            let report = overlap::report(&input.transfers, phase, &input.memory);
            report.map(|report| (phase, report))
        })
        .collect();
    if let Some(plot) = &args.plot {
        let figure = figure(&args, &input.transfers, &reports)?;
        files::commit(vec![figure.prepare(plot, args.force)?])?;
        ctx.note(format_args!("wrote {}", plot.display()));
    }
    output::to_stdout(args.output, |stdout| match args.output {
        None => summary::print(stdout, &reports, &input.gpus),
        Some(format) => rows::table(&reports, input.gpus.first()).write(stdout, format),
    })?;
    Ok(ExitStatus::Done)
}

/// Returns the plot of the pass of `--pass`, or of a pass of median length, with the statistics of its phase.
fn figure(
    args: &Args,
    transfers: &[Transfer],
    reports: &[(Phase, OverlapReport)],
) -> anyhow::Result<Figure> {
    let passes = overlap::passes(transfers);
    let index = match args.pass {
        Some(index) if index >= passes.len() => bail!(
            "--pass {index} is out of range (0..={}) for {}",
            passes.len() - 1,
            args.run.display()
        ),
        Some(index) => index,
        None => median_pass(&passes).context("no pass to plot")?,
    };
    let pass = passes[index];
    let report = reports
        .iter()
        .find(|(phase, _)| pass.first().is_some_and(|run| run.phase == *phase))
        .map(|(_, report)| report)
        .context("no statistics of the pass to plot")?;
    let run = args.run.file_name().unwrap_or(args.run.as_os_str());
    let name = format!(
        "{}, pass {index} (of 0 to {})",
        run.to_string_lossy(),
        passes.len() - 1
    );
    Ok(plot::pass_timeline(&name, pass, report))
}

/// Returns the index of a decode pass of median length, or without decode passes, of any pass of median length.
fn median_pass(passes: &[&[Transfer]]) -> Option<usize> {
    let is_generated = |&index: &usize| {
        let first = passes[index].first();
        first.is_some_and(|run| run.phase == Phase::Generate)
    };
    let mut indices: Vec<usize> = (0..passes.len()).filter(is_generated).collect();
    if indices.is_empty() {
        indices = (0..passes.len()).collect();
    }
    let candidates: Vec<&[Transfer]> = indices.iter().map(|&index| passes[index]).collect();
    overlap::median_pass(&candidates).map(|index| indices[index])
}
