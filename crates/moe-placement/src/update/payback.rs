//! Exchanges that pay for their upload.

use std::collections::BTreeMap;

use moe_ids::{ExpertId, LayerId};

use super::{Exchange, Update};
use crate::learn::LayerObservation;

/// Bandwidths and a horizon, by which an exchange is worth its upload or not.
///
/// The weights of an expert of b bytes are read once for each token that selects it: in b / `cold` seconds without a cache, in
/// b / `hot` seconds from the cache. An exchange costs one upload of b bytes. If the next `horizon` tokens select experts
/// as often as the n tokens of the request did,
///
/// ```text
/// saving = horizon / n × (selections(add) − selections(evict)) × b × (1 / cold − 1 / hot)
/// upload = b / upload
/// ```
///
/// and the exchange pays if saving > upload. Batches, which read an expert once for several tokens, save less.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Payback {
    /// Number of tokens in which the exchange must pay.
    pub horizon: f64,
    /// Bandwidth at which the cold lane reads weights, in bytes/s.
    pub cold: f64,
    /// Bandwidth at which a hot lane reads weights, in bytes/s.
    pub hot: f64,
    /// Bandwidth of uploads to a hot lane, in bytes/s.
    pub upload: f64,
}

impl Payback {
    /// Time in seconds that an exchange of `bytes` bytes saves within the horizon, if the added expert was selected
    /// `gained` times more often than the evicted one in `n_tokens` tokens. Negative if the hot lane is slower.
    pub fn saving_s(&self, gained: u64, n_tokens: u64, bytes: u64) -> f64 {
        let per_token = gained as f64 / n_tokens.max(1) as f64;
        self.horizon * per_token * bytes as f64 * (1.0 / self.cold - 1.0 / self.hot)
    }

    /// Time in seconds of an upload.
    pub fn upload_s(&self, bytes: u64) -> f64 {
        bytes as f64 / self.upload
    }
}

impl Update {
    /// The exchanges within the update rate that pay for their upload, in the order of [`Update::exchanges`].
    ///
    /// - `observations`: the observations of the request from which the update was planned. Unlike scores, selections are not
    ///   weighted.
    /// - `n_tokens`: number of tokens of the request.
    /// - `bytes`: size of an expert.
    pub fn paying(
        &self,
        payback: &Payback,
        observations: &[LayerObservation],
        n_tokens: u64,
        bytes: impl Fn(LayerId, ExpertId) -> u64,
    ) -> Vec<Exchange> {
        let selections: BTreeMap<(LayerId, ExpertId), u64> = observations
            .iter()
            .flat_map(|layer| {
                let experts = layer.experts.iter();
                experts.map(|expert| ((layer.layer, expert.expert), expert.hits()))
            })
            .collect();
        let pays = |exchange: &&Exchange| {
            let selected = |expert| selections.get(&(exchange.layer, expert)).copied();
            let selected = |expert| selected(expert).unwrap_or(0);
            let gained = selected(exchange.add).saturating_sub(selected(exchange.evict));
            let bytes = bytes(exchange.layer, exchange.add);
            payback.saving_s(gained, n_tokens, bytes) > payback.upload_s(bytes)
        };
        self.exchanges().iter().filter(pays).copied().collect()
    }
}
