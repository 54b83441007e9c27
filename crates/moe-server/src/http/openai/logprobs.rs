//! Log probabilities in the two formats of OpenAI's API.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use crate::generation::TokenProbability;
use crate::http::job::Token;
use crate::http::{Backend, Shared};

/// The lowest log probability in a response. JSON cannot represent negative infinity.
const LOWEST: f32 = -9999.0;

/// The text of tokens.
pub(in crate::http) struct Pieces(Arc<dyn Backend>);

impl Pieces {
    pub(in crate::http) fn of(server: &Shared) -> Pieces {
        Pieces(Arc::clone(&server.backend))
    }

    /// `logprobs` of a choice of `/v1/completions`.
    pub(super) fn completion(&self, tokens: &[Token]) -> Value {
        let top = tokens.iter().map(|token| {
            let top = token.top.iter().map(|top| {
                let logprob = finite(Some(top.logprob));
                (name(&self.0.piece(top.token)), json!(logprob))
            });
            Value::Object(top.collect::<Map<_, _>>())
        });
        let each = |value: &dyn Fn(&Token) -> Value| tokens.iter().map(value).collect::<Vec<_>>();
        json!({
            "tokens": each(&|token| name(&token.bytes).into()),
            "token_logprobs": each(&|token| finite(token.logprob).into()),
            "top_logprobs": top.collect::<Vec<_>>(),
            "text_offset": each(&|token| token.offset.into()),
        })
    }

    /// `logprobs.content` of a choice of `/v1/chat/completions`.
    pub(super) fn chat(&self, tokens: &[Token]) -> Value {
        let entries = tokens.iter().map(|token| {
            let mut entry = entry(&token.bytes, token.logprob);
            entry["top_logprobs"] = self.top(&token.top, |_, entry| entry);
            entry
        });
        json!({"content": entries.collect::<Vec<_>>(), "refusal": null})
    }

    /// `completion_probabilities` of llama-server's `/completion`.
    pub(in crate::http) fn llama(&self, tokens: &[Token]) -> Value {
        let with_id = |id: u32, mut entry: Value| {
            entry["id"] = id.into();
            entry
        };
        let entries = tokens.iter().map(|token| {
            let mut entry = with_id(token.id, entry(&token.bytes, token.logprob));
            entry["top_logprobs"] = self.top(&token.top, with_id);
            entry
        });
        entries.collect()
    }

    fn top(&self, top: &[TokenProbability], complete: impl Fn(u32, Value) -> Value) -> Value {
        let entries = top.iter().map(|top| {
            let entry = entry(&self.0.piece(top.token), Some(top.logprob));
            complete(top.token, entry)
        });
        entries.collect()
    }
}

fn entry(bytes: &[u8], logprob: Option<f32>) -> Value {
    json!({
        "token": String::from_utf8_lossy(bytes),
        "bytes": bytes,
        "logprob": finite(logprob),
    })
}

fn finite(logprob: Option<f32>) -> f32 {
    // `max` also replaces NaN.
    logprob.unwrap_or(LOWEST).max(LOWEST)
}

/// The name of a token: its text or, if it is not valid UTF-8, its bytes, as in OpenAI's API.
fn name(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => {
            let bytes = bytes.iter().map(|byte| format!("\\x{byte:02x}"));
            format!("bytes:{}", bytes.collect::<String>())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{finite, name};

    #[test]
    fn replaces_values_that_json_cannot_represent() {
        assert_eq!(finite(Some(f32::NEG_INFINITY)), -9999.0);
        assert_eq!(finite(Some(f32::NAN)), -9999.0);
        assert_eq!(finite(Some(-0.5)), -0.5);
    }

    #[test]
    fn names_incomplete_characters_by_their_bytes() {
        assert_eq!(name("é".as_bytes()), "é");
        assert_eq!(name(b"\xf0\x9f"), r"bytes:\xf0\x9f");
    }
}
