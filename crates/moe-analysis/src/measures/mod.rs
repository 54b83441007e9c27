//! Measures of routing, as functions of plain counts.

mod batch;
mod distance;
mod domain;
mod load_balance;

pub use batch::{distinct_if_independent, distinct_if_uniform};
pub use distance::{expected_total_variation, jaccard, total_variation};
pub use domain::{Specialization, mutual_information, specialization};
pub use load_balance::{LoadBalance, TOP_PERCENT, hottest, n_of_percent};
