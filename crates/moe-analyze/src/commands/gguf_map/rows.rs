//! The map itself, a row a tensor or expert.

use std::io::{self, Write};
use std::path::Path;

use moe_files::AtomicFile;
use moe_gguf::Gguf;
use moe_gguf::map::{MapRow, OffsetMap, Projection};
use moe_trace::manifest::ModelFile;
use moe_trace::map_table;

use crate::output::{Cell, Format, write_rows};

pub fn write(out: &mut dyn Write, format: Format, map: &OffsetMap) -> io::Result<()> {
    write_rows(out, format, &MapRow::COLUMNS, map.rows.iter().map(cells))
}

/// Writes the map as a Parquet table, which is in its place once it is committed.
pub fn prepare_parquet(
    gguf: &Gguf,
    map: &OffsetMap,
    out: &Path,
    force: bool,
) -> anyhow::Result<AtomicFile> {
    let files = gguf.files().iter();
    let files: Vec<ModelFile> = files
        .map(|file| ModelFile {
            name: file.name.clone(),
            size_bytes: file.size_bytes,
        })
        .collect();
    Ok(map_table::prepare(out, map, &files, force)?)
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
