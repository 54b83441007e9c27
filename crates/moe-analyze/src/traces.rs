//! What a path argument names as a trace: a run, tables, or a trace of another tool.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::bail;
use moe_foreign::{Contents, Detected, ForeignError, ImportOptions, Input, Missing, Summary};
use moe_gguf::Gguf;
use moe_trace::manifest::Manifest;
use moe_trace::ops::OpTable;
use moe_trace::{Facts, Run, Sink};

use crate::context::Context;
use crate::inputs::Kind;
use crate::op_table;
use crate::option_values::{first_given, whole};
use crate::progress::Progress;

/// What the user can tell about traces, their model included.
#[derive(Debug, Default, clap::Args)]
pub struct TraceArgs {
    /// Model of a trace of another tool, for what the trace does not tell: experts, bytes of an expert
    #[arg(long, value_name = "FILE.gguf")]
    model: Option<PathBuf>,
    #[command(flatten)]
    import: ImportArgs,
}

/// What the user can tell about traces beside their model.
#[derive(Debug, Default, clap::Args)]
pub struct ImportArgs {
    /// Experts for a token, for a trace of another tool that does not tell
    #[arg(long, value_name = "K", value_parser = whole(1..=4096u32))]
    top_k: Option<u32>,
    #[command(flatten)]
    ops: OpsArgs,
}

/// What the user can tell about records.
#[derive(Debug, Default, clap::Args)]
pub struct OpsArgs {
    /// Operation numbers of a bare trace of 1024-byte records: lines `number,name`
    #[arg(long, value_name = "FILE.csv")]
    ops: Option<PathBuf>,
}

impl OpsArgs {
    /// Opens a run, or a trace of records, for what needs every operation, and tells what is to be said of it.
    ///
    /// # Errors
    /// It is anything else; a trace of another tool is named.
    pub fn open(&self, path: &Path, ctx: &Context) -> anyhow::Result<Run> {
        check_run(path)?;
        let run = named(Run::open(path)?, self.read()?.as_ref());
        remark(&run, ctx)?;
        Ok(run)
    }

    /// Refuses a table of operations that all runs have of their own.
    pub fn check(&self, runs: &[&Run]) -> anyhow::Result<()> {
        match (&self.ops, runs) {
            (Some(_), [run, ..]) if runs.iter().all(|run| run.manifest.is_some()) => {
                bail!(ops_are_known(&run.path))
            }
            _ => Ok(()),
        }
    }

    /// Whether there are any.
    pub fn are_named(&self) -> bool {
        self.ops.is_some()
    }

    fn read(&self) -> anyhow::Result<Option<OpTable>> {
        self.ops.as_deref().map(op_table::read).transpose()
    }
}

fn ops_are_known(path: &Path) -> String {
    format!(
        "--ops: {} names its operations itself; leave the option out",
        path.display()
    )
}

/// A trace without manifest has the operations that the user names.
fn named(run: Run, ops: Option<&OpTable>) -> Run {
    match ops {
        Some(ops) if run.manifest.is_none() => run.with_ops(ops.clone()),
        _ => run,
    }
}

/// Tells what is to be said of a run.
pub fn remark(run: &Run, ctx: &Context) -> anyhow::Result<()> {
    let progress = Progress::of_run(ctx, run);
    let remarks = run.remarks()?;
    drop(progress);
    remarks.iter().for_each(|remark| ctx.remark(remark));
    Ok(())
}

impl ImportArgs {
    /// Reads the files that are named; `model` is what is known of the traces' model.
    pub fn options(&self, model: Option<Facts>) -> anyhow::Result<ImportOptions> {
        Ok(ImportOptions {
            top_k: self.top_k,
            ops: self.ops.read()?,
            model,
        })
    }

    /// The first option that is named.
    pub fn named(&self) -> Option<&'static str> {
        first_given([
            ("--top-k", self.top_k.is_some()),
            ("--ops", self.ops.are_named()),
        ])
    }

    /// Refuses what applies to none of the traces.
    ///
    /// # Errors
    /// An option is named that all of them tell themselves, or have not.
    pub fn check(&self, paths: &[&Path]) -> anyhow::Result<()> {
        type Why = fn(&Path, &Input) -> Option<String>;
        let top_k: Why = why_not_top_k;
        let options = [
            (self.top_k.is_some(), top_k),
            (self.ops.are_named(), why_not_ops),
        ];
        for (_, why_not) in options.into_iter().filter(|(is_named, _)| *is_named) {
            let mut reason = None;
            for path in paths {
                reason = why_not(path, &open(path, &ImportOptions::default())?);
                if reason.is_none() {
                    break;
                }
            }
            if let Some(reason) = reason {
                bail!(reason);
            }
        }
        Ok(())
    }
}

impl TraceArgs {
    /// Reads the files that are named.
    pub fn options(&self) -> anyhow::Result<ImportOptions> {
        self.import.options(self.gguf()?.map(|(facts, _)| facts))
    }

    /// As [`ImportArgs::check`].
    pub fn check(&self, paths: &[&Path]) -> anyhow::Result<()> {
        self.import.check(paths)
    }

    /// Whether a model is named.
    pub fn names_model(&self) -> bool {
        self.model.is_some()
    }

    /// The model that is named.
    pub fn model(&self) -> Option<&Path> {
        self.model.as_deref()
    }

    /// The model that is named, and what it tells.
    pub fn gguf(&self) -> anyhow::Result<Option<(Facts, Gguf)>> {
        let Some(path) = &self.model else {
            return Ok(None);
        };
        let gguf = Gguf::open(path)?;
        Ok(Some((
            Facts::of_model(&path.to_string_lossy(), &gguf)?,
            gguf,
        )))
    }
}

/// Why a trace does not want to be told how many experts a token has.
fn why_not_top_k(path: &Path, input: &Input) -> Option<String> {
    match input {
        Input::Foreign(_) => None,
        Input::Run(_) | Input::Tables(_) => Some(format!(
            "--top-k is for traces of other tools that do not tell the experts of a token, and {} does; leave the option out",
            path.display()
        )),
    }
}

/// Why a trace does not want to be told the names of its operations.
fn why_not_ops(path: &Path, input: &Input) -> Option<String> {
    match input {
        Input::Run(run) => run.manifest.is_some().then(|| ops_are_known(path)),
        Input::Foreign(trace) if trace.importer.contents().has_operations() => None,
        Input::Foreign(_) | Input::Tables(_) => Some(format!(
            "--ops is for traces of 1024-byte records, and {} is none; leave the option out",
            path.display()
        )),
    }
}

/// Opens the trace at `path`, whose operations `options` may name.
///
/// # Errors
/// There is none that is known.
pub fn open(path: &Path, options: &ImportOptions) -> anyhow::Result<Input> {
    let kind = Kind::of(path);
    let run = || {
        let run = named(Run::open(path)?, options.ops.as_ref());
        anyhow::Ok(Input::Run(Box::new(run)))
    };
    match kind {
        Ok(Kind::Run) => return run(),
        Ok(Kind::Parquet | Kind::Tables) => return Ok(Input::Tables(path.to_owned())),
        _ => {}
    }
    if let Some(detected) = detect(path)? {
        return Ok(Input::Foreign(detected));
    }
    match kind? {
        Kind::Trace => run(),
        Kind::Gguf => bail!(
            "{} is a model, which does not tell what its router chose; record a run with it",
            path.display()
        ),
        _ => bail!(
            "{} is JSON of no trace that is known; `convert --list` names the formats that are",
            path.display()
        ),
    }
}

/// Reads all of the trace at `path`, and tells what is to be said of it. A run is looked at first, so that one of a newer version
/// is told as such.
pub fn read(
    path: &Path,
    input: &Input,
    options: &ImportOptions,
    sink: &mut dyn Sink,
    ctx: &Context,
) -> anyhow::Result<Summary> {
    if let Input::Run(run) = input {
        remark(run, ctx)?;
    }
    let progress = progress(path, input, ctx);
    let summary = input.read(options, sink)?;
    drop(progress);
    if let Input::Foreign(_) = input {
        report_import(ctx, path, &summary);
    }
    Ok(summary)
}

/// Shows how far reading a trace has come.
pub fn progress(path: &Path, input: &Input, ctx: &Context) -> Progress {
    match input {
        Input::Run(run) => Progress::of_run(ctx, run),
        Input::Tables(_) | Input::Foreign(_) => Progress::reading(ctx, path),
    }
}

/// Makes sure that what was recorded at `path` can be of the model that the user names, if the run tells its own.
///
/// # Errors
/// It cannot; what differs is told.
pub fn check_model(
    path: &Path,
    recorded: Option<&Manifest>,
    named: &Facts,
) -> Result<(), ForeignError> {
    match recorded {
        Some(manifest) => {
            moe_foreign::check_model(named, &Facts::of_manifest(&manifest.model), path)
        }
        None => Ok(()),
    }
}

/// Makes sure that `path` is a run, or a trace of records, for what needs every operation.
///
/// # Errors
/// It is anything else; a trace of another tool is named.
pub fn check_run(path: &Path) -> anyhow::Result<()> {
    let kind = Kind::of(path);
    if !matches!(kind, Ok(Kind::Run))
        && let Some(Detected { importer, .. }) = detect(path)?
        && importer.contents() != Contents::Records
    {
        bail!(
            "{} is of the format {} ({}); give a run directory or its trace.bin",
            path.display(),
            importer.name(),
            importer.description()
        );
    }
    match kind? {
        Kind::Run | Kind::Trace => Ok(()),
        _ => bail!(
            "{} is not a run; give a run directory or its trace.bin",
            path.display()
        ),
    }
}

/// The trace of another tool at `path`; nothing if it is none that is known.
pub fn detect(path: &Path) -> anyhow::Result<Option<Detected>> {
    // A pipe would be waited for without end.
    let can_be_trace = fs::metadata(path).is_ok_and(|found| found.is_file() || found.is_dir());
    if !can_be_trace {
        return Ok(None);
    }
    Ok(moe_foreign::detect(path)?)
}

/// Tells the user how a trace of another tool was read, and what it has lost.
pub fn report_import(ctx: &Context, path: &Path, summary: &Summary) {
    let (n, what) = if summary.is_ordered() {
        (summary.rows, "rows of routing")
    } else {
        (summary.counts, "counts")
    };
    ctx.remark(format_args!(
        "{}: {} ({n} {what})",
        path.display(),
        summary.format
    ));
    for note in &summary.notes {
        ctx.remark(format_args!("  {note}"));
    }
    for &missing in &summary.missing {
        ctx.remark(format_args!("  {}", assumption(missing)));
    }
}

/// What was assumed in place of what a trace does not record, and which option names it.
fn assumption(missing: Missing) -> &'static str {
    match missing {
        Missing::TopK => {
            "the experts of a token are not recorded; pass --top-k or --model to have the choices by token"
        }
        Missing::Layers => {
            "warning: layers are numbered as in the trace, from 0; if the model has layers without experts, pass --model to have \
             them by its blocks"
        }
    }
}
