//! `convert`: writes a trace in the format of another tool.

use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use moe_files::AtomicFiles;
use moe_files::text::counted;
use moe_foreign::{EXPORTERS, Export, Exporter, FILES_EXPORTERS, FilesExporter, IMPORTERS, Input};
use moe_gguf::experts::expert_bytes_by_layer;
use moe_trace::ModelInfo;

use crate::context::Context;
use crate::exit_status::ExitStatus;
use crate::files::{self, OutputPath};
use crate::output::{self, Format, Table};
use crate::traces::{self, TraceArgs};

/// Convert a trace to the format of another tool
///
/// Reads a run, tables, or a trace in any format that --list shows with the direction `read` or `both`. Reports which information the
/// new format cannot contain. INPUT, --to and --out are required, except with --list.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  moe-analyze convert --list\n  moe-analyze convert runs/first --to learn --out learn.json\n  moe-analyze convert runs/first --to perfetto --out first.pftrace"
)]
pub struct Args {
    /// Run directory, trace.bin, Parquet tables, or a trace of another tool
    #[arg(required_unless_present = "list")]
    input: Option<PathBuf>,
    /// Name of the format to write, such as learn or perfetto; --list shows the names
    #[arg(long, value_name = "FORMAT", required_unless_present = "list")]
    to: Option<String>,
    /// File to write, or directory for a format with several files
    #[arg(long, value_name = "FILE", required_unless_present = "list")]
    out: Option<OutputPath>,
    /// Replace the output if it exists and has the same format
    #[arg(long)]
    force: bool,
    /// List the formats that can be read and written, and exit
    #[arg(long, conflicts_with_all = ["input", "to", "out"])]
    list: bool,
    /// Format of the rows of --list on stdout
    #[arg(short, long = "output", value_name = "FORMAT", default_value = "table")]
    output: Format,
    #[command(flatten)]
    trace: TraceArgs,
}

pub fn run(args: Args, ctx: &Context) -> anyhow::Result<ExitStatus> {
    let (Some(path), Some(to), Some(out)) = (&args.input, &args.to, &args.out) else {
        list(args.output)?;
        return Ok(ExitStatus::Done);
    };
    let Some(writer) = Writer::of(to) else {
        let names: Vec<&str> = Writer::all().map(|writer| writer.name()).collect();
        bail!(
            "--to {to} is not a format that can be written; use one of {}",
            names.join(", ")
        );
    };
    if let Writer::Files(_) = writer {
        files::check_output_directory(out, path)?;
    }
    writer.check_output(out, args.force)?;

    let mut options = args.trace.options()?;
    args.trace.check(&[path])?;
    let input = traces::open(path, &options)?;
    if let Input::Run(run) = &input
        && let Some(map) = &run.map
        && options.model.is_none()
    {
        options.model = Some(ModelInfo {
            expert_bytes: expert_bytes_by_layer(map),
            ..ModelInfo::default()
        });
    }
    if let Input::Run(run) = &input {
        traces::print_warnings(run, ctx)?;
    }
    let progress = traces::progress(path, &input, ctx);
    let export = Export::new(&input, &options)?;
    drop(progress);
    if let Input::Foreign(_) = input {
        traces::report_import(ctx, path, &export.summary);
    }
    let progress = traces::progress(path, &input, ctx);
    let (losses, n_removed) = writer.write(&export, out, args.force)?;
    drop(progress);
    ctx.note(format_args!("wrote {} ({to})", out.display()));
    if n_removed > 0 {
        let removed = counted(n_removed, "file");
        ctx.note(format_args!("  removed {removed} of an earlier trace"));
    }
    for loss in losses {
        ctx.note(format_args!("  {loss}"));
    }
    Ok(ExitStatus::Done)
}

/// A format of one file, or of several.
enum Writer {
    File(&'static dyn Exporter),
    Files(&'static dyn FilesExporter),
}

impl Writer {
    fn all() -> impl Iterator<Item = Writer> {
        let one = EXPORTERS.iter().copied().map(Writer::File);
        one.chain(FILES_EXPORTERS.iter().copied().map(Writer::Files))
    }

    fn of(name: &str) -> Option<Writer> {
        Writer::all().find(|writer| writer.name() == name)
    }

    fn name(&self) -> &'static str {
        match self {
            Writer::File(exporter) => exporter.name(),
            Writer::Files(exporter) => exporter.name(),
        }
    }

    fn description(&self) -> &'static str {
        match self {
            Writer::File(exporter) => exporter.description(),
            Writer::Files(exporter) => exporter.description(),
        }
    }

    fn check_output(&self, out: &Path, force: bool) -> anyhow::Result<()> {
        match self {
            Writer::File(exporter) => {
                files::check_output(out, force)?;
                if out.is_file() && !moe_foreign::has_format(out, exporter.name())? {
                    bail!(
                        "{} exists and has another format than {}; move it, or use another path",
                        out.display(),
                        exporter.name()
                    );
                }
                Ok(())
            }
            Writer::Files(_) if out.is_dir() && !force => {
                bail!(moe_files::Error::Exists {
                    path: out.to_owned()
                })
            }
            Writer::Files(_) if out.exists() && !out.is_dir() => bail!(
                "{} is a file, but the format {} is written to a directory; use the path of a directory",
                out.display(),
                self.name()
            ),
            Writer::Files(_) => Ok(()),
        }
    }

    /// Returns what the format cannot contain, and how many files of an earlier trace were removed.
    fn write(
        &self,
        export: &Export<'_>,
        out: &Path,
        force: bool,
    ) -> anyhow::Result<(Vec<String>, usize)> {
        match self {
            Writer::File(exporter) => {
                let mut losses = Vec::new();
                files::write(out, force, |file| {
                    losses = exporter.export(export, file)?;
                    Ok(())
                })?;
                Ok((losses, 0))
            }
            Writer::Files(exporter) => write_files(*exporter, export, out, force),
        }
    }
}

/// Writes the files of a format, all or none. Removes files of an earlier trace, because readers would read them as part of this
/// trace.
fn write_files(
    exporter: &dyn FilesExporter,
    export: &Export<'_>,
    out: &Path,
    force: bool,
) -> anyhow::Result<(Vec<String>, usize)> {
    let mut files = AtomicFiles::create(out, force)?;
    let mut current = None;
    let losses = exporter.export(export, &mut |name| {
        let file = files.file(name).map_err(io::Error::other)?;
        current = Some(out.join(name));
        Ok(Box::new(BufWriter::new(file)) as Box<dyn Write>)
    });
    // Without a started file, the error is in the trace.
    let losses = match current {
        None => losses?,
        Some(file) => losses.with_context(|| format!("writing {}", file.display()))?,
    };
    let n_removed = files.remove_others(|path| is_earlier(exporter, path))?;
    files.commit()?;
    Ok((losses, n_removed))
}

/// Returns whether a file is part of an earlier trace in the same format.
///
/// # Errors
/// Its name is a name of the format but its contents are not.
fn is_earlier(exporter: &dyn FilesExporter, path: &Path) -> anyhow::Result<bool> {
    let name = path.file_name().and_then(|name| name.to_str());
    if !name.is_some_and(|name| exporter.is_file_name(name)) {
        return Ok(false);
    }
    let expected = exporter.head().as_bytes();
    let mut head = Vec::with_capacity(expected.len());
    // Opening a pipe would wait for its writer.
    if fs::metadata(path).is_ok_and(|found| found.is_file()) {
        let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
        file.take(expected.len() as u64)
            .read_to_end(&mut head)
            .with_context(|| format!("cannot read {}", path.display()))?;
    }
    if head != expected {
        bail!(
            "{} has the name of a {} file but other contents; move it, or use another directory",
            path.display(),
            exporter.name()
        );
    }
    Ok(true)
}

/// A row of `--list`.
struct KnownFormat {
    name: &'static str,
    direction: &'static str,
    description: &'static str,
}

fn list(format: Format) -> anyhow::Result<()> {
    let reads = IMPORTERS.iter().map(|importer| KnownFormat {
        name: importer.name(),
        direction: match Writer::of(importer.name()) {
            Some(_) => "both",
            None => "read",
        },
        description: importer.description(),
    });
    let is_read = |name: &str| IMPORTERS.iter().any(|importer| importer.name() == name);
    let writes = Writer::all().filter(|writer| !is_read(writer.name()));
    let writes = writes.map(|writer| KnownFormat {
        name: writer.name(),
        direction: "write",
        description: writer.description(),
    });
    let formats: Vec<KnownFormat> = reads.chain(writes).collect();
    output::to_stdout(format, |stdout| {
        Table::of(&formats)
            .column("format", "format", |known| known.name)
            .column("direction", "direction", |known| known.direction)
            .column("description", "description", |known| known.description)
            .write(stdout, format)
    })
}
