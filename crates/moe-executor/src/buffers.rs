//! The buffers of a session as they come and go, told when a pass needed more than any before it.
//!
//! A buffer is told by its id, which is that of the trace's sources. Told are the model's files, the vectors that were
//! converted to f32, the caches, the activations, the inputs, and what the router and the products need beside them. Not
//! told are the scratch of each thread (a few rows) and what the program needs beside the session.

use std::collections::BTreeMap;

use moe_trace::buffers::{Buffer, BufferEvent, Change, usage};

use crate::activation::Activation;
use crate::cuda::DeviceBuffer;
use crate::mirrored::{Mirrored, PerGpu, Plain};
use crate::placement::DeviceId;

/// Ids of the model's files and of the vectors converted from them, above those of the caches.
pub(crate) const WEIGHT_BUFFERS: u64 = 1 << 24;

/// Set in the id of a buffer's twin on a GPU.
pub(crate) const ON_GPU: u64 = 1 << 23;

/// Lowest bit of the GPU's index in such an id, above the ids of the caches. Below [`ON_GPU`] there is room for
/// [`MAX_GPUS`](crate::devices::MAX_GPUS).
const GPU_INDEX: u32 = 19;

/// The id of a buffer's twin on a device.
fn id_on(device: DeviceId, buffer_id: u64) -> u64 {
    match device {
        DeviceId::Cpu => buffer_id,
        DeviceId::Gpu(index) => buffer_id | ON_GPU | (index as u64) << GPU_INDEX,
    }
}

/// The id of the buffer that has the values as they were written last.
pub(crate) fn twin_id<T: Plain>(buffer_id: u64, values: &Mirrored<T>) -> u64 {
    id_on(values.home(), buffer_id)
}

/// Vectors of integers that operations read and none writes. ggml has a tensor for each use, `inp_pos` or the rows of the
/// cache, say; those that are one vector here are one buffer.
#[derive(Clone, Copy)]
pub(crate) enum Input {
    /// Ids of the batch's tokens.
    Tokens,
    /// Their positions.
    Positions,
    /// Rows whose output is wanted.
    Wanted,
}

impl Input {
    /// Behind those of the activations.
    pub(crate) fn buffer_id(self) -> u64 {
        (1 << 12) + self as u64
    }
}

/// What lies where at the moment, collected from everybody who has buffers.
#[derive(Default)]
pub(crate) struct Inventory {
    buffers: Vec<Buffer>,
}

impl Inventory {
    /// A buffer of a file or a cache. One without bytes is none.
    pub(crate) fn add(&mut self, buffer: Buffer) {
        if buffer.size > 0 {
            self.buffers.push(buffer);
        }
    }

    /// The room of a vector that results of operations are put in.
    pub(crate) fn vector<T>(&mut self, buffer_id: u64, name: &str, vector: &Vec<T>) {
        self.add(on_host(buffer_id, name, vector));
    }

    /// The room of values on the host, and of their twins on GPUs.
    pub(crate) fn mirrored<T: Plain>(&mut self, buffer_id: u64, name: &str, values: &Mirrored<T>) {
        let host = on_host(buffer_id, name, values.room_on_host());
        self.twins(&host, values.room_on_gpus());
        self.add(host);
    }

    /// The twins on GPUs of a buffer of the host.
    pub(crate) fn twins(&mut self, host: &Buffer, twins: &PerGpu<DeviceBuffer>) {
        for (gpu, twin) in twins.iter() {
            let device = DeviceId::Gpu(gpu);
            self.add(Buffer {
                buffer_id: id_on(device, host.buffer_id),
                buffer_ptr: twin.ptr().0,
                size: twin.size_bytes() as u64,
                backend: device.to_string(),
                ..host.clone()
            });
        }
    }

    /// The room of an activation.
    pub(crate) fn activation(&mut self, name: &str, activation: &Activation) {
        self.mirrored(activation.buffer_id, name, &activation.values);
    }
}

fn on_host<T>(buffer_id: u64, name: &str, vector: &Vec<T>) -> Buffer {
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

/// What was told of buffers so far.
pub(crate) struct Ledger {
    /// By id: address and size.
    known: BTreeMap<u64, (u64, u64)>,
}

impl Ledger {
    pub(crate) fn new() -> Ledger {
        Ledger {
            known: BTreeMap::new(),
        }
    }

    /// What is new in `inventory`; `at` is the start of the pass in which it became so.
    pub(crate) fn changes(&mut self, inventory: Inventory, at: Moment) -> Vec<BufferEvent> {
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

    /// All that was told and does not outlive the session is given back.
    pub(crate) fn end(&mut self, at: Moment) -> Vec<BufferEvent> {
        let known = std::mem::take(&mut self.known).into_keys();
        known
            .filter(|&id| id < WEIGHT_BUFFERS)
            .map(|buffer_id| at.event(Change::Dealloc { buffer_id }))
            .collect()
    }
}

/// A moment on the clock of the trace.
#[derive(Clone, Copy)]
pub(crate) struct Moment {
    /// Nanoseconds since the clock was made.
    pub since_start_ns: u64,
    /// As records have it.
    pub timestamp_ns: u64,
}

impl Moment {
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
    fn each_device_has_its_own_ids() {
        use crate::devices::MAX_GPUS;
        use crate::kv_cache::KvCache;
        use moe_trace::NO_LAYER;

        let largest = KvCache::buffer_id(usize::from(NO_LAYER), 1);
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

    /// (id, size), 0 for a buffer given back.
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
        let now = Moment {
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
