//! The worklist of a layer call: which lane computes each selected expert of each token.

use std::ops::Range;

use moe_placement::perf::LaneIndex;

/// Number of lanes: the hot lanes and the cold lane.
pub(crate) const N_LANES: usize = LaneIndex::Cold as usize + 1;

/// All lanes; the position of a lane is its number.
pub(crate) const LANES: [LaneIndex; N_LANES] = [
    LaneIndex::Hot0,
    LaneIndex::Hot1,
    LaneIndex::Hot2,
    LaneIndex::Cold,
];

/// The place of an expert.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Place {
    /// Its lane.
    pub lane: LaneIndex,
    /// Index of its matrices: the slot in a hot lane, the expert in the cold lane.
    pub index: u32,
}

impl Place {
    /// The place of an expert that is not cached.
    pub fn cold(expert: usize) -> Place {
        Place {
            lane: LaneIndex::Cold,
            index: expert as u32,
        }
    }
}

/// The entries `(token, slot)` of a layer call, grouped by lane. The entries of a lane have the order of tokens and slots. Memory
/// is reused between calls.
#[derive(Default)]
pub(crate) struct LaneWorklist {
    /// Lane of each entry `(token, slot)`.
    lane: Vec<LaneIndex>,
    /// Place of each entry `(token, slot)` in the vectors below.
    position: Vec<u32>,
    /// Token of each grouped entry.
    token: Vec<u32>,
    /// Expert of each grouped entry.
    expert: Vec<i32>,
    /// Index of the expert's matrices in its lane, for each grouped entry.
    index: Vec<i32>,
    /// Router weight of each grouped entry.
    weight: Vec<f32>,
    /// Start of each lane in the grouped entries, and their total number.
    starts: [usize; N_LANES + 1],
}

impl LaneWorklist {
    /// Groups the selected experts `ids (token, k)` with their router `weights (token, k)`. `places` contains the place of each
    /// expert of the layer.
    pub fn fill(&mut self, ids: &[i32], weights: &[f32], k: usize, places: &[Place]) {
        let n = ids.len();
        self.lane.clear();
        let lanes = ids.iter().map(|&id| places[id as usize].lane);
        self.lane.extend(lanes);
        let mut next = [0; N_LANES];
        for &lane in &self.lane {
            next[lane as usize] += 1;
        }
        let mut total = 0;
        for (start, count) in self.starts.iter_mut().zip(&mut next) {
            *start = total;
            total += *count;
            *count = *start;
        }
        self.starts[N_LANES] = total;
        self.position.resize(n, 0);
        self.token.resize(n, 0);
        self.expert.resize(n, 0);
        self.index.resize(n, 0);
        self.weight.resize(n, 0.0);
        for (entry, (&id, &weight)) in ids.iter().zip(weights).enumerate() {
            let place = places[id as usize];
            let at = next[place.lane as usize];
            next[place.lane as usize] += 1;
            self.position[entry] = at as u32;
            self.token[at] = (entry / k) as u32;
            self.expert[at] = id;
            self.index[at] = place.index as i32;
            self.weight[at] = weight;
        }
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.lane.len()
    }

    /// Number of entries of a lane.
    pub fn count(&self, lane: LaneIndex) -> usize {
        self.range(lane).len()
    }

    /// The grouped entries of a lane.
    pub fn range(&self, lane: LaneIndex) -> Range<usize> {
        self.starts[lane as usize]..self.starts[lane as usize + 1]
    }

    /// Lane of each entry `(token, slot)`.
    pub fn lanes(&self) -> &[LaneIndex] {
        &self.lane
    }

    /// Place of each entry `(token, slot)` among the grouped entries.
    pub fn positions(&self) -> &[u32] {
        &self.position
    }

    /// Token of each entry of a lane.
    pub fn tokens(&self, lane: LaneIndex) -> &[u32] {
        &self.token[self.range(lane)]
    }

    /// Expert of each entry of a lane.
    pub fn experts(&self, lane: LaneIndex) -> &[i32] {
        &self.expert[self.range(lane)]
    }

    /// Index of the expert's matrices in its lane, for each entry of a lane.
    pub fn indices(&self, lane: LaneIndex) -> &[i32] {
        &self.index[self.range(lane)]
    }

    /// Router weight of each grouped entry of all lanes.
    pub fn weights(&self) -> &[f32] {
        &self.weight
    }

    /// The operands of a hot lane on a GPU for a single token: the slot of each entry of the lane, then the bits of their router
    /// weights, multiplied by the `factors` of the experts if they have any. Returns the number of entries.
    pub fn stage_own(
        &self,
        lane: LaneIndex,
        factors: Option<&[f32]>,
        staged: &mut Vec<u32>,
    ) -> usize {
        staged.clear();
        staged.extend(self.indices(lane).iter().map(|&slot| slot as u32));
        let weights = self.range(lane).map(|at| self.scaled_weight(at, factors));
        staged.extend(weights.map(f32::to_bits));
        self.count(lane)
    }

    /// The router weight of a grouped entry, multiplied by the factor of its expert.
    fn scaled_weight(&self, at: usize, factors: Option<&[f32]>) -> f32 {
        let factor = factors.map_or(1.0, |factors| factors[self.expert[at] as usize]);
        self.weight[at] * factor
    }

    /// Like [`LaneWorklist::stage_own`] for any number of tokens: the slot of each entry `(token, slot)`, then the bits of all router
    /// weights. Entries of other lanes have the slot `dummy`, whose matrices are zero.
    pub fn stage_all(
        &self,
        lane: LaneIndex,
        dummy: usize,
        factors: Option<&[f32]>,
        staged: &mut Vec<u32>,
    ) {
        staged.clear();
        let entries = || self.lane.iter().zip(&self.position);
        staged.extend(entries().map(|(&of, &at)| {
            if of == lane {
                self.index[at as usize] as u32
            } else {
                dummy as u32
            }
        }));
        let weights = entries().map(|(_, &at)| self.scaled_weight(at as usize, factors));
        staged.extend(weights.map(f32::to_bits));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use LaneIndex::{Cold, Hot0, Hot1};

    /// Experts 1 and 4 in the slots 1 and 0 of the first lane, expert 2 in slot 0 of the second one.
    fn places() -> Vec<Place> {
        let mut places: Vec<Place> = (0..6).map(Place::cold).collect();
        for (expert, lane, index) in [(1, Hot0, 1), (4, Hot0, 0), (2, Hot1, 0)] {
            places[expert] = Place { lane, index };
        }
        places
    }

    #[test]
    fn groups_entries_by_lane_in_the_order_of_tokens() {
        let mut work = LaneWorklist::default();
        let ids = [5, 1, 2, 4, 1, 3];
        let weights = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6];
        // The second call has fewer entries.
        for n in [6, 4] {
            work.fill(&ids[..n], &weights[..n], 2, &places());
            assert_eq!(work.len(), n);
            assert_eq!(work.lanes(), &[Cold, Hot0, Hot1, Hot0, Hot0, Cold][..n]);
            let n_of = |lane| work.lanes().iter().filter(|&&of| of == lane).count();
            for lane in LANES {
                assert_eq!(work.count(lane), n_of(lane), "{lane:?}");
                let entries = (0..n).filter(|&entry| work.lanes()[entry] == lane);
                for (at, entry) in entries.enumerate() {
                    let position = work.positions()[entry] as usize;
                    assert_eq!(position, work.range(lane).start + at);
                    assert_eq!(work.tokens(lane)[at] as usize, entry / 2);
                    assert_eq!(work.experts(lane)[at], ids[entry]);
                    let place = places()[ids[entry] as usize];
                    assert_eq!(work.indices(lane)[at], place.index as i32);
                    assert_eq!(work.weights()[position], weights[entry]);
                }
            }
        }
    }

    #[test]
    fn stages_the_entries_of_a_lane_or_dummies_for_those_of_others() {
        let mut work = LaneWorklist::default();
        let mut staged = Vec::new();
        work.fill(&[5, 4, 1], &[0.5, 2.0, 4.0], 3, &places());
        assert_eq!(work.stage_own(Hot0, None, &mut staged), 2);
        assert_eq!(staged, [0, 1, 2.0f32.to_bits(), 4.0f32.to_bits()]);
        // Experts 4 and 1 have the factors 0.5 and -2.
        let factors = [0.0, -2.0, 0.0, 0.0, 0.5, 8.0];
        work.stage_own(Hot0, Some(&factors), &mut staged);
        assert_eq!(staged[2..], [1.0f32.to_bits(), (-8.0f32).to_bits()]);
        work.stage_all(Hot0, 2, Some(&factors), &mut staged);
        assert_eq!(staged[3..], [4.0f32, 1.0, -8.0].map(f32::to_bits));
        // One token without direct merge.
        let weights = [0.5f32, 2.0, 4.0].map(f32::to_bits);
        work.stage_all(Hot0, 2, None, &mut staged);
        assert_eq!((&staged[..3], &staged[3..]), (&[2, 0, 1][..], &weights[..]));
        // Two tokens.
        work.fill(&[5, 4, 1, 2], &[0.5, 2.0, 4.0, 8.0], 2, &places());
        let weights = [0.5f32, 2.0, 4.0, 8.0].map(f32::to_bits);
        work.stage_all(Hot0, 2, None, &mut staged);
        assert_eq!(
            (&staged[..4], &staged[4..]),
            (&[2, 0, 1, 2][..], &weights[..])
        );
    }

    #[test]
    fn accepts_calls_without_entries() {
        let mut work = LaneWorklist::default();
        work.fill(&[], &[], 4, &places());
        assert!(LANES.iter().all(|&lane| work.count(lane) == 0));
    }
}
