//! A dynamic expert cache in real slots: which expert is in which slot, what to copy, and what to count.
//!
//! The rules are those of a simulation. A [`Policy`] decides which experts stay, and a
//! [`Predictor`] which experts are copied before they are selected. The caller copies experts to
//! slots and computes with them. Counts therefore equal those of a simulation of the same routing decisions.
//!
//! A simulation evicts at the end of a batch, and never an expert of that batch. Here experts are evicted before the missing
//! ones are copied, which has the same result and needs no memory in addition to the budget. Prefetched experts have slots of
//! their own. A slot that receives a prefetched expert becomes a slot of the cache when its layer selects the expert.
//!
//! Without any slot, counts differ from those of a simulation, which holds the experts of the last batch: nothing is hit or evicted.
//! An expert without a free slot is computed from where it is. That happens if a batch selects more experts than fit, and in models
//! whose layers have experts of several sizes: slots of one size cannot contain experts of another.
//!
//! ```
//! use moe_placement::cache::{OnlinePolicy, PolicyName};
//! use moe_placement::dynamic::{DynamicCache, Settings, Source};
//! use moe_placement::plan::ExpertSizes;
//! use moe_placement::{ExpertId, LayerId};
//!
//! // One layer with three experts, and room for two of them.
//! let sizes: ExpertSizes = (0..3).map(|e| (LayerId(0), ExpertId(e), 10)).collect();
//! let lru = PolicyName::Shared(OnlinePolicy::Lru);
//! let mut cache = DynamicCache::new(&sizes, |_| 0, 1, &Settings::new(lru, 20))?;
//! cache.call(LayerId(0), true, &[0], |_| true);
//! cache.call(LayerId(0), true, &[1], |_| true);
//! let actions = cache.call(LayerId(0), true, &[2], |_| true);
//! assert_eq!(actions.freed, [ExpertId(0)].map(|e| (LayerId(0), e)), "the least recently used expert");
//! assert_eq!(actions.used[0].source, Source::Load(0), "expert 2 is copied to its slot");
//! assert_eq!((cache.counts().hits[1], cache.counts().evictions), (0, 1));
//! # Ok::<(), moe_placement::dynamic::Error>(())
//! ```

mod call;
mod counts;
mod slots;

use std::sync::Arc;

use moe_ids::{ExpertId, LayerId};

use crate::cache::{
    BuildError, Changes, Experts, Key, OnlinePolicy, Policy, PolicyInputs, PolicyName,
};
use crate::plan::ExpertSizes;
use crate::predict::{Predictor, PredictorName, Prefetches};
use slots::Slots;

pub use call::{Actions, Source, Use};
pub use counts::{Counts, PrefetchLoads};
pub use slots::Slot;

/// What a dynamic cache does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// Which experts stay in the cache: a policy that loads every missing expert.
    pub policy: PolicyName,
    /// Budget of the cache in bytes, without the slots of prefetched experts.
    pub budget_bytes: u64,
    /// Which experts are copied before they are selected; `None`: none.
    pub predictor: Option<PredictorName>,
    /// Number of layers to predict ahead, from 1 to one less than the number of MoE layers.
    pub depth: usize,
    /// Number of experts to predict; `None`: as many as the predicting layer has selected.
    pub n_predict: Option<usize>,
}

impl Settings {
    /// A cache without a predictor.
    pub fn new(policy: PolicyName, budget_bytes: u64) -> Settings {
        Settings {
            policy,
            budget_bytes,
            predictor: None,
            depth: 1,
            n_predict: None,
        }
    }

    /// Checks the number of layers to predict ahead in a model with `n_layer` MoE layers.
    ///
    /// # Errors
    /// [`Error::OneLayer`], [`Error::Depth`].
    pub fn check_depth(&self, n_layer: usize) -> Result<(), Error> {
        let (depth, max) = (self.depth, n_layer.saturating_sub(1));
        if self.predictor.is_none() {
            return Ok(());
        }
        if n_layer < 2 {
            return Err(Error::OneLayer { n_layer });
        }
        if !(1..=max).contains(&depth) {
            return Err(Error::Depth {
                depth,
                max,
                n_layer,
            });
        }
        Ok(())
    }

    /// Checks the policy.
    ///
    /// # Errors
    /// [`Error::NeedsFuture`] or [`Error::FixedContents`]: only a simulation can use it.
    pub fn check_policy(&self) -> Result<(), Error> {
        let policy = self.policy;
        match policy {
            PolicyName::Shared(_) | PolicyName::Layered(_) => Ok(()),
            PolicyName::Belady | PolicyName::BeladySize | PolicyName::StaticOracle => {
                Err(Error::NeedsFuture { policy })
            }
            PolicyName::Static | PolicyName::StaticLearn | PolicyName::HotCache => {
                Err(Error::FixedContents { policy })
            }
        }
    }
}

/// Reason why a dynamic cache cannot have these settings.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The policy needs look-ups of the future.
    #[error(
        "the policy {policy} needs the routing decisions of the future, which only a simulation knows; use {}",
        OnlinePolicy::alternatives()
    )]
    NeedsFuture {
        /// The policy.
        policy: PolicyName,
    },
    /// The policy does not load missing experts.
    #[error(
        "the policy {policy} does not load missing experts; for fixed contents use a hot cache, else {}",
        OnlinePolicy::alternatives()
    )]
    FixedContents {
        /// The policy.
        policy: PolicyName,
    },
    /// There is no later layer to predict.
    #[error("prefetching needs at least 2 MoE layers, but the model has {n_layer}")]
    OneLayer {
        /// Number of MoE layers.
        n_layer: usize,
    },
    /// The predicted layer is too far ahead.
    #[error("{depth} layers to predict ahead is out of range (1..={max}) for {n_layer} MoE layers")]
    Depth {
        /// Layers to predict ahead.
        depth: usize,
        /// Largest number.
        max: usize,
        /// Number of MoE layers.
        n_layer: usize,
    },
    /// The policy cannot be built.
    #[error(transparent)]
    Policy(#[from] BuildError),
}

/// A dynamic cache.
pub struct DynamicCache {
    experts: Arc<Experts>,
    policy: Box<dyn Policy>,
    prefetch: Option<Prefetching>,
    slots: Slots,
    counts: Counts,
    /// Number of the current call, from 1.
    call: u64,
    /// `[n_keys]`: number of the last call that selected the expert.
    last_call: Vec<u64>,
    actions: Actions,
    // Scratch of a call.
    selected: Vec<Key>,
    distinct: Vec<Key>,
    changes: Changes,
}

/// A predictor and the experts that were prefetched for it.
struct Prefetching {
    predictor: Box<dyn Predictor>,
    prefetches: Prefetches<()>,
}

impl DynamicCache {
    /// An empty cache for the experts `sizes`.
    ///
    /// - `class`: class of a layer's experts, from 0 without gaps. Experts of one class have the same size, and their slots are
    ///   interchangeable.
    /// - `n_expert_used`: experts per token; the maximum if layers differ.
    ///
    /// # Errors
    /// [`Error`] if the settings do not fit to the model.
    pub fn new(
        sizes: &ExpertSizes,
        class: impl Fn(LayerId) -> usize,
        n_expert_used: usize,
        settings: &Settings,
    ) -> Result<DynamicCache, Error> {
        settings.check_policy()?;
        let experts = Arc::new(Experts::new(sizes));
        let n_layer = experts.n_layer();
        settings.check_depth(n_layer)?;
        let prefetch = settings.predictor.map(|name| Prefetching {
            predictor: name.predictor(&experts, settings.depth),
            prefetches: Prefetches::new(n_layer, settings.depth, settings.n_predict),
        });
        Ok(DynamicCache {
            policy: PolicyInputs::default().policy(
                settings.policy,
                &experts,
                settings.budget_bytes,
            )?,
            slots: Slots::new(&experts, class, n_expert_used, settings),
            prefetch,
            counts: Counts::default(),
            call: 0,
            last_call: vec![0; experts.len()],
            actions: Actions::default(),
            selected: Vec::new(),
            distinct: Vec::new(),
            changes: Changes::default(),
            experts,
        })
    }

    /// Number of slots of each class: for the budget, and for prefetched experts.
    pub fn n_slots(&self) -> Vec<[usize; 2]> {
        self.slots.numbers()
    }

    /// Slot of an expert; `None` if it is in none.
    pub fn slot(&self, layer: LayerId, expert: ExpertId) -> Option<Slot> {
        self.slots.get(self.experts.key(layer, expert)?)
    }

    /// Removes the slots that a layer shares with the layers of its class, because they cannot be allocated. No expert is in a slot
    /// yet.
    pub fn remove_slots(&mut self, layer: LayerId) {
        if let Some(key) = self.experts.key(layer, ExpertId(0)) {
            self.slots.remove(self.experts.layer_index(key));
        }
    }

    /// Whether the slots always suffice for the experts of single tokens in a layer, once the policy meets its budget. It does after a
    /// single token has run in the layer.
    pub fn guarantees_slots(&self, layer: LayerId) -> bool {
        let key = self.experts.key(layer, ExpertId(0));
        key.is_some_and(|key| self.slots.suffice(self.experts.layer_index(key)))
            && self.counts.failed_copies == 0
    }

    /// Counts since the cache was created.
    pub fn counts(&self) -> Counts {
        let prefetch = self.prefetch.as_ref();
        Counts {
            predictions: prefetch.map(|prefetch| prefetch.prefetches.counts()),
            ..self.counts
        }
    }

    /// Empties the slot of an expert whose copy failed. It is computed from where it is, until its next look-up copies it again.
    pub fn copy_failed(&mut self, layer: LayerId, expert: ExpertId) {
        if let Some(key) = self.experts.key(layer, expert) {
            self.slots.free(key, &self.experts);
        }
        self.counts.failed_copies += 1;
    }
}

#[cfg(test)]
mod tests;
