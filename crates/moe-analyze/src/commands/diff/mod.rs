//! `diff`: where two runs differ.

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

/// Tell where two recorded runs differ: routing, operations, bytes
///
/// The runs may be of two engines, two quantizations of a model or two settings. Tokens are matched by sequence, phase,
/// position and layer, operations by their names. What the manifests tell differently is shown, and counts for nothing.
/// Exit 1 if the runs differ.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A run directory, or a trace
    run_a: PathBuf,
    /// The run to compare it with
    run_b: PathBuf,
    /// What to compare
    #[arg(
        long,
        value_enum,
        value_name = "PART",
        value_delimiter = ',',
        default_values_t = [Part::Routing, Part::Operations, Part::Bytes]
    )]
    only: Vec<Part>,
    /// Differing tokens to list, and kinds of operations and ranges of bytes of each way to differ
    #[arg(long, value_name = "N", default_value_t = 10)]
    limit: usize,
    /// Router weights this close count as equal
    #[arg(long, value_name = "W", default_value_t = 0.0, allow_negative_numbers = true, value_parser = tolerance)]
    weight_tolerance: f64,
    /// Format on stdout; all but table are rows for programs
    #[arg(short, long = "output", value_name = "FORMAT", default_value = "table")]
    output: Format,
    #[command(flatten)]
    ops: OpsArgs,
}

/// What is compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// The experts of each token in each layer
    Routing,
    /// The operations and what they read from
    Operations,
    /// The ranges of the model's file that were read
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
            ctx.remark(text_report::verdict(&report));
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
