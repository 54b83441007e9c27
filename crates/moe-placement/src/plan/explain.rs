//! Explanations: why an expert is in the cache or not.

use std::fmt;

use moe_ids::{ExpertId, LayerId};

use super::lanes::{Plan, PlanVerdict};
use super::ranking::Entry;
use super::sizes::ExpertSizes;

/// Why an expert is in the cache, or why not.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Explanation {
    /// Block number in the model.
    pub layer: LayerId,
    /// Expert id within its layer.
    pub expert: ExpertId,
    /// Rank and score; `None` if the learn file does not count the expert.
    pub rank: Option<ExpertRank>,
    /// Verdict of the plan; `None` if the plan did not consider the expert, because the learn file does not count it.
    pub verdict: Option<PlanVerdict>,
}

/// Rank and score of an expert in a ranking.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertRank {
    /// Number of selections of the expert.
    pub hits: u64,
    /// Score of the expert; [`rank`](super::rank) contains the formulas.
    pub score: u64,
    /// Rank of the expert in the ranking: 1 for the highest score.
    pub rank: usize,
    /// Number of experts in the ranking.
    pub n_ranked: usize,
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
        let index = ranking.iter().position(is_it);
        let decision = plan
            .decisions
            .iter()
            .find(|decision| is_it(&decision.entry) && decision.verdict != PlanVerdict::Repeated);
        Explanation {
            layer,
            expert,
            rank: index.map(|index| ExpertRank {
                hits: ranking[index].hits,
                score: ranking[index].score,
                rank: index + 1,
                n_ranked: ranking.len(),
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
        let side = if self.is_in() { "is" } else { "is not" };
        write!(
            f,
            "expert {} of layer {} {side} in the cache: ",
            self.expert, self.layer
        )?;
        match self.rank {
            None => write!(f, "it does not appear in the learn file")?,
            Some(ranked) => {
                let ExpertRank {
                    hits,
                    score,
                    rank,
                    n_ranked,
                } = ranked;
                write!(
                    f,
                    "rank {rank} of {n_ranked} (score {score}, {hits} activations)"
                )?;
            }
        }
        match self.verdict {
            None => Ok(()),
            Some(PlanVerdict::Taken { lane, bytes, cost }) => {
                let filled = if self.rank.is_none() {
                    ", but it fills free memory"
                } else {
                    ""
                };
                write!(f, "{filled}; it uses {bytes} bytes of lane {lane}")?;
                if cost > bytes {
                    write!(f, ", plus {bytes} bytes for the empty expert of its layer")?;
                }
                Ok(())
            }
            Some(PlanVerdict::NoRoom { lane, cost, free }) => write!(
                f,
                "; it needs {cost} bytes, but lane {lane} had only {free} bytes left when its rank was reached"
            ),
            Some(PlanVerdict::UnknownSize) => write!(f, "; the size of the expert is unknown"),
            Some(PlanVerdict::Repeated) => write!(f, "; the learn file contains its layer twice"),
        }
    }
}
