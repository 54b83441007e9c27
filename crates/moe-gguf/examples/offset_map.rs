//! Prints the offset map of a model: `offset_map MODEL.gguf`. For a model in several files, name any of them.

use std::error::Error;
use std::io::{self, BufWriter, Write};

use moe_gguf::Gguf;
use moe_gguf::check::check;
use moe_gguf::map::OffsetMap;

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args_os().nth(1);
    let gguf = Gguf::open(path.ok_or("usage: offset_map MODEL.gguf")?)?;
    let mut out = BufWriter::new(io::stdout().lock());
    writeln!(out, "file,offset,size_bytes,type,tensor,expert")?;
    for row in &OffsetMap::new(&gguf).rows {
        let file = &gguf.files()[usize::from(row.file)].name;
        let expert = row.expert_id.map_or(String::new(), |id| id.to_string());
        writeln!(
            out,
            "{file},{},{},{},{},{expert}",
            row.file_offset, row.size_bytes, row.ty, row.tensor
        )?;
    }
    out.flush()?;

    let report = check(&gguf);
    for overlap in &report.overlaps {
        eprintln!("overlap: {}", overlap.describe(&gguf));
    }
    for tensor in &report.past_end {
        eprintln!("truncated: {}", tensor.describe(&gguf));
    }
    Ok(())
}
