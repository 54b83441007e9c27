//! The matrix, on stdout and in files.

use std::path::Path;

use anyhow::bail;
use moe_analysis::hotness::{Matrix, Phases, Value};
use moe_files::AtomicFile;
use moe_foreign::{npy_header_f64, npy_header_u64};

use super::args::Args;
use super::input::Counted;
use crate::files;
use crate::output::{self, Cell, Format, write_rows};

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

/// The matrix that the user asked for.
pub fn matrix<'a>(args: &Args, counted: &'a Counted) -> anyhow::Result<Matrix<'a>> {
    if args.value() == Value::Bytes && counted.bytes.is_empty() {
        bail!(
            "the bytes of an expert are not told by {}; name the model with --model FILE.gguf",
            args.source()
        );
    }
    let (hotness, bytes) = (&counted.hotness, &counted.bytes);
    if args.value() == Value::Mass && !hotness.has_mass() {
        bail!(
            "the router weights of all choices are not told by {}; choose --value count",
            args.source()
        );
    }
    Ok(match args.group_by() {
        None => Matrix::whole(hotness, args.phases(), bytes),
        Some(by) => Matrix::split(
            hotness,
            args.phases(),
            by.name(),
            counted.survey.groups(),
            bytes,
        ),
    })
}

/// Writes the matrix for a file, in the format of its extension.
pub fn prepare(args: &Args, counted: &Counted, path: &Path) -> anyhow::Result<AtomicFile> {
    let matrix = matrix(args, counted)?;
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
    let mut columns = vec!["layer_id", "expert_id", "count", "mass", "bytes"];
    if let Some(by) = matrix.group_by() {
        columns.insert(0, by);
    }
    let rows = matrix.rows().map(|row| -> Vec<Cell> {
        let group = matrix.group_by().map(|_| row.group.into());
        let cells = [
            row.layer.into(),
            row.expert.into(),
            row.count.into(),
            row.mass.into(),
            row.bytes.into(),
        ];
        group.into_iter().chain(cells).collect()
    });
    write_rows(out, format, &columns, rows)
}

/// Prints the whole matrix, the hottest of a layer first.
pub fn print_ranked(counted: &Counted, phases: Phases, format: Format) -> anyhow::Result<()> {
    let ranked = counted.hotness.ranked(phases);
    let columns = ["layer_id", "expert_id", "count", "share", "mass"];
    let rows = ranked.iter().map(|expert| -> Vec<Cell> {
        vec![
            expert.layer.into(),
            expert.expert.into(),
            expert.count.into(),
            expert.share.into(),
            expert.mass.into(),
        ]
    });
    output::to_stdout(format, |stdout| write_rows(stdout, format, &columns, rows))
}
