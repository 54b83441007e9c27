//! `gguf-map`: the byte ranges of tensors and experts in a model's files, and checks of them.

mod data;
mod map_format;
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

use map_format::{FileFormat, MapFormat};
use report::{Survey, summary, write_findings};

/// Print the offset map of a GGUF model: the byte range of each tensor and expert
///
/// Reads the headers of the model files and prints one row per tensor; a stacked expert tensor has one row per expert. --check-overlaps
/// and --verify check the files.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  moe-analyze gguf-map model.gguf --out map.parquet\n  moe-analyze gguf-map model.gguf --verify"
)]
pub struct Args {
    /// Model, a GGUF file (any file of a split model)
    file: PathBuf,
    /// Check for overlaps, gaps and tensors past the end of the file; exit with 1 if there are any
    #[arg(long, help_heading = "Checks")]
    check_overlaps: bool,
    /// In addition to --check-overlaps, hash every tensor and check for values that are not finite; exit with 1 if there are any.
    /// --hash, --manifest-out and --check-manifest imply this option
    #[arg(long, help_heading = "Checks")]
    verify: bool,
    /// Hash algorithm of --verify [default: that of --check-manifest, or xxh3]
    #[arg(
        long,
        help_heading = "Checks",
        value_parser = PossibleValuesParser::new(["xxh3", "sha256"]).try_map(|name| name.parse::<Algorithm>())
    )]
    hash: Option<Algorithm>,
    /// Write the hashes to a manifest in the line format of llama.cpp's gguf-hash, one line per tensor
    #[arg(long, value_name = "FILE", help_heading = "Checks")]
    manifest_out: Option<OutputPath>,
    /// Compare the hashes with a manifest that --manifest-out or llama.cpp's gguf-hash wrote; exit with 1 if they differ
    #[arg(long, value_name = "FILE", help_heading = "Checks")]
    check_manifest: Option<PathBuf>,
    /// Format of the map
    #[arg(long, alias = "form", value_enum, default_value_t = MapFormat::Rows)]
    format: MapFormat,
    /// Encoding on stdout [default: none with --out; else table for rows, json or csv for the other formats]
    #[arg(short, long = "output", value_name = "ENCODING")]
    output: Option<Format>,
    /// Write the map to a file; the extension selects the encoding: csv, json, jsonl, md, parquet
    #[arg(long, value_name = "FILE")]
    out: Option<OutputPath>,
    /// Replace the files of --out and --manifest-out if they exist
    #[arg(long)]
    force: bool,
}

impl Args {
    /// Returns whether the data is read: `--verify`, or an option that implies it.
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
        (format, _) => Some(args.format.encoding(format)?),
    };
    let out = match &args.out {
        Some(path) => Some((path, args.format.file_format(path)?)),
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
        let output = prepare_file(&survey, &map, args.format, path, file_format, args.force)?;
        outputs.push(output);
        written.push(path);
    }
    files::commit(outputs)?;
    if let Some(format) = format {
        output::to_stdout(format, |stdout| {
            args.format.write(stdout, format, &survey, &map)
        })?;
    }
    let checks = args.check_overlaps || verifies;
    // The summary goes to the same stream as the findings of a check.
    let to_stdout = checks && format.is_none_or(|format| format == Format::Table);
    if !to_stdout {
        for line in summary(&survey, &map).lines() {
            ctx.note(line);
        }
    }
    if gguf.files().len() > 1 && !args.format.names_files() {
        ctx.note("this format does not contain the file in which each offset is; use --format rows for a split model");
    }
    for path in written {
        ctx.note(format_args!("wrote {}", path.display()));
    }
    if !checks {
        if !survey.check.is_sound() {
            ctx.note("warning: the file has faults; pass --check-overlaps to print them");
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
    map_format: MapFormat,
    path: &Path,
    format: FileFormat,
    force: bool,
) -> anyhow::Result<AtomicFile> {
    match format {
        FileFormat::Text(format) => files::prepare(path, force, |file| {
            Ok(map_format.write(file, format, survey, map)?)
        }),
        FileFormat::Parquet => prepare_map_table(survey.gguf, map, path, force),
    }
}
