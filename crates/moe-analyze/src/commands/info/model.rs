//! `info` of a GGUF model.

use std::path::Path;

use moe_files::text::counted;
use moe_gguf::check::check;
use moe_gguf::layers::layer_order;
use moe_gguf::map::OffsetMap;
use moe_gguf::{Gguf, Metadata, PerLayer};
use moe_trace::{InvalidModel, ModelError, ModelInfo};
use serde_json::{Value, json};

use super::Findings;
use crate::layout::{layers, verdict};
use crate::output::Cell;

pub fn describe(path: &Path, findings: &mut Findings) -> anyhow::Result<()> {
    let gguf = Gguf::open(path)?;
    let metadata = gguf.metadata();
    findings.fact("kind", "GGUF model");
    findings.fact("version", gguf.version());
    let name = text(metadata, "general.name", findings);
    findings.fact("name", name.map(str::to_owned));
    let arch = text(metadata, "general.architecture", findings).unwrap_or("unknown");
    findings.fact("architecture", arch.to_owned());
    let n_block = hyper_parameter(metadata, arch, "block_count", "layers", findings);
    const NEXTN: &str = "nextn_predict_layers";
    if metadata.get(&format!("{arch}.{NEXTN}")).is_some() {
        let n_nextn = hyper_parameter(metadata, arch, NEXTN, "nextn layers", findings);
        let numbers = [&n_nextn, &n_block].map(|n| n.as_ref().and_then(PerLayer::uniform));
        if let [Some(n_nextn @ 1..), Some(n_block)] = numbers
            && n_nextn >= n_block
        {
            findings.note(format!(
                "{arch}.{NEXTN} is {n_nextn}, but the model has {}: all blocks would belong to the MTP head",
                counted(n_block, "block")
            ));
        }
    }
    for (key, name) in [
        ("expert_count", "experts per layer"),
        ("expert_used_count", "experts per token"),
    ] {
        let values = hyper_parameter(metadata, arch, key, name, findings);
        if let (Some(PerLayer::Each(list)), Some(n_block)) = (values, &n_block)
            && n_block.uniform() != Some(list.len() as u64)
        {
            findings.note(format!(
                "{arch}.{key} has {}, but the model has {n_block} blocks: llama.cpp rejects the model",
                counted(list.len(), "value")
            ));
        }
    }
    findings.fact("files", gguf.files().len() as u64);
    findings.size(
        "size",
        gguf.files().iter().map(|file| file.size_bytes).sum(),
    );
    findings.fact("metadata keys", metadata.len() as u64);
    findings.fact("tensors", gguf.tensors().len() as u64);
    findings.fact("map rows", OffsetMap::new(&gguf).rows.len() as u64);
    let types = tensor_types(&gguf);
    findings.parts("tensor types", list(&types), counts(&types));
    findings.fact("layer order", layers(&layer_order(&gguf)));
    findings.fact("header hash", format!("{:016x}", gguf.header_xxh3()));
    // A head without hidden layers has a note.
    if let Err(ModelError::Invalid { source, .. }) =
        ModelInfo::from_gguf(&path.to_string_lossy(), &gguf)
        && !matches!(source, InvalidModel::NoHiddenLayer { .. })
    {
        findings.fault(source.to_string());
    }

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

/// Returns the string value of a key. A value of another type adds a note.
fn text<'g>(metadata: &'g Metadata, key: &str, findings: &mut Findings) -> Option<&'g str> {
    metadata.str(key).unwrap_or_else(|error| {
        findings.note(error.to_string());
        None
    })
}

/// Adds a hyperparameter: a number if all layers share it, else a list with one number per layer. A value of another type adds a
/// note.
fn hyper_parameter(
    metadata: &Metadata,
    arch: &str,
    key: &str,
    name: &str,
    findings: &mut Findings,
) -> Option<PerLayer> {
    let values = metadata
        .per_layer(&format!("{arch}.{key}"))
        .unwrap_or_else(|error| {
            findings.note(error.to_string());
            None
        });
    match (&values, values.as_ref().and_then(PerLayer::uniform)) {
        (None, _) => findings.fact(name, Cell::Null),
        (Some(_), Some(number)) => findings.fact(name, number),
        (Some(values), None) => findings.parts(name, values.to_string(), values.values().into()),
    }
    values
}

/// Returns the tensor types with their numbers of tensors, in order of appearance.
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

fn list(types: &[(&str, u32)]) -> String {
    let texts = types.iter().map(|(name, count)| format!("{name} {count}"));
    texts.collect::<Vec<_>>().join(", ")
}

fn counts(types: &[(&str, u32)]) -> Value {
    let counts = types.iter().map(|&(name, n)| (name.to_owned(), n.into()));
    Value::Object(counts.collect())
}
