//! The chat template of a model, or of a file that replaces it.

use std::path::Path;

use anyhow::{Context as _, anyhow};
use moe_engine::Engine;
use moe_engine::chat::{ChatError, ChatTemplate, MAX_TEMPLATE_BYTES, RenderOptions, SpecialTokens};
use moe_gguf::Gguf;
use moe_trace::{bounded, manifest};
use serde_json::Value;
use xxhash_rust::xxh3::xxh3_64;

/// Key of the template in a model file.
const KEY: &str = "tokenizer.chat_template";

/// Key of the template for conversations with tools. Few models have it.
const TOOLS_KEY: &str = "tokenizer.chat_template.tool_use";

/// The chat templates of a model.
pub struct ModelChat {
    template: ChatTemplate,
    with_tools: Option<ChatTemplate>,
    description: manifest::ChatTemplate,
}

impl ModelChat {
    /// Compiles the template in `file`, or that of the model.
    pub fn new(gguf: &Gguf, file: Option<&Path>) -> anyhow::Result<ModelChat> {
        let special = special_tokens(gguf)?;
        let model = gguf.files()[0].path.display().to_string();
        let (origin, place, source) = match file {
            Some(file) => {
                let source = bounded::read_text_or_pipe(file, MAX_TEMPLATE_BYTES as u64)?;
                ("file", file.display().to_string(), source)
            }
            None => {
                let source = gguf.metadata().str(KEY)?.ok_or_else(|| {
                    anyhow!("{model}: the model has no chat template ({KEY}); pass one with --chat-template FILE")
                })?;
                ("model", model.clone(), source.to_owned())
            }
        };
        let remedy = match file {
            Some(_) => "correct the template, or omit --chat-template",
            None => "pass another template with --chat-template FILE",
        };
        let template = compiled(&source, special.clone(), place, remedy)?;
        let with_tools = match (file, gguf.metadata().str(TOOLS_KEY)?) {
            (None, Some(source)) => {
                let place = format!("{model}: {TOOLS_KEY}");
                Some(compiled(source, special, place, remedy)?)
            }
            _ => None,
        };
        let description = manifest::ChatTemplate {
            origin: origin.to_owned(),
            xxh3: format!("{:016x}", xxh3_64(source.as_bytes())),
        };
        Ok(ModelChat {
            template,
            with_tools,
            description,
        })
    }

    /// Describes the template in a manifest.
    pub fn description(&self) -> &manifest::ChatTemplate {
        &self.description
    }

    /// The text of a conversation.
    pub fn render(&self, messages: &[Value], options: &RenderOptions) -> Result<String, ChatError> {
        let with_tools = self.with_tools.as_ref().filter(|_| options.tools.is_some());
        with_tools
            .unwrap_or(&self.template)
            .render(messages, options)
    }

    /// The tokens of a rendered conversation.
    pub fn encode(&self, text: &str, engine: &dyn Engine) -> moe_engine::Result<Vec<u32>> {
        self.template.encode(text, engine)
    }
}

/// Compiles a template. `remedy` says what to do if it is invalid.
fn compiled(
    source: &str,
    special: SpecialTokens,
    place: String,
    remedy: &str,
) -> anyhow::Result<ChatTemplate> {
    match ChatTemplate::new(source, special) {
        Err(ChatError::Template { line, source }) => Err(anyhow!(
            "{place}: line {line} of the chat template is invalid: {source}; {remedy}"
        )),
        compiled => compiled.context(place),
    }
}

/// The texts of the special tokens whose ids the model file contains.
fn special_tokens(gguf: &Gguf) -> anyhow::Result<SpecialTokens> {
    let metadata = gguf.metadata();
    let tokens = metadata
        .strings("tokenizer.ggml.tokens")?
        .unwrap_or_default();
    let token = |role: &str| {
        let id = metadata
            .get(&format!("tokenizer.ggml.{role}_token_id"))?
            .as_i128()?;
        tokens.get(usize::try_from(id).ok()?).cloned()
    };
    Ok(SpecialTokens {
        bos_token: token("bos"),
        eos_token: token("eos"),
        unk_token: token("unknown"),
        pad_token: token("padding"),
    })
}
