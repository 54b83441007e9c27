//! What a GGUF model is.

use std::path::Path;

use moe_gguf::check::check;
use moe_gguf::layers::layer_order;
use moe_gguf::{Gguf, map::OffsetMap};
use serde_json::{Value, json};

use super::Findings;
use crate::commands::gguf_map::{layers, verdict};

pub fn describe(path: &Path, findings: &mut Findings) -> anyhow::Result<()> {
    let gguf = Gguf::open(path)?;
    let metadata = gguf.metadata();
    let arch = metadata
        .str("general.architecture")?
        .unwrap_or("unknown")
        .to_owned();
    findings.fact("kind", "GGUF model");
    findings.fact("version", gguf.version());
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
    findings.size(
        "size",
        gguf.files().iter().map(|file| file.size_bytes).sum(),
    );
    findings.fact("metadata keys", metadata.len() as u64);
    findings.fact("tensors", gguf.tensors().len() as u64);
    findings.fact("map rows", OffsetMap::new(&gguf).rows.len() as u64);
    let types = tensor_types(&gguf);
    findings.parts("tensor types", told(&types), counts(&types));
    findings.fact("layers lie", layers(&layer_order(&gguf)));
    findings.fact("header hash", format!("{:016x}", gguf.header_xxh3()));

    let report = check(&gguf);
    let faults = report.overlaps.iter().map(|found| found.describe(&gguf));
    let faults = faults.chain(report.gaps.iter().map(|found| found.describe(&gguf)));
    let faults = faults.chain(report.past_end.iter().map(|found| found.describe(&gguf)));
    faults.for_each(|fault| findings.fault(fault));
    for refusal in &report.llama_cpp_refuses {
        findings.note(refusal.describe(&gguf));
    }
    let check = json!({
        "overlaps": report.overlaps.len(),
        "gaps": report.gaps.len(),
        "past_end": report.past_end.len(),
        "padding_bytes": report.padding_bytes,
        "trailing_bytes": report.trailing_bytes,
    });
    findings.parts("check", verdict(&report), check);
    Ok(())
}

/// Types with the number of tensors of each, in order of appearance.
fn tensor_types(gguf: &Gguf) -> Vec<(&'static str, u32)> {
    let mut types: Vec<(&str, u32)> = Vec::new();
    for tensor in gguf.tensors() {
        let name = tensor.ty.name();
        match types.iter_mut().find(|(seen, _)| *seen == name) {
            Some((_, count)) => *count += 1,
            None => types.push((name, 1)),
        }
    }
    types
}

fn told(types: &[(&str, u32)]) -> String {
    let texts = types.iter().map(|(name, count)| format!("{name} {count}"));
    texts.collect::<Vec<_>>().join(", ")
}

fn counts(types: &[(&str, u32)]) -> Value {
    let counts = types.iter().map(|&(name, n)| (name.to_owned(), n.into()));
    Value::Object(counts.collect())
}
