//! `info` of a trace of another tool.

use moe_foreign::{Counts, Detected, ForeignError, ImportOptions, Missing, import};

use super::findings::Findings;
use crate::advice;
use crate::context::Context;
use crate::progress::Progress;

/// Reads the entire trace and adds its facts.
pub(super) fn describe(
    trace: &Detected,
    findings: &mut Findings,
    ctx: &Context,
) -> anyhow::Result<()> {
    let mut counts = Counts::default();
    let options = ImportOptions::default();
    let progress = Progress::reading(ctx, trace.source.path());
    let imported = import(trace.importer, &trace.source, &options, &mut counts);
    drop(progress);
    if let Err(ForeignError::Missing { missing, .. }) = imported {
        findings.fact("kind", trace.importer.description());
        findings.fact("format", trace.importer.name());
        findings.note(not_recorded(missing));
        return Ok(());
    }
    let summary = imported?;
    findings.fact("kind", trace.importer.description());
    findings.fact("format", summary.format);
    let model_info = &summary.model_info;
    if let Some(model) = &model_info.model {
        findings.fact("model", model.clone());
    }
    if let Some(arch) = &model_info.arch {
        findings.fact("architecture", arch.clone());
    }
    if summary.is_ordered() {
        findings.fact("rows", summary.rows);
    } else {
        findings.fact("counts", summary.counts);
    }
    let layers = counts.layers();
    findings.fact("layers", layers.len() as u64);
    match model_info.n_expert {
        Some(n_expert) => findings.fact("experts per layer", n_expert),
        None => findings.fact("experts per layer, at least", counts.n_expert_seen()),
    }
    let activations = layers.values().map(|layer| layer.total());
    findings.fact("activations", activations.fold(0u64, u64::saturating_add));
    for note in &summary.notes {
        findings.note(note.clone());
    }
    for &missing in &summary.missing {
        findings.note(not_recorded(missing));
    }
    Ok(())
}

fn not_recorded(missing: Missing) -> String {
    let advice = advice::for_missing(missing);
    format!("{missing} is not recorded; {advice} to commands that read the trace")
}
