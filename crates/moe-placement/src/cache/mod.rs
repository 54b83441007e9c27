//! Cache policies: which experts a cache with a budget in bytes loads and evicts.
//!
//! A *batch* is what one layer routes in one forward pass: all tokens of a ubatch of the prompt, or one generated token. The
//! rules are the same for all policies:
//!
//! - Each distinct expert of a batch is looked up once. Further tokens of the batch that selected the expert only make it
//!   the most recently used one.
//! - A miss loads the expert, except in the static policies and the hot cache, which load only at defined points.
//! - Evictions happen at the end of a batch and never evict an expert of that batch. Until then the cache needs memory for
//!   the batch in addition to its budget. A batch that exceeds the budget stays resident until the end of the next batch.
//!
//! A [`Policy`] receives look-ups and reports what to load and evict. It can replay a trace or drive real slots. Build one
//! with [`PolicyInputs::policy`].
//!
//! | [`PolicyName`] | name | needs |
//! |---|---|---|
//! | `Shared(OnlinePolicy)` | `lru`, `lfu`, … : [`OnlinePolicy::name`] | nothing |
//! | `Layered(OnlinePolicy)` | `layer`, `layerlfu`, … : one cache per layer | nothing |
//! | `Belady`, `BeladySize` | `belady`, `beladysize` | [`PolicyInputs::future`] |
//! | `Static` | `static` | [`PolicyInputs::train_look_ups`] |
//! | `StaticOracle` | `staticoracle` | [`PolicyInputs::counts`] |
//! | `StaticLearn` | `staticlearn` | [`PolicyInputs::learn`] |
//! | `HotCache` | `hotcache` | [`PolicyInputs::learn`], [`PolicyInputs::update_rate`] |

mod arc;
mod belady;
mod by_count;
mod clock;
mod contents;
mod demand;
mod experts;
mod fixed;
mod future;
mod hot_cache;
mod layered;
mod lfru;
mod lfu;
mod lfu_da;
mod list;
mod lru;
mod policy_inputs;
mod policy_name;
mod random;
mod rank_queue;
mod s3_fifo;
mod slru;

pub use experts::{Experts, Key};
pub use fixed::hottest_that_fit;
pub use future::Future;
pub use policy_inputs::{BuildError, MissingInput, PolicyInputs};
pub use policy_name::{OnlinePolicy, PolicyName};

/// Result of a look-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// The expert is resident: it is in the cache.
    Hit,
    /// The expert was missing. The caller must load it into the cache now.
    Loaded,
    /// The expert is missing, and the policy does not load it. The caller uses it from where it is.
    Bypassed,
}

/// Evictions, and loads that no look-up caused.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Changes {
    /// Experts to evict.
    pub evicted: Vec<Key>,
    /// Experts to load although they were not looked up, for example the contents of a plan.
    pub loaded: Vec<Key>,
}

impl Changes {
    /// Empties both lists and keeps their memory.
    pub fn clear(&mut self) {
        self.evicted.clear();
        self.loaded.clear();
    }
}

/// Decides which experts a cache holds.
///
/// Call [`start`](Policy::start) once. For each batch call [`look_up`](Policy::look_up) or
/// [`look_up_again`](Policy::look_up_again) for the experts of its tokens in order, then
/// [`end_batch`](Policy::end_batch). Call [`end_request`](Policy::end_request) after the last batch of a request.
///
/// Methods append to `changes`. Apply evictions before loads, then clear it.
///
/// Keys are numbers from [`Experts::key`]. Methods panic for keys that are not in the [`Experts`] of the policy.
pub trait Policy: Send {
    /// Reports the experts to load before the first batch.
    fn start(&mut self, changes: &mut Changes) {
        let _ = changes;
    }

    /// Looks up an expert for the first time in the current batch.
    fn look_up(&mut self, key: Key) -> Access;

    /// Reports that a further token of the current batch selected an expert that was looked up before in this batch.
    fn look_up_again(&mut self, key: Key);

    /// Evicts experts until the budget is met, except experts of the batch that ends. [`PolicyName::Static`] loads its
    /// experts here.
    fn end_batch(&mut self, changes: &mut Changes);

    /// Reports changes that a policy makes only between requests.
    fn end_request(&mut self, changes: &mut Changes) {
        let _ = changes;
    }

    /// Whether an expert is resident (in the cache).
    fn holds(&self, key: Key) -> bool;

    /// Total size of the resident experts in bytes.
    fn used_bytes(&self) -> u64;
}
