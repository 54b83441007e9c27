//! The map itself, a row a tensor or expert.

use std::io::{self, Write};

use moe_gguf::map::{MapRow, OffsetMap, Projection};

use crate::output::{Cell, Format, write_rows};

pub fn write(out: &mut dyn Write, format: Format, map: &OffsetMap) -> io::Result<()> {
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
