//! Why an expert is in the cache or not.

use std::fmt;

use moe_ids::{ExpertId, LayerId};

use super::lanes::{Plan, PlanVerdict};
use super::ranking::Entry;
use super::sizes::ExpertSizes;

/// The reason that an expert is in the cache or not.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Explanation {
    /// Block number in the model.
    pub layer: LayerId,
    /// Expert id within its layer.
    pub expert: ExpertId,
    /// Its hits and its score; nothing for an expert that the file does not count.
    pub ranked: Option<Ranked>,
    /// What became of it; nothing for one that was not considered.
    pub verdict: Option<PlanVerdict>,
}

/// Where an expert stands.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ranked {
    /// How often it was chosen.
    pub hits: u64,
    /// Its score.
    pub score: u64,
    /// Its place in the ranking, from 1.
    pub place: usize,
    /// Experts in the ranking.
    pub of: usize,
}

impl Explanation {
    /// Explains an expert of a plan that was made from `ranking` and `sizes`.
    pub fn new(
        plan: &Plan,
        ranking: &[Entry],
        sizes: &ExpertSizes,
        layer: LayerId,
        expert: ExpertId,
    ) -> Explanation {
        let is_it = |entry: &Entry| (entry.layer, entry.expert) == (layer, expert);
        let place = ranking.iter().position(is_it);
        let decision = plan
            .decisions
            .iter()
            .find(|decision| is_it(&decision.entry) && decision.verdict != PlanVerdict::Repeated);
        Explanation {
            layer,
            expert,
            ranked: place.map(|place| Ranked {
                hits: ranking[place].hits,
                score: ranking[place].score,
                place: place + 1,
                of: ranking.len(),
            }),
            verdict: match (decision, sizes.get(layer, expert)) {
                (Some(decision), _) => Some(decision.verdict),
                (None, Some(_)) => None,
                (None, None) => Some(PlanVerdict::UnknownSize),
            },
        }
    }

    /// Whether the expert is in the cache.
    pub fn is_in(&self) -> bool {
        matches!(self.verdict, Some(PlanVerdict::Taken { .. }))
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let side = if self.is_in() { "in" } else { "out" };
        write!(
            f,
            "expert {} of layer {} is {side}: ",
            self.expert, self.layer
        )?;
        match self.ranked {
            None => write!(f, "the learn file counts no choice of it")?,
            Some(ranked) => {
                let Ranked {
                    hits,
                    score,
                    place,
                    of,
                } = ranked;
                write!(
                    f,
                    "place {place} of {of} with score {score} for {hits} hits"
                )?;
            }
        }
        match self.verdict {
            None => Ok(()),
            Some(PlanVerdict::Taken { lane, bytes, cost }) => {
                let filled = if self.ranked.is_none() {
                    ", but there was room to fill"
                } else {
                    ""
                };
                write!(f, "{filled}; it takes {bytes} bytes of lane {lane}")?;
                if cost > bytes {
                    write!(
                        f,
                        ", and as many for the empty expert of its layer, whose first it is there"
                    )?;
                }
                Ok(())
            }
            Some(PlanVerdict::NoRoom { lane, cost, free }) => write!(
                f,
                "; when its turn came it needed {cost} bytes and lane {lane} had {free} left"
            ),
            Some(PlanVerdict::UnknownSize) => write!(f, "; the model has no such expert"),
            Some(PlanVerdict::Repeated) => write!(f, "; its layer is in the file twice"),
        }
    }
}
