//! `diff`: the differences between two runs.

mod rows;
mod text_report;

use std::path::PathBuf;

use moe_analysis::diff::{self, DiffOptions};

use crate::context::Context;
use crate::exit_status::ExitStatus;
use crate::option_values::{ValueError, number};
use crate::output::{self, Format};
use crate::progress::Progress;
use crate::traces::OpsArgs;

/// Compare the routing, operations and bytes read of two runs
///
/// Use it to compare, for example, two engines, two quantizations of a model or two settings. Tokens are matched by sequence, phase,
/// position and layer, operations by name. Differences between the manifests are printed, but do not count as differences. Exits with 1
/// if the runs differ.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  moe-analyze diff runs/native runs/llama-cpp --only routing")]
pub struct Args {
    /// First run (A): a run directory, or a trace.bin
    run_a: PathBuf,
    /// Second run (B): a run directory, or a trace.bin
    run_b: PathBuf,
    /// Parts to compare [default: routing,operations,bytes]
    #[arg(
        long,
        value_enum,
        value_name = "PART[,…]",
        value_delimiter = ',',
        default_values_t = [Part::Routing, Part::Operations, Part::Bytes],
        hide_default_value = true
    )]
    only: Vec<Part>,
    /// Maximum number of examples to list for each kind of difference, 0 or more
    #[arg(long, value_name = "N", default_value_t = 10)]
    limit: usize,
    /// Largest absolute difference of router weights that are treated as equal, at least 0
    #[arg(long, value_name = "W", default_value_t = 0.0, allow_negative_numbers = true, value_parser = tolerance)]
    weight_tolerance: f64,
    /// Format on stdout: table prints a report with several tables, the others one row per number or difference
    #[arg(short, long = "output", value_name = "FORMAT", default_value = "table")]
    output: Format,
    #[command(flatten)]
    ops: OpsArgs,
}

/// A part of the runs that is compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// Selected experts of each token in each layer
    Routing,
    /// Operations and their sources
    Operations,
    /// Byte ranges of the model file that were read
    Bytes,
}

pub fn run(args: Args, ctx: &Context) -> anyhow::Result<ExitStatus> {
    let open = |path| args.ops.open(path, ctx);
    let (a, b) = (open(&args.run_a)?, open(&args.run_b)?);
    args.ops.check(&[&a, &b])?;
    let progress = Progress::of_run(ctx, &a);
    let report = diff::diff(
        &a,
        &b,
        &DiffOptions {
            routing: args.only.contains(&Part::Routing),
            operations: args.only.contains(&Part::Operations),
            bytes: args.only.contains(&Part::Bytes),
            limit: args.limit,
            weight_tolerance: args.weight_tolerance,
        },
    )?;
    drop(progress);
    match args.output {
        Format::Table => output::to_stdout(Format::Table, |out| {
            text_report::report(out, &report, [&args.run_a, &args.run_b], args.limit)
        })?,
        format => {
            ctx.note(text_report::verdict(&report));
            let rows = rows::rows(&report, args.limit);
            output::to_stdout(format, |out| rows::table(&rows).write(out, format))?;
        }
    }
    Ok(if report.is_equal() {
        ExitStatus::Done
    } else {
        ExitStatus::Found
    })
}

fn tolerance(text: &str) -> Result<f64, ValueError> {
    number(text, "a number of at least 0", |value| {
        (0.0..=f64::MAX).contains(value)
    })
}
