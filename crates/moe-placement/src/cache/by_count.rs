//! Keys by a count, and among those of one count by their last use.

use super::Key;
use super::list::{Links, List};

/// A list for each count, the least recently used of it first.
pub struct ByCount {
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

impl ByCount {
    /// No key of `n_keys`; all counts are 0.
    pub fn new(n_keys: usize) -> ByCount {
        ByCount {
            links: Links::new(n_keys),
            counts: vec![0; n_keys],
            lists: Vec::new(),
            filled: Vec::new(),
            first_word: 0,
        }
    }

    /// The count of a key, which is kept when it is taken out.
    pub fn count(&self, key: Key) -> u32 {
        self.counts[key as usize]
    }

    /// Puts in a key that is not in a list, as the most recent one of a count.
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

    /// Takes out a key that is in a list.
    pub fn take(&mut self, key: Key) {
        let count = self.counts[key as usize] as usize;
        self.lists[count].remove(&mut self.links, key);
        if self.lists[count].is_empty() {
            self.filled[count / 64] &= !(1 << (count % 64));
        }
    }

    /// Counts a key in a list once more; it becomes the most recent one of its new count.
    pub fn raise(&mut self, key: Key) {
        self.take(key);
        self.put(key, self.count(key) + 1);
    }

    /// Makes a key in a list the most recent one of its count.
    pub fn touch(&mut self, key: Key) {
        let count = self.counts[key as usize] as usize;
        self.lists[count].move_to_back(&mut self.links, key);
    }

    /// The least recently used key of each count that has keys, counts ascending.
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
            Some((u32::try_from(count).expect("a count of 32 bits"), front))
        })
    }
}
