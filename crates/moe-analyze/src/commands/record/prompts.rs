//! What to evaluate: one text, or a file of sequences.

use std::fs;

use anyhow::{Context, bail};
use moe_executor::Model;
use serde::Deserialize;

use super::Args;

/// The prompt when none is given: one that the embedded model has something to say on.
const DEFAULT: &str = "The kernel driver is responsible for";

/// A sequence to run.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Prompt {
    /// Text of the prompt.
    pub prompt: Option<String>,
    /// Token ids instead of text, taken as they are.
    pub tokens: Option<Vec<u32>>,
    /// Tokens to generate, where it is not `--n-predict`.
    pub n_predict: Option<usize>,
}

impl Prompt {
    fn text(text: String) -> Prompt {
        Prompt {
            prompt: Some(text),
            ..Prompt::default()
        }
    }
}

/// The sequences that the command line asks for; at least one.
pub fn read(args: &Args) -> anyhow::Result<Vec<Prompt>> {
    if let Some(path) = &args.prompts {
        let text =
            fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        return lines(&text).with_context(|| path.display().to_string());
    }
    let text = match (&args.prompt, &args.prompt_file) {
        (Some(prompt), _) => prompt.clone(),
        (None, Some(path)) => {
            let text = fs::read_to_string(path)
                .with_context(|| format!("cannot read {}", path.display()))?;
            text.strip_suffix('\n').unwrap_or(&text).to_owned()
        }
        (None, None) => DEFAULT.to_owned(),
    };
    Ok(vec![Prompt::text(text)])
}

fn lines(text: &str) -> anyhow::Result<Vec<Prompt>> {
    let mut prompts = Vec::new();
    for (i, line) in text.lines().enumerate() {
        if line.trim().is_empty() {
            continue;
        }
        let prompt: Prompt = serde_json::from_str(line).with_context(|| {
            format!(
                "line {}: want {{\"prompt\": \"text\"}} or {{\"tokens\": [ids]}}",
                i + 1
            )
        })?;
        if prompt.prompt.is_some() == prompt.tokens.is_some() {
            bail!("line {}: give either \"prompt\" or \"tokens\"", i + 1);
        }
        prompts.push(prompt);
    }
    if prompts.is_empty() {
        bail!("no sequence in it; give a line of JSON for each");
    }
    Ok(prompts)
}

/// Token ids of every sequence.
pub fn tokenize(prompts: &[Prompt], model: &Model) -> anyhow::Result<Vec<Vec<u32>>> {
    let n_vocab = model.hparams().n_vocab;
    let one = |(i, prompt): (usize, &Prompt)| match (&prompt.tokens, &prompt.prompt) {
        (Some(tokens), _) => match tokens.iter().position(|&t| t as usize >= n_vocab) {
            Some(at) => bail!(
                "sequence {}: token id {} at position {at} is outside the vocabulary of {n_vocab} tokens",
                i + 1,
                tokens[at]
            ),
            None => Ok(tokens.clone()),
        },
        (None, text) => {
            let text = text.as_deref().unwrap_or_default();
            Ok(model.tokenizer().encode(text, true, true)?)
        }
    };
    prompts.iter().enumerate().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_name_what_is_wrong() {
        let ok = lines("{\"prompt\":\"a\"}\n\n{\"tokens\":[1,2],\"n_predict\":3}\n").unwrap();
        assert_eq!(ok.len(), 2);
        assert_eq!(
            (ok[1].tokens.as_deref(), ok[1].n_predict),
            (Some(&[1, 2][..]), Some(3))
        );
        for (text, expected) in [
            ("", "no sequence"),
            ("{\"prompt\":\"a\"}\n{\"prompt\":1}", "line 2"),
            ("{\"prompt\":\"a\",\"tokens\":[1]}", "line 1: give either"),
            ("{}", "line 1: give either"),
            ("{\"promt\":\"a\"}", "line 1"),
        ] {
            let error = format!("{:#}", lines(text).unwrap_err());
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
