//! Handles of the scheduler for other threads.

use std::sync::{Arc, mpsc};
use std::time::Instant;

use moe_engine::{BatchSession, CacheUpdate};
use moe_placement::learn::LearnFile;
use moe_placement::perf::SharedCounters;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::queue::{Queue, Queued, Rejected};
use crate::generation::{Event, GenerationRequest};
use crate::metrics::{Metrics, MetricsSnapshot};
use crate::recording::SharedTraceCounts;

/// A request is not accepted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// The queue has no free place.
    #[error("the request queue is full; send the request again later")]
    QueueFull,
    /// The scheduler does not accept requests any more.
    #[error("the server is shutting down")]
    ShuttingDown,
    /// The prompt leaves no room for a generated token.
    #[error(
        "the prompt has {n_prompt} tokens, but the context has only {n_ctx}; shorten the prompt"
    )]
    PromptTooLong {
        /// Number of tokens of the prompt.
        n_prompt: usize,
        /// Context length in tokens.
        n_ctx: usize,
    },
    /// A token of the prompt is not in the vocabulary.
    #[error(
        "token {token} is out of range (0..={}); use token ids of this model's vocabulary",
        .n_vocab.saturating_sub(1)
    )]
    TokenOutOfRange {
        /// Token id.
        token: u32,
        /// Number of tokens in the vocabulary.
        n_vocab: usize,
    },
    /// The prompt has no tokens.
    #[error("the prompt is empty; it needs at least one token")]
    EmptyPrompt,
}

/// The scheduler has ended, or it ended before it ran the command.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the scheduler has ended")]
pub struct Stopped;

/// What the scheduler and its handles share.
pub(super) struct Shared {
    pub queue: Queue,
    pub metrics: Metrics,
    pub traces: SharedTraceCounts,
    pub counters: Option<SharedCounters>,
    pub n_ctx: usize,
    pub n_vocab: usize,
}

/// Submits requests to a scheduler and reads its counts. Clones refer to the same scheduler.
#[derive(Clone)]
pub struct Handle(pub(super) Arc<Shared>);

impl Handle {
    /// Puts a request into the queue. Returns its events, which end with [`Event::Finished`] or [`Event::Failed`]. Dropping the
    /// receiver cancels the request. The receiver buffers at most one event for each generated token, so that a slow reader
    /// does not delay other requests. Does not block.
    ///
    /// # Errors
    /// The queue is full, the scheduler shuts down, or the prompt is empty, too long or has a token outside the vocabulary.
    pub fn submit(
        &self,
        request: GenerationRequest,
    ) -> Result<UnboundedReceiver<Event>, SubmitError> {
        let submitted = self.check(&request).and_then(|()| {
            let (events, receiver) = unbounded_channel();
            let queued = Queued {
                request,
                events,
                submitted: Instant::now(),
            };
            match self.0.queue.push(queued) {
                Ok(()) => Ok(receiver),
                Err(Rejected::Full) => Err(SubmitError::QueueFull),
                Err(Rejected::Stopping) => Err(SubmitError::ShuttingDown),
            }
        });
        submitted.inspect_err(|_| self.0.metrics.rejected())
    }

    fn check(&self, request: &GenerationRequest) -> Result<(), SubmitError> {
        let Shared { n_ctx, n_vocab, .. } = *self.0;
        let n_prompt = request.prompt.len();
        if n_prompt == 0 {
            return Err(SubmitError::EmptyPrompt);
        }
        if n_prompt >= n_ctx {
            return Err(SubmitError::PromptTooLong { n_prompt, n_ctx });
        }
        match request.prompt.iter().find(|&&t| t as usize >= n_vocab) {
            Some(&token) => Err(SubmitError::TokenOutOfRange { token, n_vocab }),
            None => Ok(()),
        }
    }

    /// State and counts of the scheduler.
    pub fn metrics(&self) -> MetricsSnapshot {
        let [n_slots, n_running, n_queued, queue_capacity] = self.0.queue.numbers();
        MetricsSnapshot {
            n_slots,
            n_running,
            n_queued,
            queue_capacity,
            traces: self.0.traces.get(),
            ..self.0.metrics.lock().clone()
        }
    }

    /// The counters of the expert cache, which can be read at any time; `None` without a cache.
    pub fn counters(&self) -> Option<SharedCounters> {
        self.0.counters.clone()
    }

    /// Calls `command` with the session on the thread of the scheduler, between two passes, and returns its result. Blocks until
    /// then; async code calls it with `spawn_blocking`.
    ///
    /// # Errors
    /// [`Stopped`] if the scheduler ends before.
    pub fn with_session<R: Send + 'static>(
        &self,
        command: impl FnOnce(&mut dyn BatchSession) -> R + Send + 'static,
    ) -> Result<R, Stopped> {
        let (result, receiver) = mpsc::sync_channel(1);
        let command = Box::new(move |session: &mut dyn BatchSession| {
            // A caller that has ended needs no result.
            let _ = result.send(command(session));
        });
        self.0.queue.push_command(command).map_err(|_| Stopped)?;
        receiver.recv().map_err(|_| Stopped)
    }

    /// Updates the hot cache with [`BatchSession::update_cache`], and counts the update. Blocks like [`Handle::with_session`].
    ///
    /// # Errors
    /// See [`Handle::with_session`].
    pub fn update_cache(
        &self,
        learn: LearnFile,
    ) -> Result<Option<moe_engine::Result<CacheUpdate>>, Stopped> {
        let updated = self.with_session(move |session| session.update_cache(&learn))?;
        if let Some(Ok(update)) = &updated {
            self.0.metrics.updated_cache(update.exchanged);
        }
        Ok(updated)
    }

    /// Whether the scheduler accepts requests: it has not ended, and no shutdown was started.
    pub fn is_accepting(&self) -> bool {
        self.0.queue.is_accepting()
    }

    /// Starts the shutdown: later requests are rejected. [`Scheduler::run`](super::Scheduler::run) returns after all running and
    /// queued requests have ended. Does not block.
    pub fn shutdown(&self) {
        self.0.queue.close();
    }
}
