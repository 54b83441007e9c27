//! Responses of vLLM and SGLang that contain the experts of each token.
//!
//! | server and request | key | content |
//! |---|---|---|
//! | vLLM 0.21 | `prompt_routed_experts`, `choices[].routed_experts` | nested lists `[prompt, layers, top_k]` and `[generated, layers, top_k]` |
//! | vLLM, later | `choices[].routed_experts` | base64 of a `.npy` file `[prompt + generated - 1, layers, top_k]` |
//! | SGLang, `/generate` | `meta_info.routed_experts` | base64 of 32-bit integers without a shape |
//! | SGLang, OpenAI API | `sglext.routed_experts` of the response or its `choices[]`; in some versions `sgl_ext` | as above |
//!
//! The last generated token is not evaluated. A response of SGLang may start late (`routed_experts_start_len` of the request),
//! so its first token is `prompt + completion - 1 - tokens`. Chunks of a stream are read as one response.

mod placing;

use std::fmt;
use std::path::Path;

use serde::de::value::MapAccessDeserializer;
use serde::de::{self, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::arrays::{Tokens, element_of, tokens};
use crate::source::read_whole;
use crate::{At, ForeignError, ImportOptions, Importer, Output, SAMPLE_SIZE, Source, json};

use super::routed_experts::{RoutedExperts, has_keys, is_event_stream};
use placing::Counts;
pub use placing::ResponseError;

/// Response of vLLM.
pub struct Vllm;

/// Response of SGLang.
pub struct SglangResponse;

/// Choices of a response, at most: its prompts, times the choices for each.
const MAX_CHOICES: usize = 1 << 14;
/// Responses and choices of a list of responses, at most.
const MAX_LISTED: usize = 1 << 17;

/// Objects in which SGLang puts its extensions.
const EXTENSIONS: [&str; 3] = ["meta_info", "sglext", "sgl_ext"];

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
        "responses of SGLang with routed_experts in meta_info or sglext (base64); needs the experts of a token"
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

/// A response, a chunk of one, or a choice: routing may be in any of them, under the same keys.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Response {
    id: Option<Id>,
    object: Option<String>,
    /// Of a choice.
    index: Option<u64>,
    prompt_routed_experts: Option<RoutedExperts>,
    routed_experts: Option<RoutedExperts>,
    sglext: Option<Extension>,
    sgl_ext: Option<Extension>,
    meta_info: Option<Extension>,
    #[serde(deserialize_with = "choices")]
    choices: Option<Vec<Response>>,
    usage: Option<Extension>,
}

/// An object of SGLang, or the usage of a response.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Extension {
    id: Option<Id>,
    prompt_tokens: Option<usize>,
    completion_tokens: Option<usize>,
    routed_experts_start_len: Option<usize>,
    routed_experts: Option<RoutedExperts>,
}

/// What names a response: text, or a number.
#[derive(Debug, PartialEq, Eq)]
struct Id(String);

impl<'de> Deserialize<'de> for Id {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextOrNumber;

        impl Visitor<'_> for TextOrNumber {
            type Value = Id;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an id, which is text or a number")
            }

            fn visit_str<E>(self, text: &str) -> Result<Id, E> {
                Ok(Id(text.to_owned()))
            }

            fn visit_u64<E>(self, number: u64) -> Result<Id, E> {
                Ok(Id(number.to_string()))
            }

            fn visit_i64<E>(self, number: i64) -> Result<Id, E> {
                Ok(Id(number.to_string()))
            }

            fn visit_f64<E>(self, number: f64) -> Result<Id, E> {
                Ok(Id(number.to_string()))
            }
        }

        deserializer.deserialize_any(TextOrNumber)
    }
}

/// The choices of a response, each without choices of its own, which would have no meaning.
fn choices<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Vec<Response>>, D::Error> {
    struct Choices;

    impl<'de> Visitor<'de> for Choices {
        type Value = Option<Vec<Response>>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a list of choices")
        }

        fn visit_unit<E>(self) -> Result<Self::Value, E> {
            Ok(None)
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
            let mut choices = Vec::new();
            while let Some(choice) = list.next_element()? {
                if choices.len() >= MAX_CHOICES {
                    return Err(too_many(MAX_CHOICES, "choices of a response"));
                }
                choices.push(Response {
                    choices: None,
                    ..choice
                });
            }
            Ok(Some(choices))
        }
    }

    deserializer.deserialize_any(Choices)
}

fn too_many<E: de::Error>(limit: usize, what: &str) -> E {
    E::custom(format_args!("there are more than {limit} {what}"))
}

/// Several prompts in a request give a list.
enum Batch {
    One(Box<Response>),
    Many(Vec<Response>),
}

impl<'de> Deserialize<'de> for Batch {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OneOrMany;

        impl<'de> Visitor<'de> for OneOrMany {
            type Value = Batch;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a response, or a list of responses")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Batch, A::Error> {
                let response = Box::deserialize(MapAccessDeserializer::new(map))?;
                Ok(Batch::One(response))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Batch, A::Error> {
                let (mut responses, mut n_listed) = (Vec::new(), 0);
                while let Some(response) = list.next_element::<Response>()? {
                    n_listed += 1 + response.choices.as_ref().map_or(0, Vec::len);
                    if n_listed > MAX_LISTED {
                        return Err(too_many(MAX_LISTED, "responses and choices in a list"));
                    }
                    responses.push(response);
                }
                Ok(Batch::Many(responses))
            }
        }

        deserializer.deserialize_any(OneOrMany)
    }
}

impl Response {
    /// The first object of SGLang with routing, and its key.
    fn extension(&self) -> Option<(&'static str, &Extension)> {
        let objects = [
            ("sglext", &self.sglext),
            ("sgl_ext", &self.sgl_ext),
            ("meta_info", &self.meta_info),
        ];
        let mut present = objects
            .into_iter()
            .filter_map(|(key, object)| Some((key, object.as_ref()?)));
        present.find(|(_, object)| object.routed_experts.is_some())
    }

    /// Names the response that a chunk is of.
    fn id(&self) -> Option<&Id> {
        let of_meta_info = || self.meta_info.as_ref()?.id.as_ref();
        self.id.as_ref().or_else(of_meta_info)
    }

    fn is_chunk(&self) -> bool {
        let object = self.object.as_deref();
        object.is_some_and(|object| object.ends_with(".chunk"))
    }

    /// Takes what a later chunk has; refuses more choices than a response has.
    fn absorb(&mut self, later: Response) -> Result<(), ResponseError> {
        replace(&mut self.prompt_routed_experts, later.prompt_routed_experts);
        replace(&mut self.routed_experts, later.routed_experts);
        replace(&mut self.sglext, later.sglext);
        replace(&mut self.sgl_ext, later.sgl_ext);
        replace(&mut self.meta_info, later.meta_info);
        replace(&mut self.usage, later.usage);
        let choices = self.choices.get_or_insert_default();
        for later in later.choices.into_iter().flatten() {
            match choices
                .iter_mut()
                .find(|choice| choice.index == later.index)
            {
                Some(choice) => choice.absorb(later)?,
                None => {
                    if choices.len() >= MAX_CHOICES {
                        return Err(ResponseError::Choices { limit: MAX_CHOICES });
                    }
                    choices.push(later);
                }
            }
        }
        Ok(())
    }
}

fn replace<T>(value: &mut Option<T>, later: Option<T>) {
    if later.is_some() {
        *value = later;
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
        let mut take = |response: Option<Response>, is_chunk| {
            let whole = match response {
                Some(response) => {
                    chunks
                        .add(response, is_chunk)
                        .map_err(|source| ForeignError::Response {
                            path: file.to_owned(),
                            at: At::Element("choices".into()),
                            source,
                        })?
                }
                None => chunks.last.take(),
            };
            whole.map_or(Ok(()), |response| {
                import_response(&response, &mut sequence_id, options, output)
            })
        };
        let bytes = read_whole(file)?;
        if is_event_stream(&bytes) {
            for event in events(file, &bytes) {
                take(Some(event?), true)?;
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
                    take(Some(response), is_chunk)?;
                }
            }
        }
        take(None, false)?;
    }
    output.note("responses do not contain router weights");
    Ok(())
}

/// Puts the chunks of a stream together.
#[derive(Default)]
struct Chunks {
    last: Option<Response>,
}

impl Chunks {
    /// Adds a response or chunk; returns the response before it once that is complete.
    fn add(
        &mut self,
        response: Response,
        is_chunk: bool,
    ) -> Result<Option<Response>, ResponseError> {
        match &mut self.last {
            Some(last) if is_chunk && last.id() == response.id() => {
                last.absorb(response)?;
                Ok(None)
            }
            last => Ok(last.replace(response)),
        }
    }
}

/// The JSON of server-sent events: lines `data: {...}`, up to `data: [DONE]`. Other lines are comments and names of events.
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

/// Hands over each choice as a sequence of its own; a prompt that they share goes to the first.
fn import_response(
    response: &Response,
    sequence_id: &mut u32,
    options: &ImportOptions,
    output: &mut Output<'_>,
) -> Result<(), ForeignError> {
    let choices = response.choices.as_deref().unwrap_or_default();
    let own = [Response::default()];
    // A response without choices is one sequence.
    let choices = if choices.is_empty() { &own } else { choices };
    let usage = Counts::of([response.usage.as_ref(), response.meta_info.as_ref()]);
    // The usage counts the generated tokens of all choices together, and those of all prompts if there are several.
    let is_one = choices.len() == 1;
    let is_of_one_prompt = is_one || response.prompt_routed_experts.is_some();
    let usage = Counts {
        prompt: usage.prompt.filter(|_| is_of_one_prompt),
        completion: usage.completion.filter(|_| is_one),
        ..usage
    };
    let mut importing = Importing {
        options,
        output,
        sequence_id: *sequence_id,
    };
    let mut n_shared = 0;
    if let Some(prompt) = &response.prompt_routed_experts {
        n_shared = importing.prompt("prompt_routed_experts", prompt)?;
    }
    for (i, choice) in choices.iter().enumerate() {
        importing.sequence_id = *sequence_id;
        let of_response = Some(response).filter(|_| i == 0);
        importing.choice(i, choice, of_response, n_shared, usage)?;
        *sequence_id = sequence_id.saturating_add(1);
    }
    Ok(())
}

/// Where the routing of one choice goes.
struct Importing<'a, 'o> {
    options: &'a ImportOptions,
    output: &'a mut Output<'o>,
    sequence_id: u32,
}

impl Importing<'_, '_> {
    /// Hands over the routing of a prompt; returns its number of tokens.
    fn prompt(&mut self, name: &str, prompt: &RoutedExperts) -> Result<usize, ForeignError> {
        let counts = Counts {
            prompt: Some(usize::MAX),
            start: Some(0),
            ..Counts::default()
        };
        self.routed(name, prompt, counts)
    }

    /// Hands over what a choice has: its own, else that of the response as a whole.
    fn choice(
        &mut self,
        i: usize,
        choice: &Response,
        response: Option<&Response>,
        n_shared: usize,
        usage: Counts,
    ) -> Result<(), ForeignError> {
        let mut n_given = n_shared;
        if let Some(prompt) = &choice.prompt_routed_experts {
            let name = format!("choices[{i}].prompt_routed_experts");
            n_given = self.prompt(&name, prompt)?;
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
                let is_whole = n_given == 0 && matches!(experts, RoutedExperts::Bytes(_));
                let first = n_given.max(usage.prompt.unwrap_or(0));
                let generated = Counts {
                    prompt: Some(first),
                    completion: None,
                    start: Some(first),
                };
                let counts = if is_whole { counts } else { generated };
                self.routed(&format!("{place}routed_experts"), experts, counts)?;
                break;
            }
        }
        Ok(())
    }

    /// Hands over an array; returns its number of tokens.
    fn routed(
        &mut self,
        name: &str,
        experts: &RoutedExperts,
        counts: Counts,
    ) -> Result<usize, ForeignError> {
        let at = |index: &[usize]| element_of(name, index);
        let array = placing::array(experts, counts, self.options, at(&[]), self.output)?;
        let n_tokens = array.shape().first().copied().unwrap_or(0);
        let place = Tokens {
            first: counts.first_token(n_tokens, at(&[]), self.output)?,
            sequence_id: Some(self.sequence_id),
            n_prompt: counts.prompt,
        };
        tokens(&array, place, at, self.options, self.output)?;
        Ok(n_tokens)
    }
}
