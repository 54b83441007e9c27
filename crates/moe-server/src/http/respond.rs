//! Responses of generations: one JSON body, or a stream of server-sent events.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;

use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream::{self, SelectAll, Stream, StreamExt};
use serde_json::Value;

use super::Shared;
use super::error::{ApiError, json_response};
use super::job::{Chunk, Ending, Generation, Job, Update};

/// The format of an endpoint. `index` is the position of the prompt in the request.
pub(super) trait Format: Send + 'static {
    /// Name in log lines and metrics.
    const ENDPOINT: &'static str;
    /// Data of the event after all others.
    const LAST_EVENT: Option<&'static str>;

    /// The first event of a text.
    fn start(&self, _index: usize) -> Option<Value> {
        None
    }

    /// An event with a part of the text.
    fn chunk(&self, index: usize, chunk: &Chunk) -> Value;

    /// The last event of a text, after the rest of the text.
    fn end(&self, index: usize, ending: &Ending) -> Value;

    /// The event with the token counts of all texts.
    fn usage(&self, _endings: &[Ending]) -> Option<Value> {
        None
    }

    /// The body of a response that is not a stream: complete texts.
    fn complete(&self, texts: &[(Chunk, Ending)]) -> Value;
}

/// Queues jobs and returns the response. All jobs are queued, or none.
pub(super) async fn respond<F: Format>(
    server: &Shared,
    jobs: Vec<Job>,
    is_stream: bool,
    format: F,
) -> Result<Response, ApiError> {
    let has_failed = Arc::default();
    let start = |job: Job| job.start(server, F::ENDPOINT, &has_failed);
    let generations = jobs.into_iter().map(start);
    let generations = generations.collect::<Result<Vec<_>, _>>()?;
    if is_stream {
        return Ok(events(generations, format));
    }
    let mut texts = Vec::new();
    for generation in generations {
        texts.push(complete(generation).await?);
    }
    Ok(json_response(&format.complete(&texts)))
}

/// The complete text of a generation.
async fn complete(mut generation: Generation) -> Result<(Chunk, Ending), ApiError> {
    let mut all = Chunk::default();
    let mut add = |chunk: Chunk| {
        all.text.push_str(&chunk.text);
        all.tokens.extend(chunk.tokens);
    };
    loop {
        match generation.next().await {
            Some(Update::Chunk(chunk)) => add(chunk),
            Some(Update::End(chunk, ending)) => {
                add(chunk);
                return Ok((all, ending));
            }
            Some(Update::Failed(error)) => return Err(error),
            None => return Err(ApiError::internal("the request ended without a result")),
        }
    }
}

fn events<F: Format>(generations: Vec<Generation>, format: F) -> Response {
    let starts = (0..generations.len()).filter_map(|index| format.start(index));
    let events = Events {
        ready: starts.map(|start| start.to_string()).collect(),
        updates: stream::select_all(generations.into_iter().enumerate().map(updates)),
        endings: Vec::new(),
        is_done: false,
        format,
    };
    let events = stream::unfold(events, async |mut events| {
        let data = events.next().await?;
        let event = Event::default().data(data);
        Some((Ok::<_, Infallible>(event), events))
    });
    Sse::new(events)
        .keep_alive(KeepAlive::default())
        .into_response()
}

type Updates = Pin<Box<dyn Stream<Item = (usize, Update)> + Send>>;

/// The steps of a generation with its index.
fn updates((index, generation): (usize, Generation)) -> Updates {
    Box::pin(stream::unfold(
        generation,
        move |mut generation| async move {
            let update = generation.next().await?;
            Some(((index, update), generation))
        },
    ))
}

/// The data of the events of a response. Texts of several prompts are interleaved.
struct Events<F> {
    ready: VecDeque<String>,
    updates: SelectAll<Updates>,
    endings: Vec<Ending>,
    is_done: bool,
    format: F,
}

impl<F: Format> Events<F> {
    async fn next(&mut self) -> Option<String> {
        loop {
            if let Some(data) = self.ready.pop_front() {
                return Some(data);
            }
            if self.is_done {
                return None;
            }
            match self.updates.next().await {
                Some((index, Update::Chunk(chunk))) => self.add_chunk(index, &chunk),
                Some((index, Update::End(chunk, ending))) => {
                    self.add_chunk(index, &chunk);
                    self.add(&self.format.end(index, &ending));
                    self.endings.push(ending);
                }
                Some((_, Update::Failed(error))) => {
                    self.add(&error.body());
                    self.updates.clear();
                    self.is_done = true;
                }
                None => {
                    if let Some(usage) = self.format.usage(&self.endings) {
                        self.add(&usage);
                    }
                    self.ready.extend(F::LAST_EVENT.map(str::to_owned));
                    self.is_done = true;
                }
            }
        }
    }

    fn add_chunk(&mut self, index: usize, chunk: &Chunk) {
        if !chunk.text.is_empty() || !chunk.tokens.is_empty() {
            self.add(&self.format.chunk(index, chunk));
        }
    }

    fn add(&mut self, value: &Value) {
        self.ready.push_back(value.to_string());
    }
}
