//! `POST /completion`, as in llama-server.

use axum::extract::State;
use axum::response::Response;
use moe_engine::SamplerParams;
use serde::Deserialize;
use serde_json::{Value, json};

use super::Shared;
use super::body::JsonBody;
use super::error::ApiError;
use super::integer::Integer;
use super::job::{Chunk, EndReason, Ending, Job, ms};
use super::openai::Pieces;
use super::respond::{Format, respond};
use super::sampling::{Prompt, Sampling, check_n_probs, check_unsupported};
use crate::generation::{GenerationRequest, Usage};

/// Sampling parameters that a request does not contain.
const SAMPLING: SamplerParams = SamplerParams {
    temperature: 0.8,
    top_k: 40,
    top_p: 0.95,
    min_p: 0.05,
    seed: 0,
};

#[derive(Deserialize)]
struct Body {
    prompt: Prompt,
    n_predict: Option<Integer>,
    /// Used without `n_predict`, as in llama-server.
    max_tokens: Option<Integer>,
    n_probs: Option<Integer>,
    return_tokens: Option<bool>,
}

/// `POST /completion`.
pub(super) async fn create(
    State(server): State<Shared>,
    body: JsonBody,
) -> Result<Response, ApiError> {
    check_unsupported(&body)?;
    let sampling: Sampling = body.read()?;
    let body: Body = body.read()?;
    let n_probs = check_n_probs("n_probs", body.n_probs)?.unwrap_or(0);
    let n_predict = body.n_predict.or(body.max_tokens);
    let template = GenerationRequest {
        prompt: Vec::new(),
        sampling: sampling.params(SAMPLING)?,
        // Negative numbers: no limit.
        n_predict: n_predict.filter(|n| n.0 >= 0).map(Integer::as_limit),
        n_probs: (n_probs > 0).then_some(n_probs),
        ignore_eos: sampling.ignore_eos(),
        deadline: None,
    };
    let stops = sampling.stops()?;
    let prompts = body.prompt.tokenize(&server, 1).await?;
    let jobs = Job::of_prompts(prompts, &template, &stops);
    let format = Completion {
        model: server.backend.model().name.clone(),
        pieces: Pieces::of(&server),
        has_probs: n_probs > 0,
        has_tokens: sampling.is_stream() || body.return_tokens == Some(true),
    };
    respond(&server, jobs, sampling.is_stream(), format).await
}

struct Completion {
    model: String,
    pieces: Pieces,
    has_probs: bool,
    has_tokens: bool,
}

impl Completion {
    fn part(&self, chunk: &Chunk) -> Value {
        let tokens = chunk.tokens.iter().filter(|_| self.has_tokens);
        let tokens: Vec<u32> = tokens.map(|token| token.id).collect();
        let mut part = json!({"index": 0, "content": chunk.text, "tokens": tokens, "stop": false});
        if self.has_probs {
            part["completion_probabilities"] = self.pieces.llama(&chunk.tokens);
        }
        part
    }

    fn last(&self, chunk: &Chunk, ending: &Ending) -> Value {
        let (stop_type, stopping_word) = match &ending.reason {
            EndReason::EndOfGeneration => ("eos", ""),
            EndReason::StopSequence(stop) => ("word", &**stop),
            EndReason::Limit | EndReason::TimeLimit => ("limit", ""),
        };
        let mut last = self.part(chunk);
        for (key, value) in [
            ("stop", json!(true)),
            ("model", json!(self.model)),
            ("stop_type", json!(stop_type)),
            ("stopping_word", json!(stopping_word)),
            ("timed_out", json!(ending.reason == EndReason::TimeLimit)),
            ("tokens_predicted", json!(ending.usage.n_generated)),
            ("tokens_evaluated", json!(ending.usage.n_prompt)),
            ("truncated", json!(false)),
            ("timings", timings(&ending.usage)),
        ] {
            last[key] = value;
        }
        last
    }
}

fn timings(usage: &Usage) -> Value {
    let (prompt_ms, predicted_ms) = (ms(usage.prompt_time), ms(usage.generation_time));
    let ratio = |value: f64, of: f64| if of > 0.0 { value / of } else { 0.0 };
    let (n_prompt, n_predicted) = (usage.n_prompt as f64, usage.n_generated as f64);
    json!({
        "prompt_n": usage.n_prompt,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": ratio(prompt_ms, n_prompt),
        "prompt_per_second": ratio(n_prompt * 1e3, prompt_ms),
        "predicted_n": usage.n_generated,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": ratio(predicted_ms, n_predicted),
        "predicted_per_second": ratio(n_predicted * 1e3, predicted_ms),
    })
}

impl Format for Completion {
    const ENDPOINT: &'static str = "completion";
    const LAST_EVENT: Option<&'static str> = None;

    fn chunk(&self, _index: usize, chunk: &Chunk) -> Value {
        self.part(chunk)
    }

    fn end(&self, _index: usize, ending: &Ending) -> Value {
        self.last(&Chunk::default(), ending)
    }

    fn complete(&self, texts: &[(Chunk, Ending)]) -> Value {
        let last = texts.first();
        last.map_or(Value::Null, |(chunk, ending)| self.last(chunk, ending))
    }
}
