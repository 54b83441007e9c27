//! LRU stack distances in bytes: the total size of the distinct units used since the last use of a unit. An LRU cache with
//! room for these units and the unit itself still contains it.
//!
//! Source: Mattson et al., "Evaluation techniques for storage hierarchies" (1970). Units are ordered by last use, each in a
//! slot. A binary indexed tree (Fenwick, 1994) sums the bytes after a slot in logarithmic time. When all slots are used, the
//! units are renumbered.

/// Index of a unit in the list of sizes.
type UnitId = usize;

/// Units ordered by their last use.
pub(crate) struct LruStack {
    sizes: Vec<u64>,
    /// Slot of each unit.
    slots: Vec<Option<usize>>,
    /// Unit in each slot; `None` if the unit has moved to a later slot.
    units: Vec<Option<UnitId>>,
    /// Binary indexed tree of the bytes in the slots; `tree[0]` is unused.
    tree: Vec<u64>,
    total: u64,
}

impl LruStack {
    /// A stack of units with these sizes, none of which has been used.
    pub(crate) fn new(sizes: Vec<u64>) -> Self {
        let n_slots = (2 * sizes.len()).max(16);
        Self {
            slots: vec![None; sizes.len()],
            units: Vec::with_capacity(n_slots),
            tree: vec![0; n_slots + 1],
            sizes,
            total: 0,
        }
    }

    /// Bytes of the other units used since the last use of a unit; `None` if the unit has not been used.
    pub(crate) fn distance(&self, unit: UnitId) -> Option<u64> {
        let slot = (*self.slots.get(unit)?)?;
        Some(self.total.wrapping_sub(self.sum_to(slot)))
    }

    /// Uses a unit. Returns the [`distance`](Self::distance) before the use.
    pub(crate) fn touch(&mut self, unit: UnitId) -> Option<u64> {
        let size = *self.sizes.get(unit)?;
        let distance = self.distance(unit);
        if let Some(slot) = self.slots[unit].take() {
            self.add(slot, size.wrapping_neg());
            self.units[slot] = None;
            self.total = self.total.wrapping_sub(size);
        }
        if self.units.len() + 1 == self.tree.len() {
            self.compact();
        }
        let slot = self.units.len();
        self.units.push(Some(unit));
        self.slots[unit] = Some(slot);
        self.add(slot, size);
        self.total = self.total.wrapping_add(size);
        distance
    }

    /// Renumbers the slots. At most half of them contain a unit.
    fn compact(&mut self) {
        let units: Vec<UnitId> = self.units.drain(..).flatten().collect();
        self.tree.fill(0);
        for unit in units {
            let slot = self.units.len();
            self.units.push(Some(unit));
            self.slots[unit] = Some(slot);
            self.add(slot, self.sizes[unit]);
        }
    }

    fn add(&mut self, slot: usize, bytes: u64) {
        let mut i = slot + 1;
        while let Some(sum) = self.tree.get_mut(i) {
            *sum = sum.wrapping_add(bytes);
            i += i & i.wrapping_neg();
        }
    }

    /// Bytes in slots 0 to `slot`.
    fn sum_to(&self, slot: usize) -> u64 {
        let mut i = slot + 1;
        let mut sum = 0u64;
        while i > 0 {
            sum = sum.wrapping_add(self.tree[i]);
            i &= i - 1;
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::LruStack;

    #[test]
    fn distance_matches_list_ordered_by_last_use() {
        let sizes = [7u64, 11, 13, 0, 1 << 40];
        let mut stack = LruStack::new(sizes.to_vec());
        let mut list: Vec<usize> = Vec::new();
        let mut state = 1u64;
        // More uses than slots.
        for _ in 0..1000 {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let unit = (state >> 60) as usize % sizes.len();
            let place = list.iter().position(|&other| other == unit);
            let expected = place.map(|place| list[place + 1..].iter().map(|&u| sizes[u]).sum());
            assert_eq!(stack.distance(unit), expected);
            assert_eq!(stack.touch(unit), expected);
            list.retain(|&other| other != unit);
            list.push(unit);
        }
        assert_eq!(stack.touch(99), None);
    }
}
