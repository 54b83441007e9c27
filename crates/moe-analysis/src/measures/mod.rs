//! Measures of routing, as functions of plain counts.

mod batch;
mod distance;
mod domain;
mod spread;

pub use batch::{distinct_if_independent, distinct_if_uniform};
pub use distance::{expected_total_variation, jaccard, total_variation};
pub use domain::{Specialization, mutual_information, specialization};
pub use spread::{Spread, TOP_PERCENT, hottest, n_of_percent};
