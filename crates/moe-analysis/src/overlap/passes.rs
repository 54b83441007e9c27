//! Passes of a run, derived from its transfers.

use moe_trace::transfers::{Span, Transfer};

/// The passes in order, each with the transfers of its layers in order. A new pass starts when the request, the position or
/// the phase changes, or when the layer number does not increase.
pub fn passes(transfers: &[Transfer]) -> Vec<&[Transfer]> {
    let key = |transfer: &Transfer| (transfer.sequence_id, transfer.token_id, transfer.phase);
    let is_same_pass = |a: &Transfer, b: &Transfer| key(a) == key(b) && a.layer_id < b.layer_id;
    transfers.chunk_by(is_same_pass).collect()
}

/// Time span from the first start to the last end of all activities in a pass; `None` for a pass without layers.
pub fn bounds(pass: &[Transfer]) -> Option<Span> {
    let spans = || {
        pass.iter()
            .flat_map(|run| [Some(run.window), run.transfer, run.product])
            .flatten()
    };
    Some(Span {
        start_ns: spans().map(|span| span.start_ns).min()?,
        end_ns: spans().map(|span| span.end_ns).max()?,
    })
}

/// Index of the pass with the median duration (the lower median).
pub fn median_pass(passes: &[&[Transfer]]) -> Option<usize> {
    let length = |&index: &usize| bounds(passes[index]).map_or(0, Span::ns);
    let mut indices: Vec<usize> = (0..passes.len()).collect();
    indices.sort_by_key(length);
    indices.get(passes.len().checked_sub(1)? / 2).copied()
}
