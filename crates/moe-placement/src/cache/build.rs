//! Making a policy from its name and what it may need.

use std::sync::Arc;

use super::belady::{Belady, BeladySize};
use super::demand::Demand;
use super::fixed::Fixed;
use super::hot::HotCache;
use super::layered::Layered;
use super::{Experts, Future, Online, Policy, PolicyName, hottest_that_fit};
use super::{arc, lfru, lfu, lfu_da, lru, random, s3_fifo, second_chance, slru};
use crate::learn::LayerObservation;
use crate::plan;

/// Why there is no policy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// A name of none.
    #[error(
        "{name:?} is no policy; give belady, beladysize, lru, lfu, lfuda, lfru, slru, s3fifo, arc, clock, random, layer and \
         one of them (layer alone is layerlru), static, staticoracle, staticlearn or hotcache"
    )]
    Name {
        /// The name.
        name: String,
    },
    /// Something that the policy needs is not given.
    #[error("{policy} needs {what}")]
    Needs {
        /// The policy.
        policy: PolicyName,
        /// What it needs.
        what: &'static str,
    },
    /// The hot cache cannot be planned.
    #[error(transparent)]
    Plan(#[from] plan::Error),
}

/// What policies are made from. Only what a policy needs must be there.
#[derive(Debug, Clone, Default)]
pub struct Setting {
    /// The coming look-ups, for Belady's policies.
    pub future: Option<Arc<Future>>,
    /// How often each expert will be looked up (`[n_keys]`), for the oracle.
    pub counts: Option<Arc<[u64]>>,
    /// Observations of a learn file.
    pub learn: Option<Arc<[LayerObservation]>>,
    /// Look-ups that a static cache learns from.
    pub first_look_ups: u64,
    /// Share of the hot cache that may be exchanged after a request, 0 to 1.
    pub update_rate: f64,
    /// Of random choices.
    pub seed: u64,
}

impl Setting {
    /// Makes a policy with a budget of bytes.
    ///
    /// # Errors
    /// [`BuildError::Needs`] if something that it needs is not there.
    pub fn policy(
        &self,
        name: PolicyName,
        experts: &Arc<Experts>,
        budget: u64,
    ) -> Result<Box<dyn Policy>, BuildError> {
        let needs = |what| BuildError::Needs { policy: name, what };
        let future = || self.future.clone().ok_or(needs("the coming look-ups"));
        let learn = || self.learn.as_deref().ok_or(needs("a learn file; name one"));
        let (experts, n) = (experts.clone(), experts.len());
        Ok(match name {
            PolicyName::Belady => Box::new(Demand::new(experts, budget, Belady::new(n, future()?))),
            PolicyName::BeladySize => {
                let order = BeladySize::new(&experts, future()?);
                Box::new(Demand::new(experts, budget, order))
            }
            PolicyName::Whole(online) => self.online(online, experts, budget),
            PolicyName::Layered(online) => {
                Box::new(Layered::new(experts, budget, |experts, share| {
                    self.online(online, experts, share)
                }))
            }
            PolicyName::Static => Box::new(Fixed::learning(experts, budget, self.first_look_ups)),
            PolicyName::StaticOracle => {
                let counts = self.counts.as_deref();
                let counts = counts.ok_or(needs("counts of the coming look-ups"))?;
                let selected = hottest_that_fit(&experts, counts, budget);
                Box::new(Fixed::new(experts, budget, selected))
            }
            PolicyName::StaticLearn => {
                let selected = hottest_that_fit(&experts, &learnt(learn()?, &experts), budget);
                Box::new(Fixed::new(experts, budget, selected))
            }
            PolicyName::HotCache => {
                Box::new(HotCache::new(experts, budget, learn()?, self.update_rate)?)
            }
        })
    }

    fn online(&self, online: Online, experts: Arc<Experts>, budget: u64) -> Box<dyn Policy> {
        let n = experts.len();
        match online {
            Online::Lru => Box::new(Demand::new(experts, budget, lru::Lru::new(n))),
            Online::Lfu => Box::new(Demand::new(experts, budget, lfu::Lfu::new(n))),
            Online::LfuDa => Box::new(Demand::new(experts, budget, lfu_da::LfuDa::new(n))),
            Online::Lfru => Box::new(Demand::new(experts, budget, lfru::Lfru::new(n))),
            Online::Slru => Box::new(Demand::new(experts, budget, slru::Slru::new(n))),
            Online::S3Fifo => Box::new(Demand::new(experts, budget, s3_fifo::S3Fifo::new(n))),
            Online::Arc => Box::new(Demand::new(experts, budget, arc::Arc::new(n))),
            Online::Clock => Box::new(Demand::new(
                experts,
                budget,
                second_chance::SecondChance::new(n),
            )),
            Online::Random => {
                Box::new(Demand::new(experts, budget, random::Random::new(self.seed)))
            }
        }
    }
}

/// The counts of a learn file, by key; a layer that it has twice adds up.
fn learnt(learn: &[LayerObservation], experts: &Experts) -> Vec<u64> {
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
