//! `report`: an interactive report of one or two inputs, as one HTML file.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use moe_executor::tokenizer::Tokenizer;
use moe_files::text::counted;
use moe_foreign::{ImportOptions, Input};
use moe_gguf::Gguf;
use moe_gguf::map::OffsetMap;
use moe_report::{InputReport, Report, Source, TokenText};
use moe_trace::manifest::ModelFile;
use moe_trace::{ModelInfo, Run};

use super::info;
use crate::context::Context;
use crate::exit_status::ExitStatus;
use crate::files::{self, OutputPath};
use crate::model;
use crate::option_values::at_least;
use crate::output::human_bytes;
use crate::traces::{self, TraceArgs};

/// Write an interactive report of one or two traces as one HTML file
///
/// Shows the computation graph, the records, the layout of the model's file, the selected experts over time, the tokens, and curves of
/// coverage, stability, caches, transfers and memory. The file opens from disk and loads nothing from the network.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  moe-analyze report runs/first --out report.html\n  \
        moe-analyze report runs/cpu runs/post-fetch --out both.html --open"
)]
pub struct Args {
    /// Run directories, trace.bin files, directories of tables, or traces of other tools; two are shown side by side
    #[arg(required = true, num_args = 1..=2, value_name = "INPUT")]
    inputs: Vec<PathBuf>,
    /// HTML file to write
    #[arg(long, value_name = "FILE.html")]
    out: OutputPath,
    /// Replace the file of --out if it exists
    #[arg(long)]
    force: bool,
    /// Open the report in the default browser
    #[arg(long)]
    open: bool,
    /// Maximum number of records of each input in the tables of the report, at least 1; most charts are computed from all records
    #[arg(long, value_name = "N", default_value_t = 1_000_000, value_parser = at_least(1usize))]
    max_records: usize,
    #[command(flatten)]
    trace: TraceArgs,
}

/// The model of `--model`.
struct NamedModel {
    info: ModelInfo,
    gguf: Gguf,
    map: OffsetMap,
}

pub fn run(args: Args, ctx: &Context) -> anyhow::Result<ExitStatus> {
    files::require_extension(&args.out, "html")?;
    files::check_output(&args.out, args.force)?;
    let paths: Vec<&Path> = args.inputs.iter().map(PathBuf::as_path).collect();
    args.trace.check(&paths)?;
    let named = args.trace.gguf()?.map(|(info, gguf)| NamedModel {
        map: OffsetMap::new(&gguf),
        info,
        gguf,
    });
    let options = args.trace.options()?;
    let names = names(&args.inputs);
    let title = names.join(" and ");
    let mut inputs = Vec::new();
    for (index, (path, name)) in paths.into_iter().zip(names).enumerate() {
        let max_records = args.max_records;
        let input = read(
            path,
            name,
            index,
            named.as_ref(),
            &options,
            max_records,
            ctx,
        )?;
        inputs.push(input);
    }
    let program = concat!("moe-analyze ", env!("CARGO_PKG_VERSION")).to_owned();
    let report = Report::new(title, program, inputs)?;
    for note in report.notes() {
        ctx.note(note);
    }
    files::write(&args.out, args.force, |file| Ok(report.write(file)?))?;
    let size = fs::metadata(&args.out).map_or(0, |found| found.len());
    ctx.note(format_args!(
        "wrote {}: {}, {}",
        args.out.display(),
        counted(report.n_records() as u64, "record"),
        human_bytes(size)
    ));
    if args.open {
        open(&args.out, ctx);
    }
    Ok(ExitStatus::Done)
}

/// Returns the names of the inputs: their paths. Equal paths are numbered.
fn names(paths: &[PathBuf]) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for path in paths {
        let mut name = path.display().to_string();
        if names.contains(&name) {
            name += " (2)";
        }
        names.push(name);
    }
    names
}

/// Reads an input, and prints its warnings.
fn read(
    path: &Path,
    name: String,
    index: usize,
    named: Option<&NamedModel>,
    options: &ImportOptions,
    max_records: usize,
    ctx: &Context,
) -> anyhow::Result<InputReport> {
    let input = traces::open(path, options)?;
    if let Input::Run(run) = &input {
        traces::print_warnings(run, ctx)?;
        if let Some(named) = named {
            traces::check_model(path, run.manifest.as_ref(), &named.info)?;
        }
    }
    let (properties, notes) = match &input {
        Input::Run(run) => info::properties_of_run(run, ctx)?,
        Input::Tables(_) => info::properties(path, ctx)?,
        // The report reads the properties with the options of the command line.
        Input::Foreign(trace) => {
            let property = |name: &str, value: &str| (name.to_owned(), value.to_owned());
            let properties = vec![
                property("kind", trace.importer.description()),
                property("format", trace.importer.name()),
            ];
            (properties, Vec::new())
        }
    };
    let texts = match &input {
        Input::Run(run) => Texts::of_run(run, named),
        Input::Tables(_) | Input::Foreign(_) => None,
    };
    let text = texts
        .as_ref()
        .map(|texts| move |sequence: u32, position: u32| texts.at(sequence, position));
    let source = Source {
        name,
        path,
        input: &input,
        options,
        map: named.map(|named| &named.map),
        files: named.map_or_else(Vec::new, |named| model_files(&named.gguf)),
        texts: text.as_ref().map(|text| text as &TokenText<'_>),
        properties,
        notes,
        max_records,
    };
    let progress = traces::progress(path, &input, ctx);
    let report = InputReport::read(source, index)?;
    drop(progress);
    if let (Input::Foreign(_), Some(summary)) = (&input, report.summary()) {
        traces::report_import(ctx, path, summary);
    }
    for note in report.notes() {
        ctx.note(format_args!("{}: {note}", path.display()));
    }
    Ok(report)
}

fn model_files(gguf: &Gguf) -> Vec<ModelFile> {
    let files = gguf.files().iter();
    files
        .map(|file| ModelFile {
            name: file.name.clone(),
            size_bytes: file.size_bytes,
        })
        .collect()
}

/// Texts of the tokens of a run.
struct Texts {
    /// Ids in the vocabulary, by sequence and position.
    ids: Vec<Vec<u32>>,
    tokenizer: Tokenizer,
}

impl Texts {
    /// Returns `None` if the run contains no token ids, or if its model or tokenizer cannot be read.
    fn of_run(run: &Run, named: Option<&NamedModel>) -> Option<Texts> {
        let manifest = run.manifest.as_ref()?;
        let ids = manifest.token_ids.clone()?;
        let is_same = |gguf: &Gguf| {
            let hash = format!("{:016x}", gguf.header_xxh3());
            hash == manifest.model.header_xxh3
        };
        let tokenizer = |gguf: &Gguf| {
            let tokenizer = Tokenizer::from_gguf(gguf.metadata()).ok();
            tokenizer.filter(Tokenizer::has_vocabulary)
        };
        let tokenizer = match named.filter(|named| is_same(&named.gguf)) {
            Some(named) => tokenizer(&named.gguf),
            None => model::recorded(&manifest.model)
                .filter(is_same)
                .and_then(|gguf| tokenizer(&gguf)),
        };
        Some(Texts {
            ids,
            tokenizer: tokenizer?,
        })
    }

    /// Returns the text of a token. Incomplete UTF-8 is replaced.
    fn at(&self, sequence: u32, position: u32) -> Option<String> {
        let tokens = self.ids.get(usize::try_from(sequence).ok()?)?;
        let id = *tokens.get(usize::try_from(position).ok()?)?;
        let piece = self.tokenizer.piece(id);
        Some(String::from_utf8_lossy(piece).into_owned())
    }
}

/// Opens a file in the default browser. A failure is a warning, because the report is complete.
fn open(path: &Path, ctx: &Context) {
    let (program, args): (&str, &[&str]) = if cfg!(target_os = "macos") {
        ("open", &[])
    } else if cfg!(windows) {
        ("cmd", &["/C", "start", ""])
    } else {
        ("xdg-open", &[])
    };
    let absolute = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let mut command = Command::new(program);
    command
        .args(args)
        .arg(absolute)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let problem = match command.status() {
        Ok(status) if status.success() => return,
        Ok(status) => format!("{program} failed ({status})"),
        Err(error) => format!("cannot start {program}: {error}"),
    };
    ctx.note(format_args!(
        "warning: {problem}; open {} in a browser",
        path.display()
    ));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_equal_paths_differ() {
        let path = |name: &str| PathBuf::from(name);
        assert_eq!(names(&[path("a"), path("b")]), ["a", "b"]);
        assert_eq!(names(&[path("a"), path("a")]), ["a", "a (2)"]);
    }
}
