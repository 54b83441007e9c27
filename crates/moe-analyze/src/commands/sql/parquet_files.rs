//! Finds the tables in Parquet files: a file, a directory of tables, or a dataset of several runs.

use std::path::{Path, PathBuf};

use anyhow::bail;
use moe_trace::map_table;
use moe_trace::tables::{RUN_ID_KEY, SCHEMA_KEY, TABLES, TableMetadata, dataset_parts};

use super::inputs::QUERY_TABLES;

/// A Parquet file of a table.
#[derive(Debug, Clone)]
pub struct TableFile {
    pub table: &'static str,
    pub path: PathBuf,
    /// Id of the run.
    pub run: String,
    /// Whether the file belongs to a dataset, whose tables have a column `run`.
    pub is_partition: bool,
}

/// Returns the files at a path, which is a Parquet file or a directory.
pub fn find(path: &Path) -> anyhow::Result<Vec<TableFile>> {
    if !path.is_dir() {
        return Ok(vec![file(path)?]);
    }
    let mut files = Vec::new();
    for table in TABLES {
        let single = path.join(format!("{table}.parquet"));
        if single.is_file() {
            files.push(of_table(table, single)?);
            continue;
        }
        for part in dataset_parts(path, table)? {
            files.push(TableFile {
                is_partition: true,
                ..of_table(table, part)?
            });
        }
    }
    let map = path.join(map_table::FILE_NAME);
    if map.is_file() {
        files.push(of_table("map", map)?);
    }
    Ok(files)
}

/// Returns a single file. The schema in its metadata, or its name, identifies the table.
fn file(path: &Path) -> anyhow::Result<TableFile> {
    let metadata = TableMetadata::read(path)?;
    let stem = path.file_stem().and_then(|stem| stem.to_str());
    let schema = metadata.value(SCHEMA_KEY).and_then(|schema| {
        let name = schema.strip_prefix("moe-analyze.")?;
        Some(name.split_once('.').map_or(name, |(name, _)| name))
    });
    let is_table = |name: &str| {
        let name = if name == "gguf-map" { "map" } else { name };
        QUERY_TABLES.into_iter().find(|&table| table == name)
    };
    match schema.or(stem).and_then(is_table) {
        Some(table) => of_table(table, path.to_owned()),
        None => bail!(
            "{} is not one of the tables {}: neither the metadata key {SCHEMA_KEY} nor the file name is a table; rename the file to the \
             name of its table",
            path.display(),
            QUERY_TABLES.join(", ")
        ),
    }
}

fn of_table(table: &'static str, path: PathBuf) -> anyhow::Result<TableFile> {
    let metadata = TableMetadata::read(&path)?;
    let run = metadata.value(RUN_ID_KEY).map(str::to_owned);
    Ok(TableFile {
        table,
        run: run
            .or_else(|| partition(&path))
            .unwrap_or_else(|| path.display().to_string()),
        path,
        is_partition: false,
    })
}

/// Returns the run in the name of a dataset's directory, `run=ID`.
fn partition(path: &Path) -> Option<String> {
    let directory = path.parent()?.file_name()?.to_str()?;
    directory.strip_prefix("run=").map(str::to_owned)
}
