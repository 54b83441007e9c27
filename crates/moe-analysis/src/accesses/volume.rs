//! Volume: bytes read by pass, token and layer.

use super::{Event, PassTokens};
use moe_trace::{LayerId, Phase};

/// Bytes read in a phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PhaseVolume {
    /// Number of passes.
    pub passes: u64,
    /// Evaluated tokens: the sum of the batch sizes of the passes.
    pub tokens: u64,
    /// Number of accesses.
    pub accesses: u64,
    /// Bytes of all accesses. Repeated reads count repeatedly.
    pub bytes: u64,
    /// Bytes read from expert tensors.
    pub expert_bytes: u64,
    /// Minimum and maximum bytes of a pass.
    pub pass_bytes: Option<(u64, u64)>,
}

impl PhaseVolume {
    /// Bytes read per token: `bytes / tokens`; `None` without tokens.
    pub fn bytes_per_token(&self) -> Option<f64> {
        (self.tokens > 0).then(|| self.bytes as f64 / self.tokens as f64)
    }
}

/// Bytes read from a layer in a phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerVolume {
    /// Block number; `None` for tensors that belong to no layer.
    pub layer: Option<LayerId>,
    /// Phase.
    pub phase: Phase,
    /// Number of accesses.
    pub accesses: u64,
    /// Bytes of all accesses.
    pub bytes: u64,
    /// Bytes read from expert tensors.
    pub expert_bytes: u64,
}

/// Look-ups: `GET_ROWS` operations on model tensors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lookups {
    /// Number of operations.
    pub operations: u64,
    /// Number of tensor rows read: one per token of an operation.
    pub rows: u64,
    /// Bytes of these rows.
    pub bytes: u64,
}

#[derive(Clone, Copy, Default)]
struct Sums {
    accesses: u64,
    bytes: u64,
    expert_bytes: u64,
}

pub(super) struct VolumeCounter {
    phases: [PhaseVolume; 2],
    /// `[n_layer + 1][phase]`; the last entry is for tensors that belong to no layer.
    layers: Vec<[Sums; 2]>,
    lookups: Lookups,
    pass_bytes: u64,
}

impl VolumeCounter {
    pub(super) fn new(n_layer: usize) -> Self {
        Self {
            phases: Default::default(),
            layers: vec![Default::default(); n_layer + 1],
            lookups: Lookups::default(),
            pass_bytes: 0,
        }
    }

    pub(super) fn access(&mut self, event: &Event) {
        let bytes = event.size_bytes;
        let expert_bytes = if event.is_expert { bytes } else { 0 };
        self.pass_bytes = self.pass_bytes.saturating_add(bytes);
        let phase = &mut self.phases[usize::from(event.phase.number())];
        phase.accesses += 1;
        phase.bytes = phase.bytes.saturating_add(bytes);
        phase.expert_bytes = phase.expert_bytes.saturating_add(expert_bytes);
        let no_layer = self.layers.len() - 1;
        let layer = event.layer.map_or(no_layer, LayerId::index);
        if let Some(layer) = self.layers.get_mut(layer) {
            let sums = &mut layer[usize::from(event.phase.number())];
            sums.accesses += 1;
            sums.bytes = sums.bytes.saturating_add(bytes);
            sums.expert_bytes = sums.expert_bytes.saturating_add(expert_bytes);
        }
    }

    pub(super) fn lookup(&mut self, rows: u64, bytes: u64) {
        self.lookups.operations += 1;
        self.lookups.rows = self.lookups.rows.saturating_add(rows);
        self.lookups.bytes = self.lookups.bytes.saturating_add(bytes);
    }

    pub(super) fn end_pass(&mut self, pass: &PassTokens) {
        let bytes = std::mem::take(&mut self.pass_bytes);
        let phase = &mut self.phases[usize::from(pass.phase.number())];
        phase.passes += 1;
        phase.tokens = phase.tokens.saturating_add(pass.n_tokens);
        let (min, max) = phase.pass_bytes.unwrap_or((bytes, bytes));
        phase.pass_bytes = Some((min.min(bytes), max.max(bytes)));
    }

    pub(super) fn finish(self) -> ([PhaseVolume; 2], Vec<LayerVolume>, Lookups) {
        let no_layer = self.layers.len() - 1;
        let layers = self.layers.iter().enumerate().flat_map(|(layer, phases)| {
            let layer = (layer < no_layer)
                .then(|| LayerId::try_from(layer).ok())
                .flatten();
            Phase::ALL
                .into_iter()
                .zip(phases)
                .map(move |(phase, sums)| LayerVolume {
                    layer,
                    phase,
                    accesses: sums.accesses,
                    bytes: sums.bytes,
                    expert_bytes: sums.expert_bytes,
                })
        });
        let layers = layers.filter(|layer| layer.accesses > 0).collect();
        (self.phases, layers, self.lookups)
    }
}
