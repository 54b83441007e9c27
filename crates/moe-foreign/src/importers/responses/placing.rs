//! The shape of routing in a response, and the position of its first token.

use crate::arrays::use_of_layer;
use crate::binary::array::{Array, ElementType};
use crate::binary::npy;
use crate::layers::Layouts;
use crate::{At, ForeignError, ImportOptions, Missing, Output};

use super::super::routed_experts::RoutedExperts;
use super::Extension;

/// Why the routing of a response makes no sense.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ResponseError {
    /// Not the elements that SGLang writes.
    #[error(
        "{n_bytes} bytes are not 32-bit integers for {top_k} experts of a token; the response is damaged, or the number of experts of a token is another"
    )]
    Bytes {
        /// Bytes of the decoded base64.
        n_bytes: usize,
        /// Experts that a token selects.
        top_k: usize,
    },
    /// No number of tokens fits.
    #[error(
        "{n_numbers} experts do not fit {top_k} of each token in {rows} of at most {n_tokens} tokens; the response is of another model, or the number of experts of a token is another"
    )]
    Shape {
        /// Integers of the response.
        n_numbers: usize,
        /// Experts that a token selects.
        top_k: usize,
        /// The numbers of layers that were tried, in words.
        rows: String,
        /// The tokens that the response counts, in words.
        n_tokens: String,
    },
    /// The counts of the response contradict each other.
    #[error(
        "{n_tokens} tokens from token {start} on are not the {n_counted} that prompt_tokens and completion_tokens count; the response is damaged"
    )]
    Start {
        /// Tokens of the array.
        n_tokens: usize,
        /// The first of them.
        start: usize,
        /// `prompt_tokens + completion_tokens - 1`.
        n_counted: usize,
    },
    /// The chunks of a stream have more choices than any response.
    #[error("the chunks have more than {limit} choices; the stream is damaged")]
    Choices {
        /// Choices of a response, at most.
        limit: usize,
    },
}

/// The tokens that a response counts, as far as it does.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    /// Tokens of the prompt.
    pub(super) prompt: Option<usize>,
    /// Generated tokens, the last included.
    pub(super) completion: Option<usize>,
    /// Position of the first token of the array.
    pub(super) start: Option<usize>,
}

impl Counts {
    /// What the first of several objects that has a count says.
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

    /// These counts, and those of `other` where there are none.
    pub(super) fn or(self, other: Self) -> Self {
        Self {
            prompt: self.prompt.or(other.prompt),
            completion: self.completion.or(other.completion),
            start: self.start.or(other.start),
        }
    }

    /// Tokens that were evaluated: all but the last generated one.
    fn n_evaluated(self) -> Option<usize> {
        Some(
            self.prompt?
                .saturating_add(self.completion?)
                .saturating_sub(1),
        )
    }

    /// Position of the first of `n_tokens` tokens: they are the last ones that were evaluated.
    pub(super) fn first_token(
        self,
        n_tokens: usize,
        at: At,
        output: &mut Output<'_>,
    ) -> Result<usize, ForeignError> {
        match (self.start, self.n_evaluated()) {
            (Some(start), Some(n_counted)) if start.checked_add(n_tokens) != Some(n_counted) => {
                let source = ResponseError::Start {
                    n_tokens,
                    start,
                    n_counted,
                };
                Err(output.response(at, source))
            }
            (Some(start), _) => Ok(start),
            (None, Some(n_counted)) if n_tokens <= n_counted => Ok(n_counted - n_tokens),
            (None, Some(n_counted)) => {
                output.note(format!(
                    "warning: {at} has {n_tokens} tokens, more than the {n_counted} that prompt_tokens and completion_tokens count; the first was taken as token 0"
                ));
                Ok(0)
            }
            (None, None) => {
                output.note("prompt_tokens or completion_tokens of a sequence is not recorded: its first token was taken as token 0");
                Ok(0)
            }
        }
    }
}

/// The array `[tokens, layers, top_k]` of `experts`.
pub(super) fn array<'e>(
    experts: &'e RoutedExperts,
    counts: Counts,
    options: &ImportOptions,
    at: At,
    output: &mut Output<'_>,
) -> Result<Array<'e>, ForeignError> {
    match experts {
        RoutedExperts::Lists(lists) => lists.array().map_err(|error| output.invalid(at, error)),
        RoutedExperts::Bytes(bytes) if bytes.starts_with(npy::MAGIC) => {
            npy::read(bytes).map_err(|fault| {
                let reason = format!(
                    "{} (byte {} of what it decodes to)",
                    fault.reason, fault.offset
                );
                output.invalid(at, reason)
            })
        }
        RoutedExperts::Bytes(bytes) => integers(bytes, counts, options, at, output),
    }
}

/// Views 32-bit integers without a shape. The layers come from the model, or, without one, from the numbers of tokens.
fn integers<'e>(
    bytes: &'e [u8],
    counts: Counts,
    options: &ImportOptions,
    at: At,
    output: &mut Output<'_>,
) -> Result<Array<'e>, ForeignError> {
    let Some(top_k) = options.max_expert_used() else {
        return Err(output.lacks(at, Missing::TopK));
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
    let n_counted = counts.n_evaluated();
    let n_tokens = n_counted.map(|n| n.saturating_sub(counts.start.unwrap_or(0)));
    // A response may have fewer tokens than were evaluated, unless it says where it starts.
    let is_possible = |n_layer: &usize| {
        let row = n_layer.saturating_mul(top_k);
        row > 0
            && n_numbers.is_multiple_of(row)
            && n_tokens.is_none_or(|n| match counts.start {
                Some(_) => n_numbers / row == n,
                None => n_numbers / row <= n,
            })
    };
    let unfit = |rows: String| {
        let n_tokens = n_tokens.map_or("any number of".into(), |n| n.to_string());
        ResponseError::Shape {
            n_numbers,
            top_k,
            rows,
            n_tokens,
        }
    };
    let Some(layouts) = layouts else {
        let Some(n_tokens) = n_tokens else {
            return Err(output.lacks(at, Missing::Layers));
        };
        let row = n_tokens.saturating_mul(top_k);
        if n_numbers == 0 {
            return view(1);
        }
        if row == 0 || !n_numbers.is_multiple_of(row) {
            let source = unfit("a whole number of layers".into());
            return Err(output.response(at, source));
        }
        let array = view(n_numbers / row)?;
        if counts.start.is_none() {
            output.note(format!(
                "warning: {at} does not record its number of layers: {} were assumed, which is right if it starts with the first token of the prompt",
                n_numbers / row
            ));
            output.missing(Missing::Layers);
        }
        return Ok(array);
    };
    let possible: Vec<usize> = layouts.n_rows().filter(is_possible).collect();
    match possible[..] {
        [] => {
            let rows: Vec<String> = layouts.n_rows().map(|n| n.to_string()).collect();
            let source = unfit(format!("{} layers", rows.join(" or ")));
            Err(output.response(at, source))
        }
        [n_layer] => view(n_layer),
        [all, moe, ..] => {
            // In a row for each hidden layer, those of dense layers are empty.
            let array = view(all)?;
            if layouts.dense_rows_are_empty(|layer| use_of_layer(&array, layer)) {
                Ok(array)
            } else {
                view(moe)
            }
        }
    }
}
