//! [Perfetto](https://perfetto.dev) trace: the operations of a run on a time axis, as `TrackEvent` protobuf messages
//! (<https://perfetto.dev/docs/reference/synthetic-track-event>). <https://ui.perfetto.dev> opens it.
//!
//! | track | events |
//! |---|---|
//! | passes | a slice for each forward pass |
//! | counters | of each pass: hit rate, and bytes/s of the selected experts; bytes/s of copies; memory of each backend |
//! | Post-Fetch | of each layer: gate and up on the CPU, the copies, and the down projection on the GPU, with an arrow from copy to use |
//! | lanes of experts | a row for each [lane](moe_trace::record::lane): the expert operations, with the experts that were computed on the lane |
//! | devices | a row for each backend: the operations whose first input in a buffer is in its memory |
//! | layers | a row for each layer: a slice for each pass, which contains the operations |
//!
//! Packets are written in the order in which a run is read, so memory does not grow with the trace. The times of a track never
//! decrease. An operation without a duration is an instant: records without extension have none, and one kernel can compute
//! several operations.

mod copies;
mod memory;
mod operations;
mod proto;
#[cfg(test)]
mod tests;
mod timeline;

use std::collections::HashMap;
use std::io::Write;

use moe_files::text::counted;
use moe_trace::bounded::is_present;
use moe_trace::{buffers, transfers};

use crate::{Export, ExportError, Exporter};

pub(crate) use timeline::head;

use operations::Operations;
use timeline::{MAX_NS, Timeline};

/// Exporter of Perfetto traces.
pub struct Perfetto;

impl Exporter for Perfetto {
    fn name(&self) -> &'static str {
        "perfetto"
    }

    fn description(&self) -> &'static str {
        "Perfetto trace for ui.perfetto.dev, with times, lanes, copies and memory: every operation of a run"
    }

    fn export(&self, export: &Export<'_>, out: &mut dyn Write) -> Result<Vec<String>, ExportError> {
        let run = export.run().ok_or(ExportError::Missing {
            format: self.name(),
            what: "the times of operations",
            hint: "use a run directory or a trace.bin",
        })?;
        // A trace.bin without its directory has no further files.
        let file = |name: &str| Some(run.path.join(name)).filter(|path| is_present(path));
        let mut losses =
            vec!["addresses, sources and the experts of each token of a batch are lost".to_owned()];
        let mut timeline = Timeline::new(out)?;
        let mut backends = HashMap::new();
        if let Some(path) = file(buffers::FILE_NAME) {
            let events = buffers::read(&path)?;
            backends = memory::backends(&events);
            let n_skipped = memory::write(&events, &mut timeline)?;
            if n_skipped > 0 {
                losses.push(format!(
                    "skipped {} of buffers without timestamp_ns",
                    counted(n_skipped, "event")
                ));
            }
        }
        if let Some(path) = file(transfers::FILE_NAME) {
            copies::write(&path, &mut timeline)?;
        }
        let expert_bytes = &export.model_info().expert_bytes;
        let n_moved = Operations::new(run, expert_bytes, &backends).write(&mut timeline)?;
        if n_moved > 0 {
            losses.push(format!(
                "{} started before the previous one in the trace; their starts were set to the start of the previous one",
                counted(n_moved, "operation")
            ));
        }
        let n_clamped = timeline.n_clamped();
        if n_clamped > 0 {
            losses.push(format!(
                "times above {MAX_NS} ns, the maximum of the format, were set to it: {}",
                counted(n_clamped, "event")
            ));
        }
        Ok(losses)
    }
}
