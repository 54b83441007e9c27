//! `POST /v1/completions`.

use axum::extract::State;
use axum::response::Response;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    Header, Pieces, SAMPLING, StreamOptions, check_max_tokens, finish_reason, includes_usage,
};
use crate::generation::GenerationRequest;
use crate::http::Shared;
use crate::http::body::JsonBody;
use crate::http::error::ApiError;
use crate::http::integer::Integer;
use crate::http::job::{Chunk, Ending, Job};
use crate::http::respond::{Format, respond};
use crate::http::sampling::{Prompt, Sampling, check_n_probs, check_unsupported};

/// Maximum number of prompts of a request.
const MAX_PROMPTS: usize = 32;

/// `max_tokens` of a request without it.
const MAX_TOKENS: usize = 16;

#[derive(Deserialize)]
struct Body {
    prompt: Prompt,
    max_tokens: Option<Integer>,
    logprobs: Option<Integer>,
    stream_options: Option<StreamOptions>,
}

/// `POST /v1/completions`.
pub(in crate::http) async fn create(
    State(server): State<Shared>,
    body: JsonBody,
) -> Result<Response, ApiError> {
    check_unsupported(&body)?;
    let sampling: Sampling = body.read()?;
    let body: Body = body.read()?;
    let template = GenerationRequest {
        prompt: Vec::new(),
        sampling: sampling.params(SAMPLING)?,
        n_predict: check_max_tokens("max_tokens", body.max_tokens)?.or(Some(MAX_TOKENS)),
        n_probs: check_n_probs("logprobs", body.logprobs)?,
        ignore_eos: sampling.ignore_eos(),
        deadline: None,
    };
    let stops = sampling.stops()?;
    let prompts = body.prompt.tokenize(&server, MAX_PROMPTS).await?;
    check_capacity(&server, prompts.len())?;
    let jobs = Job::of_prompts(prompts, &template, &stops);
    let format = Completion {
        header: Header::new("cmpl", "text_completion", &server.backend.model().name),
        pieces: Pieces::of(&server),
        has_logprobs: template.n_probs.is_some(),
        includes_usage: includes_usage(body.stream_options.as_ref()),
    };
    respond(&server, jobs, sampling.is_stream(), format).await
}

/// # Errors
/// The request could never be accepted: not even an idle server can run and queue `n_prompts` prompts.
fn check_capacity(server: &Shared, n_prompts: usize) -> Result<(), ApiError> {
    let metrics = server.backend.metrics();
    let limit = metrics.n_slots.saturating_add(metrics.queue_capacity);
    if n_prompts <= limit {
        return Ok(());
    }
    let message = format!(
        "prompt: {n_prompts} prompts are out of range (1..={limit}): the server runs and queues at most {limit}; send fewer prompts"
    );
    Err(ApiError::param("prompt", message))
}

struct Completion {
    header: Header,
    pieces: Pieces,
    has_logprobs: bool,
    includes_usage: bool,
}

impl Completion {
    fn choice(&self, index: usize, chunk: &Chunk, ending: Option<&Ending>) -> Value {
        let logprobs = self
            .has_logprobs
            .then(|| self.pieces.completion(&chunk.tokens));
        json!({
            "text": chunk.text,
            "index": index,
            "logprobs": logprobs,
            "finish_reason": ending.map(finish_reason),
        })
    }
}

impl Format for Completion {
    const ENDPOINT: &'static str = "completions";
    const LAST_EVENT: Option<&'static str> = Some("[DONE]");

    fn chunk(&self, index: usize, chunk: &Chunk) -> Value {
        let choice = self.choice(index, chunk, None);
        self.header.event(vec![choice], self.includes_usage)
    }

    fn end(&self, index: usize, ending: &Ending) -> Value {
        let mut choice = self.choice(index, &Chunk::default(), Some(ending));
        choice["logprobs"] = Value::Null;
        self.header.event(vec![choice], self.includes_usage)
    }

    fn usage(&self, endings: &[Ending]) -> Option<Value> {
        let usage = || self.header.with_usage(Vec::new(), endings.iter());
        self.includes_usage.then(usage)
    }

    fn complete(&self, texts: &[(Chunk, Ending)]) -> Value {
        let texts = texts.iter();
        let choices = texts.clone().enumerate();
        let choices = choices.map(|(index, (chunk, end))| self.choice(index, chunk, Some(end)));
        let endings = texts.map(|(_, ending)| ending);
        self.header.with_usage(choices.collect(), endings)
    }
}
