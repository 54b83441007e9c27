//! Selection of phases, and values by phase.

use std::ops::{Index, IndexMut};

use moe_trace::Phase;

/// Phases to include.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Phases {
    /// All tokens, including those of unknown phase.
    #[default]
    All,
    /// Tokens of one phase.
    Only(Phase),
}

impl Phases {
    /// Whether tokens of this phase are included.
    pub(crate) fn contains(self, phase: Option<Phase>) -> bool {
        match self {
            Phases::All => true,
            Phases::Only(only) => phase == Some(only),
        }
    }
}

/// Values for prompt tokens, generated tokens, and tokens of unknown phase.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct ByPhase<T>([T; 3]);

impl<T> ByPhase<T> {
    /// Values of the included phases.
    pub(crate) fn of(&self, phases: Phases) -> impl Iterator<Item = &T> {
        let all = [Some(Phase::Prompt), Some(Phase::Generate), None];
        let values = all.into_iter().zip(&self.0);
        values.filter_map(move |(phase, value)| phases.contains(phase).then_some(value))
    }

    pub(crate) fn iter(&self) -> std::slice::Iter<'_, T> {
        self.0.iter()
    }

    pub(crate) fn iter_mut(&mut self) -> std::slice::IterMut<'_, T> {
        self.0.iter_mut()
    }
}

fn index(phase: Option<Phase>) -> usize {
    phase.map_or(2, |phase| phase.number().into())
}

impl<T> Index<Option<Phase>> for ByPhase<T> {
    type Output = T;

    fn index(&self, phase: Option<Phase>) -> &T {
        &self.0[index(phase)]
    }
}

impl<T> IndexMut<Option<Phase>> for ByPhase<T> {
    fn index_mut(&mut self, phase: Option<Phase>) -> &mut T {
        &mut self.0[index(phase)]
    }
}
