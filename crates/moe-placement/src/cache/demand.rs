//! A cache that loads what is asked for, and an order in which experts go.

use std::sync::Arc;

use super::room::Room;
use super::{Access, Changes, Experts, Key, Policy};

/// Who goes first. All that differs between policies that load what is asked for.
pub trait EvictionOrder: Send {
    /// An expert that is there was looked up.
    fn hit(&mut self, key: Key, room: &Room);

    /// An expert that was not there has been put into `room`.
    fn insert(&mut self, key: Key, room: &Room);

    /// A further token of the batch chose an expert.
    fn again(&mut self, key: Key, room: &Room);

    /// Forgets the expert that is to go next and gives it; none that the running batch uses.
    fn evict(&mut self, room: &Room) -> Option<Key>;
}

/// The cache.
pub struct Demand<O> {
    room: Room,
    order: O,
}

impl<O: EvictionOrder> Demand<O> {
    /// An empty cache.
    pub fn new(experts: Arc<Experts>, budget: u64, order: O) -> Demand<O> {
        Demand {
            room: Room::new(experts, budget),
            order,
        }
    }
}

impl<O: EvictionOrder> Policy for Demand<O> {
    fn look_up(&mut self, key: Key) -> Access {
        if self.room.touch(key) {
            self.order.hit(key, &self.room);
            Access::Hit
        } else {
            self.room.insert(key);
            self.order.insert(key, &self.room);
            Access::Loaded
        }
    }

    fn look_up_again(&mut self, key: Key) {
        self.order.again(key, &self.room);
    }

    fn end_batch(&mut self, changes: &mut Changes) {
        let order = &mut self.order;
        self.room.end_batch(changes, |room| order.evict(room));
    }

    fn holds(&self, key: Key) -> bool {
        self.room.holds(key)
    }

    fn used_bytes(&self) -> u64 {
        self.room.used()
    }
}
