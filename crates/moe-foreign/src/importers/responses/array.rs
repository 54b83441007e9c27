//! The array of routing in a response: its shape, and the position of its first token.

use crate::arrays::use_of_layer;
use crate::binary::array::{Array, ElementType};
use crate::binary::npy;
use crate::layers::Layouts;
use crate::{ForeignError, ImportOptions, Location, Missing, Output};

use super::document::Extension;
use super::routed_experts::RoutedExperts;

/// Why the routing in a response is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ResponseError {
    /// The bytes are not an array of 32-bit integers with `top_k` columns.
    #[error(
        "{n_bytes} bytes are not a multiple of {top_k} 32-bit integers; the response is damaged, or the top-k is not {top_k}"
    )]
    Bytes {
        /// Number of bytes after base64 decoding.
        n_bytes: usize,
        /// Experts that a token selects.
        top_k: usize,
    },
    /// No shape fits the number of integers.
    #[error(
        "{n_numbers} expert ids do not fit [tokens, layers, top_k] with {n_tokens} tokens, {layers} layers and top-k {top_k}; the \
         response is of another model, or the top-k is not {top_k}"
    )]
    Shape {
        /// Number of integers in the response.
        n_numbers: usize,
        /// Experts that a token selects.
        top_k: usize,
        /// The numbers of layers that were tried, as text: `5 or 3`.
        layers: String,
        /// The number of tokens of the response, as text: `at most 8`.
        n_tokens: String,
    },
    /// The token counts of the response contradict each other.
    #[error(
        "{n_tokens} tokens from position {start} do not end at {n_evaluated} = prompt_tokens + completion_tokens - 1; the response is \
         damaged"
    )]
    Start {
        /// Tokens of the array.
        n_tokens: usize,
        /// Position of the first token.
        start: usize,
        /// `prompt_tokens + completion_tokens - 1`.
        n_evaluated: usize,
    },
    /// The chunks of a streamed response have too many choices.
    #[error("the chunks have more than {limit} choices; the stream is damaged")]
    Choices {
        /// Maximum number of choices.
        limit: usize,
    },
}

/// Token counts in a response; `None` if missing.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    /// Tokens of the prompt.
    pub(super) prompt: Option<usize>,
    /// Generated tokens, including the last one, which is not evaluated.
    pub(super) completion: Option<usize>,
    /// Position of the first token of the array.
    pub(super) start: Option<usize>,
}

impl Counts {
    /// The counts in several objects; for each count, the first object that has it.
    pub(super) fn of<'e>(objects: impl IntoIterator<Item = Option<&'e Extension>>) -> Self {
        objects
            .into_iter()
            .flatten()
            .fold(Self::default(), |counts, object| {
                counts.or(Self {
                    prompt: object.prompt_tokens,
                    completion: object.completion_tokens,
                    start: object.routed_experts_start_len,
                })
            })
    }

    /// These counts; missing ones are taken from `other`.
    pub(super) fn or(self, other: Self) -> Self {
        Self {
            prompt: self.prompt.or(other.prompt),
            completion: self.completion.or(other.completion),
            start: self.start.or(other.start),
        }
    }

    /// Number of evaluated tokens: all except the last generated one.
    fn n_evaluated(self) -> Option<usize> {
        Some(
            self.prompt?
                .saturating_add(self.completion?)
                .saturating_sub(1),
        )
    }

    /// Position of the first of `n_tokens` tokens, which are the last evaluated ones.
    pub(super) fn first_token(
        self,
        n_tokens: usize,
        at: Location,
        output: &mut Output<'_>,
    ) -> Result<usize, ForeignError> {
        match (self.start, self.n_evaluated()) {
            (Some(start), Some(n_evaluated))
                if start.checked_add(n_tokens) != Some(n_evaluated) =>
            {
                let source = ResponseError::Start {
                    n_tokens,
                    start,
                    n_evaluated,
                };
                Err(output.response(at, source))
            }
            (Some(start), _) => Ok(start),
            (None, Some(n_evaluated)) if n_tokens <= n_evaluated => Ok(n_evaluated - n_tokens),
            (None, Some(n_evaluated)) => {
                output.note(format!(
                    "warning: {at} has {n_tokens} tokens, more than prompt_tokens + completion_tokens - 1 = {n_evaluated}; the first is \
                     read as token 0"
                ));
                Ok(0)
            }
            (None, None) => {
                output.note("a sequence has no prompt_tokens or completion_tokens; its first token is read as token 0");
                Ok(0)
            }
        }
    }
}

/// Returns a view of `experts` as an array `[tokens, layers, top_k]`.
pub(super) fn view<'e>(
    experts: &'e RoutedExperts,
    counts: Counts,
    options: &ImportOptions,
    at: Location,
    output: &mut Output<'_>,
) -> Result<Array<'e>, ForeignError> {
    match experts {
        RoutedExperts::Lists(lists) => lists.array().map_err(|error| output.invalid(at, error)),
        RoutedExperts::Bytes(bytes) if bytes.starts_with(npy::MAGIC) => {
            npy::read(bytes).map_err(|error| {
                let reason = format!(
                    "{} (byte {} of the decoded data)",
                    error.reason, error.offset
                );
                output.invalid(at, reason)
            })
        }
        RoutedExperts::Bytes(bytes) => integers(bytes, counts, options, at, output),
    }
}

/// Returns a view of 32-bit integers without a shape. The number of layers is that of the model, or, without a model, follows from
/// the number of tokens.
fn integers<'e>(
    bytes: &'e [u8],
    counts: Counts,
    options: &ImportOptions,
    at: Location,
    output: &mut Output<'_>,
) -> Result<Array<'e>, ForeignError> {
    let Some(top_k) = options.max_expert_used() else {
        return Err(output.not_recorded(at, Missing::TopK));
    };
    let top_k = top_k as usize;
    let n_numbers = bytes.len() / 4;
    if !bytes.len().is_multiple_of(4) || !n_numbers.is_multiple_of(top_k) {
        let n_bytes = bytes.len();
        return Err(output.response(at, ResponseError::Bytes { n_bytes, top_k }));
    }
    let view = |n_layer: usize| {
        let n_tokens = n_numbers / (n_layer * top_k);
        let shape = vec![n_tokens, n_layer, top_k];
        Array::contiguous(bytes, ElementType::I32, false, shape, false)
            .map_err(|error| output.invalid(at.clone(), error))
    };
    let layouts = Layouts::of(options.model.as_ref());
    let n_evaluated = counts.n_evaluated();
    let n_tokens = n_evaluated.map(|n| n.saturating_sub(counts.start.unwrap_or(0)));
    // A response may have fewer tokens than were evaluated, unless its start is known.
    let fits = |n_layer: &usize| {
        let row = n_layer.saturating_mul(top_k);
        row > 0
            && n_numbers.is_multiple_of(row)
            && n_tokens.is_none_or(|n| match counts.start {
                Some(_) => n_numbers / row == n,
                None => n_numbers / row <= n,
            })
    };
    let mismatch = |layers: String| {
        let n_tokens = match (n_tokens, counts.start) {
            (None, _) => "any number of".into(),
            (Some(n), None) => format!("at most {n}"),
            (Some(n), Some(_)) => n.to_string(),
        };
        ResponseError::Shape {
            n_numbers,
            top_k,
            layers,
            n_tokens,
        }
    };
    let Some(layouts) = layouts else {
        let Some(n_tokens) = n_tokens else {
            return Err(output.not_recorded(at, Missing::Layers));
        };
        let row = n_tokens.saturating_mul(top_k);
        if n_numbers == 0 {
            return view(1);
        }
        if row == 0 || !n_numbers.is_multiple_of(row) {
            let source = mismatch("any number of".into());
            return Err(output.response(at, source));
        }
        let array = view(n_numbers / row)?;
        if counts.start.is_none() {
            output.note(format!(
                "warning: {at} does not record its number of layers; assumed {}, which is correct if the array starts with the first \
                 token of the prompt",
                n_numbers / row
            ));
            output.missing(Missing::Layers);
        }
        return Ok(array);
    };
    let possible: Vec<usize> = layouts.n_rows().filter(fits).collect();
    match possible[..] {
        [] => {
            let layers: Vec<String> = layouts.n_rows().map(|n| n.to_string()).collect();
            let source = mismatch(layers.join(" or "));
            Err(output.response(at, source))
        }
        [n_layer] => view(n_layer),
        [all, moe, ..] => {
            // With one row per hidden layer, the rows of dense layers are empty.
            let array = view(all)?;
            if layouts.dense_rows_are_empty(|layer| use_of_layer(&array, layer)) {
                Ok(array)
            } else {
                view(moe)
            }
        }
    }
}
