//! A request in a slot of the session.

use std::time::{Duration, Instant};

use moe_engine::{BatchEntry, Sampler};
use moe_trace::Phase;
use tokio::sync::mpsc::UnboundedSender;

use super::logprobs::LogSoftmax;
use super::queue::Queued;
use crate::generation::{Event, FinishReason, GenerationRequest, TokenProbability, Usage};
use crate::metrics::TokenTime;
use crate::recent::RecentRequests;

/// A request that is evaluated.
pub(super) struct Running {
    request: GenerationRequest,
    events: UnboundedSender<Event>,
    sampler: Sampler,
    /// Id of its sequence in traces.
    pub sequence_id: u32,
    /// Number of evaluated tokens.
    n_past: usize,
    /// The sampled token that the next pass evaluates.
    next: Option<u32>,
    n_generated: usize,
    submitted: Instant,
    started: Instant,
    /// End of the last pass over the prompt.
    prompt_end: Option<Instant>,
    last_token: Option<Instant>,
}

/// A token that was sampled from the logits of a slot.
pub(super) struct Sampled {
    pub slot: usize,
    pub token: u32,
    logprob: Option<f32>,
    top: Vec<TokenProbability>,
}

impl Running {
    pub fn new(queued: Queued, sequence_id: u32) -> Running {
        let Queued {
            request,
            events,
            submitted,
        } = queued;
        Running {
            sampler: Sampler::new(request.sampling),
            sequence_id,
            n_past: 0,
            next: None,
            n_generated: 0,
            submitted,
            started: Instant::now(),
            prompt_end: None,
            last_token: None,
            request,
            events,
        }
    }

    /// Adds the request to the recent ones.
    pub fn watch(&self, recent: &RecentRequests) {
        recent.begin(self.sequence_id, self.submitted, &self.request.prompt);
    }

    /// Time since the submission.
    pub fn time(&self) -> Duration {
        self.submitted.elapsed()
    }

    /// Why the request ends before the next pass: the client is gone, or the deadline has passed.
    pub fn reason_to_end(&self, now: Instant) -> Option<FinishReason> {
        if self.events.is_closed() {
            return Some(FinishReason::Cancelled);
        }
        let is_late = self
            .request
            .deadline
            .is_some_and(|deadline| deadline <= now);
        is_late.then_some(FinishReason::TimeLimit)
    }

    /// Number of prompt tokens that are not evaluated.
    pub fn n_prompt_left(&self) -> usize {
        self.request.prompt.len().saturating_sub(self.n_past)
    }

    /// The entry of the generated token that the next pass evaluates; `None` in the prompt.
    pub fn decode_step(&self, slot: usize) -> Option<BatchEntry> {
        Some(BatchEntry {
            slot,
            token: self.next?,
            position: self.n_past,
            phase: Phase::Generate,
            logits: true,
        })
    }

    /// The entries of the next `n` tokens of the prompt.
    pub fn prompt_chunk(&self, slot: usize, n: usize) -> impl Iterator<Item = BatchEntry> {
        let last = self.request.prompt.len() - 1;
        let wants_logits = self.request.n_predict != Some(0);
        let tokens = self.request.prompt.iter().enumerate().skip(self.n_past);
        tokens.take(n).map(move |(position, &token)| BatchEntry {
            slot,
            token,
            position,
            phase: Phase::Prompt,
            logits: wants_logits && position == last,
        })
    }

    /// Notes that a pass has evaluated `n` tokens. Returns the reason if the request is complete without a generated token.
    pub fn evaluated(&mut self, n: usize, now: Instant) -> Option<FinishReason> {
        self.n_past += n;
        self.next = None;
        if self.n_prompt_left() > 0 {
            return None;
        }
        self.prompt_end.get_or_insert(now);
        (self.request.n_predict == Some(0)).then_some(FinishReason::Length)
    }

    /// Samples the token after the last evaluated one.
    pub fn sample(&mut self, slot: usize, logits: &[f32]) -> Sampled {
        let token = self.sampler.sample(logits);
        let mut sampled = Sampled {
            slot,
            token,
            logprob: None,
            top: Vec::new(),
        };
        if let Some(n) = self.request.n_probs {
            let softmax = LogSoftmax::new(logits);
            sampled.logprob = Some(softmax.of(token));
            sampled.top = softmax.top(n);
        }
        sampled
    }

    /// Reports a sampled token and its time, or returns why the request ends. `is_eog` is whether it ends the generation. A token that
    /// does not fit into the context is not reported.
    pub fn report(
        &mut self,
        sampled: Sampled,
        is_eog: bool,
        n_ctx: usize,
        now: Instant,
    ) -> (Option<TokenTime>, Option<FinishReason>) {
        if is_eog && !self.request.ignore_eos {
            return (None, Some(FinishReason::EndOfGeneration));
        }
        if self.n_past >= n_ctx {
            return (None, Some(FinishReason::ContextFull));
        }
        let Sampled {
            token,
            logprob,
            top,
            ..
        } = sampled;
        let event = Event::Token {
            token,
            logprob,
            top,
        };
        if self.events.send(event).is_err() {
            return (None, Some(FinishReason::Cancelled));
        }
        self.n_generated += 1;
        self.next = Some(token);
        let time = match self.last_token.replace(now) {
            None => TokenTime::First(now - self.submitted),
            Some(last) => TokenTime::Next(now - last),
        };
        let is_complete = Some(self.n_generated) == self.request.n_predict;
        (Some(time), is_complete.then_some(FinishReason::Length))
    }

    /// Reports the end.
    pub fn finish(self, reason: FinishReason) {
        let now = Instant::now();
        let prompt_end = self.prompt_end.unwrap_or(now);
        let usage = Usage {
            n_prompt: self.request.prompt.len(),
            n_generated: self.n_generated,
            queue_time: self.started - self.submitted,
            prompt_time: prompt_end - self.started,
            generation_time: self
                .last_token
                .map_or(Duration::ZERO, |last| last - prompt_end),
        };
        // The client may be gone.
        let _ = self.events.send(Event::Finished { reason, usage });
    }

    /// Reports a failure.
    pub fn fail(self, message: &str) {
        let _ = self.events.send(Event::Failed(message.to_owned()));
    }
}
