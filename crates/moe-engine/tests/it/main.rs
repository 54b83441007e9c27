//! Tests of the public API.

#![allow(clippy::unwrap_used)]

mod chat;
mod chat_limits;
mod chat_tokens;
