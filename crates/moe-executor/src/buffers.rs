//! Allocation events of a session's buffers, recorded when a pass needs more memory than all passes before it.
//!
//! The id of a buffer is the id in the sources of trace records. The events cover the model files, the vectors converted
//! to f32, the caches, the activations, the inputs, and the buffers of router and products. They do not cover the scratch
//! memory of each thread (a few rows) and memory outside the session.

use std::collections::BTreeMap;

use moe_trace::buffers::{Buffer, BufferEvent, Change, usage};

use crate::activation::Activation;
use crate::cuda::DeviceBuffer;
use crate::device_id::DeviceId;
use crate::mirrored::{Mirrored, PerGpu, Plain};

/// First buffer id of the weights (the f32 vectors, then the model files), above the ids of the caches.
pub(crate) const WEIGHT_BUFFERS: u64 = 1 << 24;

/// Bit that is set in the id of a buffer's copy on a GPU.
pub(crate) const ON_GPU: u64 = 1 << 23;

/// Lowest bit of the GPU's index in the id of a copy, above the ids of the caches. The bits below [`ON_GPU`] are enough for
/// [`MAX_GPUS`](crate::devices::MAX_GPUS).
const GPU_INDEX: u32 = 19;

/// The id of a buffer's copy on a device.
fn id_on(device: DeviceId, buffer_id: u64) -> u64 {
    match device {
        DeviceId::Cpu => buffer_id,
        DeviceId::Gpu(index) => buffer_id | ON_GPU | (index as u64) << GPU_INDEX,
    }
}

/// The id of the copy on the device that is the home of the values.
pub(crate) fn id_at_home<T: Plain>(buffer_id: u64, values: &Mirrored<T>) -> u64 {
    id_on(values.home(), buffer_id)
}

/// Vectors that are inputs of the graph. ggml has a tensor for each use, for example `inp_pos` and
/// `attn_inp_k_idxs`; uses that share a vector here have the same buffer id.
#[derive(Clone, Copy)]
pub(crate) enum Input {
    /// Token ids of the batch.
    Tokens,
    /// Positions of the tokens.
    Positions,
    /// Rows whose logits are wanted.
    Wanted,
    /// A factor of each token.
    Factors,
}

impl Input {
    /// Buffer id, above the ids of the activations.
    pub(crate) fn buffer_id(self) -> u64 {
        (1 << 12) + self as u64
    }
}

/// Addresses and sizes of all buffers at one time.
#[derive(Default)]
pub(crate) struct Inventory {
    buffers: Vec<Buffer>,
}

impl Inventory {
    /// Adds a buffer, unless its size is 0.
    pub(crate) fn add(&mut self, buffer: Buffer) {
        if buffer.size > 0 {
            self.buffers.push(buffer);
        }
    }

    /// Sizes of the buffers in bytes.
    #[cfg(test)]
    pub(crate) fn sizes(&self) -> impl Iterator<Item = u64> {
        self.buffers.iter().map(|buffer| buffer.size)
    }

    /// Adds the memory of a vector.
    pub(crate) fn vector<T>(&mut self, buffer_id: u64, name: &str, vector: &Vec<T>) {
        self.add(on_cpu(buffer_id, name, vector));
    }

    /// Adds the memory of values on the CPU and on GPUs.
    pub(crate) fn mirrored<T: Plain>(&mut self, buffer_id: u64, name: &str, values: &Mirrored<T>) {
        let on_cpu = on_cpu(buffer_id, name, values.cpu_memory());
        self.gpu_copies(&on_cpu, values.gpu_memory());
        self.add(on_cpu);
    }

    /// Adds the copies on GPUs of a buffer on the CPU.
    pub(crate) fn gpu_copies(&mut self, on_cpu: &Buffer, copies: &PerGpu<DeviceBuffer>) {
        for (gpu, copy) in copies.iter() {
            let device = DeviceId::Gpu(gpu);
            self.add(Buffer {
                buffer_id: id_on(device, on_cpu.buffer_id),
                buffer_ptr: copy.ptr().0,
                size: copy.size_bytes() as u64,
                backend: device.to_string(),
                ..on_cpu.clone()
            });
        }
    }

    /// Adds the memory of an activation.
    pub(crate) fn activation(&mut self, name: &str, activation: &Activation) {
        self.mirrored(activation.buffer_id, name, &activation.values);
    }
}

fn on_cpu<T>(buffer_id: u64, name: &str, vector: &Vec<T>) -> Buffer {
    Buffer {
        buffer_id,
        buffer_ptr: vector.as_ptr() as u64,
        size: (vector.capacity() * size_of::<T>()) as u64,
        name: name.to_owned(),
        backend: "CPU".to_owned(),
        usage: usage::COMPUTE,
        layer: None,
    }
}

/// The buffers whose allocation has been recorded.
pub(crate) struct Ledger {
    /// Address and size by id.
    known: BTreeMap<u64, (u64, u64)>,
}

impl Ledger {
    pub(crate) fn new() -> Ledger {
        Ledger {
            known: BTreeMap::new(),
        }
    }

    /// Events for the buffers of `inventory` that are new or have changed; `at` is the start of the pass that changed them.
    pub(crate) fn changes(&mut self, inventory: Inventory, at: Timestamp) -> Vec<BufferEvent> {
        let mut events = Vec::new();
        for buffer in inventory.buffers {
            let place = (buffer.buffer_ptr, buffer.size);
            let before = self.known.insert(buffer.buffer_id, place);
            if before == Some(place) {
                continue;
            }
            let buffer_id = buffer.buffer_id;
            if before.is_some() {
                events.push(at.event(Change::Dealloc { buffer_id }));
            }
            events.push(at.event(Change::Alloc(buffer)));
        }
        events
    }

    /// Deallocation events for all buffers except the weights, which outlive the session.
    pub(crate) fn end(&mut self, at: Timestamp) -> Vec<BufferEvent> {
        let known = std::mem::take(&mut self.known).into_keys();
        known
            .filter(|&id| id < WEIGHT_BUFFERS)
            .map(|buffer_id| at.event(Change::Dealloc { buffer_id }))
            .collect()
    }
}

/// A time on the clock of the trace.
#[derive(Clone, Copy)]
pub(crate) struct Timestamp {
    /// Nanoseconds since the start of the clock.
    pub since_start_ns: u64,
    /// `timestamp_ns` of records.
    pub timestamp_ns: u64,
}

impl Timestamp {
    fn event(self, change: Change) -> BufferEvent {
        BufferEvent {
            timestamp_ms: self.since_start_ns as f64 / 1e6,
            timestamp_ns: Some(self.timestamp_ns),
            change,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inventory(sizes: &[(u64, usize)]) -> Inventory {
        let mut inventory = Inventory::default();
        for &(id, size) in sizes {
            inventory.add(Buffer {
                buffer_id: id,
                buffer_ptr: 64,
                size: size as u64,
                name: String::new(),
                backend: String::new(),
                usage: usage::ANY,
                layer: None,
            });
        }
        inventory
    }

    #[test]
    fn buffer_ids_differ_between_devices() {
        use crate::devices::MAX_GPUS;
        use crate::kv_cache::KvCache;
        use moe_trace::LayerId;

        let largest = KvCache::buffer_id(LayerId(u16::MAX), 1);
        let mut ids = vec![WEIGHT_BUFFERS];
        for id in [1, largest] {
            ids.push(id_on(DeviceId::Cpu, id));
            ids.extend((0..MAX_GPUS).map(|gpu| id_on(DeviceId::Gpu(gpu), id)));
        }
        assert!(ids[1..].iter().all(|&id| id < WEIGHT_BUFFERS));
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), 1 + 2 * (1 + MAX_GPUS));
        assert_eq!(id_on(DeviceId::Gpu(0), 5), ON_GPU | 5);
    }

    /// (id, size); size 0 for a deallocation.
    fn known(events: &[BufferEvent]) -> Vec<(u64, u64)> {
        let known = events.iter().map(|event| match &event.change {
            Change::Alloc(buffer) => (buffer.buffer_id, buffer.size),
            Change::Dealloc { buffer_id } => (*buffer_id, 0),
        });
        known.collect()
    }

    #[test]
    fn reports_unchanged_buffers_once_and_grown_ones_again() {
        let mut ledger = Ledger::new();
        let now = Timestamp {
            since_start_ns: 1_500_000,
            timestamp_ns: 7,
        };
        let mut changes = |sizes: &[(u64, usize)]| known(&ledger.changes(inventory(sizes), now));
        assert_eq!(changes(&[(1, 10), (2, 0)]), [(1, 10)]);
        assert_eq!(changes(&[(1, 10), (2, 5)]), [(2, 5)]);
        assert_eq!(changes(&[(1, 30), (2, 5)]), [(1, 0), (1, 30)]);
        assert_eq!(changes(&[(WEIGHT_BUFFERS, 7)]), [(WEIGHT_BUFFERS, 7)]);
        let end = ledger.end(now);
        assert_eq!(known(&end), [(1, 0), (2, 0)]);
        assert_eq!((end[0].timestamp_ms, end[0].timestamp_ns), (1.5, Some(7)));
        assert_eq!(known(&ledger.end(now)), []);
    }
}
