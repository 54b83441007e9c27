//! Parameters that all endpoints for text share, and prompts.

use std::hash::{BuildHasher, RandomState};
use std::ops::RangeInclusive;

use moe_engine::SamplerParams;
use serde::Deserialize;

use super::Server;
use super::error::ApiError;

/// Maximum number of the most probable tokens that a request may ask for.
pub(super) const MAX_PROBS: usize = 20;

/// Maximum number of stop sequences.
const MAX_STOPS: usize = 16;

/// Parameters of a body that all endpoints for text share.
#[derive(Deserialize)]
pub(super) struct Sampling {
    temperature: Option<f32>,
    top_k: Option<i64>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    seed: Option<i64>,
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
        let top_k = self.top_k.map(|top_k| usize::try_from(top_k.max(0)));
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
            top_k: top_k.map_or(default.top_k, |top_k| top_k.unwrap_or(0)),
            top_p: in_range("top_p", self.top_p, default.top_p, 0.0..=1.0)?,
            min_p: in_range("min_p", self.min_p, default.min_p, 0.0..=1.0)?,
            seed: match self.seed {
                None | Some(-1) => random(),
                Some(seed) => seed.cast_unsigned(),
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

/// A random number, for seeds and ids.
pub(super) fn random() -> u64 {
    RandomState::new().hash_one(0)
}

/// Checks the number of most probable tokens that a request asks for.
pub(super) fn check_n_probs(param: &str, n_probs: usize) -> Result<usize, ApiError> {
    if n_probs > MAX_PROBS {
        let message = format!("{param}: {n_probs} is out of range (0..={MAX_PROBS})");
        return Err(ApiError::param(param, message));
    }
    Ok(n_probs)
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
    Tokens(Vec<u32>),
    /// Several texts.
    Texts(Vec<String>),
    /// The tokens of several prompts.
    TokenLists(Vec<Vec<u32>>),
}

impl Prompt {
    /// The tokens of each prompt.
    pub(super) async fn tokenize(self, server: &Server) -> Result<Vec<Vec<u32>>, ApiError> {
        let texts = match self {
            Prompt::Text(text) => vec![text],
            Prompt::Texts(texts) => texts,
            Prompt::Tokens(tokens) => return Ok(vec![tokens]),
            Prompt::TokenLists(lists) => return Ok(lists),
        };
        let tokens = server.blocking(move |backend| {
            let tokens = texts.iter().map(|text| backend.tokenize(text, true, true));
            tokens.collect::<Result<Vec<_>, _>>()
        });
        tokens
            .await?
            .map_err(|message| ApiError::param("prompt", format!("prompt: {message}")))
    }
}
