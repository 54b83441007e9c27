//! The buffers of a session as they come and go, told when a pass needed more than any before it.
//!
//! A buffer is told by its id, which is that of the trace's sources. Told are the model's files, the vectors that were
//! converted to f32, the caches, the activations, and what the router and the products need beside them. Not told are the
//! scratch of each thread (a few rows) and what the program needs beside the session.

use std::collections::BTreeMap;
use std::time::Instant;

use moe_trace::NO_LAYER;
use moe_trace::buffers::{Buffer, BufferEvent, Change, usage};

use crate::activation::Activation;

/// Ids of the model's files and of the vectors converted from them, above those of the caches.
pub(crate) const WEIGHT_BUFFERS: u64 = 1 << 24;

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
        self.add(Buffer {
            buffer_id,
            buffer_ptr: vector.as_ptr() as u64,
            size: (vector.capacity() * size_of::<T>()) as u64,
            name: name.to_owned(),
            backend: "CPU".to_owned(),
            usage: usage::COMPUTE,
            layer: NO_LAYER,
        });
    }

    /// The room of an activation.
    pub(crate) fn activation(&mut self, name: &str, activation: &Activation) {
        self.vector(activation.buffer_id, name, activation.room());
    }
}

/// What was told of buffers so far.
pub(crate) struct Ledger {
    origin: Instant,
    /// By id: address and size.
    told: BTreeMap<u64, (u64, u64)>,
}

impl Ledger {
    pub(crate) fn new() -> Ledger {
        Ledger {
            origin: Instant::now(),
            told: BTreeMap::new(),
        }
    }

    /// What is new in `inventory`; `at` is the start of the pass in which it became so.
    pub(crate) fn changes(&mut self, inventory: Inventory, at: Instant) -> Vec<BufferEvent> {
        let mut events = Vec::new();
        let timestamp_ms = self.ms(at);
        for buffer in inventory.buffers {
            let place = (buffer.buffer_ptr, buffer.size);
            let before = self.told.insert(buffer.buffer_id, place);
            if before == Some(place) {
                continue;
            }
            let buffer_id = buffer.buffer_id;
            if before.is_some() {
                let change = Change::Dealloc { buffer_id };
                events.push(BufferEvent {
                    timestamp_ms,
                    change,
                });
            }
            let change = Change::Alloc(buffer);
            events.push(BufferEvent {
                timestamp_ms,
                change,
            });
        }
        events
    }

    /// All that was told and does not outlive the session is given back.
    pub(crate) fn end(&mut self) -> Vec<BufferEvent> {
        let timestamp_ms = self.ms(Instant::now());
        let told = std::mem::take(&mut self.told).into_keys();
        told.filter(|&id| id < WEIGHT_BUFFERS)
            .map(|buffer_id| BufferEvent {
                timestamp_ms,
                change: Change::Dealloc { buffer_id },
            })
            .collect()
    }

    fn ms(&self, at: Instant) -> f64 {
        at.saturating_duration_since(self.origin).as_nanos() as f64 / 1e6
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
                layer: NO_LAYER,
            });
        }
        inventory
    }

    /// (id, size), 0 for a buffer given back.
    fn told(events: &[BufferEvent]) -> Vec<(u64, u64)> {
        let told = events.iter().map(|event| match &event.change {
            Change::Alloc(buffer) => (buffer.buffer_id, buffer.size),
            Change::Dealloc { buffer_id } => (*buffer_id, 0),
        });
        told.collect()
    }

    #[test]
    fn what_stays_is_told_once_and_what_grows_comes_anew() {
        let mut ledger = Ledger::new();
        let now = Instant::now();
        let mut changes = |sizes: &[(u64, usize)]| told(&ledger.changes(inventory(sizes), now));
        assert_eq!(changes(&[(1, 10), (2, 0)]), [(1, 10)]);
        assert_eq!(changes(&[(1, 10), (2, 5)]), [(2, 5)]);
        assert_eq!(changes(&[(1, 30), (2, 5)]), [(1, 0), (1, 30)]);
        assert_eq!(changes(&[(WEIGHT_BUFFERS, 7)]), [(WEIGHT_BUFFERS, 7)]);
        assert_eq!(told(&ledger.end()), [(1, 0), (2, 0)]);
        assert_eq!(told(&ledger.end()), []);
    }
}
