//! The value of `routed_experts` in responses of vLLM and SGLang: base64 or nested lists.

use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::de::value::SeqAccessDeserializer;
use serde::de::{self, Deserialize, Deserializer, SeqAccess, Visitor};

use crate::binary::nested::Nested;

/// The value of `routed_experts`.
#[derive(Debug)]
pub(super) enum RoutedExperts {
    /// Nested lists `[tokens, layers, top_k]`.
    Lists(Nested),
    /// Decoded base64.
    Bytes(Vec<u8>),
}

impl<'de> Deserialize<'de> for RoutedExperts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;

        impl<'de> Visitor<'de> for Either {
            type Value = RoutedExperts;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("base64, or nested lists of expert ids")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<RoutedExperts, E> {
                let bytes = STANDARD.decode(text).map_err(E::custom)?;
                Ok(RoutedExperts::Bytes(bytes))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<RoutedExperts, A::Error> {
                Nested::deserialize(SeqAccessDeserializer::new(list)).map(RoutedExperts::Lists)
            }
        }

        deserializer.deserialize_any(Either)
    }
}

/// Whether a sample is JSON, JSONL or server-sent events with JSON, and contains all these keys.
pub(super) fn has_keys(sample: &[u8], keys: &[&str]) -> bool {
    let text = sample.trim_ascii_start();
    let is_json = matches!(text.first(), Some(b'{' | b'['));
    (is_json || is_event_stream(sample))
        && keys.iter().all(|key| {
            let key = format!("\"{key}\"");
            sample
                .windows(key.len())
                .any(|bytes| bytes == key.as_bytes())
        })
}

/// Whether a text starts like the server-sent events of a streamed response: with data, the name of an event, or a comment.
pub(super) fn is_event_stream(text: &[u8]) -> bool {
    let text = text.trim_ascii_start();
    [&b"data:"[..], b"event:", b":"]
        .iter()
        .any(|field| text.starts_with(field))
}
