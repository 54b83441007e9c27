//! How long a layer works, by the times of a trace.

use std::collections::BTreeMap;

use moe_placement::cache::Experts;
use moe_trace::LayerId;

/// Times from a layer's routing to the routing that follows it, for generated tokens.
///
/// The window of a layer is the mean of these times: in it its experts are computed and what comes before the next layer
/// routes; after the last layer also the output, the sampling and the next token up to its first routing. So the windows of
/// a token's layers sum to the time of a token. What the recorded program waited for, experts from a disk perhaps, is in
/// them. A prompt between two generated tokens is not, nor are times that do not go up.
#[derive(Debug, Clone, Default)]
pub(super) struct Windows {
    /// Layer and time of the last routing, if it was of a generated token.
    last: Option<(LayerId, u64)>,
    /// Sum and number of the times of each layer.
    layers: BTreeMap<LayerId, (u64, u64)>,
}

impl Windows {
    /// A layer routed at `time_ns`; `None`: not a generated token, or at a time that is not told.
    pub(super) fn note(&mut self, layer: LayerId, time_ns: Option<u64>) {
        let now = time_ns.map(|time| (layer, time));
        if let (Some((last_layer, last)), Some((_, time))) = (self.last, now)
            && time > last
        {
            let (sum, n) = self.layers.entry(last_layer).or_default();
            *sum = sum.saturating_add(time - last);
            *n += 1;
        }
        self.last = now;
    }

    /// The window of each layer that has experts (`[n_layer]`), in seconds; a layer that nothing follows has the mean of the
    /// others. `None` where no layer has one.
    pub(super) fn seconds(&self, experts: &Experts) -> Option<Vec<f64>> {
        let mean = |(sum, n): (u64, u64)| sum as f64 / n as f64 * 1e-9;
        let all = self.layers.values().map(|&layer| mean(layer));
        let others = all.sum::<f64>() / self.layers.len() as f64;
        let window = |index: usize| {
            let (layer, _) = experts.get(experts.keys_of(index).start);
            let own = self.layers.get(&layer);
            own.map_or(others, |&layer| mean(layer))
        };
        (!self.layers.is_empty()).then(|| (0..experts.n_layer()).map(window).collect())
    }
}
