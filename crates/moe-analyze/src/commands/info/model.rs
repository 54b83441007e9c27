//! What a GGUF model is.

use std::path::Path;

use moe_gguf::check::check;
use moe_gguf::layers::layer_order;
use moe_gguf::{Gguf, map::OffsetMap};

use super::Findings;
use crate::commands::gguf_map::{layers, verdict};
use crate::output::human_bytes;

pub fn describe(path: &Path, findings: &mut Findings) -> anyhow::Result<()> {
    let gguf = Gguf::open(path)?;
    let metadata = gguf.metadata();
    let arch = metadata
        .str("general.architecture")?
        .unwrap_or("unknown")
        .to_owned();
    findings.fact("kind", format!("GGUF model, version {}", gguf.version()));
    findings.fact("name", metadata.str("general.name")?.map(str::to_owned));
    findings.fact("architecture", arch.clone());
    findings.fact("layers", metadata.u32(&format!("{arch}.block_count"))?);
    findings.fact(
        "experts in a layer",
        metadata.u32(&format!("{arch}.expert_count"))?,
    );
    findings.fact(
        "experts for a token",
        metadata.u32(&format!("{arch}.expert_used_count"))?,
    );
    findings.fact("files", gguf.files().len() as u64);
    findings.fact(
        "size",
        human_bytes(gguf.files().iter().map(|file| file.size_bytes).sum()),
    );
    findings.fact("metadata keys", metadata.len() as u64);
    findings.fact("tensors", gguf.tensors().len() as u64);
    findings.fact("map rows", OffsetMap::new(&gguf).rows.len() as u64);
    findings.fact("tensor types", tensor_types(&gguf));
    findings.fact("layers lie", layers(&layer_order(&gguf)));
    findings.fact("header hash", format!("{:016x}", gguf.header_xxh3()));

    let report = check(&gguf);
    let faults = report.overlaps.iter().map(|found| found.describe(&gguf));
    let faults = faults.chain(report.gaps.iter().map(|found| found.describe(&gguf)));
    let faults = faults.chain(report.past_end.iter().map(|found| found.describe(&gguf)));
    findings.faults.extend(faults);
    for refusal in &report.llama_cpp_refuses {
        findings.fact("note", refusal.describe(&gguf));
    }
    findings.fact("check", verdict(&report));
    Ok(())
}

/// Types with the number of tensors of each, in order of appearance.
fn tensor_types(gguf: &Gguf) -> String {
    let mut types: Vec<(&str, u32)> = Vec::new();
    for tensor in gguf.tensors() {
        let name = tensor.ty.name();
        match types.iter_mut().find(|(seen, _)| *seen == name) {
            Some((_, count)) => *count += 1,
            None => types.push((name, 1)),
        }
    }
    types
        .iter()
        .map(|(name, count)| format!("{name} {count}"))
        .collect::<Vec<_>>()
        .join(", ")
}
