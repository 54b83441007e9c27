//! `gguf-map`: which bytes of a model's files are which tensor and expert.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use moe_gguf::Gguf;
use moe_gguf::check::{Report, check};
use moe_gguf::map::{MapRow, OffsetMap, Projection};
use moe_trace::manifest::ModelFile;
use moe_trace::map_table;

use crate::cli::{Context, ExitStatus};
use crate::files;
use crate::output::{self, Cell, Format, human_bytes, write_rows};

/// Print or write the offset map of a GGUF model, one row an expert of a stacked tensor
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The model, a GGUF file
    file: PathBuf,
    /// Report overlaps, gaps and bytes past the end of the file; exit 1 if there are any
    #[arg(long)]
    check_overlaps: bool,
    /// Format of the rows on stdout [default: table; no rows with --out]
    #[arg(short, long = "output", value_name = "FORMAT")]
    output: Option<Format>,
    /// Write the rows to a file; its extension chooses: csv, json, jsonl, md, parquet
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Replace the file of --out if it exists
    #[arg(long)]
    force: bool,
}

pub fn run(args: Args, ctx: &Context) -> anyhow::Result<ExitStatus> {
    let format = match (args.output, &args.out) {
        (Some(format), _) => Some(format),
        (None, None) => Some(Format::Table),
        (None, Some(_)) => None,
    };
    if let Some(out) = &args.out {
        MapFormat::of(out)?;
        files::check_output(out, args.force)?;
    }

    let gguf = Gguf::open(&args.file)?;
    let map = OffsetMap::new(&gguf);
    if let Some(out) = &args.out {
        write_map(&gguf, &map, out, args.force)?;
    }
    if let Some(format) = format {
        output::to_stdout(|stdout| write_map_rows(stdout, format, &map))?;
    }
    let report = check(&gguf);
    ctx.remark(summary(&gguf, &map, &report));
    if let Some(out) = &args.out {
        ctx.remark(format_args!(
            "wrote {} rows to {}",
            map.rows.len(),
            out.display()
        ));
    }
    if !args.check_overlaps {
        return Ok(ExitStatus::Done);
    }

    let findings = findings(&gguf, &report);
    if format.is_none_or(|format| format == Format::Table) {
        output::to_stdout(|stdout| stdout.write_all(findings.as_bytes()))?;
    } else {
        let _ = io::stderr().write_all(findings.as_bytes());
    }
    Ok(if report.is_sound() {
        ExitStatus::Done
    } else {
        ExitStatus::Found
    })
}

enum MapFormat {
    Rows(Format),
    Parquet,
}

impl MapFormat {
    fn of(path: &Path) -> anyhow::Result<MapFormat> {
        let extension = path
            .extension()
            .map(|extension| extension.to_ascii_lowercase());
        Ok(
            match extension
                .as_deref()
                .and_then(|extension| extension.to_str())
            {
                Some("csv") => MapFormat::Rows(Format::Csv),
                Some("json") => MapFormat::Rows(Format::Json),
                Some("jsonl") => MapFormat::Rows(Format::Jsonl),
                Some("md") => MapFormat::Rows(Format::Md),
                Some("parquet") => MapFormat::Parquet,
                _ => anyhow::bail!(
                    "{}: no format of the map has that extension; name a .csv, .json, .jsonl, .md or .parquet file",
                    path.display()
                ),
            },
        )
    }
}

fn write_map(gguf: &Gguf, map: &OffsetMap, out: &Path, force: bool) -> anyhow::Result<()> {
    match MapFormat::of(out)? {
        MapFormat::Rows(format) => {
            files::write_whole(out, force, |file| Ok(write_map_rows(file, format, map)?))
        }
        MapFormat::Parquet => {
            let files = gguf.files().iter();
            let files: Vec<ModelFile> = files
                .map(|file| ModelFile {
                    name: file.name.clone(),
                    size_bytes: file.size_bytes,
                })
                .collect();
            Ok(map_table::write(out, map, &files, force)?)
        }
    }
}

fn write_map_rows(out: &mut dyn Write, format: Format, map: &OffsetMap) -> io::Result<()> {
    write_rows(out, format, &MapRow::COLUMNS, map.rows.iter().map(cells))
}

/// One cell for each of [`MapRow::COLUMNS`].
fn cells(row: &MapRow) -> Vec<Cell<'_>> {
    vec![
        row.file.into(),
        (&*row.tensor).into(),
        row.tensor_idx.into(),
        row.expert_id.into(),
        row.layer_id.into(),
        row.projection.map(Projection::as_str).into(),
        row.category.as_str().into(),
        row.ty.name().into(),
        row.ne[0].into(),
        row.ne[1].into(),
        row.ne[2].into(),
        row.ne[3].into(),
        row.file_offset.into(),
        row.size_bytes.into(),
    ]
}

/// What the model is made of, for reading.
fn summary(gguf: &Gguf, map: &OffsetMap, report: &Report) -> String {
    let columns = ["category", "tensors", "bytes", "", "share %"];
    let rows = report.shares.iter().map(|share| {
        let percent = 100.0 * share.size_bytes as f64 / report.tensor_bytes.max(1) as f64;
        vec![
            share.category.as_str().into(),
            share.n_tensors.into(),
            share.size_bytes.into(),
            human_bytes(share.size_bytes).into(),
            format!("{percent:5.1}").into(),
        ]
    });
    let mut text = Vec::new();
    write_rows(&mut text, Format::Table, &columns, rows).expect("memory takes every write");
    format!(
        "{} tensors, {} rows, {} of tensors behind {} of header\n{}",
        gguf.tensors().len(),
        map.rows.len(),
        human_bytes(report.tensor_bytes),
        human_bytes(report.header_bytes),
        String::from_utf8_lossy(&text).trim_end(),
    )
}

/// Everything that the check found, a line each, and a verdict.
fn findings(gguf: &Gguf, report: &Report) -> String {
    let mut lines: Vec<String> = Vec::new();
    lines.extend(
        report
            .overlaps
            .iter()
            .map(|found| format!("overlap: {}", found.describe(gguf))),
    );
    lines.extend(
        report
            .gaps
            .iter()
            .map(|found| format!("gap: {}", found.describe(gguf))),
    );
    lines.extend(
        report
            .past_end
            .iter()
            .map(|found| format!("past end: {}", found.describe(gguf))),
    );
    let refusals = report.llama_cpp_refuses.iter();
    lines.extend(refusals.map(|found| format!("note: {}", found.describe(gguf))));
    lines.push(verdict(report));
    lines.iter().map(|line| format!("{line}\n")).collect()
}

/// Whether the map fits the file, on one line.
pub fn verdict(report: &Report) -> String {
    format!(
        "{}: {} overlaps, {} gaps, {} tensors past the end; {} bytes of padding, {} bytes after the last tensor",
        if report.is_sound() { "sound" } else { "FAULTY" },
        report.overlaps.len(),
        report.gaps.len(),
        report.past_end.len(),
        report.padding_bytes,
        report.trailing_bytes,
    )
}
