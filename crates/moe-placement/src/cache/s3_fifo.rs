//! S3-FIFO (Yang et al., "FIFO queues are all you need for cache eviction", 2023): what comes passes through a small queue
//! of a tenth of the budget; what was hit there more than once goes on to the main queue, the rest leaves a ghost, and what
//! comes back while its ghost is remembered goes to the main queue at once.

use super::Key;
use super::demand::EvictionOrder;
use super::list::{Links, List};
use super::room::Room;

/// Hits are counted up to this.
const MAX_HITS: u8 = 3;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Queue {
    None,
    Small,
    Main,
    Ghost,
}

/// The three queues.
pub struct S3Fifo {
    links: Links,
    small: List,
    main: List,
    ghost: List,
    /// `[n_keys]`: queue and hits.
    state: Vec<(Queue, u8)>,
    small_bytes: u64,
    ghost_bytes: u64,
}

impl S3Fifo {
    /// Of a model with `n_keys` experts.
    pub fn new(n_keys: usize) -> S3Fifo {
        S3Fifo {
            links: Links::new(n_keys),
            small: List::EMPTY,
            main: List::EMPTY,
            ghost: List::EMPTY,
            state: vec![(Queue::None, 0); n_keys],
            small_bytes: 0,
            ghost_bytes: 0,
        }
    }

    fn push_main(&mut self, key: Key, hits: u8) {
        self.main.push_back(&mut self.links, key);
        self.state[key as usize] = (Queue::Main, hits);
    }

    fn take_small(&mut self, key: Key, room: &Room) {
        self.small.remove(&mut self.links, key);
        self.small_bytes -= room.experts().bytes(key);
    }

    /// Remembers an expert that went, and forgets the oldest ghosts beyond the main queue's share.
    fn push_ghost(&mut self, key: Key, room: &Room) {
        self.ghost.push_back(&mut self.links, key);
        self.state[key as usize] = (Queue::Ghost, 0);
        self.ghost_bytes += room.experts().bytes(key);
        while self.ghost_bytes > room.budget() / 10 * 9 {
            let Some(oldest) = self.ghost.front() else {
                break;
            };
            self.take_ghost(oldest, room);
        }
    }

    fn take_ghost(&mut self, key: Key, room: &Room) {
        self.ghost.remove(&mut self.links, key);
        self.ghost_bytes -= room.experts().bytes(key);
        self.state[key as usize] = (Queue::None, 0);
    }

    fn evict_small(&mut self, room: &Room) -> Option<Key> {
        loop {
            let key = self.small.find(&self.links, |key| !room.is_current(key))?;
            self.take_small(key, room);
            if self.state[key as usize].1 <= 1 {
                self.push_ghost(key, room);
                return Some(key);
            }
            self.push_main(key, 0);
        }
    }

    fn evict_main(&mut self, room: &Room) -> Option<Key> {
        loop {
            let key = self.main.find(&self.links, |key| !room.is_current(key))?;
            self.main.remove(&mut self.links, key);
            let hits = self.state[key as usize].1;
            if hits == 0 {
                self.state[key as usize] = (Queue::None, 0);
                return Some(key);
            }
            self.push_main(key, hits - 1);
        }
    }
}

impl EvictionOrder for S3Fifo {
    fn hit(&mut self, key: Key, _room: &Room) {
        let hits = &mut self.state[key as usize].1;
        *hits = (*hits + 1).min(MAX_HITS);
    }

    fn insert(&mut self, key: Key, room: &Room) {
        if self.state[key as usize].0 == Queue::Ghost {
            self.take_ghost(key, room);
            self.push_main(key, 0);
        } else {
            self.small.push_back(&mut self.links, key);
            self.small_bytes += room.experts().bytes(key);
            self.state[key as usize] = (Queue::Small, 0);
        }
    }

    fn again(&mut self, _key: Key, _room: &Room) {}

    fn evict(&mut self, room: &Room) -> Option<Key> {
        if self.small_bytes > room.budget() / 10 {
            self.evict_small(room).or_else(|| self.evict_main(room))
        } else {
            // What moves from the small queue to the main one is evicted there.
            let main = self.evict_main(room);
            main.or_else(|| self.evict_small(room))
                .or_else(|| self.evict_main(room))
        }
    }
}
