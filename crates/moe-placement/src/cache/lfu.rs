//! Least often looked up goes first; of equal ones, the least recently used. Counts are of the whole trace: an expert that
//! went and comes back keeps its own.

use super::Key;
use super::demand::Order;
use super::list::{Links, List};
use super::room::Room;

/// Experts by how often they were looked up, a list for each count in the order of the last use.
pub struct Lfu {
    links: Links,
    /// `[n_keys]`
    counts: Vec<u32>,
    /// By count.
    lists: Vec<List>,
    /// A bit for each list that is not empty.
    filled: Vec<u64>,
    /// No word of `filled` before this has a bit set.
    first_word: usize,
}

impl Lfu {
    /// Of a model with `n_keys` experts.
    pub fn new(n_keys: usize) -> Lfu {
        Lfu {
            links: Links::new(n_keys),
            counts: vec![0; n_keys],
            lists: Vec::new(),
            filled: Vec::new(),
            first_word: 0,
        }
    }

    fn put(&mut self, key: Key) {
        let count = self.counts[key as usize] as usize;
        if self.lists.len() <= count {
            self.lists.resize(count + 1, List::EMPTY);
            self.filled.resize(count / 64 + 1, 0);
        }
        self.lists[count].push_back(&mut self.links, key);
        self.filled[count / 64] |= 1 << (count % 64);
        self.first_word = self.first_word.min(count / 64);
    }

    fn take(&mut self, key: Key) {
        let count = self.counts[key as usize] as usize;
        self.lists[count].remove(&mut self.links, key);
        if self.lists[count].is_empty() {
            self.filled[count / 64] &= !(1 << (count % 64));
        }
    }
}

impl Order for Lfu {
    fn hit(&mut self, key: Key, _room: &Room) {
        self.take(key);
        self.counts[key as usize] += 1;
        self.put(key);
    }

    fn insert(&mut self, key: Key, _room: &Room) {
        self.counts[key as usize] += 1;
        self.put(key);
    }

    fn again(&mut self, key: Key, _room: &Room) {
        let count = self.counts[key as usize] as usize;
        self.lists[count].move_to_back(&mut self.links, key);
    }

    fn evict(&mut self, room: &Room) -> Option<Key> {
        while self.filled.get(self.first_word) == Some(&0) {
            self.first_word += 1;
        }
        for word in self.first_word..self.filled.len() {
            let mut bits = self.filled[word];
            while bits != 0 {
                let count = word * 64 + bits.trailing_zeros() as usize;
                // The batch's own are behind all others of their list.
                let front = self.lists[count].front();
                if let Some(key) = front.filter(|&key| !room.is_current(key)) {
                    self.take(key);
                    return Some(key);
                }
                bits &= bits - 1;
            }
        }
        None
    }
}
