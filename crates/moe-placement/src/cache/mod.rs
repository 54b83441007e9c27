//! Caches of experts: what is kept within a budget of bytes, and what goes.
//!
//! A batch is what one layer routes in one pass: all tokens of a prompt, or one generated token. Each distinct expert of a
//! batch is looked up once; that further tokens of the batch chose it only makes it the most recent one. What is missing
//! is loaded. The cache is cut back to its budget when the batch ends, and no expert of the batch goes: until then it needs
//! room for a batch beyond the budget, and a batch larger than the budget stays whole until the next one.
//!
//! A [`Policy`] is told look-ups and tells what is loaded and what is evicted, so it drives a replay of a trace and real
//! slots alike. `docs/cache-policies.md` describes each.

mod arc;
mod belady;
mod build;
mod by_count;
mod demand;
mod experts;
mod fixed;
mod future;
mod hot;
mod layered;
mod lfru;
mod lfu;
mod lfu_da;
mod list;
mod lru;
mod name;
mod random;
mod ranked;
mod room;
mod s3_fifo;
mod second_chance;
mod slru;

pub use build::{BuildError, Setting};
pub use experts::{Experts, Key};
pub use fixed::hottest_that_fit;
pub use future::Future;
pub use name::{Online, PolicyName};

/// What a look-up came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// The expert was there.
    Hit,
    /// It was not, and has been loaded into the cache.
    Loaded,
    /// It was not, and the policy leaves it out of the cache.
    Passed,
}

/// What a policy did beside the look-ups.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Changes {
    /// Experts that went.
    pub evicted: Vec<Key>,
    /// Experts that came without being looked up.
    pub loaded: Vec<Key>,
}

impl Changes {
    /// Forgets all, keeping the memory.
    pub fn clear(&mut self) {
        self.evicted.clear();
        self.loaded.clear();
    }
}

/// Decides what a cache of experts holds. Calls come as `start`; then for each batch `look_up` and `look_up_again` for its
/// tokens in order and `end_batch`; `end_request` after the last batch of a request.
pub trait Policy: Send {
    /// Loads what is there before the first batch.
    fn start(&mut self, changes: &mut Changes) {
        let _ = changes;
    }

    /// The first look-up of an expert in the running batch.
    fn look_up(&mut self, key: Key) -> Access;

    /// A further token of the running batch chose an expert that was looked up in it before.
    fn look_up_again(&mut self, key: Key);

    /// Cuts the cache back to its budget, sparing the experts of the batch that ends.
    fn end_batch(&mut self, changes: &mut Changes);

    /// Changes what a policy changes between requests alone.
    fn end_request(&mut self, changes: &mut Changes) {
        let _ = changes;
    }

    /// Whether an expert is in the cache.
    fn holds(&self, key: Key) -> bool;

    /// Bytes of the experts in the cache.
    fn used_bytes(&self) -> u64;
}
