//! S3-FIFO: a new expert enters a small queue of a tenth of the budget. At the end of the small queue, an expert with two or
//! more hits moves to the main queue; any other is evicted and leaves a ghost. An expert that is loaded while its ghost
//! exists enters the main queue directly.
//!
//! Source: Yang et al., "FIFO queues are all you need for cache eviction" (SOSP 2023).

use super::Key;
use super::contents::Contents;
use super::demand::EvictionOrder;
use super::list::{Links, List};

/// Upper limit of the hit counter of an expert.
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
    /// `[n_keys]`: queue and number of hits.
    state: Vec<(Queue, u8)>,
    small_bytes: u64,
    ghost_bytes: u64,
}

impl S3Fifo {
    /// Eviction order for `n_keys` experts.
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

    fn take_small(&mut self, key: Key, contents: &Contents) {
        self.small.remove(&mut self.links, key);
        self.small_bytes -= contents.experts().bytes(key);
    }

    /// Adds a ghost and drops the oldest ghosts beyond nine tenths of the budget, the share of the main queue.
    fn push_ghost(&mut self, key: Key, contents: &Contents) {
        self.ghost.push_back(&mut self.links, key);
        self.state[key as usize] = (Queue::Ghost, 0);
        self.ghost_bytes += contents.experts().bytes(key);
        while self.ghost_bytes > contents.budget() / 10 * 9 {
            let Some(oldest) = self.ghost.front() else {
                break;
            };
            self.take_ghost(oldest, contents);
        }
    }

    fn take_ghost(&mut self, key: Key, contents: &Contents) {
        self.ghost.remove(&mut self.links, key);
        self.ghost_bytes -= contents.experts().bytes(key);
        self.state[key as usize] = (Queue::None, 0);
    }

    fn evict_small(&mut self, contents: &Contents) -> Option<Key> {
        loop {
            let key = self
                .small
                .find(&self.links, |key| !contents.is_current(key))?;
            self.take_small(key, contents);
            if self.state[key as usize].1 <= 1 {
                self.push_ghost(key, contents);
                return Some(key);
            }
            self.push_main(key, 0);
        }
    }

    fn evict_main(&mut self, contents: &Contents) -> Option<Key> {
        loop {
            let key = self
                .main
                .find(&self.links, |key| !contents.is_current(key))?;
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
    fn hit(&mut self, key: Key, _contents: &Contents) {
        let hits = &mut self.state[key as usize].1;
        *hits = (*hits + 1).min(MAX_HITS);
    }

    fn insert(&mut self, key: Key, contents: &Contents) {
        if self.state[key as usize].0 == Queue::Ghost {
            self.take_ghost(key, contents);
            self.push_main(key, 0);
        } else {
            self.small.push_back(&mut self.links, key);
            self.small_bytes += contents.experts().bytes(key);
            self.state[key as usize] = (Queue::Small, 0);
        }
    }

    fn touch(&mut self, _key: Key, _contents: &Contents) {}

    fn evict(&mut self, contents: &Contents) -> Option<Key> {
        if self.small_bytes > contents.budget() / 10 {
            self.evict_small(contents)
                .or_else(|| self.evict_main(contents))
        } else {
            // The small queue may move all its experts to the main queue; then the main queue evicts one.
            let main = self.evict_main(contents);
            main.or_else(|| self.evict_small(contents))
                .or_else(|| self.evict_main(contents))
        }
    }
}
