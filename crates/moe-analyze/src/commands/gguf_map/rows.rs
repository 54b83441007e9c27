//! The rows of the map, one per tensor or expert.

use std::io::{self, Write};

use moe_gguf::map::{OffsetMap, Projection};

use crate::output::{Format, Table};

/// Writes the map with the column names of its Parquet table.
pub fn write(out: &mut dyn Write, format: Format, map: &OffsetMap) -> io::Result<()> {
    Table::of(&map.rows)
        .column("file", "file", |row| row.file)
        .column("tensor", "tensor", |row| &*row.tensor)
        .column("tensor_idx", "index", |row| row.tensor_idx)
        .column("expert_id", "expert", |row| row.expert_id)
        .column("layer_id", "layer", |row| row.layer_id)
        .column("projection", "projection", |row| {
            row.projection.map(Projection::as_str)
        })
        .column("category", "category", |row| row.category.as_str())
        .column("type", "type", |row| row.ty.name())
        .column("ne0", "ne0", |row| row.ne[0])
        .column("ne1", "ne1", |row| row.ne[1])
        .column("ne2", "ne2", |row| row.ne[2])
        .column("ne3", "ne3", |row| row.ne[3])
        .column("file_offset", "offset (bytes)", |row| row.file_offset)
        .column("size_bytes", "size (bytes)", |row| row.size_bytes)
        .write(out, format)
}
