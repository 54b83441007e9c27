//! Belady's policy ("A study of replacement algorithms for a virtual-storage computer", 1966): what is looked up again
//! latest, or never, goes first.
//!
//! It is the optimum where all experts have the same size and no batch exceeds the budget: then no policy hits more. With
//! unequal sizes the optimum is hard to compute (it is NP-hard), and neither [`Belady`] nor [`BeladySize`], which weighs the
//! time until the next look-up with the bytes that are freed, is a bound; the better of the two is a good guess.

use std::sync::Arc;

use super::Key;
use super::demand::Order;
use super::future::{Future, NEVER};
use super::ranked::Ranked;
use super::room::Room;

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

impl Order for Belady {
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

/// By the time until the next look-up times bytes. Relations change as time passes, so each eviction looks at all that is
/// held.
pub struct BeladySize {
    future: Arc<Future>,
    now: u32,
    /// `[n_keys]`: next look-up.
    next: Vec<u32>,
}

impl BeladySize {
    /// Of a model with `n_keys` experts.
    pub fn new(n_keys: usize, future: Arc<Future>) -> BeladySize {
        BeladySize {
            future,
            now: 0,
            next: vec![NEVER; n_keys],
        }
    }

    fn look_up(&mut self, key: Key) {
        self.next[key as usize] = self.future.next(self.now);
        self.now = self.now.saturating_add(1);
    }
}

impl Order for BeladySize {
    fn hit(&mut self, key: Key, _room: &Room) {
        self.look_up(key);
    }

    fn insert(&mut self, key: Key, _room: &Room) {
        self.look_up(key);
    }

    fn again(&mut self, _key: Key, _room: &Room) {}

    fn evict(&mut self, room: &Room) -> Option<Key> {
        room.lowest(|key| {
            let bytes = u128::from(room.experts().bytes(key));
            let worth = match self.next[key as usize] {
                NEVER => u128::MAX,
                next => u128::from(next.saturating_sub(self.now)) * bytes,
            };
            (u128::MAX - worth, key)
        })
    }
}
