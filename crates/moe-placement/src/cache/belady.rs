//! Belady's policy ("A study of replacement algorithms for a virtual-storage computer", 1966): what is looked up again
//! latest, or never, goes first.
//!
//! It is the optimum where all experts have the same size and no batch exceeds the budget: then no policy hits more. With
//! unequal sizes the optimum is hard to compute (it is NP-hard), and neither [`Belady`] nor [`BeladySize`], which weighs the
//! time until the next look-up with the bytes that are freed, is a bound; the better of the two is a good guess.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

use super::demand::EvictionOrder;
use super::future::{Future, NEVER};
use super::ranked::Ranked;
use super::room::Room;
use super::{Experts, Key};

/// By the next look-up alone.
pub struct Belady {
    future: Arc<Future>,
    /// Look-ups so far.
    now: u32,
    ranked: Ranked,
}

impl Belady {
    /// Of a model with `n_keys` experts.
    pub fn new(n_keys: usize, future: Arc<Future>) -> Belady {
        Belady {
            future,
            now: 0,
            ranked: Ranked::new(n_keys),
        }
    }

    fn look_up(&mut self, key: Key) {
        let rank = match self.future.next(self.now) {
            // Before all others, the least recently used first.
            NEVER => self.now.into(),
            next => u64::MAX - u64::from(next),
        };
        self.now = self.now.saturating_add(1);
        self.ranked.set(key, rank);
    }
}

impl EvictionOrder for Belady {
    fn hit(&mut self, key: Key, _room: &Room) {
        self.look_up(key);
    }

    fn insert(&mut self, key: Key, _room: &Room) {
        self.look_up(key);
    }

    fn again(&mut self, _key: Key, _room: &Room) {}

    fn evict(&mut self, room: &Room) -> Option<Key> {
        self.ranked.pop(room).map(|(key, _)| key)
    }
}

/// By the time until the next look-up times bytes. Relations change as time passes, but among experts of one size the furthest
/// stays the furthest: each size has a heap of its own, and an eviction compares the first of each.
pub struct BeladySize {
    future: Arc<Future>,
    now: u32,
    /// `[n_keys]`: next look-up.
    next: Vec<u32>,
    /// `[n_keys]`: index in `sizes`.
    size_of: Vec<u32>,
    sizes: Vec<OfSize>,
}

/// The experts of one size.
struct OfSize {
    bytes: u64,
    /// (next look-up, key), the furthest first, of those the lowest key. What was looked up or went since leaves its entry.
    heap: BinaryHeap<(u32, Reverse<Key>)>,
}

impl BeladySize {
    /// Of a model with these experts.
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
    /// The entry of the expert that would go first, if any may go.
    fn first(&mut self, next: &[u32], room: &Room) -> Option<(u32, Key)> {
        let mut spared = Vec::new();
        let found = loop {
            let Some(&entry) = self.heap.peek() else {
                break None;
            };
            let (at, Reverse(key)) = entry;
            if room.holds(key) && next[key as usize] == at {
                if !room.is_current(key) {
                    break Some((at, key));
                }
                spared.push(entry);
            }
            self.heap.pop();
        };
        self.heap.extend(spared);
        found
    }
}

impl EvictionOrder for BeladySize {
    fn hit(&mut self, key: Key, _room: &Room) {
        self.look_up(key);
    }

    fn insert(&mut self, key: Key, _room: &Room) {
        self.look_up(key);
    }

    fn again(&mut self, _key: Key, _room: &Room) {}

    fn evict(&mut self, room: &Room) -> Option<Key> {
        let firsts = self.sizes.iter_mut().filter_map(|of_size| {
            let (at, key) = of_size.first(&self.next, room)?;
            let rank = match at {
                NEVER => u128::MAX,
                at => u128::from(at.saturating_sub(self.now)) * u128::from(of_size.bytes),
            };
            Some((rank, Reverse(key)))
        });
        // It stays in its heap until it comes up again, no longer held.
        firsts.max().map(|(_, Reverse(key))| key)
    }
}
