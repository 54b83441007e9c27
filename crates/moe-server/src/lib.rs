//! HTTP server over a session that evaluates several sequences.
//!
//! ```text
//! http (axum) ── GenerationRequest ──► scheduler ── batches ──► moe_engine session
//!      ▲                                  │
//!      └──────────── Event ───────────────┘
//! ```
#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod generation;
pub mod http;
pub mod metrics;
pub mod recent;
pub mod recording;
pub mod scheduler;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
