//! A cache that loads an expert on every miss; an [`EvictionOrder`] decides which expert to evict.

use std::sync::Arc;

use super::contents::Contents;
use super::{Access, Changes, Experts, Key, Policy};

/// Order in which a cache evicts experts. Online policies differ only in this order.
pub trait EvictionOrder: Send {
    /// Called when a resident expert is looked up.
    fn hit(&mut self, key: Key, contents: &Contents);

    /// Called after a missing expert has been added to `contents`.
    fn insert(&mut self, key: Key, contents: &Contents);

    /// Called when a further token of the batch selected the expert.
    fn touch(&mut self, key: Key, contents: &Contents);

    /// Removes the next expert to evict from the order and returns it. Never returns an expert of the current batch.
    fn evict(&mut self, contents: &Contents) -> Option<Key>;
}

/// A cache that loads every missing expert.
pub struct Demand<O> {
    contents: Contents,
    order: O,
}

impl<O: EvictionOrder> Demand<O> {
    /// An empty cache.
    pub fn new(experts: Arc<Experts>, budget: u64, order: O) -> Demand<O> {
        Demand {
            contents: Contents::new(experts, budget),
            order,
        }
    }
}

impl<O: EvictionOrder> Policy for Demand<O> {
    fn look_up(&mut self, key: Key) -> Access {
        if self.contents.touch(key) {
            self.order.hit(key, &self.contents);
            Access::Hit
        } else {
            self.contents.insert(key);
            self.order.insert(key, &self.contents);
            Access::Loaded
        }
    }

    fn look_up_again(&mut self, key: Key) {
        self.order.touch(key, &self.contents);
    }

    fn end_batch(&mut self, changes: &mut Changes) {
        let order = &mut self.order;
        self.contents
            .end_batch(changes, |contents| order.evict(contents));
    }

    fn holds(&self, key: Key) -> bool {
        self.contents.holds(key)
    }

    fn used_bytes(&self) -> u64 {
        self.contents.used()
    }
}
