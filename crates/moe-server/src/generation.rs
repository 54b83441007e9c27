//! A request to generate text, and the events that answer it: the interface between the endpoints and the scheduler.

use std::time::{Duration, Instant};

use moe_engine::SamplerParams;

/// A prompt and how to continue it.
#[derive(Clone, Debug)]
pub struct GenerationRequest {
    /// Tokens of the prompt, at least one.
    pub prompt: Vec<u32>,
    /// Sampling parameters.
    pub sampling: SamplerParams,
    /// Maximum number of generated tokens; `None`: until the context is full.
    pub n_predict: Option<usize>,
    /// Number of the most probable tokens to report with each generated token; `None`: no probabilities at all.
    pub n_probs: Option<usize>,
    /// Whether to continue after an end-of-generation token.
    pub ignore_eos: bool,
    /// When the request is ended with [`FinishReason::TimeLimit`].
    pub deadline: Option<Instant>,
}

/// A token and its log probability before the filters and the temperature of sampling.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct TokenProbability {
    /// Token id.
    pub token: u32,
    /// Natural logarithm of its probability.
    pub logprob: f32,
}

/// An answer of the scheduler to a request. Each request gets any number of tokens, then `Finished` or `Failed`.
#[derive(Clone, Debug)]
pub enum Event {
    /// A generated token.
    Token {
        /// Token id.
        token: u32,
        /// Its log probability, if probabilities were requested.
        logprob: Option<f32>,
        /// The most probable tokens, best first; empty unless requested.
        top: Vec<TokenProbability>,
    },
    /// The request is complete.
    Finished {
        /// Why it ended.
        reason: FinishReason,
        /// Token counts and times.
        usage: Usage,
    },
    /// The request failed; the message says why.
    Failed(String),
}

/// Why a request ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FinishReason {
    /// An end-of-generation token was generated. It is not reported as a token.
    EndOfGeneration,
    /// `n_predict` tokens were generated.
    Length,
    /// The context is full.
    ContextFull,
    /// The deadline has passed.
    TimeLimit,
    /// The client is no longer waiting: it dropped the receiver of events.
    Cancelled,
}

/// Token counts and times of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Usage {
    /// Number of prompt tokens.
    pub n_prompt: usize,
    /// Number of generated tokens.
    pub n_generated: usize,
    /// Time in the queue.
    pub queue_time: Duration,
    /// From the first pass over the prompt to its last.
    pub prompt_time: Duration,
    /// From the last pass over the prompt to the last generated token.
    pub generation_time: Duration,
}
