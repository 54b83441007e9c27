//! ARC (Megiddo, Modha, "ARC: a self-tuning, low overhead replacement cache", 2003), in bytes: experts looked up once and
//! experts looked up more often share the budget, and a look-up of one that went of late moves the border in its favour.

use super::Key;
use super::demand::EvictionOrder;
use super::list::{Links, List};
use super::room::Room;

/// The lists, T1, T2, B1 and B2 of the paper.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Once,
    Often,
    OnceGhost,
    OftenGhost,
}

const N_PARTS: usize = 4;

/// The four lists, each in the order of the last use.
pub struct Arc {
    links: Links,
    lists: [List; N_PARTS],
    bytes: [u64; N_PARTS],
    /// `[n_keys]`
    parts: Vec<Option<Part>>,
    /// Bytes that experts looked up once may take, `p` in the paper.
    target: u64,
}

impl Arc {
    /// Of a model with `n_keys` experts.
    pub fn new(n_keys: usize) -> Arc {
        Arc {
            links: Links::new(n_keys),
            lists: [List::EMPTY; N_PARTS],
            bytes: [0; N_PARTS],
            parts: vec![None; n_keys],
            target: 0,
        }
    }

    fn bytes_of(&self, part: Part) -> u64 {
        self.bytes[part as usize]
    }

    fn take(&mut self, key: Key, room: &Room) {
        if let Some(part) = self.parts[key as usize].take() {
            self.lists[part as usize].remove(&mut self.links, key);
            self.bytes[part as usize] -= room.experts().bytes(key);
        }
    }

    fn put(&mut self, key: Key, part: Part, room: &Room) {
        self.take(key, room);
        self.lists[part as usize].push_back(&mut self.links, key);
        self.bytes[part as usize] += room.experts().bytes(key);
        self.parts[key as usize] = Some(part);
    }

    /// How far a ghost of `hit` moves the border: its bytes, times how much larger the other list of ghosts is.
    #[expect(clippy::cast_possible_truncation, reason = "the cast saturates")]
    fn step(&self, bytes: u64, hit: Part, other: Part) -> u64 {
        let ratio = self.bytes_of(other) as f64 / self.bytes_of(hit).max(1) as f64;
        (bytes as f64 * ratio.max(1.0)) as u64
    }

    /// Forgets ghosts until one list of pairs is within the budget, and all within twice the budget.
    fn trim(&mut self, room: &Room) {
        let budget = room.budget();
        loop {
            let once = self.bytes_of(Part::Once) + self.bytes_of(Part::OnceGhost);
            let often = self.bytes_of(Part::Often) + self.bytes_of(Part::OftenGhost);
            let oldest = |part: Part| self.lists[part as usize].front();
            let goes = if once > budget && oldest(Part::OnceGhost).is_some() {
                oldest(Part::OnceGhost)
            } else if once + often > budget.saturating_mul(2) {
                oldest(Part::OftenGhost)
            } else {
                None
            };
            let Some(key) = goes else { break };
            self.take(key, room);
        }
    }
}

impl EvictionOrder for Arc {
    fn hit(&mut self, key: Key, room: &Room) {
        self.put(key, Part::Often, room);
    }

    fn insert(&mut self, key: Key, room: &Room) {
        let bytes = room.experts().bytes(key);
        let part = match self.parts[key as usize] {
            Some(Part::OnceGhost) => {
                let step = self.step(bytes, Part::OnceGhost, Part::OftenGhost);
                self.target = self.target.saturating_add(step).min(room.budget());
                Part::Often
            }
            Some(Part::OftenGhost) => {
                let step = self.step(bytes, Part::OftenGhost, Part::OnceGhost);
                self.target = self.target.saturating_sub(step);
                Part::Often
            }
            _ => Part::Once,
        };
        self.put(key, part, room);
    }

    fn again(&mut self, key: Key, _room: &Room) {
        if let Some(part) = self.parts[key as usize] {
            self.lists[part as usize].move_to_back(&mut self.links, key);
        }
    }

    fn evict(&mut self, room: &Room) -> Option<Key> {
        let may_go = |part: Part| {
            let list = &self.lists[part as usize];
            list.find(&self.links, |key| !room.is_current(key))
        };
        let key = if self.bytes_of(Part::Once) > self.target {
            may_go(Part::Once).or_else(|| may_go(Part::Often))?
        } else {
            may_go(Part::Often).or_else(|| may_go(Part::Once))?
        };
        let ghost = match self.parts[key as usize] {
            Some(Part::Once) => Part::OnceGhost,
            _ => Part::OftenGhost,
        };
        self.put(key, ghost, room);
        self.trim(room);
        Some(key)
    }
}
