//! Responses of SGLang with `--enable-return-routed-experts`, one or several behind one another.
//!
//! `meta_info.routed_experts` is base64 of 32-bit numbers `[prompt + generated - 1, layers, top_k]`; the response does not tell
//! how many layers and experts those are, so the top-k comes from the user or the model; where it does not tell the numbers of
//! tokens either, the model's layers tell how many there are.

use serde::Deserialize;

use crate::foreign::arrays::{Tokens, element_of, tokens};
use crate::foreign::binary::array::{Array, ElementType};
use crate::foreign::source::read_whole;
use crate::foreign::{ForeignError, Importer, Options, Output, Source, json};

use super::routed_experts::{RoutedExperts, has_keys};

/// Response of SGLang.
pub struct SglangResponse;

/// Several prompts in a request give a list.
#[derive(Deserialize)]
#[serde(untagged)]
enum Batch {
    One(Response),
    Many(Vec<Response>),
}

#[derive(Deserialize)]
struct Response {
    meta_info: MetaInfo,
}

#[derive(Deserialize)]
struct MetaInfo {
    prompt_tokens: Option<usize>,
    completion_tokens: Option<usize>,
    routed_experts: RoutedExperts,
}

impl Importer for SglangResponse {
    fn name(&self) -> &'static str {
        "sglang-response"
    }

    fn description(&self) -> &'static str {
        "responses of SGLang with meta_info.routed_experts (base64), needs --top-k or --model"
    }

    fn is_applicable(&self, sample: &[u8]) -> bool {
        has_keys(sample, &["meta_info", "routed_experts"])
    }

    fn import(
        &self,
        source: &Source,
        options: &Options,
        output: &mut Output<'_>,
    ) -> Result<(), ForeignError> {
        let mut sequence_id = 0u32;
        for file in source.files() {
            output.begin_file(file);
            let bytes = read_whole(file)?;
            for batch in serde_json::Deserializer::from_slice(&bytes).into_iter::<Batch>() {
                let batch = batch.map_err(|error| json::invalid(file, &error, 0))?;
                let responses = match batch {
                    Batch::One(response) => vec![response],
                    Batch::Many(responses) => responses,
                };
                for response in responses {
                    import_response(&response.meta_info, sequence_id, options, output)?;
                    sequence_id = sequence_id.saturating_add(1);
                }
            }
        }
        output.note("responses do not tell router weights");
        Ok(())
    }
}

fn import_response(
    response: &MetaInfo,
    sequence_id: u32,
    options: &Options,
    output: &mut Output<'_>,
) -> Result<(), ForeignError> {
    let at = |index: &[usize]| element_of("meta_info.routed_experts", index);
    let array = match &response.routed_experts {
        RoutedExperts::Lists(lists) => lists.array(),
        RoutedExperts::Bytes(bytes) => shape(bytes, response, options)
            .and_then(|shape| Array::contiguous(bytes, ElementType::I32, false, shape, false)),
    };
    let array = array.map_err(|reason| output.invalid(at(&[]), reason))?;
    let place = Tokens {
        first: 0,
        sequence_id: Some(sequence_id),
        n_prompt: response.prompt_tokens,
    };
    tokens(&array, place, at, options, output)
}

/// How many layers the numbers are of, by the model: all, or those that have experts.
fn n_layer(
    bytes: &[u8],
    top_k: usize,
    response: &MetaInfo,
    options: &Options,
) -> Result<usize, String> {
    let model = options.model.as_ref().ok_or(
        "the response tells not both prompt_tokens and completion_tokens: how many tokens these are only the model tells; name it with --model",
    )?;
    let all = model.n_layer.map_or(0, |n| n as usize);
    let mut possible = vec![all, model.expert_bytes.len()];
    possible.dedup();
    let least = response.prompt_tokens.unwrap_or(1).max(1);
    possible.retain(|&n_layer| {
        let row = n_layer.saturating_mul(top_k).saturating_mul(4);
        row > 0 && bytes.len().is_multiple_of(row) && bytes.len() / row >= least
    });
    match possible[..] {
        [n_layer] => Ok(n_layer),
        _ => Err(format!(
            "{} bytes: prompt_tokens or completion_tokens is missing, and the model's layers do not tell how many tokens these are",
            bytes.len()
        )),
    }
}

/// `[tokens, layers, top_k]` of the numbers.
fn shape(bytes: &[u8], response: &MetaInfo, options: &Options) -> Result<Vec<usize>, String> {
    let Some(top_k) = options.n_expert_used().filter(|&k| k > 0) else {
        return Err(
            "the response does not tell how many experts a token is routed to; say it with --top-k, or name the model with --model"
                .into(),
        );
    };
    let top_k = top_k as usize;
    let (Some(prompt), Some(completion)) = (response.prompt_tokens, response.completion_tokens)
    else {
        let n_layer = n_layer(bytes, top_k, response, options)?;
        return Ok(vec![bytes.len() / (n_layer * top_k * 4), n_layer, top_k]);
    };
    let n_tokens = prompt.saturating_add(completion).saturating_sub(1);
    let row = n_tokens.saturating_mul(top_k).saturating_mul(4);
    if row == 0 || !bytes.len().is_multiple_of(row) {
        return Err(format!(
            "{} bytes are no whole number of layers with {top_k} experts for each of {n_tokens} tokens; is the top-k right?",
            bytes.len()
        ));
    }
    Ok(vec![n_tokens, bytes.len() / row, top_k])
}
