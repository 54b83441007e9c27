//! Exporters: one file per format.

pub(crate) mod bigmoeonedge;
pub(crate) mod coli_usage;
pub(crate) mod ds4;
pub(crate) mod jsonl;
pub(crate) mod learn;
pub(crate) mod matrix;
pub(crate) mod mesh_llm;
pub(crate) mod npy_routing;
pub(crate) mod perfetto;
pub(crate) mod thesis;
mod tokens;

use std::collections::BTreeMap;

use moe_files::text::counted;
use moe_trace::LayerId;

use crate::{Export, LayerCounts};

/// Whether a name consists of `prefix`, a number of at least `width` digits, and `suffix`.
fn is_numbered(name: &str, prefix: &str, width: usize, suffix: &str) -> bool {
    let number = name.strip_prefix(prefix);
    let number = number.and_then(|name| name.strip_suffix(suffix));
    number.is_some_and(|n| n.len() >= width && n.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Notes about what every format of counts loses.
fn losses_of_counts(export: &Export<'_>) -> Vec<String> {
    let mut losses = Vec::new();
    if export.summary.is_ordered() {
        losses.push("the format contains counts: the order of the tokens is lost".into());
    }
    if export.counts.iter().any(|(_, phase, _)| phase.is_some()) {
        losses.push("the counts of the prompt and decode phases are summed".into());
    }
    losses
}

/// A note that the number of experts per layer is an assumption, if neither the trace nor the model records it.
fn note_n_expert(export: &Export<'_>) -> Option<String> {
    let n_expert = export
        .model_info()
        .n_expert
        .is_none()
        .then(|| export.n_expert())?;
    Some(format!(
        "the number of experts per layer is unknown: assumed {n_expert}, the highest selected expert + 1"
    ))
}

/// The counts of all hidden layers and of up to `n_more` blocks of the MTP head after them, and a note about skipped layers.
fn counts_without_mtp(
    export: &Export<'_>,
    n_more: u32,
) -> (BTreeMap<LayerId, LayerCounts>, Option<String>) {
    let mut layers = export.counts.layers();
    let n_seen = layers.len();
    if let Some(n_hidden) = export.model_info().n_hidden_layer() {
        layers.retain(|layer, _| u32::from(layer.0) < n_hidden.saturating_add(n_more));
    }
    let n_skipped = n_seen - layers.len();
    let note = (n_skipped > 0).then(|| {
        let layers = counted(n_skipped, "layer");
        format!("skipped {layers} of the MTP head, which the format cannot represent")
    });
    (layers, note)
}

/// The number of rows of an array for a server (one per hidden layer), and notes about skipped layers. Blocks of the MTP head have
/// no row. If the number of layers is unknown, the last row is that of the last layer with routed tokens.
fn rows_for_servers(export: &Export<'_>) -> (usize, Vec<String>) {
    let last = export.counts.iter().map(|(layer, _, _)| layer).max();
    let n_used = last.map_or(0, |last| last.index() + 1);
    let Some(n_hidden) = export.model_info().n_hidden_layer() else {
        let note =
            "the number of layers is unknown: the last row is that of the last layer in the trace";
        return (n_used, vec![note.into()]);
    };
    let n_hidden = n_hidden as usize;
    let mut losses = Vec::new();
    if n_used > n_hidden {
        losses.push(format!(
            "skipped {} of the MTP head: servers count only hidden layers",
            counted(n_used - n_hidden, "layer")
        ));
    }
    (n_hidden, losses)
}
