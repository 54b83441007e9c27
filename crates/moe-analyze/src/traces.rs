//! Opens path arguments as traces: runs, tables, or traces of other tools.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::bail;
use moe_foreign::{Contents, Detected, ForeignError, ImportOptions, Input, Missing, Summary};
use moe_gguf::Gguf;
use moe_placement::json::non_finite;
use moe_trace::check::stale_tables;
use moe_trace::manifest::Manifest;
use moe_trace::ops::OpTable;
use moe_trace::{ModelInfo, Run, Sink, bounded};
use serde::de::IgnoredAny;

use crate::advice;
use crate::context::Context;
use crate::inputs::Kind;
use crate::op_table;
use crate::option_values::{first_given, integer_in};
use crate::progress::Progress;

/// Options that describe traces and their model.
#[derive(Debug, Default, clap::Args)]
pub struct TraceArgs {
    /// Model of the trace, a GGUF file: provides layers, experts and expert sizes that the trace does not contain
    #[arg(long, value_name = "FILE.gguf", help_heading = "Trace")]
    model: Option<PathBuf>,
    #[command(flatten)]
    import: ImportArgs,
}

/// Options that describe traces, without the model.
#[derive(Debug, Default, clap::Args)]
pub struct ImportArgs {
    /// Number of experts per token, for a trace of another tool that does not contain it; 1 to 4096
    #[arg(long, value_name = "K", value_parser = integer_in(1..=4096u32), help_heading = "Trace")]
    top_k: Option<u32>,
    #[command(flatten)]
    ops: OpsArgs,
}

/// Options that describe traces of 1024-byte records.
#[derive(Debug, Default, clap::Args)]
pub struct OpsArgs {
    /// CSV file with lines `number,name`: names of the operation numbers in a trace.bin without manifest.json
    #[arg(long, value_name = "FILE.csv", help_heading = "Trace")]
    ops: Option<PathBuf>,
}

impl OpsArgs {
    /// Opens a run or a trace of 1024-byte records, and prints its warnings.
    ///
    /// # Errors
    /// The input has another format; the error contains the format of a trace of another tool.
    pub fn open(&self, path: &Path, ctx: &Context) -> anyhow::Result<Run> {
        check_run(path)?;
        let run = with_op_names(Run::open(path)?, self.read()?.as_ref());
        print_warnings(&run, ctx)?;
        Ok(run)
    }

    /// Rejects `--ops` if all runs have a manifest.
    pub fn check(&self, runs: &[&Run]) -> anyhow::Result<()> {
        match (&self.ops, runs) {
            (Some(_), [run, ..]) if runs.iter().all(|run| run.manifest.is_some()) => {
                bail!(ops_are_known(&run.path))
            }
            _ => Ok(()),
        }
    }

    /// Returns whether `--ops` is given.
    pub fn is_given(&self) -> bool {
        self.ops.is_some()
    }

    fn read(&self) -> anyhow::Result<Option<OpTable>> {
        self.ops.as_deref().map(op_table::read).transpose()
    }
}

fn ops_are_known(path: &Path) -> String {
    format!(
        "--ops: the manifest of {} already contains the operation names; omit the option",
        path.display()
    )
}

/// Adds the operation names of the user to a trace without a manifest.
fn with_op_names(run: Run, ops: Option<&OpTable>) -> Run {
    match ops {
        Some(ops) if run.manifest.is_none() => run.with_ops(ops.clone()),
        _ => run,
    }
}

/// Prints the warnings about a run.
pub fn print_warnings(run: &Run, ctx: &Context) -> anyhow::Result<()> {
    let progress = Progress::of_run(ctx, run);
    let warnings = run.warnings()?;
    drop(progress);
    let stale = stale_tables(run).into_iter();
    let stale = stale.map(|error| advice::with_advice(&error));
    warnings
        .into_iter()
        .chain(stale)
        .for_each(|warning| ctx.note(warning));
    Ok(())
}

impl ImportArgs {
    /// Reads the files of the options. `model` contains the known parameters of the traces' model.
    pub fn options(&self, model: Option<ModelInfo>) -> anyhow::Result<ImportOptions> {
        Ok(ImportOptions {
            top_k: self.top_k,
            ops: self.ops.read()?,
            model,
        })
    }

    /// Returns the first option on the command line.
    pub fn first_given(&self) -> Option<&'static str> {
        first_given([
            ("--top-k", self.top_k.is_some()),
            ("--ops", self.ops.is_given()),
        ])
    }

    /// Rejects options that apply to none of the traces.
    ///
    /// # Errors
    /// All traces already contain what the option provides, or the option has no meaning for them.
    pub fn check(&self, paths: &[&Path]) -> anyhow::Result<()> {
        type Why = fn(&Path, &Input) -> Option<String>;
        let top_k: Why = why_not_top_k;
        let options = [
            (self.top_k.is_some(), top_k),
            (self.ops.is_given(), why_not_ops),
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
    /// Reads the files of the options.
    pub fn options(&self) -> anyhow::Result<ImportOptions> {
        self.import
            .options(self.gguf()?.map(|(model_info, _)| model_info))
    }

    /// See [`ImportArgs::check`].
    pub fn check(&self, paths: &[&Path]) -> anyhow::Result<()> {
        self.import.check(paths)
    }

    /// Returns whether `--model` is given.
    pub fn has_model(&self) -> bool {
        self.model.is_some()
    }

    /// Returns the path of `--model`.
    pub fn model(&self) -> Option<&Path> {
        self.model.as_deref()
    }

    /// Opens the model of `--model`.
    pub fn gguf(&self) -> anyhow::Result<Option<(ModelInfo, Gguf)>> {
        let Some(path) = &self.model else {
            return Ok(None);
        };
        let gguf = Gguf::open(path)?;
        Ok(Some((
            ModelInfo::from_gguf(&path.to_string_lossy(), &gguf)?,
            gguf,
        )))
    }
}

/// Returns the reason why `--top-k` does not apply to an input, or `None` if it does.
fn why_not_top_k(path: &Path, input: &Input) -> Option<String> {
    match input {
        Input::Foreign(_) => None,
        Input::Run(_) | Input::Tables(_) => Some(format!(
            "--top-k has no effect: {} already contains the experts of each token; omit the option",
            path.display()
        )),
    }
}

/// Returns the reason why `--ops` does not apply to an input, or `None` if it does.
fn why_not_ops(path: &Path, input: &Input) -> Option<String> {
    match input {
        Input::Run(run) => run.manifest.is_some().then(|| ops_are_known(path)),
        Input::Foreign(trace) if trace.importer.contents().has_operations() => None,
        Input::Foreign(_) | Input::Tables(_) => Some(format!(
            "--ops has no effect: {} is not a trace of 1024-byte records; omit the option",
            path.display()
        )),
    }
}

/// Opens the trace at `path`.
///
/// # Errors
/// The path cannot be read, or its content is not a trace in a known format.
pub fn open(path: &Path, options: &ImportOptions) -> anyhow::Result<Input> {
    let kind = Kind::of(path);
    let run = || {
        let run = with_op_names(Run::open(path)?, options.ops.as_ref());
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
            "{} is a model, which contains no routing; record a run with it",
            path.display()
        ),
        _ => bail!(unknown_json(path)),
    }
}

/// Reads the entire trace at `path`, and prints its warnings. A run is checked first, so that a trace of a newer version is reported
/// as such.
pub fn read(
    path: &Path,
    input: &Input,
    options: &ImportOptions,
    sink: &mut dyn Sink,
    ctx: &Context,
) -> anyhow::Result<Summary> {
    if let Input::Run(run) = input {
        print_warnings(run, ctx)?;
    }
    let progress = progress(path, input, ctx);
    let summary = input.read(options, sink)?;
    drop(progress);
    if let Input::Foreign(_) = input {
        report_import(ctx, path, &summary);
    }
    Ok(summary)
}

/// Describes a file that starts like a JSON object, but is not a trace.
pub fn unknown_json(path: &Path) -> String {
    const RUN_FILES: [&str; 3] = ["manifest.json", "buffers.jsonl", "transfers.jsonl"];
    if RUN_FILES.iter().any(|name| path.ends_with(name)) {
        return format!(
            "{} is a file of a run; pass the run directory",
            path.display()
        );
    }
    if let Some(error) = json_error(path) {
        return format!("{}: {error}", path.display());
    }
    format!(
        "{} is JSON, but not a trace in a known format; `convert --list` lists the formats",
        path.display()
    )
}

/// Describes the first syntax error of a file with one or more JSON values. Returns `None` if there is none, or if the file cannot be
/// read.
fn json_error(path: &Path) -> Option<String> {
    let text = bounded::read_json(path).ok()?;
    let mut values = serde_json::Deserializer::from_str(&text).into_iter::<IgnoredAny>();
    let error = values.find_map(Result::err)?;
    if let Some(value) = non_finite(&error, text.as_bytes()) {
        let (line, column) = (error.line(), error.column());
        return Some(format!(
            "{value} is not JSON (line {line}, column {column}); replace it with a number"
        ));
    }
    let reason = moe_trace::json::reason(&error);
    let cause = reason.strip_prefix("it is not JSON: ").unwrap_or(&reason);
    Some(format!(
        "line {}, column {}: it is not valid JSON: {cause}; get a new copy of the file",
        error.line(),
        error.column()
    ))
}

/// Shows the progress of reading a trace.
pub fn progress(path: &Path, input: &Input, ctx: &Context) -> Progress {
    match input {
        Input::Run(run) => Progress::of_run(ctx, run),
        Input::Tables(_) | Input::Foreign(_) => Progress::reading(ctx, path),
    }
}

/// Checks that the run at `path` can be a run of the user's model. A run without a manifest passes.
///
/// # Errors
/// The models differ; the error contains the difference.
pub fn check_model(
    path: &Path,
    recorded: Option<&Manifest>,
    named: &ModelInfo,
) -> Result<(), ForeignError> {
    match recorded {
        Some(manifest) => {
            moe_foreign::check_model(named, &ModelInfo::from_manifest(&manifest.model), path)
        }
        None => Ok(()),
    }
}

/// Checks that `path` is a run or a trace of 1024-byte records.
///
/// # Errors
/// The input has another format; the error contains the format of a trace of another tool.
pub fn check_run(path: &Path) -> anyhow::Result<()> {
    let kind = Kind::of(path);
    if !matches!(kind, Ok(Kind::Run))
        && let Some(Detected { importer, .. }) = detect(path)?
        && importer.contents() != Contents::Records
    {
        bail!(
            "{} is not a run: it has the format {} ({}); pass a run directory or its trace.bin",
            path.display(),
            importer.name(),
            importer.description()
        );
    }
    match kind? {
        Kind::Run | Kind::Trace => Ok(()),
        _ => bail!(
            "{} is not a run; pass a run directory or its trace.bin",
            path.display()
        ),
    }
}

/// Detects the format of a trace of another tool. Returns `None` for other inputs.
pub fn detect(path: &Path) -> anyhow::Result<Option<Detected>> {
    // Reading a pipe without a writer would block forever.
    let can_be_trace = fs::metadata(path).is_ok_and(|found| found.is_file() || found.is_dir());
    if !can_be_trace {
        return Ok(None);
    }
    Ok(moe_foreign::detect(path)?)
}

/// Prints the format and size of a trace of another tool, and what it does not contain.
pub fn report_import(ctx: &Context, path: &Path, summary: &Summary) {
    let (n, what) = if summary.is_ordered() {
        (summary.rows, "routing rows")
    } else {
        (summary.counts, "counts")
    };
    ctx.note(format_args!(
        "{}: {} ({n} {what})",
        path.display(),
        summary.format
    ));
    for note in &summary.notes {
        ctx.note(format_args!("  {note}"));
    }
    for &missing in &summary.missing {
        ctx.note(format_args!("  {}", assumption(missing)));
    }
}

/// Returns the assumption that replaces information missing from a trace, and the option that provides it.
fn assumption(missing: Missing) -> &'static str {
    match missing {
        Missing::TopK => {
            "the number of experts per token is not recorded; pass --top-k or --model to count tokens"
        }
        Missing::Layers => {
            "warning: layers are numbered from 0, as in the trace; if the model has layers without experts, pass --model to number \
             them like the model's blocks"
        }
    }
}
