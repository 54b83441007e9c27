//! Keys ordered by a count, and by their last use among keys with equal counts.

use super::Key;
use super::list::{Links, List};

/// One list for each count, from the least to the most recently used key.
pub struct ByCount {
    links: Links,
    /// `[n_keys]`: count of each key.
    counts: Vec<u32>,
    /// Index: the count.
    lists: Vec<List>,
    /// Bit `count` is set if the list of that count is not empty.
    filled: Vec<u64>,
    /// All words of `filled` before this index are 0.
    first_word: usize,
}

impl ByCount {
    /// Empty lists for `n_keys` keys; all counts are 0.
    pub fn new(n_keys: usize) -> ByCount {
        ByCount {
            links: Links::new(n_keys),
            counts: vec![0; n_keys],
            lists: Vec::new(),
            filled: Vec::new(),
            first_word: 0,
        }
    }

    /// Count of a key. A key that is taken out keeps its count.
    pub fn count(&self, key: Key) -> u32 {
        self.counts[key as usize]
    }

    /// Adds a key that is in no list, as the most recently used key with this count.
    pub fn put(&mut self, key: Key, count: u32) {
        self.counts[key as usize] = count;
        let count = count as usize;
        if self.lists.len() <= count {
            self.lists.resize(count + 1, List::EMPTY);
            self.filled.resize(count / 64 + 1, 0);
        }
        self.lists[count].push_back(&mut self.links, key);
        self.filled[count / 64] |= 1 << (count % 64);
        self.first_word = self.first_word.min(count / 64);
    }

    /// Removes a key that is in a list.
    pub fn take(&mut self, key: Key) {
        let count = self.counts[key as usize] as usize;
        self.lists[count].remove(&mut self.links, key);
        if self.lists[count].is_empty() {
            self.filled[count / 64] &= !(1 << (count % 64));
        }
    }

    /// Increments the count of a key in a list and makes it the most recently used key with the new count.
    pub fn raise(&mut self, key: Key) {
        self.take(key);
        self.put(key, self.count(key) + 1);
    }

    /// Makes a key in a list the most recently used key with its count.
    pub fn touch(&mut self, key: Key) {
        let count = self.counts[key as usize] as usize;
        self.lists[count].move_to_back(&mut self.links, key);
    }

    /// Least recently used key of each count that has keys, in ascending order of the counts.
    pub fn fronts(&mut self) -> impl Iterator<Item = (u32, Key)> {
        while self.filled.get(self.first_word) == Some(&0) {
            self.first_word += 1;
        }
        let words = (self.first_word..).zip(&self.filled[self.first_word..]);
        let counts = words.flat_map(|(word, &bits)| {
            let rest = |bits: u64| Some(bits).filter(|&bits| bits != 0);
            std::iter::successors(rest(bits), move |bits| rest(bits & (bits - 1)))
                .map(move |bits| word * 64 + bits.trailing_zeros() as usize)
        });
        let lists = &self.lists;
        counts.filter_map(|count| {
            let front = lists[count].front()?;
            Some((u32::try_from(count).expect("counts are u32"), front))
        })
    }
}
