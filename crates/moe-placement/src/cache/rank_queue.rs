//! A priority queue of keys with changeable ranks, lowest rank first. A changed rank leaves a stale entry in the heap; stale
//! entries are skipped.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::Key;
use super::contents::Contents;

/// The heap and the current rank of each key.
#[derive(Debug)]
pub struct RankQueue {
    heap: BinaryHeap<Reverse<(u64, Key)>>,
    /// `[n_keys]`: current rank; `None` if the key is not in the queue.
    ranks: Vec<Option<u64>>,
    /// Buffer for entries of the current batch, which `pop` skips.
    skipped: Vec<Reverse<(u64, Key)>>,
}

impl RankQueue {
    /// Empty queue for `n_keys` keys.
    pub fn new(n_keys: usize) -> RankQueue {
        RankQueue {
            heap: BinaryHeap::new(),
            ranks: vec![None; n_keys],
            skipped: Vec::new(),
        }
    }

    /// Inserts a key or changes its rank.
    pub fn set(&mut self, key: Key, rank: u64) {
        self.ranks[key as usize] = Some(rank);
        if self.heap.len() > 4 * self.ranks.len() {
            let ranks = &self.ranks;
            self.heap
                .retain(|Reverse((rank, key))| ranks[*key as usize] == Some(*rank));
        }
        self.heap.push(Reverse((rank, key)));
    }

    /// Removes and returns the key with the lowest rank that is not in the current batch, with its rank.
    pub fn pop(&mut self, contents: &Contents) -> Option<(Key, u64)> {
        let found = loop {
            let Some(entry) = self.heap.pop() else {
                break None;
            };
            let Reverse((rank, key)) = entry;
            if self.ranks[key as usize] != Some(rank) {
                continue;
            }
            if !contents.is_current(key) {
                self.ranks[key as usize] = None;
                break Some((key, rank));
            }
            self.skipped.push(entry);
        };
        self.heap.extend(self.skipped.drain(..));
        found
    }
}
