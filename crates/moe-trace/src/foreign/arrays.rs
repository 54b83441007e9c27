//! What is known from servers as arrays: counts `[layers, experts]` and routing `[tokens, layers, top_k]`.

use super::binary::array::Array;
use super::{At, CountRow, ForeignError, Options, Output, Phase, RoutingRow};
use super::{Facts, MAX_ID};

/// Where experts are replicated: which expert of the model each physical one is a copy of, `[layers, physical]`.
pub(crate) struct PhysicalMap<'a>(Array<'a>);

impl<'a> PhysicalMap<'a> {
    /// Checks the shape of `physical_to_logical_map`.
    pub(crate) fn new(map: Array<'a>) -> Result<Self, String> {
        match map.shape() {
            [_, _] => Ok(Self(map)),
            shape => Err(format!(
                "physical_to_logical_map of shape {shape:?} is not [layers, physical experts]"
            )),
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
pub(crate) type ElementFault = (Vec<usize>, String);

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
                return Err(whole(format!(
                    "an array of shape {shape:?} is neither [layers, experts] nor [steps, layers, experts]"
                )));
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
            return Err(whole(format!(
                "{n_layer} layers with {n_expert} experts are more than any model has ({MAX_ID}); the array is of something else"
            )));
        }
        if self.sums.is_empty() {
            self.n_expert = n_expert;
            self.sums = vec![0; n_layer * n_expert];
        }
        if self.sums.len() != n_layer * n_expert || self.n_expert != n_expert {
            return Err(whole(format!(
                "{n_expert} experts in a layer, {} in the counts before it; the file is of several models",
                self.n_expert
            )));
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
    ) -> Result<(), String> {
        let count = counts.integer(index);
        let Some(count) = count.and_then(|count| u64::try_from(count).ok()) else {
            let found = counts.float(index).unwrap_or(f64::NAN);
            return Err(format!(
                "{found} is not a count; the array is of something else"
            ));
        };
        let expert = match map {
            _ if count == 0 => return Ok(()),
            None => Some(physical),
            Some(map) => map.logical(layer, physical),
        };
        let sum = expert.and_then(|expert| self.sums.get_mut(layer * self.n_expert + expert));
        let Some(sum) = sum else {
            return Err(format!(
                "physical_to_logical_map does not tell which expert {physical} of layer {layer} is; the file is damaged"
            ));
        };
        *sum = sum.saturating_add(count);
        Ok(())
    }

    /// Hands over the sums and how many experts a layer has.
    pub(crate) fn finish(&self, output: &mut Output<'_>) -> Result<(), ForeignError> {
        output.facts(&Facts {
            n_expert: u32::try_from(self.n_expert).ok().filter(|&n| n > 0),
            ..Facts::default()
        })?;
        for (layer, experts) in self.sums.chunks(self.n_expert.max(1)).enumerate() {
            let layer_id = output.id(|| element(&[layer]), "layer", layer as u64)?;
            for (expert, &count) in experts.iter().enumerate() {
                let row = CountRow {
                    layer_id,
                    expert_id: expert as u32,
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

/// A place in an array, by its index.
pub(crate) fn element(index: &[usize]) -> At {
    element_of("", index)
}

/// A place in the array that is called `name`.
pub(crate) fn element_of(name: &str, index: &[usize]) -> At {
    At::Element(format!("{name}{index:?}"))
}

fn whole(reason: String) -> ElementFault {
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
///
/// Servers count only the layers that have experts. Where the model is known and has as many of them, those are meant;
/// otherwise the layers are counted from 0.
pub(crate) fn tokens(
    array: &Array<'_>,
    tokens: Tokens,
    element: impl Fn(&[usize]) -> At,
    options: &Options,
    output: &mut Output<'_>,
) -> Result<(), ForeignError> {
    let &[n_tokens, n_layer, top_k] = array.shape() else {
        let reason = format!(
            "an array of shape {:?} is not [tokens, layers, top_k]",
            array.shape()
        );
        return Err(output.invalid(element(&[]), reason));
    };
    let layers = moe_layers(options, n_layer);
    output.facts(&Facts {
        n_expert_used: u32::try_from(n_used_slots(array)).ok().filter(|&k| k > 0),
        ..Facts::default()
    })?;
    let mut experts = Vec::new();
    for token in 0..n_tokens {
        let position = tokens.first.saturating_add(token);
        let token_id = u32::try_from(position)
            .map_err(|_| output.invalid(element(&[token]), "more tokens than can be counted"))?;
        let phase = tokens.n_prompt.map(|n_prompt| {
            if position < n_prompt {
                Phase::Prompt
            } else {
                Phase::Generate
            }
        });
        for layer in 0..n_layer {
            let at = || element(&[token, layer]);
            let layer_id = match &layers {
                Some(layers) => layers[layer],
                None => output.id(at, "layer", layer as u64)?,
            };
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
                    return Err(output.invalid(
                        element(&index),
                        "not an expert; the array is of something else",
                    ));
                };
                experts.push(expert);
            }
            if top_k > 1 && experts.iter().all(|&expert| expert == 0) {
                output.note("tokens with expert 0 in every slot of a layer were not routed there and were left out");
                continue;
            }
            output.token(at, &row, experts.iter().map(|&expert| (expert, None)))?;
        }
    }
    Ok(())
}

/// Slots up to the last one that holds an expert for some token. Servers pad the last dimension, for example to 8.
fn n_used_slots(array: &Array<'_>) -> usize {
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

/// The layers that have experts, if the model is known and has `n_layer` of them.
fn moe_layers(options: &Options, n_layer: usize) -> Option<Vec<u16>> {
    let model = options.model.as_ref()?;
    (model.expert_bytes.len() == n_layer).then(|| model.expert_bytes.keys().copied().collect())
}
