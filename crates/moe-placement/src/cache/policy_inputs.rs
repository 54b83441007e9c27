//! Building a policy from its name and its inputs.

use std::fmt;
use std::sync::Arc;

use super::belady::{Belady, BeladySize};
use super::demand::Demand;
use super::fixed::Fixed;
use super::hot_cache::HotCache;
use super::layered::Layered;
use super::policy_name::{self, OnlinePolicy, PolicyName};
use super::{Experts, Future, Policy, hottest_that_fit};
use super::{arc, clock, lfru, lfu, lfu_da, lru, random, s3_fifo, slru};
use crate::learn::LayerObservation;
use crate::plan;

/// Reason why a policy cannot be built.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// The name is unknown.
    #[error("unknown policy {name:?}; use {}", policy_name::alternatives())]
    Name {
        /// The unknown name.
        name: String,
    },
    /// The policy needs an input that is `None` in [`PolicyInputs`].
    #[error("{policy} needs {what}")]
    Needs {
        /// The policy.
        policy: PolicyName,
        /// The missing input.
        what: MissingInput,
    },
    /// The hot cache cannot be planned.
    #[error(transparent)]
    Plan(#[from] plan::Error),
}

/// An input in [`PolicyInputs`] that some policies need.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum MissingInput {
    /// [`PolicyInputs::future`].
    Future,
    /// [`PolicyInputs::counts`].
    Counts,
    /// [`PolicyInputs::learn`].
    LearnFile,
}

impl fmt::Display for MissingInput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            MissingInput::Future => "the future lookups",
            MissingInput::Counts => "the counts of all lookups",
            MissingInput::LearnFile => "a learn file",
        })
    }
}

/// Inputs of policies. Each policy uses only some of them; [`PolicyInputs::default`] is enough for every [`OnlinePolicy`].
#[derive(Debug, Clone, Default)]
pub struct PolicyInputs {
    /// All look-ups of the trace, for [`PolicyName::Belady`] and [`PolicyName::BeladySize`].
    pub future: Option<Arc<Future>>,
    /// Number of look-ups of each expert in the entire trace (`[n_keys]`), for [`PolicyName::StaticOracle`].
    pub counts: Option<Arc<[u64]>>,
    /// Observations of a learn file, for [`PolicyName::StaticLearn`] and [`PolicyName::HotCache`].
    pub learn: Option<Arc<[LayerObservation]>>,
    /// Number of look-ups that [`PolicyName::Static`] counts before it loads experts.
    pub train_look_ups: u64,
    /// Fraction of the hot cache that may be exchanged after a request (0.0 to 1.0), for [`PolicyName::HotCache`].
    pub update_rate: f64,
    /// Seed of [`OnlinePolicy::Random`].
    pub seed: u64,
}

impl PolicyInputs {
    /// Builds the policy `name` for a cache of `budget` bytes. `experts` are all experts of the model.
    ///
    /// # Errors
    /// [`BuildError::Needs`] if an input that the policy needs is missing. [`BuildError::Plan`] if the hot cache cannot be
    /// planned.
    pub fn policy(
        &self,
        name: PolicyName,
        experts: &Arc<Experts>,
        budget: u64,
    ) -> Result<Box<dyn Policy>, BuildError> {
        let needs = |what| BuildError::Needs { policy: name, what };
        let future = || self.future.clone().ok_or(needs(MissingInput::Future));
        let learn = || self.learn.as_deref().ok_or(needs(MissingInput::LearnFile));
        let (experts, n) = (experts.clone(), experts.len());
        Ok(match name {
            PolicyName::Belady => Box::new(Demand::new(experts, budget, Belady::new(n, future()?))),
            PolicyName::BeladySize => {
                let order = BeladySize::new(&experts, future()?);
                Box::new(Demand::new(experts, budget, order))
            }
            PolicyName::Shared(online) => self.online(online, experts, budget),
            PolicyName::Layered(online) => {
                Box::new(Layered::new(experts, budget, |experts, share| {
                    self.online(online, experts, share)
                }))
            }
            PolicyName::Static => Box::new(Fixed::trained_on_first(
                experts,
                budget,
                self.train_look_ups,
            )),
            PolicyName::StaticOracle => {
                let counts = self.counts.as_deref();
                let counts = counts.ok_or(needs(MissingInput::Counts))?;
                let selected = hottest_that_fit(&experts, counts, budget);
                Box::new(Fixed::new(experts, budget, selected))
            }
            PolicyName::StaticLearn => {
                let selected =
                    hottest_that_fit(&experts, &learned_counts(learn()?, &experts), budget);
                Box::new(Fixed::new(experts, budget, selected))
            }
            PolicyName::HotCache => {
                Box::new(HotCache::new(experts, budget, learn()?, self.update_rate)?)
            }
        })
    }

    fn online(&self, online: OnlinePolicy, experts: Arc<Experts>, budget: u64) -> Box<dyn Policy> {
        let n = experts.len();
        match online {
            OnlinePolicy::Lru => Box::new(Demand::new(experts, budget, lru::Lru::new(n))),
            OnlinePolicy::Lfu => Box::new(Demand::new(experts, budget, lfu::Lfu::new(n))),
            OnlinePolicy::LfuDa => Box::new(Demand::new(experts, budget, lfu_da::LfuDa::new(n))),
            OnlinePolicy::Lfru => Box::new(Demand::new(experts, budget, lfru::Lfru::new(n))),
            OnlinePolicy::Slru => Box::new(Demand::new(experts, budget, slru::Slru::new(n))),
            OnlinePolicy::S3Fifo => Box::new(Demand::new(experts, budget, s3_fifo::S3Fifo::new(n))),
            OnlinePolicy::Arc => Box::new(Demand::new(experts, budget, arc::Arc::new(n))),
            OnlinePolicy::Clock => Box::new(Demand::new(experts, budget, clock::Clock::new(n))),
            OnlinePolicy::Random => {
                Box::new(Demand::new(experts, budget, random::Random::new(self.seed)))
            }
        }
    }
}

/// Counts of a learn file by key. Counts of a layer that appears twice are added.
fn learned_counts(learn: &[LayerObservation], experts: &Experts) -> Vec<u64> {
    let mut counts = vec![0u64; experts.len()];
    for layer in learn {
        for expert in &layer.experts {
            if let Some(key) = experts.key(layer.layer, expert.expert) {
                let count = &mut counts[key as usize];
                *count = count.saturating_add(expert.hits());
            }
        }
    }
    counts
}
