//! `info`: describes and checks an input.

mod architectures;
mod findings;
mod foreign;
mod model;
mod run;
mod tables;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use moe_foreign::Contents;
use moe_placement::json::JsonError;
use moe_placement::learn::{self, LayerObservation};
use moe_trace::{Run, bounded};

use crate::context::Context;
use crate::exit_status::ExitStatus;
use crate::inputs::Kind;
use crate::output::{self, Format};
use crate::plan_file::{PlanFile, PlanLane};
use crate::traces;

use findings::Findings;

/// Describe a run, trace, table, model, learn file or plan, and check it for faults
///
/// Detects the format from the content and prints its properties, notes and faults. With -o json, prints one JSON object, or an array
/// with --architectures. Exits with 1 if there is a fault. PATH is required, except with --architectures.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  moe-analyze info runs/first\n  moe-analyze info --architectures"
)]
pub struct Args {
    /// Run directory, trace.bin, Parquet table, directory of tables, GGUF model, learn file, output of `plan -o json`, or trace of another tool
    #[arg(required_unless_present = "architectures")]
    path: Option<PathBuf>,
    /// List the MoE architectures that the executor and llama.cpp run, and exit
    #[arg(long, conflicts_with = "path")]
    architectures: bool,
    /// Format of the properties or architectures on stdout
    #[arg(short, long = "output", value_name = "FORMAT", default_value = "table")]
    output: Format,
}

pub fn run(args: Args, ctx: &Context) -> anyhow::Result<ExitStatus> {
    let Some(path) = &args.path else {
        architectures::list(args.output, ctx)?;
        return Ok(ExitStatus::Done);
    };
    let findings = find(path, ctx)?;
    output::to_stdout(args.output, |stdout| findings.write(stdout, args.output))?;
    Ok(if findings.is_sound() {
        ExitStatus::Done
    } else {
        ExitStatus::Found
    })
}

/// A property as text: name and value.
pub type Property = (String, String);

/// Returns the properties of an input, and its notes and faults.
pub fn properties(path: &Path, ctx: &Context) -> anyhow::Result<(Vec<Property>, Vec<String>)> {
    Ok(find(path, ctx)?.into_text())
}

/// Like [`properties`], for a run that is open already.
pub fn properties_of_run(run: &Run, ctx: &Context) -> anyhow::Result<(Vec<Property>, Vec<String>)> {
    let mut findings = Findings::default();
    run::describe_run(run, &mut findings, ctx)?;
    Ok(findings.into_text())
}

fn find(path: &Path, ctx: &Context) -> anyhow::Result<Findings> {
    let mut findings = Findings::default();
    match (Kind::of(path), traces::detect(path)?) {
        // Learn files and traces of records are described without an import, in more detail.
        (Ok(Kind::Json | Kind::Gguf) | Err(_), Some(trace))
            if trace.importer.contents() != Contents::LearnFile =>
        {
            foreign::describe(&trace, &mut findings, ctx)?;
        }
        // Files in other formats can resemble records.
        (Ok(Kind::Trace), Some(trace)) if trace.importer.contents() != Contents::Records => {
            foreign::describe(&trace, &mut findings, ctx)?;
        }
        (kind, _) => describe(path, kind?, &mut findings, ctx)?,
    }
    Ok(findings)
}

fn describe(path: &Path, kind: Kind, findings: &mut Findings, ctx: &Context) -> anyhow::Result<()> {
    match kind {
        Kind::Run | Kind::Trace => run::describe(path, findings, ctx),
        Kind::Gguf => model::describe(path, findings),
        Kind::Parquet => tables::describe_file(path, findings),
        Kind::Tables => tables::describe_directory(path, findings),
        Kind::Json => describe_json(path, findings),
    }
}

/// Describes a plan or a learn file.
fn describe_json(path: &Path, findings: &mut Findings) -> anyhow::Result<()> {
    let text = bounded::read_json(path)?;
    if PlanFile::is_plan(&text) {
        describe_plan(&PlanFile::parse(path, &text)?, findings);
        return Ok(());
    }
    match learn::parse_observations(&text) {
        Err(learn::Error::Json(error @ JsonError::NotFinite { .. })) => {
            bail!("{}: {error}; replace it with a number", path.display())
        }
        Err(learn::Error::Json(_) | learn::Error::Schema { .. }) => {
            bail!(traces::unknown_json(path))
        }
        layers => describe_learn_file(
            &layers.with_context(|| path.display().to_string())?,
            findings,
        ),
    }
    Ok(())
}

fn describe_learn_file(layers: &[LayerObservation], findings: &mut Findings) {
    findings.fact("kind", "learn file of the hot expert cache");
    findings.fact("layers", layers.len() as u64);
    findings.fact(
        "counts",
        layers
            .iter()
            .map(|layer| layer.experts.len() as u64)
            .sum::<u64>(),
    );
    let activations = layers.iter().flat_map(|layer| &layer.experts);
    let activations = activations.map(|expert| {
        expert
            .raw
            .saturating_add(expert.hot)
            .saturating_add(expert.cold)
    });
    findings.fact("activations", activations.fold(0u64, u64::saturating_add));
    if !learn::is_usable(layers) {
        findings.fault(
            "the learn file contains no counts, so the hot expert cache cannot be planned; record a longer run",
        );
    }
}

fn describe_plan(plan: &PlanFile, findings: &mut Findings) {
    findings.fact("kind", "plan of a hot expert cache");
    findings.fact("lanes", plan.lanes.len() as u64);
    let layers: BTreeSet<_> = plan.selected.iter().map(|place| place.layer).collect();
    findings.fact("layers", layers.len() as u64);
    findings.fact("cached experts", plan.selected.len() as u64);
    let sum =
        |bytes: fn(&PlanLane) -> u64| plan.lanes.iter().map(bytes).fold(0, u64::saturating_add);
    findings.size("budget", sum(|lane| lane.budget_bytes));
    findings.size("used", sum(|lane| lane.used_bytes));
    for (number, lane) in plan.lanes.iter().enumerate() {
        if lane.used_bytes > lane.budget_bytes {
            findings.fault(format!(
                "lane {number} uses {} bytes, but its budget is {} bytes; plan again",
                lane.used_bytes, lane.budget_bytes
            ));
        }
    }
    if plan.selected.is_empty() {
        findings.fault("the plan contains no experts; plan with a larger budget");
    }
}
