//! `overlap`: how much of Post-Fetch's transfers hid under gate and up, and how much could.

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

/// Tell how much of Post-Fetch's transfers hid under gate and up, in each layer, and how much could
///
/// Without -o a summary is printed; with it a row for each layer and phase, and one without a layer for all layers. A
/// transfer can hide only as far as gate and up take as long as it, and nothing is gained where they use the whole bandwidth
/// of the memory.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A run recorded with --policy post-fetch, or its transfers.jsonl
    run: PathBuf,
    /// Passes of this phase alone [default: both]
    #[arg(long, value_parser = one_phase())]
    phase: Option<Phase>,
    /// Measured bandwidth at which the host reads its memory, as `bench` tells it (bandwidth_gb_per_s): adds the share that
    /// gate and up use
    #[arg(long, value_name = "GB/S", value_parser = positive)]
    memory_gb_s: Option<f64>,
    /// The model, for a run without a map of it: adds what gate and up read
    #[arg(long, value_name = "FILE.gguf")]
    model: Option<PathBuf>,
    /// Print rows instead of the summary
    #[arg(short, long = "output", value_name = "FORMAT")]
    output: Option<Format>,
    /// Draw a pass over time, and the hidden share of each layer; the extension chooses: png, svg
    #[arg(long, value_name = "FILE.png|svg")]
    plot: Option<OutputPath>,
    /// Which pass to draw, the first of --phase is 0 [default: one of median length, of a generated token if there is one]
    #[arg(long, value_name = "N", requires = "plot")]
    pass: Option<usize>,
    /// Replace the file of --plot if it exists
    #[arg(long)]
    force: bool,
}

/// What a phase is called where its passes are counted, and in rows.
fn phase_names(phase: Phase) -> (&'static str, &'static str) {
    match phase {
        Phase::Prompt => ("prompt", phase.name()),
        Phase::Generate => ("generated", phase.name()),
    }
}

/// Bytes of the GPU's memory that a run might use.
fn allowed_bytes(gpu: &Gpu) -> u64 {
    gpu.limit_bytes.unwrap_or(gpu.memory_bytes)
}

/// Part of them that Post-Fetch's scratchpad took.
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
                "{} has no transfers of {name} tokens; leave --phase out, or name the other one",
                args.run.display()
            );
        }
    }
    let reports: Vec<(Phase, OverlapReport)> = Phase::ALL
        .into_iter()
        .filter_map(|phase| {
            let report = overlap::report(&input.transfers, phase, &input.reads);
            report.map(|report| (phase, report))
        })
        .collect();
    if let Some(plot) = &args.plot {
        let figure = figure(&args, &input.transfers, &reports)?;
        files::commit(vec![figure.prepare(plot, args.force)?])?;
        ctx.remark(format_args!("drew {}", plot.display()));
    }
    output::to_stdout(args.output, |stdout| match args.output {
        None => summary::print(stdout, &reports, &input.gpus),
        Some(format) => rows::table(&reports, input.gpus.first()).write(stdout, format),
    })?;
    Ok(ExitStatus::Done)
}

/// The pass that is asked for, or a typical one, beside the figures of its phase.
fn figure(
    args: &Args,
    transfers: &[Transfer],
    reports: &[(Phase, OverlapReport)],
) -> anyhow::Result<Figure> {
    let passes = overlap::passes(transfers);
    let place = match args.pass {
        Some(place) if place >= passes.len() => bail!(
            "there is no pass {place} in {}; give one from 0 to {}",
            args.run.display(),
            passes.len() - 1
        ),
        Some(place) => place,
        None => typical(&passes).context("no pass to draw")?,
    };
    let pass = passes[place];
    let report = reports
        .iter()
        .find(|(phase, _)| pass.first().is_some_and(|run| run.phase == *phase))
        .map(|(_, report)| report)
        .context("no figures of the pass to draw")?;
    let run = args.run.file_name().unwrap_or(args.run.as_os_str());
    let name = format!(
        "{}, pass {place} of {}",
        run.to_string_lossy(),
        passes.len()
    );
    Ok(plot::pass_timeline(&name, pass, report))
}

/// Place of the pass of median length among those of generated tokens, or, without any, among all.
fn typical(passes: &[&[Transfer]]) -> Option<usize> {
    let is_generated = |&place: &usize| {
        let first = passes[place].first();
        first.is_some_and(|run| run.phase == Phase::Generate)
    };
    let mut places: Vec<usize> = (0..passes.len()).filter(is_generated).collect();
    if places.is_empty() {
        places = (0..passes.len()).collect();
    }
    let chosen: Vec<&[Transfer]> = places.iter().map(|&place| passes[place]).collect();
    overlap::typical(&chosen).map(|place| places[place])
}
