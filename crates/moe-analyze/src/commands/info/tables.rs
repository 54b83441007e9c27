//! `info` of a Parquet table or a directory of tables.

use std::path::{Path, PathBuf};

use moe_files::text::counted;
use moe_trace::tables::{
    FORMAT_KEY, RUN_ID_KEY, SCHEMA_KEY, TABLES, TableMetadata, dataset_parts, read_routing,
};
use serde_json::json;

use super::Findings;

pub fn describe_file(path: &Path, findings: &mut Findings) -> anyhow::Result<()> {
    let metadata = TableMetadata::read(path)?;
    findings.fact("kind", "Parquet table");
    for (key, name) in [(SCHEMA_KEY, "schema"), (RUN_ID_KEY, "run id")] {
        if let Some(value) = metadata.value(key) {
            findings.fact(name, value.to_owned());
        }
    }
    findings.fact("rows", metadata.n_rows());
    findings.fact("row groups", metadata.n_row_groups() as u64);
    let columns = metadata.columns();
    findings.parts("columns", columns.join(", "), json!(columns));
    check_rows(path, is_routing(&metadata), findings);
    Ok(())
}

/// Whether a file is a table `routing`: according to its schema, or to its columns if another program wrote it.
fn is_routing(metadata: &TableMetadata) -> bool {
    match metadata.value(SCHEMA_KEY) {
        Some(schema) => schema.starts_with("moe-analyze.routing."),
        None => ["slot", "expert_id"]
            .iter()
            .all(|name| metadata.columns().contains(name)),
    }
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
    let parts_of = |table: &str| {
        if is_dataset {
            dataset_parts(path, table)
        } else {
            Ok(vec![path.join(format!("{table}.parquet"))])
        }
    };
    let has_only_routing = is_of_another_tool(&parts_of("routing")?);
    for table in TABLES {
        let parts = parts_of(table)?;
        if !parts.iter().any(|part| part.is_file()) {
            if !has_only_routing {
                findings.fault(format!(
                    "the table {table} is missing; write it with `moe-analyze parquet`"
                ));
            }
            continue;
        }
        let rows = parts
            .iter()
            .map(|part| check_rows(part, table == "routing", findings))
            .sum::<u64>();
        let n_files = parts.len() as u64;
        let text = format!("{} in {}", counted(rows, "row"), counted(n_files, "file"));
        findings.parts(table, text, json!({"rows": rows, "files": n_files}));
    }
    Ok(())
}

/// Returns whether all parts of `routing` were written from traces of other tools, which contain no operations.
fn is_of_another_tool(parts: &[PathBuf]) -> bool {
    let names_format = |path: &PathBuf| {
        TableMetadata::read(path).is_ok_and(|metadata| metadata.value(FORMAT_KEY).is_some())
    };
    !parts.is_empty() && parts.iter().all(names_format)
}

/// Decodes all rows and returns their number. Rows that cannot be decoded are a fault. A table `routing` is read like in other
/// commands, which check its values and ignore additional columns.
fn check_rows(path: &Path, is_routing: bool, findings: &mut Findings) -> u64 {
    let read = || -> Result<(u64, u64), moe_trace::Error> {
        let metadata = TableMetadata::read(path)?;
        let rows = if is_routing {
            let mut rows = 0;
            for batch in read_routing(path)? {
                rows += batch?.len() as u64;
            }
            rows
        } else {
            metadata.decode_rows()?
        };
        Ok((metadata.n_rows(), rows))
    };
    match read() {
        Ok((promised, rows)) => {
            if promised != rows {
                findings.fault(format!(
                    "{}: the metadata declares {} but the file contains {rows}",
                    path.display(),
                    counted(promised, "row")
                ));
            }
            rows
        }
        Err(error) => {
            findings.fault(error.to_string());
            0
        }
    }
}
