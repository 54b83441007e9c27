//! The path of all endpoints from a request to its text: [`Job`], then [`Generation`].

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::error::ApiError;
use super::metrics::{Outcome, Record};
use super::serve::Phase;
use super::text::TextStream;
use super::{Backend, EventReceiver, Shared};
use crate::generation::{Event, FinishReason, GenerationRequest, TokenProbability, Usage};

/// A request to the scheduler, and where its text ends.
pub(super) struct Job {
    /// Request. Its deadline is set by [`Job::start`].
    pub(super) request: GenerationRequest,
    /// Stop sequences.
    pub(super) stops: Vec<String>,
}

/// A generated token.
pub(super) struct Token {
    /// Token id.
    pub(super) id: u32,
    /// Its bytes.
    pub(super) bytes: Vec<u8>,
    /// Number of characters of the generated text before the token.
    pub(super) offset: usize,
    /// Log probability, if requested.
    pub(super) logprob: Option<f32>,
    /// The most probable tokens, if requested.
    pub(super) top: Vec<TokenProbability>,
}

/// A part of the text, and the tokens that start in it.
#[derive(Default)]
pub(super) struct Chunk {
    /// Text.
    pub(super) text: String,
    /// Tokens.
    pub(super) tokens: Vec<Token>,
}

/// Why a text ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum EndReason {
    /// The model ended the text.
    EndOfGeneration,
    /// A stop sequence of the request.
    StopSequence(String),
    /// A limit on tokens or the context.
    Limit,
    /// The time limit of the server.
    TimeLimit,
}

/// The end of a text.
#[derive(Clone, Debug)]
pub(super) struct Ending {
    /// Why it ended.
    pub(super) reason: EndReason,
    /// Token counts and times.
    pub(super) usage: Usage,
}

/// A step of a generation. `End` and `Failed` are the last ones.
pub(super) enum Update {
    /// More text.
    Chunk(Chunk),
    /// The rest of the text, and its end.
    End(Chunk, Ending),
    /// The request failed.
    Failed(ApiError),
}

impl Job {
    /// A job for each prompt, with the other parameters of `template`.
    pub(super) fn of_prompts(
        prompts: Vec<Vec<u32>>,
        template: &GenerationRequest,
        stops: &[String],
    ) -> Vec<Job> {
        let job = |prompt| Job {
            request: GenerationRequest {
                prompt,
                ..template.clone()
            },
            stops: stops.to_vec(),
        };
        prompts.into_iter().map(job).collect()
    }

    /// Queues the request. `endpoint` is the name in log lines and metrics. `has_failed` is shared by the prompts of a request, of which
    /// all fail if one fails.
    pub(super) fn start(
        mut self,
        server: &Shared,
        endpoint: &'static str,
        has_failed: &Arc<AtomicBool>,
    ) -> Result<Generation, ApiError> {
        let now = Instant::now();
        let n_prompt = self.request.prompt.len();
        let mut record = Record::new(server, endpoint, n_prompt, has_failed);
        self.request.deadline = now.checked_add(server.options.request_timeout);
        let submitted = server
            .check_running()
            .and_then(|()| Ok(server.backend.submit(self.request)?));
        let events = submitted.inspect_err(|_| record.fail(Outcome::Rejected))?;
        Ok(Generation {
            backend: Arc::clone(&server.backend),
            phase: server.phase.clone(),
            events,
            text: TextStream::new(self.stops),
            pending: VecDeque::new(),
            n_chars: 0,
            record,
            is_done: false,
        })
    }
}

/// A queued or running request. Dropping it cancels the request.
pub(super) struct Generation {
    backend: Arc<dyn Backend>,
    phase: watch::Receiver<Phase>,
    events: EventReceiver,
    text: TextStream,
    /// Tokens that do not start in returned text.
    pending: VecDeque<Token>,
    /// Number of characters of returned text.
    n_chars: usize,
    record: Record,
    is_done: bool,
}

impl Generation {
    /// The next step; `None` after the last one.
    pub(super) async fn next(&mut self) -> Option<Update> {
        while !self.is_done {
            let event = tokio::select! {
                event = self.events.recv() => event,
                () = stopping(&mut self.phase) => {
                    return Some(self.fail(Outcome::Shutdown, ApiError::shutting_down()));
                }
            };
            let update = match event {
                Some(Event::Token {
                    token,
                    logprob,
                    top,
                }) => self.add_token(token, logprob, top),
                Some(Event::Finished { reason, usage }) => Some(self.finish(reason, usage)),
                Some(Event::Failed(message)) => Some(self.failed(message)),
                None => Some(self.failed("the request ended without a result")),
            };
            if update.is_some() {
                return update;
            }
        }
        None
    }

    fn add_token(
        &mut self,
        id: u32,
        logprob: Option<f32>,
        top: Vec<TokenProbability>,
    ) -> Option<Update> {
        self.record.add_token();
        let bytes = self.backend.piece(id);
        let offset = self.n_chars + self.text.n_held();
        let (text, stop) = self.text.push(&bytes);
        self.pending.push_back(Token {
            id,
            bytes,
            offset,
            logprob,
            top,
        });
        let chunk = self.chunk(text, false);
        if let Some(stop) = stop {
            self.events.close();
            let usage = self.record.usage();
            let reason = EndReason::StopSequence(stop);
            return Some(self.end(Outcome::StopSequence, chunk, reason, usage));
        }
        let is_empty = chunk.text.is_empty() && chunk.tokens.is_empty();
        (!is_empty).then_some(Update::Chunk(chunk))
    }

    fn finish(&mut self, reason: FinishReason, usage: Usage) -> Update {
        let reason = match reason {
            FinishReason::EndOfGeneration => EndReason::EndOfGeneration,
            FinishReason::TimeLimit if self.record.n_generated() == 0 => {
                let message =
                    "the time limit passed before the first token; send the request again later";
                return self.fail(Outcome::Failed, ApiError::timeout(message));
            }
            FinishReason::TimeLimit => EndReason::TimeLimit,
            FinishReason::Length | FinishReason::ContextFull => EndReason::Limit,
            // The receiver exists, so that the scheduler has no reason to cancel.
            FinishReason::Cancelled => return self.failed("the request was cancelled"),
        };
        let text = self.text.finish();
        let chunk = self.chunk(text, true);
        self.end(Outcome::Finished, chunk, reason, usage)
    }

    /// Text and the tokens that start in it, or all remaining tokens.
    fn chunk(&mut self, text: String, is_last: bool) -> Chunk {
        self.n_chars += text.chars().count();
        let is_in = |token: &Token| is_last || token.offset < self.n_chars;
        let n_tokens = self.pending.iter().take_while(|token| is_in(token)).count();
        Chunk {
            text,
            tokens: self.pending.drain(..n_tokens).collect(),
        }
    }

    fn end(&mut self, outcome: Outcome, chunk: Chunk, reason: EndReason, usage: Usage) -> Update {
        self.is_done = true;
        self.record.outcome = outcome;
        Update::End(chunk, Ending { reason, usage })
    }

    fn failed(&mut self, message: impl Into<String>) -> Update {
        self.fail(Outcome::Failed, ApiError::internal(message))
    }

    fn fail(&mut self, outcome: Outcome, error: ApiError) -> Update {
        self.is_done = true;
        self.events.close();
        self.record.fail(outcome);
        Update::Failed(error)
    }
}

/// Waits until running requests have to end.
async fn stopping(phase: &mut watch::Receiver<Phase>) {
    if phase
        .wait_for(|phase| matches!(phase, Phase::Stopping | Phase::Stopped))
        .await
        .is_err()
    {
        // The server is not shut down through this channel.
        std::future::pending::<()>().await;
    }
}

/// Milliseconds of a duration.
pub(super) fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
