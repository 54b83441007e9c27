//! Count and router mass of an expert.

/// Selections of one expert.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ExpertTally {
    /// Number of selections.
    pub count: u64,
    /// Sum of the known router weights of the selections; see [`Hotness::has_mass`](crate::hotness::Hotness::has_mass).
    pub mass: f64,
}
