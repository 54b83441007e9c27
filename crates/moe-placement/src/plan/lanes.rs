//! Packing of a ranking into lanes.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;

use moe_ids::LayerId;

use super::fill::shuffled;
use super::lane::{Lane, NoRoom, Selected};
use super::ranking::Entry;
use super::{Error, ExpertSizes};

/// Maximum number of lanes of a cache in the fork.
pub const MAX_LANES: usize = 3;

/// Distribution of experts over several lanes. A single lane is filled in the order of the ranking for every strategy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Strategy {
    /// Each expert goes to the first lane with enough free memory.
    #[default]
    Warm,
    /// Each expert goes to the lane with the fewest experts of its layer; ties: fewest used bytes, then lowest number.
    HotEven,
    /// Each lane has a contiguous range of layers, proportional to its budget. It takes the best expert of each in turn.
    EvenSplit,
}

impl Strategy {
    /// Name on the command line of the fork.
    pub fn name(self) -> &'static str {
        match self {
            Strategy::Warm => "warm",
            Strategy::HotEven => "hot-even",
            Strategy::EvenSplit => "even-split",
        }
    }
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Strategy {
    type Err = Error;

    fn from_str(name: &str) -> Result<Strategy, Error> {
        let all = [Strategy::Warm, Strategy::HotEven, Strategy::EvenSplit];
        let found = all.into_iter().find(|strategy| strategy.name() == name);
        found.ok_or_else(|| Error::Strategy { name: name.into() })
    }
}

/// What a plan decided on an expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlanVerdict {
    /// The expert is in the cache.
    Taken {
        /// Index of the lane.
        lane: usize,
        /// Size of the expert in bytes.
        bytes: u64,
        /// Cost in bytes: twice the size for the first expert of its layer in the lane.
        cost: u64,
    },
    /// The expert fits in no lane. The fields describe the lane that lacks the fewest bytes.
    NoRoom {
        /// Index of the lane.
        lane: usize,
        /// Bytes that the expert would cost in the lane.
        cost: u64,
        /// Free bytes of the lane.
        free: u64,
    },
    /// The size of the expert is unknown, for example because the model has no such expert.
    UnknownSize,
    /// A duplicate: the file contains the layer twice, and the expert was decided before.
    Repeated,
}

/// Verdict on an entry of the ranking, or on an expert that fills free memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decision {
    /// The expert.
    pub entry: Entry,
    /// Verdict on the expert.
    pub verdict: PlanVerdict,
}

/// Planned contents of a hot cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// One lane per budget.
    pub lanes: Vec<Lane>,
    /// Verdicts on all considered experts, in the order of the decisions.
    pub decisions: Vec<Decision>,
}

impl Plan {
    /// Packs a ranking into lanes, best expert first. `budgets` are the bytes of each lane. An expert that does not fit is skipped, and the
    /// next one is tried. Experts without a known size are skipped.
    ///
    /// If `fill` is `Some(seed)`, experts that were never selected fill the remaining memory, in a random order with that seed. The
    /// order differs from the fork's, which depends on its C++ standard library.
    ///
    /// A larger budget can remove an expert from the plan: a large expert, or the first one of another layer, may take the
    /// memory of several smaller ones. Experts ranked before the first one that does not fit are always kept.
    ///
    /// # Errors
    /// [`Error::Lanes`] if there are 0 or more than [`MAX_LANES`] budgets.
    pub fn new(
        ranking: &[Entry],
        sizes: &ExpertSizes,
        budgets: &[u64],
        strategy: Strategy,
        fill: Option<u64>,
    ) -> Result<Plan, Error> {
        if budgets.is_empty() || budgets.len() > MAX_LANES {
            return Err(Error::Lanes { n: budgets.len() });
        }
        let mut plan = Plan {
            lanes: budgets.iter().map(|&budget| Lane::new(budget)).collect(),
            decisions: Vec::new(),
        };
        let mut queue = plan.known(ranking, sizes);
        if let Some(seed) = fill {
            let known: BTreeSet<_> = queue
                .iter()
                .map(|(entry, _)| (entry.layer, entry.expert))
                .collect();
            let unknown = sizes
                .iter()
                .filter(|&(layer, expert, _)| !known.contains(&(layer, expert)));
            let filling = unknown.map(|(layer, expert, bytes)| {
                let (hits, score) = (0, 0);
                (
                    Entry {
                        layer,
                        expert,
                        hits,
                        score,
                    },
                    bytes,
                )
            });
            queue.extend(shuffled(filling.collect(), seed));
        }
        if strategy == Strategy::EvenSplit && budgets.len() > 1 {
            plan.split_evenly(&queue, sizes);
        } else {
            for &(entry, bytes) in &queue {
                let order = plan.order(entry.layer, strategy);
                plan.offer(entry, bytes, &order);
            }
        }
        Ok(plan)
    }

    /// Whether the cache is empty. The fork disables an empty cache.
    pub fn is_empty(&self) -> bool {
        self.selected().next().is_none()
    }

    /// All experts in the cache with the index of their lane, lane by lane.
    pub fn selected(&self) -> impl Iterator<Item = (usize, &Selected)> + Clone {
        let lanes = self.lanes.iter().enumerate();
        lanes.flat_map(|(lane, plan)| plan.selected.iter().map(move |selected| (lane, selected)))
    }

    /// Used bytes of all lanes.
    pub fn used_bytes(&self) -> u64 {
        let used = self.lanes.iter().map(|lane| lane.used_bytes);
        used.fold(0, u64::saturating_add)
    }

    /// Entries with a known size, each expert once. Records the verdicts on all other entries.
    fn known(&mut self, ranking: &[Entry], sizes: &ExpertSizes) -> Vec<(Entry, u64)> {
        let mut seen = BTreeSet::new();
        let mut known = Vec::with_capacity(ranking.len());
        for &entry in ranking {
            let verdict = match sizes.get(entry.layer, entry.expert) {
                None => PlanVerdict::UnknownSize,
                Some(_) if !seen.insert((entry.layer, entry.expert)) => PlanVerdict::Repeated,
                Some(bytes) => {
                    known.push((entry, bytes));
                    continue;
                }
            };
            self.decisions.push(Decision { entry, verdict });
        }
        known
    }

    /// Lanes to try for an expert of a layer, in order.
    fn order(&self, layer: LayerId, strategy: Strategy) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.lanes.len()).collect();
        if strategy == Strategy::HotEven {
            order.sort_by_key(|&lane| {
                let lane = &self.lanes[lane];
                (lane.n_experts(layer), lane.used_bytes)
            });
        }
        order
    }

    /// Adds an expert to the first lane in `order` with enough memory, and records the verdict. Returns whether a lane took
    /// it.
    fn offer(&mut self, entry: Entry, bytes: u64, order: &[usize]) -> bool {
        let mut nearest: Option<(u64, PlanVerdict)> = None;
        let mut verdict = None;
        for &lane in order {
            match self.lanes[lane].take(entry, bytes) {
                Ok(cost) => {
                    verdict = Some(PlanVerdict::Taken { lane, bytes, cost });
                    break;
                }
                Err(NoRoom { cost, free }) => {
                    let lacking = cost - free;
                    if nearest.is_none_or(|(least, _)| lacking < least) {
                        nearest = Some((lacking, PlanVerdict::NoRoom { lane, cost, free }));
                    }
                }
            }
        }
        let is_taken = verdict.is_some();
        if let Some(verdict) = verdict.or(nearest.map(|(_, verdict)| verdict)) {
            self.decisions.push(Decision { entry, verdict });
        }
        is_taken
    }

    /// Each lane repeatedly visits its layers and takes the best remaining expert of each layer that fits.
    fn split_evenly(&mut self, queue: &[(Entry, u64)], sizes: &ExpertSizes) {
        let mut by_layer: BTreeMap<LayerId, Vec<(Entry, u64)>> = BTreeMap::new();
        for &(entry, bytes) in queue {
            by_layer
                .entry(entry.layer)
                .or_default()
                .push((entry, bytes));
        }
        let layers: Vec<LayerId> = sizes.layers().into_keys().collect();
        for (lane, band) in self.bands(layers.len()).into_iter().enumerate() {
            let mut queues: Vec<_> = layers[band]
                .iter()
                .filter_map(|layer| by_layer.remove(layer))
                .map(Vec::into_iter)
                .collect();
            let mut has_taken = true;
            while has_taken {
                has_taken = false;
                for queue in &mut queues {
                    has_taken |= queue.any(|(entry, bytes)| self.offer(entry, bytes, &[lane]));
                }
            }
        }
    }

    /// Range of layers of each lane. It ends at the lane's cumulative fraction of the budget, rounded to an integer layer;
    /// the last lane takes all remaining layers.
    fn bands(&self, n_layers: usize) -> Vec<std::ops::Range<usize>> {
        let budgets = self.lanes.iter().map(|lane| u128::from(lane.budget_bytes));
        let total: u128 = budgets.clone().sum();
        let mut cumulative = 0;
        let mut start = 0;
        let mut bands = Vec::new();
        for (lane, budget) in budgets.enumerate() {
            cumulative += budget;
            let end = if lane + 1 == self.lanes.len() || total == 0 {
                n_layers
            } else {
                // round(cumulative / total * n_layers)
                let end = (2 * cumulative * n_layers as u128 + total) / (2 * total);
                usize::try_from(end).unwrap_or(n_layers)
            };
            bands.push(start..end);
            start = end;
        }
        bands
    }
}
