//! Routing `[tokens, layers, top_k]`.

use moe_trace::{Phase, RoutingRow, TokenId};

use super::row_blocks;
use crate::binary::array::{Array, ElementType};
use crate::layers::RowUse;
use crate::{ForeignError, ImportOptions, Location, Output};

/// Why an array does not contain routing.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum RoutingError {
    /// The array has the wrong number of dimensions.
    #[error("the array has shape {shape:?}; routing is [tokens, layers, top_k]")]
    Shape {
        /// Shape of the array.
        shape: Vec<usize>,
    },
    /// The elements are booleans: the experts that a token selects, not their ids.
    #[error(
        "the elements are booleans, not expert ids; convert the mask to ids [tokens, layers, top_k]"
    )]
    Mask,
    /// The position of a token does not fit 32 bits.
    #[error("token position {position} is out of range (0..=4294967295)")]
    Position {
        /// The position.
        position: usize,
    },
    /// An element is not an integer, or not a known expert.
    #[error("the element is not an expert id; the array does not contain routing")]
    NotExpert,
    /// A token has more experts than distinct expert ids exist, so that ids are repeated.
    #[error(
        "a token has {n_used} experts in one layer, but the highest expert id of the array is {highest}; the array does not \
         contain routing"
    )]
    Repeated {
        /// Slots of the token that are not empty.
        n_used: usize,
        /// Highest expert id of the array.
        highest: i64,
    },
}

/// The tokens of an array: part of one sequence.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tokens {
    /// Position of the first token.
    pub(crate) first: usize,
    /// The sequence; `None` if the format does not distinguish sequences.
    pub(crate) sequence_id: Option<u32>,
    /// Number of prompt tokens of the sequence, counted from position 0, if known.
    pub(crate) n_prompt: Option<usize>,
}

/// Passes on routing `[tokens, layers, top_k]`, token by token.
///
/// A negative id is an empty slot. If all slots of a token in a layer are 0, the layer did not route the token: servers fill
/// results that they did not compute with 0.
pub(crate) fn import_tokens(
    array: &Array<'_>,
    tokens: Tokens,
    element: impl Fn(&[usize]) -> Location,
    options: &ImportOptions,
    output: &mut Output<'_>,
) -> Result<(), ForeignError> {
    let &[n_tokens, n_layer, top_k] = array.shape() else {
        let shape = array.shape().to_vec();
        return Err(output.invalid(element(&[]), RoutingError::Shape { shape }));
    };
    if array.element_type() == ElementType::Bool {
        return Err(output.invalid(element(&[]), RoutingError::Mask));
    }
    if n_tokens == 0 {
        return Ok(());
    }
    // Unused slots may be padding, or experts of other ranks, so the size of the dimension is not the top-k.
    output.check_slots(n_used_slots(array), || element(&[]))?;
    if let Some((index, error)) = find_repeated(array) {
        return Err(output.invalid(element(&index), error));
    }
    let blocks = row_blocks(
        options,
        n_layer,
        |layer| use_of_layer(array, layer),
        || element(&[]),
        output,
    )?;
    let mut has_empty = blocks.contains(&None);
    let mut experts = Vec::new();
    for token in 0..n_tokens {
        let position = tokens.first.saturating_add(token);
        let token_id = TokenId::try_from(position)
            .map_err(|_| output.invalid(element(&[token]), RoutingError::Position { position }))?;
        let phase = tokens.n_prompt.map(|n_prompt| {
            if position < n_prompt {
                Phase::Prompt
            } else {
                Phase::Generate
            }
        });
        for (layer, &block) in blocks.iter().enumerate() {
            let Some(layer_id) = block else {
                continue;
            };
            let at = || element(&[token, layer]);
            let row = RoutingRow {
                token_id,
                sequence_id: tokens.sequence_id,
                phase,
                ..RoutingRow::at_layer(layer_id)
            };
            experts.clear();
            for slot in 0..top_k {
                let index = [token, layer, slot];
                let Some(expert) = array.integer(&index) else {
                    return Err(output.invalid(element(&index), RoutingError::NotExpert));
                };
                experts.push(expert);
            }
            if top_k > 1 && experts.iter().all(|&expert| expert == 0) {
                has_empty = true;
                continue;
            }
            output.token(at, &row, experts.iter().map(|&expert| (expert, None)))?;
        }
    }
    if has_empty {
        output.note(
            "skipped tokens with expert 0 in every slot of a layer, which the layer did not route",
        );
    }
    Ok(())
}

/// The index of the first token in `[tokens, layers, top_k]` that has more experts in a layer than the array has ids, so that
/// some repeat. Tokens with expert 0 in every slot are not routed.
fn find_repeated(array: &Array<'_>) -> Option<(Vec<usize>, RoutingError)> {
    let &[n_tokens, n_layer, top_k] = array.shape() else {
        return None;
    };
    let places =
        move || (0..n_tokens).flat_map(move |token| (0..n_layer).map(move |layer| (token, layer)));
    let experts = move |(token, layer): (usize, usize)| {
        (0..top_k).filter_map(move |slot| array.integer(&[token, layer, slot]))
    };
    // An id of top_k - 1 or more proves that there are enough experts. Usually one of the first tokens has one.
    let is_sufficient = |expert: i64| usize::try_from(expert).is_ok_and(|id| id >= top_k - 1);
    if places().flat_map(experts).any(is_sufficient) {
        return None;
    }
    let highest = places().flat_map(experts).max()?;
    let n_used = move |place: (usize, usize)| {
        let used = experts(place).filter(|&expert| expert >= 0).count();
        if experts(place).any(|expert| expert > 0) {
            used
        } else {
            0
        }
    };
    let n_expert = usize::try_from(highest).ok()?.saturating_add(1);
    let (token, layer) = places().find(|&place| n_used(place) > n_expert)?;
    let n_used = n_used((token, layer));
    Some((
        vec![token, layer],
        RoutingError::Repeated { n_used, highest },
    ))
}

/// Number of slots up to the last one that any token uses. Servers pad the last dimension, for example to 8.
pub(crate) fn n_used_slots(array: &Array<'_>) -> usize {
    let &[n_tokens, n_layer, top_k] = array.shape() else {
        return 0;
    };
    let is_used = |slot: usize| {
        let mut places =
            (0..n_tokens).flat_map(|token| (0..n_layer).map(move |l| [token, l, slot]));
        places.any(|index| array.integer(&index).is_some_and(|expert| expert >= 0))
    };
    (0..top_k)
        .rev()
        .find(|&slot| is_used(slot))
        .map_or(0, |slot| slot + 1)
}

/// The use of a layer of routing `[tokens, layers, top_k]`.
pub(crate) fn use_of_layer(array: &Array<'_>, layer: usize) -> RowUse {
    let &[n_tokens, _, top_k] = array.shape() else {
        return RowUse::Empty;
    };
    RowUse::of_tokens((0..n_tokens).map(|token| {
        let slots = (0..top_k).map(move |slot| [token, layer, slot]);
        slots.map(|index| array.integer(&index))
    }))
}
