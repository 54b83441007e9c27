//! The formats that are written, one file each.

pub(crate) mod bigmoeonedge;
pub(crate) mod coli_usage;
pub(crate) mod ds4;
pub(crate) mod jsonl;
pub(crate) mod learn;
pub(crate) mod matrix;
pub(crate) mod mesh_llm;
pub(crate) mod npy_routing;
pub(crate) mod thesis;
mod tokens;

use std::collections::BTreeMap;

use moe_gguf::text::counted;
use moe_trace::LayerId;

use crate::{Export, LayerCounts};

/// Whether a name is `prefix`, a number of at least `width` digits, and `suffix`.
fn is_numbered(name: &str, prefix: &str, width: usize, suffix: &str) -> bool {
    let number = name.strip_prefix(prefix);
    let number = number.and_then(|name| name.strip_suffix(suffix));
    number.is_some_and(|n| n.len() >= width && n.bytes().all(|byte| byte.is_ascii_digit()))
}

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

/// Tells that the number of experts of a layer is an assumption, where neither the trace nor the model has it.
fn note_n_expert(export: &Export<'_>) -> Option<String> {
    let n_expert = export
        .facts()
        .n_expert
        .is_none()
        .then(|| export.n_expert())?;
    Some(format!(
        "the number of experts of a layer is not known: {n_expert} were written, up to the last one that was used"
    ))
}

/// The counts of all hidden layers, and of up to `n_more` blocks of the MTP head after them; and what that leaves out.
fn counts_without_mtp(
    export: &Export<'_>,
    n_more: u32,
) -> (BTreeMap<LayerId, LayerCounts>, Option<String>) {
    let mut layers = export.counts.layers();
    let n_seen = layers.len();
    if let Some(n_hidden) = export.facts().n_hidden_layer() {
        layers.retain(|layer, _| u32::from(layer.0) < n_hidden.saturating_add(n_more));
    }
    let n_left_out = n_seen - layers.len();
    let note = (n_left_out > 0).then(|| {
        let what = counted(n_left_out, "layer");
        format!("{what} of the MTP head was left out: the format has no place for it")
    });
    (layers, note)
}

/// The number of rows in an array for a server, a row for each hidden layer, and what such an array leaves out. Blocks of the MTP
/// head are no hidden layers. Where the number of layers is not known, the rows end with the last layer that was used.
fn rows_for_servers(export: &Export<'_>) -> (usize, Vec<String>) {
    let last = export.counts.iter().map(|(layer, _, _)| layer).max();
    let n_used = last.map_or(0, |last| last.index() + 1);
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
