//! Parameters that all endpoints for text share, and prompts.

use std::hash::{BuildHasher, RandomState};
use std::ops::RangeInclusive;

use moe_engine::SamplerParams;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::Server;
use super::body::JsonBody;
use super::error::ApiError;
use super::integer::{Int, Integer};

/// Maximum number of the most probable tokens that a request may ask for.
pub(super) const MAX_PROBS: usize = 20;

/// Maximum number of stop sequences.
const MAX_STOPS: usize = 16;

/// Parameters of a body that all endpoints for text share.
#[derive(Deserialize)]
pub(super) struct Sampling {
    temperature: Option<f32>,
    top_k: Option<Integer>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    seed: Option<Integer>,
    stop: Option<Stops>,
    ignore_eos: Option<bool>,
    stream: Option<bool>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a string or a list of strings")]
enum Stops {
    One(String),
    Several(Vec<String>),
}

impl Sampling {
    /// The sampling parameters. `default` contains the values of missing keys, except the seed.
    pub(super) fn params(&self, default: SamplerParams) -> Result<SamplerParams, ApiError> {
        let in_range = |name, value: Option<f32>, default, range: RangeInclusive<f32>| {
            let value = value.unwrap_or(default);
            let (min, max) = (*range.start(), *range.end());
            let is_valid = range.contains(&value);
            is_valid.then_some(value).ok_or_else(|| {
                ApiError::param(
                    name,
                    format!("{name}: {value} is out of range ({min}..={max})"),
                )
            })
        };
        Ok(SamplerParams {
            temperature: in_range(
                "temperature",
                self.temperature,
                default.temperature,
                0.0..=100.0,
            )?,
            top_k: self.top_k.map_or(default.top_k, Integer::as_limit),
            top_p: in_range("top_p", self.top_p, default.top_p, 0.0..=1.0)?,
            min_p: in_range("min_p", self.min_p, default.min_p, 0.0..=1.0)?,
            seed: match self.seed {
                None | Some(Integer(-1)) => random(),
                // The low 64 bits.
                Some(Integer(seed)) => seed as u64,
            },
        })
    }

    /// The stop sequences.
    pub(super) fn stops(&self) -> Result<Vec<String>, ApiError> {
        let stops = match &self.stop {
            None => Vec::new(),
            Some(Stops::One(stop)) => vec![stop.clone()],
            Some(Stops::Several(stops)) => stops.clone(),
        };
        if stops.len() > MAX_STOPS {
            let message = format!("stop: more than {MAX_STOPS} sequences");
            return Err(ApiError::param("stop", message));
        }
        Ok(stops)
    }

    /// Whether generation continues after an end-of-generation token.
    pub(super) fn ignore_eos(&self) -> bool {
        self.ignore_eos.unwrap_or(false)
    }

    /// Whether the answer is a stream of events.
    pub(super) fn is_stream(&self) -> bool {
        self.stream.unwrap_or(false)
    }
}

/// Values with which an unsupported key has no effect.
enum Neutral {
    Numbers(&'static [f64]),
    False,
    EmptyText,
    EmptyList,
    EmptyObject,
    EmptyListOrObject,
    /// An object with the type `text`.
    TextFormat,
}

impl Neutral {
    fn contains(&self, value: &Value) -> bool {
        match self {
            Neutral::Numbers(numbers) => {
                let value = value.as_f64();
                value.is_some_and(|value| numbers.contains(&value))
            }
            Neutral::False => *value == Value::Bool(false),
            Neutral::EmptyText => value.as_str().is_some_and(str::is_empty),
            Neutral::EmptyList => value.as_array().is_some_and(Vec::is_empty),
            Neutral::EmptyObject => value.as_object().is_some_and(Map::is_empty),
            Neutral::EmptyListOrObject => {
                Neutral::EmptyList.contains(value) || Neutral::EmptyObject.contains(value)
            }
            Neutral::TextFormat => value["type"] == "text",
        }
    }
}

/// Keys of OpenAI's API and of llama-server that would change the text, but are not supported.
const UNSUPPORTED: [(&str, Neutral); 18] = [
    ("n", Neutral::Numbers(&[1.0])),
    ("best_of", Neutral::Numbers(&[1.0])),
    ("echo", Neutral::False),
    ("suffix", Neutral::EmptyText),
    ("logit_bias", Neutral::EmptyListOrObject),
    ("presence_penalty", Neutral::Numbers(&[0.0])),
    ("frequency_penalty", Neutral::Numbers(&[0.0])),
    ("repeat_penalty", Neutral::Numbers(&[1.0])),
    ("dry_multiplier", Neutral::Numbers(&[0.0])),
    ("xtc_probability", Neutral::Numbers(&[0.0])),
    ("typical_p", Neutral::Numbers(&[1.0])),
    ("top_n_sigma", Neutral::Numbers(&[-1.0, 0.0])),
    ("dynatemp_range", Neutral::Numbers(&[0.0])),
    ("mirostat", Neutral::Numbers(&[0.0])),
    ("grammar", Neutral::EmptyText),
    ("json_schema", Neutral::EmptyObject),
    ("response_format", Neutral::TextFormat),
    ("lora", Neutral::EmptyList),
];

/// # Errors
/// The request asks for something that would change the text, but that the server does not support.
pub(super) fn check_unsupported(body: &JsonBody) -> Result<(), ApiError> {
    for (key, neutral) in &UNSUPPORTED {
        if body.get(key).is_some_and(|value| !neutral.contains(value)) {
            let message = format!("{key} is not supported; remove it from the request");
            return Err(ApiError::param(*key, message));
        }
    }
    Ok(())
}

/// A random number, for seeds and ids.
pub(super) fn random() -> u64 {
    RandomState::new().hash_one(0)
}

/// Checks the number of most probable tokens that a request asks for.
pub(super) fn check_n_probs(
    param: &str,
    n_probs: Option<Integer>,
) -> Result<Option<usize>, ApiError> {
    let n_probs = n_probs.map(|n| n.in_range(param, 0..=MAX_PROBS));
    n_probs.transpose()
}

/// One or several prompts.
#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "expected a string, a list of token ids, or a list of strings or of lists of token ids"
)]
pub(super) enum Prompt {
    /// A text.
    Text(String),
    /// The tokens of a prompt.
    Tokens(Vec<Int<u32>>),
    /// Several texts.
    Texts(Vec<String>),
    /// The tokens of several prompts.
    TokenLists(Vec<Vec<Int<u32>>>),
}

impl Prompt {
    /// The tokens of each prompt: 1 to `max` prompts, none of which is empty.
    pub(super) async fn tokenize(
        self,
        server: &Server,
        max: usize,
    ) -> Result<Vec<Vec<u32>>, ApiError> {
        let ids = |tokens: Vec<Int<u32>>| tokens.into_iter().map(|id| id.0).collect::<Vec<_>>();
        let prompts = match self {
            Prompt::Text(text) => texts(server, vec![text], max).await?,
            Prompt::Texts(prompts) => texts(server, prompts, max).await?,
            Prompt::Tokens(tokens) => vec![ids(tokens)],
            Prompt::TokenLists(lists) => lists.into_iter().map(ids).collect(),
        };
        check_prompts(prompts.len(), max, prompts.iter().any(Vec::is_empty))?;
        Ok(prompts)
    }
}

async fn texts(server: &Server, texts: Vec<String>, max: usize) -> Result<Vec<Vec<u32>>, ApiError> {
    check_prompts(texts.len(), max, texts.iter().any(String::is_empty))?;
    let tokens = server.blocking(move |backend| {
        let tokens = texts.iter().map(|text| backend.tokenize(text, true, true));
        tokens.collect::<Result<Vec<_>, _>>()
    });
    tokens
        .await?
        .map_err(|message| ApiError::param("prompt", format!("prompt: {message}")))
}

/// # Errors
/// The number of prompts is not 1 to `max`, or a prompt is empty.
fn check_prompts(n: usize, max: usize, is_any_empty: bool) -> Result<(), ApiError> {
    let message = match n {
        0 => "prompt: the list is empty".to_owned(),
        _ if n > max => format!("prompt: {n} prompts are out of range (1..={max})"),
        _ if is_any_empty => "prompt: a prompt is empty; it needs at least one token".to_owned(),
        _ => return Ok(()),
    };
    Err(ApiError::param("prompt", message))
}
