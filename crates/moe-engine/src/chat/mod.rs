//! Chat templates: messages of a conversation to the text of a prompt.
//!
//! ```text
//! template (Jinja) ─► ChatTemplate ─► render(messages, tools, …) ─► text ─► encode ─► tokens
//! ```
//!
//! A template sees the variables and functions that the Python package `transformers` defines: `messages`, `tools`,
//! `documents`, `add_generation_prompt`, the special tokens, `raise_exception`, `strftime_now`, `tojson`, loop controls and the
//! block `generation`. Values print like in Python.
//!
//! A template is part of a model file, which may come from anywhere. Therefore it cannot read files, and the steps, memory,
//! and recursion of a rendering are limited.
//!
//! ```
//! use moe_engine::chat::{ChatTemplate, RenderOptions, SpecialTokens};
//! use serde_json::json;
//!
//! let source = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}\
//!               {% if add_generation_prompt %}<|assistant|>{% endif %}";
//! let template = ChatTemplate::new(source, SpecialTokens::default())?;
//! let messages = [json!({"role": "user", "content": "Hello"})];
//! let text = template.render(&messages, &RenderOptions::default())?;
//! assert_eq!(text, "<|user|>Hello\n<|assistant|>");
//! # Ok::<(), moe_engine::chat::ChatError>(())
//! ```

mod compile;
mod environment;
mod error;
mod generation;
mod json;
mod methods;
mod python;
mod strftime;

use std::collections::BTreeMap;

use minijinja::value::Serde;
use minijinja::{Environment, Value};
use serde_json::Map;
use time::OffsetDateTime;

pub use error::ChatError;

use crate::Engine;

/// Maximum size of a template in bytes. The largest templates of published models have about 30 KiB.
pub const MAX_TEMPLATE_BYTES: usize = 64 << 10;

/// Steps of a rendering, in addition to one for each byte of the conversation. A step is an operation of the template, or
/// 64 bytes of text that it creates.
const STEPS: u64 = 2_000_000;

/// Name of the template in errors of the template engine.
const NAME: &str = "template";

/// The texts of special tokens, which templates use as variables. A template sees a missing token as undefined.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    /// Start of a text.
    pub bos_token: Option<String>,
    /// End of a text.
    pub eos_token: Option<String>,
    /// Unknown text.
    pub unk_token: Option<String>,
    /// Padding.
    pub pad_token: Option<String>,
}

impl SpecialTokens {
    fn variables(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let tokens = [
            ("bos_token", &self.bos_token),
            ("eos_token", &self.eos_token),
            ("unk_token", &self.unk_token),
            ("pad_token", &self.pad_token),
        ];
        tokens
            .into_iter()
            .filter_map(|(name, token)| Some((name, token.as_deref()?)))
    }
}

/// Variables of a rendering in addition to the messages.
#[derive(Clone, Debug)]
pub struct RenderOptions {
    /// Functions that the model may call, in the format of the API of OpenAI.
    pub tools: Option<Vec<serde_json::Value>>,
    /// Whether the text ends with the start of the assistant's message.
    pub add_generation_prompt: bool,
    /// The time of `strftime_now`.
    pub now: OffsetDateTime,
    /// Other variables of the template, such as `enable_thinking`.
    pub variables: Map<String, serde_json::Value>,
}

impl Default for RenderOptions {
    /// No tools, a generation prompt, and the current time in UTC.
    fn default() -> RenderOptions {
        RenderOptions {
            tools: None,
            add_generation_prompt: true,
            now: OffsetDateTime::now_utc(),
            variables: Map::new(),
        }
    }
}

/// A compiled chat template.
#[derive(Clone, Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    special: SpecialTokens,
}

impl ChatTemplate {
    /// Compiles the Jinja template `source`.
    ///
    /// # Errors
    /// The template is too long, an expression is too large, or the template is not valid. The error contains the line.
    pub fn new(source: &str, special: SpecialTokens) -> Result<ChatTemplate, ChatError> {
        if source.len() > MAX_TEMPLATE_BYTES {
            return Err(ChatError::TooLong {
                bytes: source.len(),
                max: MAX_TEMPLATE_BYTES,
            });
        }
        Ok(ChatTemplate {
            environment: compile::compile(source)?,
            special,
        })
    }

    /// The text of a conversation. Each message is an object with a string `role`; the template determines the other keys:
    /// `content` (a string or a list of parts), `tool_calls`, `reasoning_content`, …
    ///
    /// # Errors
    /// A message has no role, the template rejects the conversation, or it exceeds a limit.
    pub fn render(
        &self,
        messages: &[serde_json::Value],
        options: &RenderOptions,
    ) -> Result<String, ChatError> {
        for (index, message) in messages.iter().enumerate() {
            if !message["role"].is_string() {
                return Err(ChatError::Message { index });
            }
        }
        let mut variables: BTreeMap<&str, Value> = self
            .special
            .variables()
            .map(|(name, token)| (name, Value::from(token)))
            .collect();
        for (name, value) in &options.variables {
            variables.insert(name, Value::from(Serde(value)));
        }
        let (messages, tools) = (Value::from(Serde(messages)), &options.tools);
        variables.insert("messages", messages);
        variables.insert("tools", Value::from(Serde(tools)));
        variables.insert("documents", Value::from(()));
        let add_generation_prompt = Value::from(options.add_generation_prompt);
        variables.insert("add_generation_prompt", add_generation_prompt);
        let now = options.now;
        let strftime = Value::from_function(move |format: &str| strftime::format(now, format));
        variables.insert("strftime_now", strftime);

        let variables = Value::from_pairs(variables);
        let limit = STEPS + json::size(&variables);
        let mut environment = self.environment.clone();
        environment.set_fuel(Some(limit));
        environment
            .get_template(NAME)
            .and_then(|template| template.render(variables))
            .map_err(|error| ChatError::render(error, limit))
    }

    /// The tokens of a rendered conversation. The texts of special tokens become these tokens, also in messages: like in
    /// llama.cpp, a message can contain the end of a turn.
    ///
    /// If both the template and the vocabulary add the BOS token, the tokens contain it once.
    ///
    /// # Errors
    /// The text cannot be tokenized.
    pub fn encode(&self, text: &str, engine: &dyn Engine) -> crate::Result<Vec<u32>> {
        let mut tokens = engine.encode(text)?;
        let (Some(bos), Some(&first)) = (self.special.bos_token.as_deref(), tokens.first()) else {
            return Ok(tokens);
        };
        let mut written = 0;
        let mut rest = text;
        while let (false, Some(after)) = (bos.is_empty(), rest.strip_prefix(bos)) {
            (written, rest) = (written + 1, after);
        }
        let encoded = tokens.iter().take_while(|&&token| token == first).count();
        if written > 0 && encoded > written && engine.piece(first) == bos.as_bytes() {
            tokens.remove(0);
        }
        Ok(tokens)
    }
}
