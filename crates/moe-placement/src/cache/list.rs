//! Doubly linked lists of keys without allocation per entry: all lists of a policy share one array of links.

use super::Key;

const NONE: u32 = u32::MAX;

/// Links of all keys. A key is in at most one list.
#[derive(Debug)]
pub struct Links {
    /// `[n_keys]`: (previous key, next key).
    links: Vec<(u32, u32)>,
}

impl Links {
    /// Links for `n_keys` keys, none of which is in a list.
    pub fn new(n_keys: usize) -> Links {
        Links {
            links: vec![(NONE, NONE); n_keys],
        }
    }
}

/// First and last key of a list.
#[derive(Debug, Clone, Copy)]
pub struct List {
    front: u32,
    back: u32,
}

impl List {
    /// An empty list.
    pub const EMPTY: List = List {
        front: NONE,
        back: NONE,
    };

    /// The first key.
    pub fn front(&self) -> Option<Key> {
        (self.front != NONE).then_some(self.front)
    }

    /// Whether the list is empty.
    pub fn is_empty(&self) -> bool {
        self.front == NONE
    }

    /// Appends a key that is in no list.
    pub fn push_back(&mut self, links: &mut Links, key: Key) {
        links.links[key as usize] = (self.back, NONE);
        match self.back {
            NONE => self.front = key,
            back => links.links[back as usize].1 = key,
        }
        self.back = key;
    }

    /// Removes a key that is in this list.
    pub fn remove(&mut self, links: &mut Links, key: Key) {
        let (previous, next) = links.links[key as usize];
        match previous {
            NONE => self.front = next,
            previous => links.links[previous as usize].1 = next,
        }
        match next {
            NONE => self.back = previous,
            next => links.links[next as usize].0 = previous,
        }
    }

    /// Moves a key of this list to its end.
    pub fn move_to_back(&mut self, links: &mut Links, key: Key) {
        if self.back != key {
            self.remove(links, key);
            self.push_back(links, key);
        }
    }

    /// The first key for which `is_wanted` returns true.
    pub fn find(&self, links: &Links, is_wanted: impl Fn(Key) -> bool) -> Option<Key> {
        let mut key = self.front;
        while key != NONE {
            if is_wanted(key) {
                return Some(key);
            }
            key = links.links[key as usize].1;
        }
        None
    }
}
