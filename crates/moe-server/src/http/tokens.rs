//! `POST /tokenize` and `POST /detokenize`, as in llama-server.

use axum::extract::State;
use axum::response::Response;
use serde::Deserialize;
use serde_json::{Value, json};

use super::Shared;
use super::body::JsonBody;
use super::error::{ApiError, json_response};

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
    let text: Text = body.parse()?;
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
    tokens: Vec<u32>,
}

/// `POST /detokenize`.
pub(super) async fn detokenize(
    State(server): State<Shared>,
    body: JsonBody,
) -> Result<Response, ApiError> {
    let Tokens { tokens } = body.parse()?;
    let n_vocab = server.backend.model().n_vocab;
    let is_unknown = |token: &&u32| usize::try_from(**token).is_ok_and(|token| token >= n_vocab);
    if let Some(token) = tokens.iter().find(is_unknown) {
        let message = format!("tokens: {token} is out of range (0..{n_vocab})");
        return Err(ApiError::param("tokens", message));
    }
    let pieces = tokens
        .into_iter()
        .flat_map(|token| server.backend.piece(token));
    let bytes: Vec<u8> = pieces.collect();
    Ok(json_response(
        &json!({"content": String::from_utf8_lossy(&bytes)}),
    ))
}
