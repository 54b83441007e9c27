//! `info`: what a path is, and whether it is sound.

mod findings;
mod model;
mod run;
mod tables;

use std::path::PathBuf;

use anyhow::Context as _;
use moe_placement::learn;

use crate::cli::{Context, ExitStatus};
use crate::inputs::Kind;
use crate::output::{self, Format};

use findings::Findings;

/// Tell what a run, a trace, a table, a dataset or a model is, and whether it is sound
///
/// Exit 1 if it is not.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A run directory, a trace, a Parquet table, a directory of tables, a GGUF model or a learn file
    path: PathBuf,
    /// Format of the facts on stdout
    #[arg(short, long = "output", value_name = "FORMAT", default_value = "table")]
    output: Format,
}

pub fn run(args: Args, _: &Context) -> anyhow::Result<ExitStatus> {
    let path = &args.path;
    let mut findings = Findings::default();
    match Kind::of(path)? {
        Kind::Run | Kind::Trace => run::describe(path, &mut findings)?,
        Kind::Gguf => model::describe(path, &mut findings)?,
        Kind::Parquet => tables::describe_file(path, &mut findings)?,
        Kind::Tables => tables::describe_directory(path, &mut findings)?,
        Kind::Json => describe_learn_file(path, &mut findings)?,
    }
    output::to_stdout(|stdout| findings.write(stdout, args.output))?;
    Ok(if findings.is_sound() {
        ExitStatus::Done
    } else {
        ExitStatus::Found
    })
}

fn describe_learn_file(path: &PathBuf, findings: &mut Findings) -> anyhow::Result<()> {
    let text =
        std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    let layers =
        learn::parse_observations(&text).with_context(|| format!("{} is JSON", path.display()))?;
    findings.fact("kind", "learn file of the hot-cache runtime");
    findings.fact("layers", layers.len() as u64);
    findings.fact(
        "experts",
        layers
            .iter()
            .map(|layer| layer.experts.len() as u64)
            .sum::<u64>(),
    );
    let choices = layers.iter().flat_map(|layer| &layer.experts);
    let choices = choices.map(|expert| {
        expert
            .raw
            .saturating_add(expert.hot)
            .saturating_add(expert.cold)
    });
    findings.fact("choices", choices.fold(0u64, u64::saturating_add));
    if !learn::is_usable(&layers) {
        findings.fault(
            "it counts nothing, so the runtime cannot plan a cache with it; record a longer run",
        );
    }
    Ok(())
}
