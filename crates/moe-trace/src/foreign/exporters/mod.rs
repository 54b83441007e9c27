//! The formats that are written, one file each.

mod bigmoeonedge;
mod coli_usage;
mod ds4;
mod jsonl;
mod matrix;
mod mesh_llm;
mod npy_routing;
mod thesis;
mod tokens;

use super::{Export, Exporter, FilesExporter};

/// All formats of one file that this crate writes.
pub const EXPORTERS: &[&dyn Exporter] = &[
    &bigmoeonedge::BigMoeOnEdge,
    &coli_usage::ColiUsage,
    &ds4::Ds4,
    &matrix::Eplb,
    &matrix::EplbCsv,
    &jsonl::Jsonl,
    &npy_routing::NpyRouting,
    &matrix::NpyCounts,
    &matrix::Sglang,
];

/// All formats of several files that this crate writes.
pub const FILES_EXPORTERS: &[&dyn FilesExporter] = &[&mesh_llm::MeshLlm, &thesis::Thesis];

/// What formats of counts leave out.
fn losses_of_counts(export: &Export<'_>) -> Vec<String> {
    let mut losses = Vec::new();
    if export.summary.is_ordered() {
        losses.push("the order of the tokens was left out: the format holds counts".into());
    }
    if export.counts.iter().any(|(_, phase, _)| phase.is_some()) {
        losses.push("the counts of prompt and generated tokens were summed".into());
    }
    losses
}
