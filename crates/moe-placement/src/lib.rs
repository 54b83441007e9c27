//! Who lives where: files of observed expert counts, plans of a hot-expert cache made from them, what an update of such a
//! cache would exchange, policies of caches that load what is asked for, and predictors of what will be.
//!
//! Everything here is pure: text and numbers in, text and numbers out. No model files, no GPUs, no plots. The rules of learn
//! files, plans and updates are those of a public runtime, the hot-cache fork of llama.cpp (`adrianhoehne/llama.cpp`), to the
//! last expert.
//!
//! ```
//! use moe_placement::ExpertId;
//! use moe_placement::learn::parse_observations;
//! use moe_placement::plan::{ExpertSizes, LayerCurve, Plan, Strategy, Weighting, rank};
//!
//! let learn = r#"{"schema": "llama.cpp.moe_layer_opt_perf.v1", "layers": [{"layer": 0, "experts": [[12, 100], [42, 90]]}]}"#;
//! let ranking = rank(&parse_observations(learn)?, Weighting::Flat, LayerCurve::DEFAULT);
//! let sizes = ExpertSizes::from_csv("layer,expert,bytes\n0,12,10\n0,42,10")?;
//! // The first expert of a layer costs double: the layer has an empty one too.
//! let plan = Plan::new(&ranking, &sizes, &[29], Strategy::Warm, None)?;
//! assert_eq!(plan.lanes[0].selected[0].entry.expert, ExpertId(12));
//! assert_eq!(plan.used_bytes(), 20);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::cast_possible_truncation))]
#![warn(missing_docs)]

pub mod cache;
pub mod json;
pub mod learn;
pub mod plan;
pub mod predict;
pub mod random;
pub mod update;

pub use moe_ids::{ExpertId, LayerId};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
