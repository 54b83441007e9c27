//! `gguf-map`: which bytes of a model's files are which tensor and expert, and whether they can be.

mod data;
mod form;
mod report;
mod rows;

use std::path::{Path, PathBuf};

use clap::builder::{PossibleValuesParser, TypedValueParser as _};
use moe_files::AtomicFile;
use moe_gguf::Gguf;
use moe_gguf::map::OffsetMap;
use moe_gguf::verify::Algorithm;

use crate::context::Context;
use crate::exit_status::ExitStatus;
use crate::files::{self, OutputPath};
use crate::layout::prepare_map_table;
use crate::output::{self, Format, message};

use form::{FileFormat, Form};
use report::{Survey, summary, write_findings};

/// Print or write the offset map of a GGUF model, one row an expert of a stacked tensor
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The model, a GGUF file; of a model in several files, any of them
    file: PathBuf,
    /// Report overlaps, gaps and bytes past the end of the file; exit 1 if there are any
    #[arg(long)]
    check_overlaps: bool,
    /// Check overlaps, then read the data: hash every tensor, look for values that no model has; exit 1 if there are any.
    /// --hash, --manifest-out and --check-manifest do so too
    #[arg(long)]
    verify: bool,
    /// Hash of --verify [default: that of --check-manifest, or xxh3]
    #[arg(
        long,
        value_parser = PossibleValuesParser::new(["xxh3", "sha256"]).try_map(|name| name.parse::<Algorithm>())
    )]
    hash: Option<Algorithm>,
    /// Write the hashes to a manifest
    #[arg(long, value_name = "FILE")]
    manifest_out: Option<OutputPath>,
    /// Compare the hashes with a manifest, one of llama.cpp's gguf-hash too; exit 1 if they differ
    #[arg(long, value_name = "FILE")]
    check_manifest: Option<PathBuf>,
    /// What is printed or written
    #[arg(long, value_enum, default_value_t = Form::Rows)]
    form: Form,
    /// Format on stdout [default: the form's first; nothing is printed with --out]
    #[arg(short, long = "output", value_name = "FORMAT")]
    output: Option<Format>,
    /// Write to a file; its extension chooses: csv, json, jsonl, md, parquet
    #[arg(long, value_name = "FILE")]
    out: Option<OutputPath>,
    /// Replace the files of --out and --manifest-out if they exist
    #[arg(long)]
    force: bool,
}

impl Args {
    /// Whether the data is read: `--verify`, or an option that is of no use without.
    fn verifies(&self) -> bool {
        self.verify
            || self.hash.is_some()
            || self.manifest_out.is_some()
            || self.check_manifest.is_some()
    }
}

pub fn run(args: Args, ctx: &Context) -> anyhow::Result<ExitStatus> {
    let verifies = args.verifies();
    let format = match (args.output, &args.out) {
        (None, Some(_)) => None,
        (format, _) => Some(args.form.format(format)?),
    };
    let out = match &args.out {
        Some(path) => Some((path, args.form.file_format(path)?)),
        None => None,
    };
    for path in args.out.iter().chain(&args.manifest_out) {
        files::check_output(path, args.force)?;
    }

    let gguf = Gguf::open(&args.file)?;
    let map = OffsetMap::new(&gguf);
    let manifest = args.check_manifest.as_deref();
    let manifest = manifest.map(|path| data::read_manifest(&gguf, path, args.hash));
    let manifest = manifest.transpose()?;

    let mut survey = Survey::of(&gguf);
    let (mut written, mut outputs) = (Vec::new(), Vec::new());
    if verifies && survey.is_readable() {
        let data = data::read(&gguf, args.hash, manifest.as_ref(), ctx)?;
        if let Some(path) = &args.manifest_out {
            outputs.push(data::prepare_manifest(&gguf, &data, path, args.force)?);
            written.push(path);
        }
        survey.data = Some(data);
    }

    if let Some((path, file_format)) = out {
        let output = prepare_file(&survey, &map, args.form, path, file_format, args.force)?;
        outputs.push(output);
        written.push(path);
    }
    files::commit(outputs)?;
    if let Some(format) = format {
        output::to_stdout(format, |stdout| {
            args.form.write(stdout, format, &survey, &map)
        })?;
    }
    let checks = args.check_overlaps || verifies;
    // What a check looked at goes where its findings go.
    let to_stdout = checks && format.is_none_or(|format| format == Format::Table);
    if !to_stdout {
        for line in summary(&survey, &map).lines() {
            ctx.remark(line);
        }
    }
    if gguf.files().len() > 1 && !args.form.names_files() {
        ctx.remark("this form names no files: each offset is in the tensor's own file, which --form rows tells");
    }
    for path in written {
        ctx.remark(format_args!("wrote {}", path.display()));
    }
    if !checks {
        if !survey.check.is_sound() {
            ctx.remark("the file is faulty; --check-overlaps tells how");
        }
        return Ok(ExitStatus::Done);
    }

    if to_stdout {
        output::to_stdout(None, |stdout| {
            writeln!(stdout, "{}", summary(&survey, &map))?;
            write_findings(stdout, &survey, verifies)
        })?;
    } else {
        let mut findings = Vec::new();
        write_findings(&mut findings, &survey, verifies)?;
        for finding in String::from_utf8_lossy(&findings).lines() {
            message::print(finding);
        }
    }
    Ok(if survey.is_sound() {
        ExitStatus::Done
    } else {
        ExitStatus::Found
    })
}

fn prepare_file(
    survey: &Survey,
    map: &OffsetMap,
    form: Form,
    path: &Path,
    format: FileFormat,
    force: bool,
) -> anyhow::Result<AtomicFile> {
    match format {
        FileFormat::Text(format) => files::prepare(path, force, |file| {
            Ok(form.write(file, format, survey, map)?)
        }),
        FileFormat::Parquet => prepare_map_table(survey.gguf, map, path, force),
    }
}
