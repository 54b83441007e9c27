//! How long a layer is being read.

use super::{Event, PassTokens};
use moe_trace::{LayerId, Phase};

/// Time between the first and the last access of a layer within a pass: from the start of the first operation that reads
/// of the layer to the end of the last one (to its start, where the trace tells no durations).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerSpan {
    /// Layer.
    pub layer: LayerId,
    /// 0 prompt, 1 generated.
    pub phase: Phase,
    /// Over the passes that read of the layer.
    pub spread: Spread,
}

/// Sum, least and most of some durations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spread {
    /// How many.
    pub n: u64,
    /// Their sum, nanoseconds.
    pub sum_ns: u64,
    /// The least.
    pub min_ns: u64,
    /// The most.
    pub max_ns: u64,
}

impl Spread {
    fn add(&mut self, ns: u64) {
        self.min_ns = if self.n == 0 { ns } else { self.min_ns.min(ns) };
        self.max_ns = self.max_ns.max(ns);
        self.sum_ns = self.sum_ns.saturating_add(ns);
        self.n += 1;
    }

    /// The duration on average, nanoseconds.
    pub fn mean_ns(&self) -> Option<f64> {
        (self.n > 0).then(|| self.sum_ns as f64 / self.n as f64)
    }
}

pub(super) struct SpanCounter {
    /// `[n_layer]`: first start and last end in this pass.
    open: Vec<Option<(u64, u64)>>,
    /// `[n_layer][phase]`
    spreads: Vec<[Spread; 2]>,
}

impl SpanCounter {
    pub(super) fn new(n_layer: usize) -> Self {
        Self {
            open: vec![None; n_layer],
            spreads: vec![Default::default(); n_layer],
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
        for (open, spreads) in self.open.iter_mut().zip(&mut self.spreads) {
            if let Some((first, last)) = open.take() {
                spreads[usize::from(pass.phase.number())].add(last.saturating_sub(first));
            }
        }
    }

    pub(super) fn finish(self) -> Vec<LayerSpan> {
        let layers = (0..).map(LayerId).zip(self.spreads);
        let spans = layers.flat_map(|(layer, phases)| {
            let phases = Phase::ALL.into_iter().zip(phases);
            phases.map(move |(phase, spread)| LayerSpan {
                layer,
                phase,
                spread,
            })
        });
        spans.filter(|span| span.spread.n > 0).collect()
    }
}
