//! Passes of a run, found in its transfers.

use moe_trace::transfers::{Span, Transfer};

/// The passes in order, each with its layers in order: where the request, the position or the phase is another one, or the
/// layers begin anew, a pass begins.
pub fn passes(transfers: &[Transfer]) -> Vec<&[Transfer]> {
    let of = |transfer: &Transfer| (transfer.sequence_id, transfer.token_id, transfer.phase);
    let goes_on = |a: &Transfer, b: &Transfer| of(a) == of(b) && a.layer_id < b.layer_id;
    transfers.chunk_by(goes_on).collect()
}

/// From the first begin of anything in a pass to the last end; `None` if it has no layers.
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

/// Place of the pass of median length (of two, the shorter one).
pub fn typical(passes: &[&[Transfer]]) -> Option<usize> {
    let length = |&place: &usize| bounds(passes[place]).map_or(0, Span::ns);
    let mut places: Vec<usize> = (0..passes.len()).collect();
    places.sort_by_key(length);
    places.get(passes.len().checked_sub(1)? / 2).copied()
}
