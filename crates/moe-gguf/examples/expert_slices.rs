//! Lists the byte ranges of an expert: `expert_slices MODEL.gguf LAYER EXPERT`.
//!
//! These are the ranges that a runtime reads to load the expert.

use std::error::Error;
use std::ffi::OsString;

use moe_gguf::map::{Category, OffsetMap};
use moe_gguf::{ExpertId, Gguf, LayerId};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let [path, layer, expert] = &arguments[..] else {
        return Err("usage: expert_slices MODEL.gguf LAYER EXPERT".into());
    };
    let layer: LayerId = layer.to_string_lossy().parse()?;
    let expert: ExpertId = expert.to_string_lossy().parse()?;

    let gguf = Gguf::open(path)?;
    let map = OffsetMap::new(&gguf);
    let mut total = 0;
    for row in &map.rows {
        if row.category == Category::Expert
            && row.layer_id == Some(layer)
            && row.expert_id == Some(expert)
        {
            let file = &gguf.files()[usize::from(row.file)].name;
            let end = row.file_offset + row.size_bytes;
            let projection = row.projection.map_or("", |projection| projection.as_str());
            println!(
                "{file}: {}..{end}  {} {projection}",
                row.file_offset, row.ty
            );
            total += row.size_bytes;
        }
    }
    if total == 0 {
        return Err(format!("layer {layer} has no expert {expert}").into());
    }
    println!("{total} bytes");
    Ok(())
}
