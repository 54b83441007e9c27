//! `info`: what a path is, and whether it is sound.

mod findings;
mod foreign;
mod model;
mod run;
mod tables;

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use moe_foreign::Contents;
use moe_placement::learn;
use moe_trace::bounded;

use crate::context::Context;
use crate::exit_status::ExitStatus;
use crate::inputs::Kind;
use crate::output::{self, Format};
use crate::traces;

use findings::Findings;

/// Tell what a run, a trace, a table, a dataset or a model is, and whether it is sound
///
/// Exit 1 if it is not.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A run directory, a trace, a Parquet table, a directory of tables, a GGUF model, a learn file or a trace of another tool
    path: PathBuf,
    /// Format of the facts on stdout
    #[arg(short, long = "output", value_name = "FORMAT", default_value = "table")]
    output: Format,
}

pub fn run(args: Args, ctx: &Context) -> anyhow::Result<ExitStatus> {
    let path = &args.path;
    let mut findings = Findings::default();
    match (Kind::of(path), traces::detect(path)?) {
        // What a learn file and a trace of records say of themselves is more than an import tells.
        (Ok(Kind::Json) | Err(_), Some(trace))
            if trace.importer.contents() != Contents::LearnFile =>
        {
            foreign::describe(&trace, &mut findings, ctx)?;
        }
        // Other files may look like records.
        (Ok(Kind::Trace), Some(trace)) if trace.importer.contents() != Contents::Records => {
            foreign::describe(&trace, &mut findings, ctx)?;
        }
        (kind, _) => describe(path, kind?, &mut findings, ctx)?,
    }
    output::to_stdout(args.output, |stdout| findings.write(stdout, args.output))?;
    Ok(if findings.is_sound() {
        ExitStatus::Done
    } else {
        ExitStatus::Found
    })
}

fn describe(path: &Path, kind: Kind, findings: &mut Findings, ctx: &Context) -> anyhow::Result<()> {
    match kind {
        Kind::Run | Kind::Trace => run::describe(path, findings, ctx),
        Kind::Gguf => model::describe(path, findings),
        Kind::Parquet => tables::describe_file(path, findings),
        Kind::Tables => tables::describe_directory(path, findings),
        Kind::Json => describe_learn_file(path, findings),
    }
}

fn describe_learn_file(path: &Path, findings: &mut Findings) -> anyhow::Result<()> {
    let text = bounded::read_json(path)?;
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
