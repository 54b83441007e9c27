//! Packing a ranking into lanes: who goes where, and why somebody does not.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;

use moe_ids::LayerId;

use super::fill::shuffled;
use super::lane::{Lane, NoRoom, Selected};
use super::ranking::Entry;
use super::{Error, ExpertSizes};

/// The most lanes that the runtime has.
pub const MAX_LANES: usize = 3;

/// How experts are spread over several lanes. One lane is filled in the order of the ranking, whatever the strategy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Strategy {
    /// The first lane with room.
    #[default]
    Warm,
    /// The lane with the fewest experts of that layer, then the fewest bytes used, then the lowest number.
    HotEven,
    /// Each lane has a band of layers, as wide as its share of the budget, and takes their best experts in turn.
    EvenSplit,
}

impl Strategy {
    /// The name that the runtime's command line takes.
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

/// What became of an expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlanVerdict {
    /// It is in the cache.
    Taken {
        /// Where.
        lane: usize,
        /// Its bytes.
        bytes: u64,
        /// Bytes that it cost: double for the first of its layer in the lane.
        cost: u64,
    },
    /// No lane had room. Told of the lane where the least was wanting.
    NoRoom {
        /// That lane.
        lane: usize,
        /// Bytes that it would have cost there.
        cost: u64,
        /// Bytes that were left there.
        free: u64,
    },
    /// The model has no such expert.
    UnknownSize,
    /// It was dealt with before: the file has its layer twice.
    Repeated,
}

/// What became of an entry of the ranking, or of an expert that could have filled room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decision {
    /// The expert.
    pub entry: Entry,
    /// What became of it.
    pub verdict: PlanVerdict,
}

/// What the cache will hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// One lane for each budget.
    pub lanes: Vec<Lane>,
    /// What became of every expert that was considered, in the order in which that was decided.
    pub decisions: Vec<Decision>,
}

impl Plan {
    /// Packs a ranking, best first: an expert that does not fit is passed over and the next one tried. Experts of unknown
    /// size are left out.
    ///
    /// `fill` is the seed of an order in which experts that were never chosen fill the room that is left; `None` leaves it
    /// empty. The order is our own: that of the runtime depends on the C++ library it was built with.
    ///
    /// A larger budget can drop an expert: it may take a large one, or the first of another layer with that layer's empty
    /// expert, in whose place smaller ones had fit. Those before the first that did not fit always stay.
    ///
    /// # Errors
    /// [`Error::Lanes`] if there are none or more than [`MAX_LANES`].
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

    /// Whether no expert is in the cache: the runtime switches such a one off.
    pub fn is_empty(&self) -> bool {
        self.selected().next().is_none()
    }

    /// All experts in the cache with their lane, lane by lane.
    pub fn selected(&self) -> impl Iterator<Item = (usize, &Selected)> + Clone {
        let lanes = self.lanes.iter().enumerate();
        lanes.flat_map(|(lane, plan)| plan.selected.iter().map(move |selected| (lane, selected)))
    }

    /// Bytes of all lanes together.
    pub fn used_bytes(&self) -> u64 {
        let used = self.lanes.iter().map(|lane| lane.used_bytes);
        used.fold(0, u64::saturating_add)
    }

    /// The entries with a size, each expert once; the others are decided here.
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

    /// The lanes in which an expert of a layer is tried, one after the other.
    fn order(&self, layer: LayerId, strategy: Strategy) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.lanes.len()).collect();
        if strategy == Strategy::HotEven {
            order.sort_by_key(|&lane| {
                let lane = &self.lanes[lane];
                (lane.n_of_layer(layer), lane.used_bytes)
            });
        }
        order
    }

    /// Tries an expert in lanes; tells whether one took it.
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
                    let wanting = cost - free;
                    if nearest.is_none_or(|(least, _)| wanting < least) {
                        nearest = Some((wanting, PlanVerdict::NoRoom { lane, cost, free }));
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

    /// Each lane goes through its layers again and again and takes the best expert of each that fits and is left.
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

    /// Where the layers of each lane lie among all: a lane's end is its cumulative share of the budget, rounded to whole
    /// layers; the last takes the rest.
    fn bands(&self, n_layers: usize) -> Vec<std::ops::Range<usize>> {
        let budgets = self.lanes.iter().map(|lane| u128::from(lane.budget_bytes));
        let total: u128 = budgets.clone().sum();
        let mut cumulative = 0;
        let mut begin = 0;
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
            bands.push(begin..end);
            begin = end;
        }
        bands
    }
}
