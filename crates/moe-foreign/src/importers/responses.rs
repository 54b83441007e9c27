//! Responses of [vLLM](https://github.com/vllm-project/vllm) and [SGLang](https://github.com/sgl-project/sglang) that contain the
//! selected experts of each token.
//!
//! | server | key | content |
//! |---|---|---|
//! | vLLM 0.21 | `prompt_routed_experts`, `choices[].routed_experts` | nested lists `[prompt, layers, top_k]` and `[generated, layers, top_k]` |
//! | vLLM, later | `choices[].routed_experts` | base64 of a `.npy` file `[prompt + generated - 1, layers, top_k]` |
//! | SGLang, `/generate` | `meta_info.routed_experts` | base64 of 32-bit integers without a shape |
//! | SGLang, OpenAI API | `sglext.routed_experts` of the response or of its `choices[]` (some versions: `sgl_ext`) | the same |
//!
//! The last generated token is not evaluated, so it has no experts. A response of SGLang may omit the first tokens
//! (`routed_experts_start_len` of the request): with N tokens in the array, the first one is at position
//! `prompt + completion - 1 - N`. The chunks of a stream are read as one response. Each choice is read as a sequence. Compared
//! with our records, the formats lack router weights, timestamps and lanes.
//!
//! Definitions: <https://github.com/vllm-project/vllm/pull/28284> and <https://github.com/sgl-project/sglang/pull/12162>

mod array;
mod document;
mod routed_experts;

use std::path::Path;

use crate::arrays::{Tokens, element_of, import_tokens};
use crate::source::{is_partial, read_text};
use crate::{ForeignError, ImportOptions, Importer, Location, Output, Source, json};

use array::Counts;
pub use array::ResponseError;
use document::{Batch, Response};
use routed_experts::{RoutedExperts, has_keys, is_event_stream};

/// Importer of responses of vLLM.
pub struct Vllm;

/// Importer of responses of SGLang.
pub struct SglangResponse;

/// Keys of the objects that contain the extensions of SGLang.
const EXTENSIONS: [&str; 3] = ["meta_info", "sglext", "sgl_ext"];

impl Importer for Vllm {
    fn name(&self) -> &'static str {
        "vllm"
    }

    fn description(&self) -> &'static str {
        "responses of vLLM with routed_experts (nested lists or base64): routing"
    }

    fn is_applicable(&self, sample: &[u8]) -> bool {
        // The generated text precedes the routing and may fill the sample.
        has_keys(sample, &["choices"])
            && (has_keys(sample, &["routed_experts"])
                || has_keys(sample, &["prompt_routed_experts"])
                || is_partial(sample))
    }

    fn import(
        &self,
        source: &Source,
        options: &ImportOptions,
        output: &mut Output<'_>,
    ) -> Result<(), ForeignError> {
        import(source, options, output)
    }
}

impl Importer for SglangResponse {
    fn name(&self) -> &'static str {
        "sglang-response"
    }

    fn description(&self) -> &'static str {
        "responses of SGLang with routed_experts in meta_info or sglext (base64); needs the top-k: routing"
    }

    fn is_applicable(&self, sample: &[u8]) -> bool {
        has_keys(sample, &["routed_experts"])
            && EXTENSIONS.iter().any(|key| has_keys(sample, &[key]))
    }

    fn import(
        &self,
        source: &Source,
        options: &ImportOptions,
        output: &mut Output<'_>,
    ) -> Result<(), ForeignError> {
        import(source, options, output)
    }
}

fn import(
    source: &Source,
    options: &ImportOptions,
    output: &mut Output<'_>,
) -> Result<(), ForeignError> {
    let mut sequence_id = 0;
    for file in source.files() {
        output.begin_file(file);
        let mut chunks = Chunks::default();
        let mut add = |response: Option<Response>, is_chunk| {
            let complete = match response {
                Some(response) => {
                    chunks
                        .add(response, is_chunk)
                        .map_err(|source| ForeignError::Response {
                            path: file.to_owned(),
                            at: Location::Element("choices".into()),
                            source,
                        })?
                }
                None => chunks.last.take(),
            };
            complete.map_or(Ok(()), |response| {
                import_response(&response, &mut sequence_id, options, output)
            })
        };
        let bytes = read_text(file)?;
        if is_event_stream(&bytes) {
            for event in events(file, &bytes) {
                add(Some(event?), true)?;
            }
        } else {
            for batch in serde_json::Deserializer::from_slice(&bytes).into_iter::<Batch>() {
                let responses =
                    match batch.map_err(|error| json::invalid_in(file, &error, 0, &bytes))? {
                        Batch::One(response) => vec![*response],
                        Batch::Many(responses) => responses,
                    };
                for response in responses {
                    let is_chunk = response.is_chunk();
                    add(Some(response), is_chunk)?;
                }
            }
        }
        add(None, false)?;
    }
    output.note("router weights are not recorded");
    Ok(())
}

/// Merges the chunks of streamed responses.
#[derive(Default)]
struct Chunks {
    last: Option<Response>,
}

impl Chunks {
    /// Adds a response or chunk; returns the previous response when it is complete.
    fn add(
        &mut self,
        response: Response,
        is_chunk: bool,
    ) -> Result<Option<Response>, ResponseError> {
        match &mut self.last {
            Some(last) if is_chunk && last.id() == response.id() => {
                last.merge(response)?;
                Ok(None)
            }
            last => Ok(last.replace(response)),
        }
    }
}

/// The JSON of server-sent events: lines `data: {...}`, without `data: [DONE]`. Other lines are comments and event names.
fn events<'a>(
    file: &'a Path,
    bytes: &'a [u8],
) -> impl Iterator<Item = Result<Response, ForeignError>> + 'a {
    let lines = bytes.split(|&byte| byte == b'\n').zip(0..);
    let data = lines.filter_map(|(line, before)| {
        let data = line.trim_ascii().strip_prefix(b"data:")?.trim_ascii();
        (!data.is_empty() && data != b"[DONE]").then_some((data, before))
    });
    data.map(move |(data, before)| {
        serde_json::from_slice(data).map_err(|error| json::invalid_in(file, &error, before, data))
    })
}

/// Passes on each choice as a sequence. A prompt that the choices share belongs to the first sequence.
fn import_response(
    response: &Response,
    sequence_id: &mut u32,
    options: &ImportOptions,
    output: &mut Output<'_>,
) -> Result<(), ForeignError> {
    let choices = response.choices.as_deref().unwrap_or_default();
    let own = [Response::default()];
    // A response without choices is itself one sequence.
    let choices = if choices.is_empty() { &own } else { choices };
    let usage = Counts::of([response.usage.as_ref(), response.meta_info.as_ref()]);
    // `usage` sums the generated tokens of all choices, and the tokens of all prompts.
    let has_one_choice = choices.len() == 1;
    let has_one_prompt = has_one_choice || response.prompt_routed_experts.is_some();
    let usage = Counts {
        prompt: usage.prompt.filter(|_| has_one_prompt),
        completion: usage.completion.filter(|_| has_one_choice),
        ..usage
    };
    let mut importer = ChoiceImporter {
        options,
        output,
        sequence_id: *sequence_id,
    };
    let mut n_shared = 0;
    if let Some(prompt) = &response.prompt_routed_experts {
        n_shared = importer.prompt("prompt_routed_experts", prompt)?;
    }
    for (i, choice) in choices.iter().enumerate() {
        importer.sequence_id = *sequence_id;
        let of_response = Some(response).filter(|_| i == 0);
        importer.choice(i, choice, of_response, n_shared, usage)?;
        *sequence_id = sequence_id.saturating_add(1);
    }
    Ok(())
}

/// Passes on the routing of one choice.
struct ChoiceImporter<'a, 'o> {
    options: &'a ImportOptions,
    output: &'a mut Output<'o>,
    sequence_id: u32,
}

impl ChoiceImporter<'_, '_> {
    /// Passes on the routing of a prompt; returns its number of tokens.
    fn prompt(&mut self, name: &str, prompt: &RoutedExperts) -> Result<usize, ForeignError> {
        let counts = Counts {
            prompt: Some(usize::MAX),
            start: Some(0),
            ..Counts::default()
        };
        self.routed(name, prompt, counts)
    }

    /// Passes on the routing of a choice, or, if it has none, that of `response`. `n_shared` tokens of the prompt were passed on
    /// before.
    fn choice(
        &mut self,
        i: usize,
        choice: &Response,
        response: Option<&Response>,
        n_shared: usize,
        usage: Counts,
    ) -> Result<(), ForeignError> {
        let mut n_prompt = n_shared;
        if let Some(prompt) = &choice.prompt_routed_experts {
            let name = format!("choices[{i}].prompt_routed_experts");
            n_prompt = self.prompt(&name, prompt)?;
        }
        let counts = Counts::of([choice.meta_info.as_ref()]).or(usage);
        let places = [
            (format!("choices[{i}]."), Some(choice)),
            (String::new(), response),
        ];
        for (place, response) in places {
            let Some(response) = response else {
                continue;
            };
            if let Some((key, extension)) = response.extension()
                && let Some(experts) = &extension.routed_experts
            {
                let counts = Counts::of([Some(extension)]).or(counts);
                self.routed(&format!("{place}{key}.routed_experts"), experts, counts)?;
                break;
            }
            if let Some(experts) = &response.routed_experts {
                let includes_prompt = n_prompt == 0 && matches!(experts, RoutedExperts::Bytes(_));
                let first = n_prompt.max(usage.prompt.unwrap_or(0));
                let generated = Counts {
                    prompt: Some(first),
                    completion: None,
                    start: Some(first),
                };
                let counts = if includes_prompt { counts } else { generated };
                self.routed(&format!("{place}routed_experts"), experts, counts)?;
                break;
            }
        }
        Ok(())
    }

    /// Passes on an array; returns its number of tokens.
    fn routed(
        &mut self,
        name: &str,
        experts: &RoutedExperts,
        counts: Counts,
    ) -> Result<usize, ForeignError> {
        let at = |index: &[usize]| element_of(name, index);
        let array = array::view(experts, counts, self.options, at(&[]), self.output)?;
        let n_tokens = array.shape().first().copied().unwrap_or(0);
        let tokens = Tokens {
            first: counts.first_token(n_tokens, at(&[]), self.output)?,
            sequence_id: Some(self.sequence_id),
            n_prompt: counts.prompt,
        };
        import_tokens(&array, tokens, at, self.options, self.output)?;
        Ok(n_tokens)
    }
}
