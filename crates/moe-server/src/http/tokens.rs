//! `POST /tokenize` and `POST /detokenize`, as in llama-server.

use axum::extract::State;
use axum::response::Response;
use serde::Deserialize;
use serde_json::{Value, json};

use super::Shared;
use super::body::JsonBody;
use super::error::{ApiError, json_response};
use super::integer::Integer;

#[derive(Deserialize)]
struct Text {
    content: String,
    add_special: Option<bool>,
    parse_special: Option<bool>,
    with_pieces: Option<bool>,
}

/// `POST /tokenize`.
pub(super) async fn tokenize(
    State(server): State<Shared>,
    body: JsonBody,
) -> Result<Response, ApiError> {
    let text: Text = body.read()?;
    let add_special = text.add_special.unwrap_or(false);
    let parse_special = text.parse_special.unwrap_or(true);
    let content = text.content;
    let tokens =
        server.blocking(move |backend| backend.tokenize(&content, add_special, parse_special));
    let tokens = tokens
        .await?
        .map_err(|message| ApiError::param("content", format!("content: {message}")))?;
    let tokens: Value = match text.with_pieces {
        Some(true) => tokens
            .into_iter()
            .map(|id| with_piece(&server, id))
            .collect(),
        _ => tokens.into(),
    };
    Ok(json_response(&json!({"tokens": tokens})))
}

/// A token with its text, or its bytes if they are not valid UTF-8.
fn with_piece(server: &Shared, id: u32) -> Value {
    let piece = match String::from_utf8(server.backend.piece(id)) {
        Ok(text) => text.into(),
        Err(error) => json!(error.into_bytes()),
    };
    json!({"id": id, "piece": piece})
}

#[derive(Deserialize)]
struct Tokens {
    tokens: Vec<Integer>,
}

/// `POST /detokenize`.
pub(super) async fn detokenize(
    State(server): State<Shared>,
    body: JsonBody,
) -> Result<Response, ApiError> {
    let Tokens { tokens } = body.read()?;
    let n_vocab = server.backend.model().n_vocab;
    let mut bytes = Vec::new();
    for (index, token) in tokens.into_iter().enumerate() {
        let token = token.0;
        let id = u32::try_from(token).ok();
        let id = id.filter(|id| usize::try_from(*id).is_ok_and(|id| id < n_vocab));
        let Some(id) = id else {
            let param = format!("tokens[{index}]");
            let last = n_vocab.saturating_sub(1);
            let message = format!(
                "{param}: {token} is out of range (0..={last}); use token ids of this model's vocabulary"
            );
            return Err(ApiError::param(param, message));
        };
        bytes.extend(server.backend.piece(id));
    }
    Ok(json_response(
        &json!({"content": String::from_utf8_lossy(&bytes)}),
    ))
}
