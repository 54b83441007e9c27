//! Break-even batch size of offloading: from which batch size on copying experts to the device is faster than computing them
//! on the CPU.
//!
//! For experts in CPU memory, llama.cpp computes small batches on the CPU. From 32 tokens on (`GGML_OP_OFFLOAD_MIN_BATCH`)
//! it copies the used experts to the device. The best threshold depends on the interconnect, the CPU, and the number of
//! experts that the tokens of a batch share.

use super::{Batches, ExpertTime, Machine};

/// Maximum batch size in tokens.
pub const MAX_BATCH: u64 = 1 << 16;

/// Time that the experts of all layers take for a batch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BatchTime {
    /// Batch size in tokens.
    pub n_tokens: u64,
    /// Expected number of distinct experts in all layers.
    pub distinct: f64,
    /// Time on the CPU, in s.
    pub cpu_s: f64,
    /// Time to copy the distinct experts, in s.
    pub load_s: f64,
    /// Time on the device after the copy, in s.
    pub device_s: f64,
}

impl BatchTime {
    /// Time of copies and computation with perfect overlap: the maximum of both.
    pub fn offload_min_s(&self) -> f64 {
        self.load_s.max(self.device_s)
    }

    /// Time of copies and computation without overlap: the sum of both.
    pub fn offload_max_s(&self) -> f64 {
        self.load_s + self.device_s
    }
}

/// Times of batches on a machine, for the selection frequencies of a trace.
///
/// A batch of B tokens uses an expert with probability 1 − (1 − p)^B. p is the fraction of the layer's tokens that select
/// it, and tokens are independent ([`distinct_if_independent`](crate::measures::distinct_if_independent)). A used expert
/// takes [`ExpertTime::first_s`] for its first token and [`ExpertTime::next_s`] for each further token.
#[derive(Debug, Clone)]
pub struct Offload {
    /// For each selected expert: fraction of the tokens that select it, and bytes.
    experts: Vec<(f64, f64)>,
    /// Experts per token in all layers.
    n_selected: f64,
    machine: Machine,
    cpu: ExpertTime,
}

impl Offload {
    /// `None` if the CPU time of an expert is unknown, or the trace has no selections.
    pub fn new(batches: &Batches, machine: &Machine) -> Option<Offload> {
        let cpu = machine.cpu?;
        let shares = batches.shares();
        let experts = batches.experts();
        let selected = (0..).zip(&shares).filter(|&(_, &share)| share > 0.0);
        let selected: Vec<(f64, f64)> = selected
            .map(|(key, &share)| (share, experts.bytes(key) as f64))
            .collect();
        (!selected.is_empty()).then(|| Offload {
            experts: selected,
            n_selected: shares.iter().sum(),
            machine: *machine,
            cpu,
        })
    }

    /// Times for a batch of `n_tokens` tokens.
    pub fn time(&self, n_tokens: u64) -> BatchTime {
        let (mut distinct, mut bytes) = (0.0, 0.0);
        for &(share, size) in &self.experts {
            let used = 1.0 - (1.0 - share).powf(n_tokens as f64);
            distinct += used;
            bytes += used * size;
        }
        let further = (n_tokens as f64 * self.n_selected - distinct).max(0.0);
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

    /// Smallest batch size for which `offload` returns at most the CPU time; `None` if it exceeds [`MAX_BATCH`].
    ///
    /// The number of distinct experts grows more slowly than the batch. If offloading is faster for one batch size, it is
    /// faster for all larger ones, unless the device is slower than the CPU for further tokens. In that case the result is
    /// `None`.
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
