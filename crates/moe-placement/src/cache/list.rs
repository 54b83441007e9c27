//! Doubly linked lists over keys, without allocation: the links lie in two arrays that all lists of a policy share.

use super::Key;

const NONE: u32 = u32::MAX;

/// The links of all keys; a key is in one list at most.
#[derive(Debug)]
pub struct Links {
    /// `[n_keys]`: (before, behind)
    links: Vec<(u32, u32)>,
}

impl Links {
    /// Links of `n_keys` keys that are in no list.
    pub fn new(n_keys: usize) -> Links {
        Links {
            links: vec![(NONE, NONE); n_keys],
        }
    }
}

/// Front and back of a list.
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

    /// Whether there are no keys.
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

    /// Takes out a key that is in this list.
    pub fn remove(&mut self, links: &mut Links, key: Key) {
        let (before, behind) = links.links[key as usize];
        match before {
            NONE => self.front = behind,
            before => links.links[before as usize].1 = behind,
        }
        match behind {
            NONE => self.back = before,
            behind => links.links[behind as usize].0 = before,
        }
    }

    /// Moves a key of this list to its end.
    pub fn move_to_back(&mut self, links: &mut Links, key: Key) {
        if self.back != key {
            self.remove(links, key);
            self.push_back(links, key);
        }
    }

    /// The first key of which `is_wanted` holds.
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
