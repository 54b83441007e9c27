//! The prompts to run: one text, or a file of sequences. Conversations become texts with a chat template.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, anyhow, bail};
use moe_engine::Engine;
use moe_engine::chat::RenderOptions;
use moe_files::text::strip_byte_order_mark;
use moe_placement::json::non_finite;
use moe_trace::json::{Object, reason};
use serde::Deserialize;
use serde_json::{Value, json};

use super::Args;
use crate::chat::ModelChat;

/// Default prompt. The embedded model was trained on similar text.
const DEFAULT: &str = "The kernel driver is responsible for";

/// Maximum size of a prompt file. Larger prompts fit no context.
const MAX_BYTES: u64 = 256 << 20;

/// Maximum number of sequences in a file.
const MAX_SEQUENCES: usize = 1 << 17;

/// A sequence to run.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Prompt {
    /// Text of the prompt; of a conversation, once it is rendered.
    pub prompt: Option<String>,
    /// Messages of a conversation instead of text.
    messages: Option<Vec<Value>>,
    /// Functions that the model may call in the conversation.
    tools: Option<Vec<Value>>,
    /// Token ids instead of text, not tokenized.
    pub tokens: Option<Vec<u32>>,
    /// Tokens to generate, if different from `--n-predict`.
    pub n_predict: Option<u32>,
    /// File and line of the prompt.
    #[serde(skip)]
    place: Option<String>,
}

impl Prompt {
    fn text(text: String, place: Option<String>) -> Prompt {
        Prompt {
            prompt: Some(text),
            place,
            ..Prompt::default()
        }
    }

    /// Turns a text into the message of a user.
    fn into_chat(mut self) -> Prompt {
        if let Some(content) = self.prompt.take() {
            self.messages = Some(vec![json!({"role": "user", "content": content})]);
        }
        self
    }

    /// Whether the text is rendered with a chat template.
    pub fn is_chat(&self) -> bool {
        self.messages.is_some()
    }

    /// Renders a conversation. `options` are those of all conversations of the run.
    fn render(&mut self, chat: &ModelChat, options: &RenderOptions) -> anyhow::Result<()> {
        if let Some(messages) = &self.messages {
            let options = RenderOptions {
                tools: self.tools.clone(),
                ..options.clone()
            };
            self.prompt = Some(chat.render(messages, &options)?);
        }
        Ok(())
    }

    /// Checks the combination of keys in a line.
    fn check(&self) -> Result<(), &'static str> {
        let n_inputs = [self.prompt.is_some(), self.tokens.is_some(), self.is_chat()];
        if n_inputs.into_iter().filter(|&is_given| is_given).count() != 1 {
            return Err("a line needs either \"prompt\", \"tokens\" or \"messages\"");
        }
        if self.tools.is_some() && !self.is_chat() {
            return Err("\"tools\" needs \"messages\"");
        }
        if self.messages.as_ref().is_some_and(Vec::is_empty) {
            return Err("\"messages\" is empty");
        }
        Ok(())
    }

    /// Adds the file and line of this sequence to an error.
    pub fn with_place(&self, error: anyhow::Error) -> anyhow::Error {
        match &self.place {
            Some(place) => error.context(place.clone()),
            None => error,
        }
    }
}

/// Returns the sequences of the command line, at least one.
pub fn read(args: &Args) -> anyhow::Result<Vec<Prompt>> {
    let prompts = read_inputs(args)?;
    let prompts: Vec<Prompt> = if args.chat {
        prompts.into_iter().map(Prompt::into_chat).collect()
    } else {
        prompts
    };
    if args.chat_template.is_some() && !prompts.iter().any(Prompt::is_chat) {
        bail!(
            "--chat-template has no effect without a conversation; pass --chat, or \"messages\" in the lines of --prompts"
        );
    }
    Ok(prompts)
}

fn read_inputs(args: &Args) -> anyhow::Result<Vec<Prompt>> {
    if let Some(path) = &args.prompts {
        return lines(&read_text(path)?, &path.display().to_string());
    }
    Ok(vec![match (&args.prompt, &args.prompt_file) {
        (Some(prompt), _) => Prompt::text(prompt.clone(), None),
        (None, Some(path)) => {
            let text = read_text(path)?;
            let text = strip_byte_order_mark(&text);
            let text = text.strip_suffix('\n').unwrap_or(text).to_owned();
            Prompt::text(text, Some(path.display().to_string()))
        }
        (None, None) => Prompt::text(DEFAULT.to_owned(), None),
    }])
}

fn read_text(path: &Path) -> anyhow::Result<String> {
    let mut bytes = Vec::new();
    File::open(path)
        .and_then(|file| file.take(MAX_BYTES + 1).read_to_end(&mut bytes))
        .with_context(|| format!("cannot read {}", path.display()))?;
    if bytes.len() as u64 > MAX_BYTES {
        bail!(
            "{} is larger than {} MiB; split it",
            path.display(),
            MAX_BYTES >> 20
        );
    }
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        let line = error.as_bytes()[..at]
            .iter()
            .filter(|&&byte| byte == b'\n')
            .count()
            + 1;
        anyhow!(
            "{}, line {line}: byte {at} is not UTF-8; convert the file to UTF-8",
            path.display()
        )
    })
}

fn lines(text: &str, file: &str) -> anyhow::Result<Vec<Prompt>> {
    let mut prompts = Vec::new();
    for (i, line) in strip_byte_order_mark(text).lines().enumerate() {
        if line.trim().is_empty() {
            continue;
        }
        let place = format!("{file}, line {}", i + 1);
        if prompts.len() >= MAX_SEQUENCES {
            bail!("{place}: the file contains more than {MAX_SEQUENCES} sequences; split it");
        }
        let Object(mut prompt) = serde_json::from_str::<Object<Prompt>>(line).map_err(|error| {
            if let Some(value) = non_finite(&error, line.as_bytes()) {
                return anyhow!(
                    "{place}: {value} in column {} is not JSON; write {FORMAT}",
                    error.column()
                );
            }
            let reason = reason(&error);
            anyhow!(
                "{place}, column {}: {reason}; write {FORMAT}",
                error.column()
            )
        })?;
        if let Err(reason) = prompt.check() {
            bail!("{place}: {reason}; write {FORMAT}");
        }
        if prompt.tokens.as_ref().is_some_and(Vec::is_empty) {
            bail!("{place}: \"tokens\" is empty; write at least one token id");
        }
        prompt.place = Some(place);
        prompts.push(prompt);
    }
    if prompts.is_empty() {
        bail!("{file}: the file contains no sequence; write lines {FORMAT}");
    }
    Ok(prompts)
}

/// Format of a line of `--prompts`.
const FORMAT: &str = r#"{"prompt": "text"}, {"tokens": [ids]} or {"messages": [{"role": "user", "content": "text"}]}"#;

/// Renders the conversations with the template of `chat`.
pub fn render(prompts: &mut [Prompt], chat: &ModelChat) -> anyhow::Result<()> {
    let options = RenderOptions::default();
    for prompt in prompts {
        let rendered = prompt.render(chat, &options);
        rendered.map_err(|error| prompt.with_place(error))?;
    }
    Ok(())
}

/// Returns the token ids of every sequence. `chat` is set if there are conversations.
pub fn tokenize(
    prompts: &[Prompt],
    chat: Option<&ModelChat>,
    engine: &dyn Engine,
) -> anyhow::Result<Vec<Vec<u32>>> {
    let n_vocab = engine.info().n_vocab;
    let one = |prompt: &Prompt| match (&prompt.tokens, &prompt.prompt) {
        (Some(tokens), _) => match tokens.iter().position(|&t| t as usize >= n_vocab) {
            Some(at) => bail!(
                "token id {} at position {at} is out of range (0..={}); use token ids of this model's vocabulary",
                tokens[at],
                n_vocab.saturating_sub(1)
            ),
            None => Ok(tokens.clone()),
        },
        (None, text) => {
            let text = text.as_deref().unwrap_or_default();
            match chat.filter(|_| prompt.is_chat()) {
                Some(chat) => Ok(chat.encode(text, engine)?),
                None => Ok(engine.encode(text)?),
            }
        }
    };
    prompts
        .iter()
        .map(|prompt| one(prompt).map_err(|e| prompt.with_place(e)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_the_number_of_sequences() {
        let sequences = |n| lines(&"{\"tokens\":[1]}\n".repeat(n), "f");
        assert_eq!(sequences(MAX_SEQUENCES).unwrap().len(), MAX_SEQUENCES);
        assert_eq!(
            sequences(MAX_SEQUENCES + 1).unwrap_err().to_string(),
            "f, line 131073: the file contains more than 131072 sequences; split it"
        );
    }

    #[test]
    fn errors_contain_line_and_reason() {
        let ok = lines(
            "\u{feff}{\"prompt\":\"a\"}\n\n{\"tokens\":[1,2],\"n_predict\":3}\n",
            "f",
        )
        .unwrap();
        assert_eq!(ok.len(), 2);
        assert_eq!(
            (ok[1].tokens.as_deref(), ok[1].n_predict),
            (Some(&[1, 2][..]), Some(3))
        );
        for (text, expected) in [
            ("", "no sequence"),
            (
                "{\"prompt\":\"a\"}\n{\"prompt\":1}",
                "f, line 2, column 11: 1 instead of a string;",
            ),
            (
                "{\"prompt\":\"a\",\"tokens\":[1]}",
                "line 1: a line needs either",
            ),
            ("{}", "line 1: a line needs either"),
            (
                "{\"prompt\":\"a\",\"messages\":[{}]}",
                "line 1: a line needs either",
            ),
            (
                "{\"prompt\":\"a\",\"tools\":[]}",
                "line 1: \"tools\" needs \"messages\"",
            ),
            ("\n{\"messages\":[]}", "f, line 2: \"messages\" is empty"),
            (
                "{\"tokens\":[]}",
                "f, line 1: \"tokens\" is empty; write at least one token id",
            ),
            (
                "{\"messages\":\"a\"}",
                "f, line 1, column 15: \"a\" instead of",
            ),
            ("{\"promt\":\"a\"}", "line 1"),
            (
                "{\"prompt\":\"a\",\"n_predict\":NaN}",
                "f, line 1: NaN in column 27 is not JSON",
            ),
        ] {
            let error = format!("{:#}", lines(text, "f").unwrap_err());
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
