//! From which batch on it is faster to copy experts to the device than to compute them on the CPU.
//!
//! Stock llama.cpp leaves experts in the CPU's memory on the CPU for small batches, and from 32 tokens on
//! (`GGML_OP_OFFLOAD_MIN_BATCH`) copies those that a batch uses. What is right depends on the link, on the CPU, and on how many
//! experts the tokens of a batch share.

use super::{Batches, ExpertTime, Machine};

/// The largest batch that is looked at.
pub const MAX_BATCH: u64 = 1 << 16;

/// What the experts of all layers take for a batch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BatchTime {
    /// Tokens of the batch.
    pub n_tokens: u64,
    /// Expected distinct experts, all layers together.
    pub distinct: f64,
    /// Time on the CPU.
    pub cpu_s: f64,
    /// Time to copy the distinct experts.
    pub load_s: f64,
    /// Time on the device once they are there.
    pub device_s: f64,
}

impl BatchTime {
    /// Time of copying and computing, if copies are hidden as well as can be.
    pub fn offload_min_s(&self) -> f64 {
        self.load_s.max(self.device_s)
    }

    /// Time of copying and computing one after the other.
    pub fn offload_max_s(&self) -> f64 {
        self.load_s + self.device_s
    }
}

/// What batches take on a machine, by the experts that a trace's tokens choose.
///
/// A batch of B tokens needs an expert with the probability 1 − (1 − p)^B, p being the share of the layer's tokens that
/// chose it, as for unrelated tokens ([`distinct_if_independent`](crate::measures::distinct_if_independent)). An expert that
/// is used takes its time for a first token, each further choice of it that for a next token.
#[derive(Debug, Clone)]
pub struct Offload {
    /// Of each expert that was chosen: share of tokens, bytes.
    experts: Vec<(f64, f64)>,
    /// Experts that a token chooses, all layers together.
    choices: f64,
    machine: Machine,
    cpu: ExpertTime,
}

impl Offload {
    /// `None` where the CPU's time is not told, or nothing was chosen.
    pub fn new(batches: &Batches, machine: &Machine) -> Option<Offload> {
        let cpu = machine.cpu?;
        let shares = batches.shares();
        let experts = batches.experts();
        let chosen = (0..).zip(&shares).filter(|&(_, &share)| share > 0.0);
        let chosen: Vec<(f64, f64)> = chosen
            .map(|(key, &share)| (share, experts.bytes(key) as f64))
            .collect();
        (!chosen.is_empty()).then(|| Offload {
            experts: chosen,
            choices: shares.iter().sum(),
            machine: *machine,
            cpu,
        })
    }

    /// What a batch takes.
    pub fn time(&self, n_tokens: u64) -> BatchTime {
        let (mut distinct, mut bytes) = (0.0, 0.0);
        for &(share, size) in &self.experts {
            let used = 1.0 - (1.0 - share).powf(n_tokens as f64);
            distinct += used;
            bytes += used * size;
        }
        let further = (n_tokens as f64 * self.choices - distinct).max(0.0);
        let time = |expert: ExpertTime| distinct * expert.first_s + further * expert.next_s;
        let machine = &self.machine;
        let reading = machine
            .memory_bytes_per_s
            .map_or(0.0, |memory| bytes / memory);
        BatchTime {
            n_tokens,
            distinct,
            cpu_s: time(self.cpu),
            load_s: bytes / machine.link_bytes_per_s + distinct * machine.link_latency_s,
            device_s: machine.device.map_or(reading, time),
        }
    }

    /// The smallest batch for which `offload` takes no longer than the CPU; `None`: none up to [`MAX_BATCH`].
    ///
    /// Distinct experts grow slower than a batch: what is faster for one batch stays so for larger ones, unless the device is
    /// slower than the CPU for a further token. Then it is never told to be faster.
    pub fn crossover(&self, offload: fn(&BatchTime) -> f64) -> Option<u64> {
        let is_faster = |n_tokens: u64| {
            let time = self.time(n_tokens);
            offload(&time) <= time.cpu_s
        };
        if !is_faster(MAX_BATCH) {
            return None;
        }
        let (mut slower, mut faster) = (0, MAX_BATCH);
        while faster - slower > 1 {
            let middle = slower + (faster - slower) / 2;
            if is_faster(middle) {
                faster = middle;
            } else {
                slower = middle;
            }
        }
        Some(faster)
    }
}
