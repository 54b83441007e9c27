//! Time spans in which layers are read.

use super::{Event, PassTokens};
use moe_trace::{LayerId, Phase};

/// Time between the first and the last access to a layer within a pass: from the start of the first operation that reads the
/// layer to the end of the last one. If the trace has no durations, to the start of the last one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerSpan {
    /// Block number.
    pub layer: LayerId,
    /// Phase of the passes.
    pub phase: Phase,
    /// Summary over the passes that read the layer.
    pub stats: SpanStats,
}

/// Number, sum, minimum and maximum of durations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpanStats {
    /// Number of durations.
    pub n: u64,
    /// Sum in nanoseconds.
    pub sum_ns: u64,
    /// Minimum in nanoseconds; 0 without durations.
    pub min_ns: u64,
    /// Maximum in nanoseconds.
    pub max_ns: u64,
}

impl SpanStats {
    fn add(&mut self, ns: u64) {
        self.min_ns = if self.n == 0 { ns } else { self.min_ns.min(ns) };
        self.max_ns = self.max_ns.max(ns);
        self.sum_ns = self.sum_ns.saturating_add(ns);
        self.n += 1;
    }

    /// Mean duration in nanoseconds; `None` without durations.
    pub fn mean_ns(&self) -> Option<f64> {
        (self.n > 0).then(|| self.sum_ns as f64 / self.n as f64)
    }
}

pub(super) struct SpanCounter {
    /// `[n_layer]`: first start and last end in the current pass.
    open: Vec<Option<(u64, u64)>>,
    /// `[n_layer][phase]`: summary of the completed passes.
    stats: Vec<[SpanStats; 2]>,
}

impl SpanCounter {
    pub(super) fn new(n_layer: usize) -> Self {
        Self {
            open: vec![None; n_layer],
            stats: vec![Default::default(); n_layer],
        }
    }

    pub(super) fn access(&mut self, event: &Event) {
        let layer = event.layer.map(LayerId::index);
        let Some(open) = layer.and_then(|layer| self.open.get_mut(layer)) else {
            return;
        };
        let (start, end) = event.time;
        let (first, last) = open.unwrap_or(event.time);
        *open = Some((first.min(start), last.max(end)));
    }

    pub(super) fn end_pass(&mut self, pass: &PassTokens) {
        for (open, stats) in self.open.iter_mut().zip(&mut self.stats) {
            if let Some((first, last)) = open.take() {
                stats[usize::from(pass.phase.number())].add(last.saturating_sub(first));
            }
        }
    }

    pub(super) fn finish(self) -> Vec<LayerSpan> {
        let layers = (0..).map(LayerId).zip(self.stats);
        let spans = layers.flat_map(|(layer, phases)| {
            let phases = Phase::ALL.into_iter().zip(phases);
            phases.map(move |(phase, stats)| LayerSpan {
                layer,
                phase,
                stats,
            })
        });
        spans.filter(|span| span.stats.n > 0).collect()
    }
}
