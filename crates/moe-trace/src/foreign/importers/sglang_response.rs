//! Responses of SGLang with `--enable-return-routed-experts`, one or several behind one another.
//!
//! `meta_info.routed_experts` is base64 of 32-bit numbers `[prompt + generated - 1, layers, top_k]`; the response does not tell
//! how many layers and experts those are, so the top-k comes from the user or the model.

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
    prompt_tokens: usize,
    completion_tokens: usize,
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
        n_prompt: Some(response.prompt_tokens),
    };
    tokens(&array, place, at, options, output)
}

/// `[tokens, layers, top_k]` of the numbers.
fn shape(bytes: &[u8], response: &MetaInfo, options: &Options) -> Result<Vec<usize>, String> {
    let n_tokens = response
        .prompt_tokens
        .saturating_add(response.completion_tokens)
        .saturating_sub(1);
    let Some(top_k) = options.n_expert_used().filter(|&k| k > 0) else {
        return Err(
            "the response does not tell how many experts a token is routed to; say it with --top-k, or name the model with --model"
                .into(),
        );
    };
    let top_k = top_k as usize;
    let row = n_tokens.saturating_mul(top_k).saturating_mul(4);
    if row == 0 || !bytes.len().is_multiple_of(row) {
        return Err(format!(
            "{} bytes are no whole number of layers with {top_k} experts for each of {n_tokens} tokens; is the top-k right?",
            bytes.len()
        ));
    }
    Ok(vec![n_tokens, bytes.len() / row, top_k])
}
