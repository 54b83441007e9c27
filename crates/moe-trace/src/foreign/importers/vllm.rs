//! Responses of vLLM with `--enable-return-routed-experts`, one or several behind one another.
//!
//! Version 0.21 gives `prompt_routed_experts` `[prompt, layers, top_k]` and, for each choice, `routed_experts`
//! `[generated, layers, top_k]` as nested lists; several prompts in a request have theirs beside each choice. Later ones give `routed_experts` as base64 of a `.npy` file,
//! `[prompt + generated - 1, layers, top_k]`: the last token was not fed back.

use serde::Deserialize;

use crate::foreign::arrays::{Tokens, element_of, tokens};
use crate::foreign::binary::npy;
use crate::foreign::source::read_whole;
use crate::foreign::{ForeignError, Importer, Options, Output, SAMPLE_SIZE, Source, json};

use super::routed_experts::{RoutedExperts, has_keys};

/// Response of vLLM.
pub struct Vllm;

#[derive(Deserialize)]
struct Response {
    #[serde(default)]
    prompt_routed_experts: Option<RoutedExperts>,
    choices: Vec<Choice>,
    #[serde(default)]
    usage: Option<Usage>,
}

#[derive(Deserialize)]
struct Choice {
    #[serde(default)]
    prompt_routed_experts: Option<RoutedExperts>,
    #[serde(default)]
    routed_experts: Option<RoutedExperts>,
}

#[derive(Deserialize)]
struct Usage {
    prompt_tokens: usize,
}

impl Importer for Vllm {
    fn name(&self) -> &'static str {
        "vllm"
    }

    fn description(&self) -> &'static str {
        "responses of vLLM with routed_experts, as nested lists or base64"
    }

    fn is_applicable(&self, sample: &[u8]) -> bool {
        // A long answer may come before its routing.
        has_keys(sample, &["choices"])
            && (has_keys(sample, &["routed_experts"])
                || has_keys(sample, &["prompt_routed_experts"])
                || sample.len() >= SAMPLE_SIZE - 16)
    }

    fn import(
        &self,
        source: &Source,
        options: &Options,
        output: &mut Output<'_>,
    ) -> Result<(), ForeignError> {
        let mut sequence_id = 0;
        for file in source.files() {
            output.begin_file(file);
            let bytes = read_whole(file)?;
            for response in serde_json::Deserializer::from_slice(&bytes).into_iter::<Response>() {
                let response = response.map_err(|error| json::invalid(file, &error, 0))?;
                import_response(&response, &mut sequence_id, options, output)?;
            }
        }
        output.note("responses do not tell router weights");
        Ok(())
    }
}

/// Hands over each choice as a sequence of its own; a prompt that they share is told with the first.
fn import_response(
    response: &Response,
    sequence_id: &mut u32,
    options: &Options,
    output: &mut Output<'_>,
) -> Result<(), ForeignError> {
    let n_prompt = response.usage.as_ref().map(|usage| usage.prompt_tokens);
    let import_prompt = |name: &str, prompt, sequence_id, output: &mut Output<'_>| {
        let place = Tokens {
            sequence_id: Some(sequence_id),
            n_prompt: Some(usize::MAX),
            ..Tokens::default()
        };
        import_routed(name, prompt, place, options, output)
    };
    let mut n_shared = 0;
    if let Some(prompt) = &response.prompt_routed_experts {
        n_shared = import_prompt("prompt_routed_experts", prompt, *sequence_id, output)?;
    }
    for (i, choice) in response.choices.iter().enumerate() {
        let mut n_given = n_shared;
        if let Some(prompt) = &choice.prompt_routed_experts {
            let name = format!("choices[{i}].prompt_routed_experts");
            n_given = import_prompt(&name, prompt, *sequence_id, output)?;
        }
        if let Some(routed) = &choice.routed_experts {
            let is_whole = n_given == 0 && matches!(routed, RoutedExperts::Bytes(_));
            let first = if is_whole {
                0
            } else {
                n_given.max(n_prompt.unwrap_or(0))
            };
            let place = Tokens {
                first,
                sequence_id: Some(*sequence_id),
                n_prompt: if is_whole { n_prompt } else { Some(first) },
            };
            let name = format!("choices[{i}].routed_experts");
            import_routed(&name, routed, place, options, output)?;
        }
        *sequence_id = sequence_id.saturating_add(1);
    }
    Ok(())
}

/// Hands over an array and tells how many tokens it has.
fn import_routed(
    name: &str,
    routed: &RoutedExperts,
    place: Tokens,
    options: &Options,
    output: &mut Output<'_>,
) -> Result<usize, ForeignError> {
    let at = |index: &[usize]| element_of(name, index);
    let array = match routed {
        RoutedExperts::Lists(lists) => lists
            .array()
            .map_err(|reason| output.invalid(at(&[]), reason))?,
        RoutedExperts::Bytes(bytes) => npy::read(bytes).map_err(|fault| {
            let reason = format!(
                "{} (byte {} of what it decodes to)",
                fault.reason, fault.offset
            );
            output.invalid(at(&[]), reason)
        })?,
    };
    tokens(&array, place, at, options, output)?;
    Ok(array.shape().first().copied().unwrap_or(0))
}
