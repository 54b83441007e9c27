//! The matrix of layers × experts, on stdout and in files.

use std::path::Path;

use anyhow::bail;
use moe_analysis::Phases;
use moe_analysis::hotness::{Matrix, Value};
use moe_files::AtomicFile;
use moe_foreign::{npy_header_f64, npy_header_u64};
use moe_trace::{ExpertId, LayerId};

use super::args::Args;
use crate::counting::inputs::Counted;
use crate::files;
use crate::output::{self, Format, Table};

/// Format of a file.
enum FileFormat {
    Rows(Format),
    Parquet,
    Npy,
}

/// Rejects a path whose extension selects no format.
pub fn check_extension(path: &Path) -> anyhow::Result<()> {
    format_of(path).map(|_| ())
}

fn format_of(path: &Path) -> anyhow::Result<FileFormat> {
    let extension = path.extension().and_then(|extension| extension.to_str());
    Ok(match extension {
        Some("csv") => FileFormat::Rows(Format::Csv),
        Some("json") => FileFormat::Rows(Format::Json),
        Some("jsonl") => FileFormat::Rows(Format::Jsonl),
        Some("md") => FileFormat::Rows(Format::Md),
        Some("parquet") => FileFormat::Parquet,
        Some("npy") => FileFormat::Npy,
        _ => bail!(
            "{}: the extension must be .csv, .json, .jsonl, .md, .parquet or .npy",
            path.display()
        ),
    })
}

/// Rejects values that the inputs do not contain.
pub fn check_value(args: &Args, counted: &Counted) -> anyhow::Result<()> {
    if args.value() == Value::Bytes && counted.bytes.is_empty() {
        bail!(
            "{} does not contain expert sizes; pass --model FILE.gguf",
            args.inputs.source()
        );
    }
    if args.value() == Value::Mass && !counted.hotness.has_mass() {
        bail!(
            "{} does not contain all router weights; use --value count",
            args.inputs.source()
        );
    }
    Ok(())
}

/// Returns the matrix, split by `--by`.
pub fn matrix<'a>(args: &Args, counted: &'a Counted) -> Matrix<'a> {
    let (hotness, bytes) = (&counted.hotness, &counted.bytes);
    match args.group_by() {
        None => Matrix::ungrouped(hotness, args.phases(), bytes),
        Some(by) => Matrix::by_group(
            hotness,
            args.phases(),
            by.name(),
            counted.survey.groups(),
            bytes,
        ),
    }
}

/// Writes the matrix to a file, which appears at its path on commit. The extension selects the format.
pub fn prepare(args: &Args, counted: &Counted, path: &Path) -> anyhow::Result<AtomicFile> {
    let matrix = matrix(args, counted);
    files::prepare(path, args.force, |out| match format_of(path)? {
        FileFormat::Rows(format) => Ok(write_cells(out, &matrix, format)?),
        FileFormat::Parquet => Ok(matrix.write_parquet(out)?),
        FileFormat::Npy => Ok(write_npy(out, &matrix, args.value())?),
    })
}

/// Writes a NumPy array of the matrix's shape: counts and bytes as `<u8`, mass as `<f8`. Unknown bytes are 0, unknown mass is NaN.
fn write_npy(
    out: &mut dyn std::io::Write,
    matrix: &Matrix<'_>,
    value: Value,
) -> std::io::Result<()> {
    let header = match value {
        Value::Mass => npy_header_f64(&matrix.shape()),
        Value::Count | Value::Bytes => npy_header_u64(&matrix.shape()),
    };
    out.write_all(&header)?;
    for row in matrix.rows() {
        let bytes = match value {
            Value::Count => row.count.to_le_bytes(),
            Value::Mass => row.mass.unwrap_or(f64::NAN).to_le_bytes(),
            Value::Bytes => row.bytes.unwrap_or(0).to_le_bytes(),
        };
        out.write_all(&bytes)?;
    }
    Ok(())
}

/// Prints a split matrix in the order of layers and experts.
pub fn print(matrix: &Matrix<'_>, format: Format) -> anyhow::Result<()> {
    output::to_stdout(format, |stdout| write_cells(stdout, matrix, format))
}

fn write_cells(
    out: &mut dyn std::io::Write,
    matrix: &Matrix<'_>,
    format: Format,
) -> std::io::Result<()> {
    let mut table = Table::of(matrix.rows());
    if let Some(by) = matrix.group_by() {
        table = table.column(by, by, |row| row.group);
    }
    with_expert_columns(table, |row| (row.layer, row.expert, row.count))
        .column("mass", "router weight (sum)", |row| row.mass)
        .column("bytes", "read (bytes)", |row| row.bytes)
        .write(out, format)
}

/// Adds the columns that identify an expert, and its activations.
fn with_expert_columns<'a, I: Iterator + Clone>(
    table: Table<'a, I>,
    of: impl Fn(&I::Item) -> (LayerId, ExpertId, u64) + Copy + 'a,
) -> Table<'a, I> {
    table
        .column("layer_id", "layer", move |row| of(row).0)
        .column("expert_id", "expert", move |row| of(row).1)
        .column("count", "activations", move |row| of(row).2)
}

/// Prints the unsplit matrix, the hottest expert of a layer first.
pub fn print_ranked(counted: &Counted, phases: Phases, format: Format) -> anyhow::Result<()> {
    let ranked = counted.hotness.ranked(phases);
    output::to_stdout(format, |stdout| {
        with_expert_columns(Table::of(&ranked), |expert| {
            (expert.layer, expert.expert, expert.count)
        })
        .column("share", "fraction of layer", |expert| expert.share)
        .column("mass", "router weight (sum)", |expert| expert.mass)
        .write(stdout, format)
    })
}
