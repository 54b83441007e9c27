//! The transfers of Post-Fetch: copies to the GPU, each with an arrow to the operation that uses it.

use std::path::Path;

use moe_trace::transfers::{self, Span, Transfer};

use super::proto::DebugAnnotation;
use super::timeline::{Counter, Group, Row, Timeline, Times, Unit, event};
use crate::ExportError;

/// Writes the transfers in `path`.
pub(super) fn write(path: &Path, timeline: &mut Timeline<'_>) -> Result<(), ExportError> {
    let row = |name: &str, rank| Row::new(Some(Group::PostFetch), name, rank);
    let mut windows = row("gate and up on the CPU", 0);
    let mut copies = row("copy stream", 1);
    let mut products = row("down on the GPU", 2);
    let mut rate = Counter::new("copies to the GPU", Unit::Other("B/s"), 2);
    transfers::visit(path, |transfer| -> Result<(), ExportError> {
        let name = format!("layer {}", transfer.layer_id);
        let slice = || event("post-fetch", name.as_str(), annotations(&transfer));
        let window = times(timeline, transfer.window);
        windows.slice(timeline, None, window, slice())?;
        let flow = transfer
            .transfer
            .and(transfer.product)
            .map(|_| timeline.flow());
        if let Some(span) = transfer.transfer {
            let mut copy = slice();
            copy.flow_ids.extend(flow);
            let times = times(timeline, span);
            copies.slice(timeline, None, times, copy)?;
            if let Some(bytes_per_s) = times.per_second(transfer.bytes) {
                rate.set(timeline, times.start_ns, bytes_per_s)?;
                rate.set(timeline, times.end_ns, 0.0)?;
            }
        }
        if let Some(span) = transfer.product {
            let mut product = slice();
            product.terminating_flow_ids.extend(flow);
            let times = times(timeline, span);
            products.slice(timeline, None, times, product)?;
        }
        Ok(())
    })
}

fn times(timeline: &mut Timeline<'_>, span: Span) -> Times {
    timeline.times(span.start_ns, span.end_ns)
}

fn annotations(transfer: &Transfer) -> Vec<DebugAnnotation> {
    [
        ("token", transfer.token_id.0.into()),
        ("sequence", transfer.sequence_id.into()),
        ("layer", transfer.layer_id.0.into()),
        ("n_tokens", transfer.n_tokens.into()),
        ("n_experts", transfer.n_experts.into()),
        ("n_fetched", transfer.n_fetched.into()),
        ("bytes", transfer.bytes),
    ]
    .into_iter()
    .map(|(name, value): (&str, u64)| DebugAnnotation::number(name, value))
    .collect()
}
