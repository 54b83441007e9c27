//! Time windows of layers, measured from the timestamps of a trace.

use std::collections::BTreeMap;

use moe_placement::cache::Experts;
use moe_trace::LayerId;

/// Times from a layer's routing to the next routing, for generated tokens.
///
/// The window of a layer is the mean of these times. It contains the layer's experts and the next layer up to its routing.
/// After the last layer it contains the output, sampling, and the next token up to its first routing. The windows of all
/// layers therefore add up to the time of a token. Waiting times of the recorded program, such as expert reads from a disk,
/// are included. Prompts between generated tokens and timestamps that do not increase are excluded.
#[derive(Debug, Clone, Default)]
pub(super) struct Windows {
    /// Layer and timestamp of the last routing; `None` if it was not of a generated token.
    last: Option<(LayerId, u64)>,
    /// Sum and number of the times of each layer, in ns.
    layers: BTreeMap<LayerId, (u64, u64)>,
}

impl Windows {
    /// Adds a routing of a layer at `time_ns`; `None` if it is not of a generated token, or the time is unknown.
    pub(super) fn add(&mut self, layer: LayerId, time_ns: Option<u64>) {
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

    /// Window of each layer (`[n_layer]`) in seconds. A layer without a measured window has the mean of the others. `None`
    /// if no layer has a measured window.
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
