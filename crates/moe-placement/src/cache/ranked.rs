//! Keys by rank, the lowest first. A rank that changes leaves its old entry in the heap, where it is passed over.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::Key;
use super::room::Room;

/// The heap, and the rank of each key.
#[derive(Debug)]
pub struct Ranked {
    heap: BinaryHeap<Reverse<(u64, Key)>>,
    /// `[n_keys]`; `None` for keys that are not in it.
    ranks: Vec<Option<u64>>,
    /// Room to work in.
    spared: Vec<Reverse<(u64, Key)>>,
}

impl Ranked {
    /// No key of `n_keys`.
    pub fn new(n_keys: usize) -> Ranked {
        Ranked {
            heap: BinaryHeap::new(),
            ranks: vec![None; n_keys],
            spared: Vec::new(),
        }
    }

    /// Puts in a key, or gives it another rank.
    pub fn set(&mut self, key: Key, rank: u64) {
        self.ranks[key as usize] = Some(rank);
        if self.heap.len() > 4 * self.ranks.len() {
            let ranks = &self.ranks;
            self.heap
                .retain(|Reverse((rank, key))| ranks[*key as usize] == Some(*rank));
        }
        self.heap.push(Reverse((rank, key)));
    }

    /// Takes out the key of the lowest rank that the running batch does not use, with its rank.
    pub fn pop(&mut self, room: &Room) -> Option<(Key, u64)> {
        let found = loop {
            let Some(entry) = self.heap.pop() else {
                break None;
            };
            let Reverse((rank, key)) = entry;
            if self.ranks[key as usize] != Some(rank) {
                continue;
            }
            if !room.is_current(key) {
                self.ranks[key as usize] = None;
                break Some((key, rank));
            }
            self.spared.push(entry);
        };
        self.heap.extend(self.spared.drain(..));
        found
    }
}
