//! The matrix, on stdout and in files.

use std::path::Path;

use anyhow::bail;
use moe_analysis::hotness::{Matrix, Phases, Value};
use moe_files::AtomicFile;
use moe_foreign::{npy_header_f64, npy_header_u64};

use super::args::Args;
use crate::counting::inputs::Counted;
use crate::files;
use crate::output::{self, Format, Table};

/// How a file of a matrix is written.
enum FileFormat {
    Rows(Format),
    Parquet,
    Npy,
}

/// Refuses a file name whose extension names no format.
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
            "{}: no format of a matrix has that extension; name a .csv, .json, .jsonl, .md, .parquet or .npy file",
            path.display()
        ),
    })
}

/// Refuses values that the inputs do not contain.
pub fn check_value(args: &Args, counted: &Counted) -> anyhow::Result<()> {
    if args.value() == Value::Bytes && counted.bytes.is_empty() {
        bail!(
            "the bytes of an expert are not told by {}; name the model with --model FILE.gguf",
            args.inputs.source()
        );
    }
    if args.value() == Value::Mass && !counted.hotness.has_mass() {
        bail!(
            "the router weights of all choices are not told by {}; choose --value count",
            args.inputs.source()
        );
    }
    Ok(())
}

/// The matrix that the user asked for.
pub fn matrix<'a>(args: &Args, counted: &'a Counted) -> Matrix<'a> {
    let (hotness, bytes) = (&counted.hotness, &counted.bytes);
    match args.group_by() {
        None => Matrix::whole(hotness, args.phases(), bytes),
        Some(by) => Matrix::split(
            hotness,
            args.phases(),
            by.name(),
            counted.survey.groups(),
            bytes,
        ),
    }
}

/// Writes the matrix for a file, in the format of its extension.
pub fn prepare(args: &Args, counted: &Counted, path: &Path) -> anyhow::Result<AtomicFile> {
    let matrix = matrix(args, counted);
    files::prepare(path, args.force, |out| match format_of(path)? {
        FileFormat::Rows(format) => Ok(write_cells(out, &matrix, format)?),
        FileFormat::Parquet => Ok(matrix.write_parquet(out)?),
        FileFormat::Npy => Ok(write_npy(out, &matrix, args.value())?),
    })
}

/// Writes an array of NumPy of the matrix's shape: counts and bytes as `<u8`, mass as `<f8`. Bytes that are not known are 0, mass
/// is NaN.
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

/// Prints a matrix that is split, layers and experts ascending.
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
    table
        .column("layer_id", "layer", |row| row.layer)
        .column("expert_id", "expert", |row| row.expert)
        .column("count", "activations", |row| row.count)
        .column("mass", "router weight", |row| row.mass)
        .column("bytes", "read (bytes)", |row| row.bytes)
        .write(out, format)
}

/// Prints the whole matrix, the hottest of a layer first.
pub fn print_ranked(counted: &Counted, phases: Phases, format: Format) -> anyhow::Result<()> {
    let ranked = counted.hotness.ranked(phases);
    output::to_stdout(format, |stdout| {
        Table::of(&ranked)
            .column("layer_id", "layer", |expert| expert.layer)
            .column("expert_id", "expert", |expert| expert.expert)
            .column("count", "activations", |expert| expert.count)
            .column("share", "share of the layer", |expert| expert.share)
            .column("mass", "router weight", |expert| expert.mass)
            .write(stdout, format)
    })
}
