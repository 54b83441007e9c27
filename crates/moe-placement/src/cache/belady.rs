//! Belady's algorithm: evict the expert whose next look-up is furthest in the future.
//!
//! The policy is optimal if all experts have the same size and no batch exceeds the budget. With unequal sizes the optimal
//! policy is NP-hard to compute. [`Belady`] and [`BeladySize`] are then heuristics, not bounds.
//!
//! Source: L. A. Belady, "A study of replacement algorithms for a virtual-storage computer" (IBM Systems Journal, 1966).

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

use super::contents::Contents;
use super::demand::EvictionOrder;
use super::future::{Future, NEVER};
use super::rank_queue::RankQueue;
use super::{Experts, Key};

/// Evicts the expert with the furthest next look-up.
pub struct Belady {
    future: Arc<Future>,
    /// Number of look-ups so far.
    now: u32,
    queue: RankQueue,
}

impl Belady {
    /// Eviction order for `n_keys` experts.
    pub fn new(n_keys: usize, future: Arc<Future>) -> Belady {
        Belady {
            future,
            now: 0,
            queue: RankQueue::new(n_keys),
        }
    }

    fn look_up(&mut self, key: Key) {
        let rank = match self.future.next(self.now) {
            // Experts that are never looked up again go first, the least recently used of them before the others.
            NEVER => self.now.into(),
            next => u64::MAX - u64::from(next),
        };
        self.now = self.now.saturating_add(1);
        self.queue.set(key, rank);
    }
}

impl EvictionOrder for Belady {
    fn hit(&mut self, key: Key, _contents: &Contents) {
        self.look_up(key);
    }

    fn insert(&mut self, key: Key, _contents: &Contents) {
        self.look_up(key);
    }

    fn touch(&mut self, _key: Key, _contents: &Contents) {}

    fn evict(&mut self, contents: &Contents) -> Option<Key> {
        self.queue.pop(contents).map(|(key, _)| key)
    }
}

/// Evicts the expert with the largest product of look-ups until its next one and bytes. Experts that are never looked up
/// again go first.
///
/// The products change with every look-up. Among experts of one size the order by next look-up does not change, so each size
/// has its own heap, and an eviction compares only the tops of the heaps.
pub struct BeladySize {
    future: Arc<Future>,
    now: u32,
    /// `[n_keys]`: number of the next look-up.
    next: Vec<u32>,
    /// `[n_keys]`: index in `sizes`.
    size_of: Vec<u32>,
    sizes: Vec<OfSize>,
}

/// Experts of one size.
struct OfSize {
    bytes: u64,
    /// (next look-up, key): the furthest look-up on top, then the lowest key. Entries of experts that were looked up or
    /// evicted since are stale and stay in the heap.
    heap: BinaryHeap<(u32, Reverse<Key>)>,
}

impl BeladySize {
    /// Eviction order for these experts.
    pub fn new(experts: &Experts, future: Arc<Future>) -> BeladySize {
        let keys = experts.keys();
        let mut sizes: Vec<u64> = keys.clone().map(|key| experts.bytes(key)).collect();
        sizes.sort_unstable();
        sizes.dedup();
        let size_of = keys.map(|key| {
            let index = sizes.partition_point(|&size| size < experts.bytes(key));
            Key::try_from(index).expect("no more sizes than keys")
        });
        BeladySize {
            future,
            now: 0,
            next: vec![NEVER; experts.len()],
            size_of: size_of.collect(),
            sizes: sizes
                .into_iter()
                .map(|bytes| OfSize {
                    bytes,
                    heap: BinaryHeap::new(),
                })
                .collect(),
        }
    }

    fn look_up(&mut self, key: Key) {
        let next = self.future.next(self.now);
        self.now = self.now.saturating_add(1);
        self.next[key as usize] = next;
        let heap = &mut self.sizes[self.size_of[key as usize] as usize].heap;
        if heap.len() > 4 * self.next.len() {
            heap.retain(|&(at, Reverse(key))| self.next[key as usize] == at);
        }
        heap.push((next, Reverse(key)));
    }
}

impl OfSize {
    /// Entry of the expert to evict first among those that are resident and not in the current batch.
    fn first(&mut self, next: &[u32], contents: &Contents) -> Option<(u32, Key)> {
        let mut in_batch = Vec::new();
        let found = loop {
            let Some(&entry) = self.heap.peek() else {
                break None;
            };
            let (at, Reverse(key)) = entry;
            if contents.holds(key) && next[key as usize] == at {
                if !contents.is_current(key) {
                    break Some((at, key));
                }
                in_batch.push(entry);
            }
            self.heap.pop();
        };
        self.heap.extend(in_batch);
        found
    }
}

impl EvictionOrder for BeladySize {
    fn hit(&mut self, key: Key, _contents: &Contents) {
        self.look_up(key);
    }

    fn insert(&mut self, key: Key, _contents: &Contents) {
        self.look_up(key);
    }

    fn touch(&mut self, _key: Key, _contents: &Contents) {}

    fn evict(&mut self, contents: &Contents) -> Option<Key> {
        let firsts = self.sizes.iter_mut().filter_map(|of_size| {
            let (at, key) = of_size.first(&self.next, contents)?;
            let rank = match at {
                NEVER => u128::MAX,
                at => u128::from(at.saturating_sub(self.now)) * u128::from(of_size.bytes),
            };
            Some((rank, Reverse(key)))
        });
        // The entry stays in its heap. It is stale from now on, because the expert is not resident.
        firsts.max().map(|(_, Reverse(key))| key)
    }
}
