//! What a Parquet table or a directory of tables is.

use std::fs::File;
use std::path::Path;

use anyhow::{Context, anyhow};
use moe_gguf::text::counted;
use moe_trace::tables::TABLES;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde_json::json;

use super::Findings;
use crate::inputs::{damage, dataset_parts};

pub fn describe_file(path: &Path, findings: &mut Findings) -> anyhow::Result<()> {
    let builder = open(path)?;
    let metadata = builder.metadata().file_metadata();
    findings.fact("kind", "Parquet table");
    for entry in metadata.key_value_metadata().into_iter().flatten() {
        match (entry.key.as_str(), &entry.value) {
            ("moe-analyze.schema", Some(value)) => findings.fact("schema", value.clone()),
            ("moe-analyze.run_id", Some(value)) => findings.fact("run id", value.clone()),
            _ => {}
        }
    }
    findings.fact("rows", metadata.num_rows() as u64);
    findings.fact("row groups", builder.metadata().num_row_groups() as u64);
    let columns: Vec<&str> = builder
        .schema()
        .fields()
        .iter()
        .map(|field| field.name().as_str())
        .collect();
    findings.parts("columns", columns.join(", "), json!(columns));
    check_rows(path, findings);
    Ok(())
}

pub fn describe_directory(path: &Path, findings: &mut Findings) -> anyhow::Result<()> {
    let is_dataset = !path.join("routing.parquet").is_file();
    findings.fact(
        "kind",
        if is_dataset {
            "dataset of tables, partitioned by run"
        } else {
            "tables of one run"
        },
    );
    for table in TABLES {
        let parts = if is_dataset {
            dataset_parts(path, table)?
        } else {
            vec![path.join(format!("{table}.parquet"))]
        };
        if !parts.iter().any(|part| part.is_file()) {
            findings.fault(format!(
                "there is no table {table}; write it with `moe-analyze parquet`"
            ));
            continue;
        }
        let rows = parts
            .iter()
            .map(|part| check_rows(part, findings))
            .sum::<u64>();
        let n_files = parts.len() as u64;
        let told = format!("{} in {}", counted(rows, "row"), counted(n_files, "file"));
        findings.parts(table, told, json!({"rows": rows, "files": n_files}));
    }
    Ok(())
}

fn open(path: &Path) -> anyhow::Result<ParquetRecordBatchReaderBuilder<File>> {
    File::open(path)
        .map_err(anyhow::Error::from)
        .with_context(|| format!("cannot open {}", path.display()))
        .and_then(|file| {
            ParquetRecordBatchReaderBuilder::try_new(file).map_err(|error| {
                let reason = error.to_string();
                let reason = damage(&reason).unwrap_or(reason);
                anyhow!("{} is {reason}; get or write it anew", path.display())
            })
        })
}

/// Decodes every row; a fault if some cannot be. Gives the number of rows that could.
fn check_rows(path: &Path, findings: &mut Findings) -> u64 {
    let read = || -> anyhow::Result<(u64, u64)> {
        let builder = open(path)?;
        let promised = builder.metadata().file_metadata().num_rows() as u64;
        let mut rows = 0;
        for batch in builder.build()? {
            rows += batch?.num_rows() as u64;
        }
        Ok((promised, rows))
    };
    match read() {
        Ok((promised, rows)) => {
            if promised != rows {
                findings.fault(format!(
                    "{} promises {} and holds {rows}",
                    path.display(),
                    counted(promised, "row")
                ));
            }
            rows
        }
        Err(error) => {
            let reason = error.root_cause().to_string();
            let reason = damage(&reason).unwrap_or(reason);
            findings.fault(format!("{}: {reason}", path.display()));
            0
        }
    }
}
