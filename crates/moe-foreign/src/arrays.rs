//! What is known from servers as arrays: counts `[layers, experts]` and routing `[tokens, layers, top_k]`.

use moe_trace::{CountRow, ExpertId, Facts, LayerId, MAX_ID, Phase, RoutingRow, TokenId};

use crate::binary::array::Array;
use crate::layers::{RowBlocks, RowUse, blocks_of_rows};
use crate::{At, ForeignError, ImportOptions, Missing, Output};

/// Experts that a token of a known model is routed to, at most.
const MAX_TOP_K: usize = 32;
/// Experts in a layer of a known model are fewer.
const MAX_EXPERT: i64 = 1024;

/// Why an array does not hold counts of experts.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub(crate) enum CountError {
    #[error("physical_to_logical_map of shape {shape:?} is not [layers, physical experts]")]
    MapShape { shape: Vec<usize> },
    #[error(
        "an array of shape {shape:?} is neither [layers, experts] nor [steps, layers, experts]"
    )]
    Shape { shape: Vec<usize> },
    #[error(
        "{n_layer} layers with {n_expert} experts are more than any model has ({MAX_ID}); the array is of something else"
    )]
    TooMany { n_layer: usize, n_expert: usize },
    #[error(
        "{n_expert} experts in a layer, {before} in the counts before it; the file is of several models"
    )]
    OtherModel { n_expert: usize, before: usize },
    #[error("{found} is not a count; the array is of something else")]
    NotCount { found: f64 },
    #[error(
        "physical_to_logical_map does not contain which expert {physical} of layer {layer} is; the file is damaged"
    )]
    Unmapped { physical: usize, layer: usize },
}

/// Why an array does not hold routing.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
enum RoutingError {
    #[error("an array of shape {shape:?} is not [tokens, layers, top_k]")]
    Shape { shape: Vec<usize> },
    #[error("token {position} of the sequence is more than 32 bits count")]
    Position { position: usize },
    #[error("not an expert; the array is of something else")]
    NotExpert,
    #[error(
        "{n_used} experts in one layer, but no expert is above {highest}; the array is of something else"
    )]
    Repeats { n_used: usize, highest: i64 },
}

/// Where experts are replicated: which expert of the model each physical one is a copy of, `[layers, physical]`.
pub(crate) struct PhysicalMap<'a>(Array<'a>);

impl<'a> PhysicalMap<'a> {
    /// Checks the shape of `physical_to_logical_map`.
    pub(crate) fn new(map: Array<'a>) -> Result<Self, CountError> {
        match map.shape() {
            [_, _] => Ok(Self(map)),
            shape => Err(CountError::MapShape {
                shape: shape.to_vec(),
            }),
        }
    }

    /// The expert of the model that `physical` is a copy of; there are no more of them than there are copies.
    pub(crate) fn logical(&self, layer: usize, physical: usize) -> Option<usize> {
        let expert = usize::try_from(self.0.integer(&[layer, physical])?).ok()?;
        (expert < self.0.shape()[1]).then_some(expert)
    }

    fn n_logical(&self) -> usize {
        let &[n_layer, n_physical] = self.0.shape() else {
            return 0;
        };
        let places = (0..n_layer).flat_map(|layer| (0..n_physical).map(move |i| (layer, i)));
        let experts = places.filter_map(|(layer, physical)| self.logical(layer, physical));
        experts.max().map_or(0, |last| last + 1)
    }
}

/// Sums of counts, `[layers, experts]`.
#[derive(Debug, Default)]
pub(crate) struct CountSums {
    n_expert: usize,
    sums: Vec<u64>,
}

/// Index of an element, and what is wrong with it.
pub(crate) type ElementFault = (Vec<usize>, CountError);

impl CountSums {
    /// Adds counts `[layers, experts]`, or, over the steps, `[steps, layers, experts]`; with a map, of physical experts.
    pub(crate) fn add(
        &mut self,
        counts: &Array<'_>,
        map: Option<&PhysicalMap<'_>>,
    ) -> Result<(), ElementFault> {
        let (n_steps, n_layer, n_physical) = match *counts.shape() {
            [n_layer, n_physical] => (None, n_layer, n_physical),
            [n_steps, n_layer, n_physical] => (Some(n_steps), n_layer, n_physical),
            ref shape => {
                let shape = shape.to_vec();
                return Err(whole(CountError::Shape { shape }));
            }
        };
        self.make_room(n_layer, map.map_or(n_physical, PhysicalMap::n_logical))?;
        for step in 0..n_steps.unwrap_or(1) {
            for layer in 0..n_layer {
                for physical in 0..n_physical {
                    let index = [step, layer, physical];
                    let index = &index[usize::from(n_steps.is_none())..];
                    self.add_one(counts, map, index, layer, physical)
                        .map_err(|reason| (index.to_vec(), reason))?;
                }
            }
        }
        Ok(())
    }

    fn make_room(&mut self, n_layer: usize, n_expert: usize) -> Result<(), ElementFault> {
        if n_layer > MAX_ID as usize || n_expert > MAX_ID as usize {
            return Err(whole(CountError::TooMany { n_layer, n_expert }));
        }
        if self.sums.is_empty() {
            self.n_expert = n_expert;
            self.sums = vec![0; n_layer * n_expert];
        }
        if self.sums.len() != n_layer * n_expert || self.n_expert != n_expert {
            return Err(whole(CountError::OtherModel {
                n_expert,
                before: self.n_expert,
            }));
        }
        Ok(())
    }

    fn add_one(
        &mut self,
        counts: &Array<'_>,
        map: Option<&PhysicalMap<'_>>,
        index: &[usize],
        layer: usize,
        physical: usize,
    ) -> Result<(), CountError> {
        let count = counts.integer(index);
        let Some(count) = count.and_then(|count| u64::try_from(count).ok()) else {
            let found = counts.float(index).unwrap_or(f64::NAN);
            return Err(CountError::NotCount { found });
        };
        let expert = match map {
            _ if count == 0 => return Ok(()),
            None => Some(physical),
            Some(map) => map.logical(layer, physical),
        };
        let sum = expert.and_then(|expert| self.sums.get_mut(layer * self.n_expert + expert));
        let Some(sum) = sum else {
            return Err(CountError::Unmapped { physical, layer });
        };
        *sum = sum.saturating_add(count);
        Ok(())
    }

    /// Hands over the sums, by the blocks of the model in `options`, and how many experts a layer has.
    pub(crate) fn finish(
        &self,
        options: &ImportOptions,
        output: &mut Output<'_>,
    ) -> Result<(), ForeignError> {
        if self.sums.is_empty() {
            return Ok(());
        }
        output.facts(&Facts {
            n_expert: u32::try_from(self.n_expert).ok().filter(|&n| n > 0),
            ..Facts::default()
        })?;
        let layers: Vec<&[u64]> = self.sums.chunks(self.n_expert.max(1)).collect();
        let row_use = |layer: usize| RowUse::of_counts(layers[layer]);
        let blocks = row_blocks(options, layers.len(), row_use, || element(&[]), output)?;
        for ((layer, experts), block) in layers.into_iter().enumerate().zip(blocks) {
            let Some(layer_id) = block else {
                continue;
            };
            for ((expert_id, expert), &count) in (0..).map(ExpertId).zip(0..).zip(experts) {
                let row = CountRow {
                    layer_id,
                    expert_id,
                    phase: None,
                    count,
                    mass: None,
                };
                output.count(|| element(&[layer, expert]), &row)?;
            }
        }
        Ok(())
    }
}

/// Warns where an array that was read as counts may be routing: nothing in its shape shows which. The model's number of experts
/// does.
pub(crate) fn warn_of_routing(array: &Array<'_>, options: &ImportOptions, output: &mut Output<'_>) {
    if options.n_expert().is_none() && may_be_routing(array) {
        output.note(format!(
            "warning: an array of shape {:?} was read as counts of experts, but its numbers may be the experts of tokens; routing is an \
             array of integers [tokens, layers, top_k]",
            array.shape()
        ));
    }
}

/// Whether the last dimension may be the experts of a token: a few small numbers, none of them twice.
fn may_be_routing(array: &Array<'_>) -> bool {
    let Some((&n_slots, outer)) = array.shape().split_last() else {
        return false;
    };
    let n_rows: usize = outer.iter().product();
    if !(2..=MAX_TOP_K).contains(&n_slots) || n_rows < 2 {
        return false;
    }
    let mut index = vec![0; array.shape().len()];
    let mut experts = Vec::with_capacity(n_slots);
    for row in 0..n_rows {
        let mut rest = row;
        for (place, &size) in index.iter_mut().zip(outer).rev() {
            *place = rest % size;
            rest /= size;
        }
        experts.clear();
        for slot in 0..n_slots {
            if let Some(last) = index.last_mut() {
                *last = slot;
            }
            match array.integer(&index) {
                Some(-1) => {}
                Some(expert @ 0..MAX_EXPERT) if !experts.contains(&expert) => experts.push(expert),
                _ => return false,
            }
        }
    }
    true
}

/// A place in an array, by its index.
pub(crate) fn element(index: &[usize]) -> At {
    element_of("", index)
}

/// A place in the array that is called `name`.
pub(crate) fn element_of(name: &str, index: &[usize]) -> At {
    At::Element(format!("{name}{index:?}"))
}

fn whole(reason: CountError) -> ElementFault {
    (Vec::new(), reason)
}

/// Tokens of one sequence, as [`tokens`] hands them over.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tokens {
    /// Position of the first one.
    pub(crate) first: usize,
    /// The sequence, if it is known that there are several.
    pub(crate) sequence_id: Option<u32>,
    /// Tokens of the prompt among those from position 0 on, if that is known.
    pub(crate) n_prompt: Option<usize>,
}

/// Hands over routing `[tokens, layers, top_k]`, token by token. Negative ids mark empty slots, and a token has no expert in a
/// layer where all slots are 0, which is how servers fill what they did not compute.
pub(crate) fn tokens(
    array: &Array<'_>,
    tokens: Tokens,
    element: impl Fn(&[usize]) -> At,
    options: &ImportOptions,
    output: &mut Output<'_>,
) -> Result<(), ForeignError> {
    let &[n_tokens, n_layer, top_k] = array.shape() else {
        let shape = array.shape().to_vec();
        return Err(output.invalid(element(&[]), RoutingError::Shape { shape }));
    };
    if n_tokens == 0 {
        return Ok(());
    }
    // Unused slots may be padding, or experts of other ranks: they do not show how many experts a token is routed to.
    output.check_slots(n_used_slots(array), || element(&[]))?;
    if let Some((index, fault)) = repeats(array) {
        return Err(output.invalid(element(&index), fault));
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
            "tokens with expert 0 in every slot of a layer were not routed there and were left out",
        );
    }
    Ok(())
}

/// The first token of routing `[tokens, layers, top_k]` with more experts in a layer than the array has, so that some repeat, and
/// what is wrong with it. A token with expert 0 in every slot was not routed.
fn repeats(array: &Array<'_>) -> Option<(Vec<usize>, RoutingError)> {
    let &[n_tokens, n_layer, top_k] = array.shape() else {
        return None;
    };
    let places =
        move || (0..n_tokens).flat_map(move |token| (0..n_layer).map(move |layer| (token, layer)));
    let experts = move |(token, layer): (usize, usize)| {
        (0..top_k).filter_map(move |slot| array.integer(&[token, layer, slot]))
    };
    // An id that shows as many experts as a token has slots settles it; usually one of the first tokens has one.
    let shows_enough = |expert: i64| usize::try_from(expert).is_ok_and(|id| id >= top_k - 1);
    if places().flat_map(experts).any(shows_enough) {
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
    let most = usize::try_from(highest).ok()?.saturating_add(1);
    let (token, layer) = places().find(|&place| n_used(place) > most)?;
    let n_used = n_used((token, layer));
    Some((
        vec![token, layer],
        RoutingError::Repeats { n_used, highest },
    ))
}

/// Slots, the last dimension, up to the last one that holds an expert for some token. Servers pad the last dimension, for example to 8.
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

/// The block of each row of a server's array; `None` for an empty row of a dense layer. Where the model is not known, `output`
/// records that the numbering is an assumption.
pub(crate) fn row_blocks(
    options: &ImportOptions,
    n_rows: usize,
    row_use: impl Fn(usize) -> RowUse,
    at: impl Fn() -> At,
    output: &mut Output<'_>,
) -> Result<Vec<Option<LayerId>>, ForeignError> {
    let RowBlocks { blocks, is_assumed } = blocks_of_rows(options.model.as_ref(), n_rows, row_use)
        .map_err(|error| output.layers(at(), error))?;
    if is_assumed {
        output.missing(Missing::Layers);
    }
    Ok(blocks)
}

/// What a layer of routing `[tokens, layers, top_k]` holds.
pub(crate) fn use_of_layer(array: &Array<'_>, layer: usize) -> RowUse {
    let &[n_tokens, _, top_k] = array.shape() else {
        return RowUse::Empty;
    };
    RowUse::of_tokens((0..n_tokens).map(|token| {
        let slots = (0..top_k).map(move |slot| [token, layer, slot]);
        slots.map(|index| array.integer(&index))
    }))
}
