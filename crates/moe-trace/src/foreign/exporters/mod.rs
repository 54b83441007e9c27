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

use moe_gguf::text::counted;

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

/// The number of rows in an array for a server, a row for each hidden layer, and what such an array leaves out. Blocks of the MTP
/// head are no hidden layers. Where the number of layers is not known, the rows end with the last layer that was used.
fn rows_for_servers(export: &Export<'_>) -> (usize, Vec<String>) {
    let last = export.counts.iter().map(|(layer, _, _)| layer).max();
    let n_used = last.map_or(0, |last| usize::from(last) + 1);
    let Some(n_hidden) = export.facts().n_hidden_layer() else {
        let note =
            "the number of layers is not known: the rows end with the last layer that was used";
        return (n_used, vec![note.into()]);
    };
    let n_hidden = n_hidden as usize;
    let mut losses = Vec::new();
    if n_used > n_hidden {
        losses.push(format!(
            "{} of the MTP head was left out: servers count hidden layers only",
            counted(n_used - n_hidden, "layer")
        ));
    }
    (n_hidden, losses)
}
