//! Expert placement for mixture-of-experts models: which experts to keep in fast memory, and what that saves.
//!
//! | module | contents |
//! |---|---|
//! | [`learn`] | learn files: how often each expert of each layer was selected; reading, writing, merging |
//! | [`plan`] | plans of a hot expert cache: rank experts by a learn file, pack them into memory budgets |
//! | [`update`] | which cached experts to exchange after a request |
//! | [`perf`] | counters of a running hot cache, and their report as a learn file |
//! | [`cache`] | cache policies (LRU, LFU, ARC, Belady's algorithm, …) that drive a trace replay or a real cache |
//! | [`dynamic`] | a dynamic cache in real slots: policy, predictor, slots and counts |
//! | [`predict`] | predictors of the experts that a layer selects next, for prefetching |
//! | [`random`], [`json`] | reproducible pseudorandom numbers, and parsing of JSON with clear errors |
//!
//! The crate reads no model files and uses no GPU: its inputs and outputs are text and numbers. An expert is identified by
//! [`LayerId`], the block number in the model, and [`ExpertId`], the index within its layer. *Hits* of an expert are its
//! selections, that is, the number of tokens that selected it. Learn files, plans and
//! updates follow the rules of the hot expert cache of [adrianhoehne/llama.cpp](https://github.com/adrianhoehne/llama.cpp).
//! This fork of llama.cpp is called *the fork* below. A plan contains the same experts as the cache that the fork builds
//! from the same learn file.
//!
//! # Plan a hot cache
//!
//! A learn file counts selections. [`plan::rank`] turns the counts into a ranking, and [`plan::Plan`] packs the ranking into
//! a budget in bytes.
//!
//! ```
//! use moe_placement::ExpertId;
//! use moe_placement::learn::parse_observations;
//! use moe_placement::plan::{ExpertSizes, LayerCurve, Plan, Strategy, Weighting, rank};
//!
//! let learn = r#"{"schema": "llama.cpp.moe_layer_opt_perf.v1",
//!     "layers": [{"layer": 0, "experts": [[12, 100], [42, 90]]}]}"#;
//! let ranking = rank(&parse_observations(learn)?, Weighting::Flat, LayerCurve::DEFAULT);
//! let sizes = ExpertSizes::from_csv("layer,expert,bytes\n0,12,10\n0,42,10")?;
//! // The first expert of a layer costs twice its bytes: the fork adds one zero-filled expert per cached layer.
//! let plan = Plan::new(&ranking, &sizes, &[29], Strategy::Warm, None)?;
//! assert_eq!(plan.lanes[0].selected[0].entry.expert, ExpertId(12));
//! assert_eq!(plan.used_bytes(), 20);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Drive a cache
//!
//! A [`cache::Policy`] decides what a cache loads and evicts. [`cache::PolicyInputs`] contains what policies may need and builds
//! one by name. The caller reports look-ups and applies the decisions to its own slots.
//!
//! ```
//! use std::sync::Arc;
//! use moe_placement::cache::{Access, Changes, Experts, OnlinePolicy, PolicyInputs, PolicyName};
//! use moe_placement::plan::ExpertSizes;
//! use moe_placement::{ExpertId, LayerId};
//!
//! let sizes = ExpertSizes::from_csv("layer,expert,bytes\n0,0,10\n0,1,10\n0,2,10")?;
//! let experts = Arc::new(Experts::new(&sizes));
//! // Room for two of the three experts.
//! let mut cache = PolicyInputs::default().policy(PolicyName::Shared(OnlinePolicy::Lru), &experts, 20)?;
//! let mut changes = Changes::default();
//! cache.start(&mut changes);
//! for expert in [0, 1, 2] {
//!     let key = experts.key(LayerId(0), ExpertId(expert)).ok_or("unknown expert")?;
//!     assert_eq!(cache.look_up(key), Access::Loaded);
//!     changes.clear();
//!     cache.end_batch(&mut changes);
//! }
//! assert_eq!(changes.evicted, [0], "expert 0 is the least recently used");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! `examples/plan_cache.rs` plans a cache from a learn file. `examples/cache_slots.rs` copies experts into real slots.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::cast_possible_truncation))]
#![warn(missing_docs)]

pub mod cache;
pub mod dynamic;
pub mod json;
pub mod learn;
mod names;
pub mod perf;
pub mod plan;
pub mod predict;
pub mod random;
pub mod update;

pub use moe_ids::{ExpertId, LayerId};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
