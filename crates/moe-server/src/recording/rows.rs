//! The routing rows of the current pass and of the running requests.

use std::collections::BTreeMap;

use moe_engine::{RouterOutput, TokenSequence, TraceClock};
use moe_trace::{ExpertId, LayerId, Phase, RoutingRow, TokenId};

/// Collects the routing of each running request.
pub(super) struct Collector {
    clock: TraceClock,
    max_request_bytes: usize,
    /// Layers of the current pass.
    pass: Vec<LayerRows>,
    /// Rows of the running requests, by sequence id.
    requests: BTreeMap<u32, RequestRows>,
}

/// The routing of a layer in a pass.
struct LayerRows {
    layer: LayerId,
    timestamp_ns: u64,
    n_expert_used: usize,
    positions: Vec<u32>,
    sequences: Vec<TokenSequence>,
    /// `(token, n_expert_used)`
    ids: Vec<i32>,
    /// `(token, n_expert_used)`
    weights: Vec<f32>,
}

/// The routing of a request.
#[derive(Default)]
pub(super) struct RequestRows {
    /// In the order of the passes and layers.
    tokens: Vec<RoutedToken>,
    /// Experts of all tokens.
    ids: Vec<i32>,
    /// Their weights.
    weights: Vec<f32>,
}

/// A token in a layer.
struct RoutedToken {
    layer: LayerId,
    position: u32,
    phase: Phase,
    timestamp_ns: u64,
    n_expert_used: usize,
}

impl Collector {
    pub fn new(max_request_bytes: usize) -> Collector {
        Collector {
            clock: TraceClock::new(),
            max_request_bytes,
            pass: Vec::new(),
            requests: BTreeMap::new(),
        }
    }

    /// Starts a request without rows.
    pub fn begin(&mut self, sequence_id: u32) {
        self.requests.insert(sequence_id, RequestRows::default());
    }

    /// Ends a request and returns its rows; `None` if it was dropped.
    pub fn end(&mut self, sequence_id: u32) -> Option<RequestRows> {
        self.requests.remove(&sequence_id)
    }

    /// Starts a pass. Rows of a failed pass are removed.
    pub fn begin_pass(&mut self) {
        self.pass.clear();
    }

    /// Adds a layer to the pass. A layer that is not above the previous one starts the repetition of the pass.
    pub fn layer(&mut self, routed: &RouterOutput) {
        if self
            .pass
            .last()
            .is_some_and(|last| routed.layer <= last.layer)
        {
            self.pass.clear();
        }
        self.pass.push(LayerRows {
            layer: routed.layer,
            timestamp_ns: self.clock.ns(std::time::Instant::now()),
            n_expert_used: routed.n_expert_used,
            positions: routed.positions.to_vec(),
            sequences: routed.sequences.to_vec(),
            ids: routed.ids.to_vec(),
            weights: routed.weights.to_vec(),
        });
    }

    /// Adds the rows of the pass to its requests. Returns the number of requests whose trace was dropped because it is too large.
    pub fn end_pass(&mut self) -> u64 {
        for layer in self.pass.drain(..) {
            let k = layer.n_expert_used.max(1);
            let tokens = layer.positions.iter().zip(&layer.sequences);
            let experts = layer.ids.chunks_exact(k).zip(layer.weights.chunks_exact(k));
            for ((&position, sequence), (ids, weights)) in tokens.zip(experts) {
                let Some(request) = self.requests.get_mut(&sequence.id) else {
                    continue;
                };
                request.tokens.push(RoutedToken {
                    layer: layer.layer,
                    position,
                    phase: sequence.phase,
                    timestamp_ns: layer.timestamp_ns,
                    n_expert_used: k,
                });
                request.ids.extend_from_slice(ids);
                request.weights.extend_from_slice(weights);
            }
        }
        let (before, limit) = (self.requests.len(), self.max_request_bytes);
        self.requests
            .retain(|_, request| request.size_bytes() <= limit);
        (before - self.requests.len()) as u64
    }
}

impl RequestRows {
    /// Whether no token was routed.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    fn size_bytes(&self) -> usize {
        size_of_val(self.tokens.as_slice())
            + size_of_val(self.ids.as_slice())
            + size_of_val(self.weights.as_slice())
    }

    /// The rows of the table. Negative ids (empty slots) are omitted.
    pub fn rows(&self, sequence_id: u32) -> impl Iterator<Item = RoutingRow> {
        let mut start = 0;
        self.tokens.iter().flat_map(move |token| {
            let experts = start..start + token.n_expert_used;
            start = experts.end;
            let ids = self.ids[experts.clone()].iter();
            let ranked = (0u16..).zip(ids.zip(&self.weights[experts]));
            ranked.filter_map(move |(slot, (&id, &weight))| {
                Some(RoutingRow {
                    token_id: TokenId(token.position),
                    sequence_id: Some(sequence_id),
                    phase: Some(token.phase),
                    slot,
                    expert_id: ExpertId::try_from(id).ok()?,
                    weight: Some(weight),
                    timestamp_ns: Some(token.timestamp_ns),
                    ..RoutingRow::at_layer(token.layer)
                })
            })
        })
    }
}
