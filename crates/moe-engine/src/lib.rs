//! Traits that an engine implements, and the code that drives it: sampling, generation, chat templates, the clock of a
//! trace.
//!
//! ```text
//! Engine ──► Session: Decode (tokens in, logits out) ──► RunWriter
//!    ▲          │  └► Observer: the routing of each layer
//!    │          └► generate: prompt in batches, Sampler, one token after another
//!    └ implemented by the executor and by llama.cpp
//!
//! BatchSession (tokens of several sequences in one pass) ──► logits of each
//!    └ implemented by the executor
//! ```
//!
//! The crate does not depend on a concrete engine.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod batch;
pub mod chat;
mod clock;
mod engine;
mod error;
mod generate;
mod observer;
pub mod random;
mod sampler;

pub use batch::{BatchEntry, BatchSession, CacheUpdate};
pub use clock::TraceClock;
pub use engine::{
    CreateRun, Decode, Engine, EngineInfo, Logits, Mode, Session, SessionInfo, Setup,
};
pub use error::{BoxError, Error, Result};
pub use generate::{Generated, Limits, Stop, generate, max_records};
pub use observer::{Observer, RouterOutput, TokenSequence};
pub use sampler::{Sampler, SamplerParams};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
