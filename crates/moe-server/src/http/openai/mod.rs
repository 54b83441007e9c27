//! The endpoints of OpenAI's API.

pub(super) mod chat;
pub(super) mod completions;
mod logprobs;
pub(super) mod models;

use std::time::{SystemTime, UNIX_EPOCH};

pub(super) use logprobs::Pieces;
use moe_engine::SamplerParams;
use serde::Deserialize;
use serde_json::{Value, json};

use super::error::ApiError;
use super::integer::Integer;
use super::job::{EndReason, Ending};
use super::sampling::random;

/// Sampling parameters that a request does not contain.
const SAMPLING: SamplerParams = SamplerParams {
    temperature: 1.0,
    top_k: 0,
    top_p: 1.0,
    min_p: 0.0,
    seed: 0,
};

/// Settings of a stream.
#[derive(Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
}

/// Whether the stream that a request asks for has an event with token counts.
fn includes_usage(options: Option<&StreamOptions>) -> bool {
    options.and_then(|options| options.include_usage) == Some(true)
}

/// Checks a limit on generated tokens.
fn check_max_tokens(param: &str, max_tokens: Option<Integer>) -> Result<Option<usize>, ApiError> {
    if let Some(Integer(n)) = max_tokens.filter(|n| n.0 < 1) {
        let message = format!("{param}: {n} is out of range (1..)");
        return Err(ApiError::param(param, message));
    }
    Ok(max_tokens.map(Integer::as_limit))
}

/// The keys that all objects of a response share.
struct Header {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
}

impl Header {
    fn new(prefix: &str, object: &'static str, model: &str) -> Header {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        Header {
            id: format!("{prefix}-{:016x}", random()),
            object,
            created: now.unwrap_or_default().as_secs(),
            model: model.to_owned(),
        }
    }

    /// An object of the response.
    fn with(&self, choices: Vec<Value>) -> Value {
        json!({
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        })
    }

    /// An event of a stream. With `includes_usage`, all events have the key `usage`.
    fn event(&self, choices: Vec<Value>, includes_usage: bool) -> Value {
        let mut event = self.with(choices);
        if includes_usage {
            event["usage"] = Value::Null;
        }
        event
    }

    /// A response with token counts, or the last event of a stream with them.
    fn with_usage<'a>(
        &self,
        choices: Vec<Value>,
        endings: impl Iterator<Item = &'a Ending> + Clone,
    ) -> Value {
        let prompt: usize = endings.clone().map(|ending| ending.usage.n_prompt).sum();
        let completion: usize = endings.map(|ending| ending.usage.n_generated).sum();
        let mut object = self.with(choices);
        object["usage"] = json!({
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        });
        object
    }
}

/// `finish_reason` of a choice.
fn finish_reason(ending: &Ending) -> &'static str {
    match ending.reason {
        EndReason::EndOfGeneration | EndReason::StopSequence(_) => "stop",
        EndReason::Limit | EndReason::TimeLimit => "length",
    }
}
