//! Expert counts `[layers, experts]`, also of physical experts, and their sums over steps.

use moe_trace::{CountRow, ExpertId, MAX_ID, ModelInfo};

use super::{element, row_blocks};
use crate::binary::array::{Array, ElementType};
use crate::layers::RowUse;
use crate::{ForeignError, ImportOptions, Output};

/// Most experts that a token of any known model selects.
const MAX_TOP_K: usize = 32;
/// Experts in a layer of any known model are fewer.
const MAX_EXPERT: i64 = 1024;

/// Why an array does not contain expert counts.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CountError {
    /// The map of physical experts has the wrong number of dimensions.
    #[error("physical_to_logical_map has shape {shape:?}; expected [layers, physical experts]")]
    MapShape {
        /// Shape of the map.
        shape: Vec<usize>,
    },
    /// The counts have the wrong number of dimensions.
    #[error(
        "the array has shape {shape:?}; counts are [layers, experts] or [steps, layers, experts]"
    )]
    Shape {
        /// Shape of the array.
        shape: Vec<usize>,
    },
    /// The array has more layers or experts than [`MAX_ID`].
    #[error(
        "{n_layer} layers of {n_expert} experts exceed the limit of {MAX_ID}; the array does not contain expert counts"
    )]
    TooMany {
        /// Layers of the array.
        n_layer: usize,
        /// Experts in a layer.
        n_expert: usize,
    },
    /// The counts of one file belong to different models.
    #[error(
        "{n_expert} experts in a layer, but {before} in earlier counts; the file mixes several models"
    )]
    OtherModel {
        /// Experts in a layer of these counts.
        n_expert: usize,
        /// Experts in a layer of earlier counts.
        before: usize,
    },
    /// The elements are booleans.
    #[error("the elements are booleans, not expert counts; sum the mask over the tokens")]
    Mask,
    /// An element is negative, too large, or not an integer.
    #[error("{found} is not a count (0..={max}); the array does not contain expert counts")]
    NotCount {
        /// The element.
        found: String,
        /// The highest count that can be read: 2^53 for floats and JSON.
        max: u64,
    },
    /// The map lacks a physical expert.
    #[error(
        "physical_to_logical_map has no valid entry for physical expert {physical} of layer {layer}; the file is damaged"
    )]
    Unmapped {
        /// Index of the physical expert.
        physical: usize,
        /// Row of the array.
        layer: usize,
    },
    /// Physical counts without `physical_to_logical_map`.
    #[error(
        "counts of physical experts without last_physical_to_logical_map, which maps them to experts of the model; use the complete dump"
    )]
    NoMap,
    /// `physical_to_logical_map` without counts.
    #[error("the file is a placement without counts; use a file with logical_count")]
    NoCounts,
    /// JSON lists with three or more dimensions, which may be counts or routing.
    #[error(
        "the lists are three or more deep: they are routing [tokens, layers, top_k] or counts [steps, layers, experts], which the \
         format does not distinguish; sum the counts over the steps, write them as logical_count, or save routing with numpy.save"
    )]
    Ambiguous,
}

/// The expert of the model that each physical expert (replica) is a copy of: `[layers, physical experts]`.
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

    /// The expert of the model that `physical` is a copy of. Ids are below the number of physical experts.
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

/// Index of an element, and the error.
pub(crate) type ElementError = (Vec<usize>, CountError);

impl CountSums {
    /// Adds counts `[layers, experts]`, or the sum over the steps of `[steps, layers, experts]`. With `map`, the experts are
    /// physical experts.
    pub(crate) fn add(
        &mut self,
        counts: &Array<'_>,
        map: Option<&PhysicalMap<'_>>,
    ) -> Result<(), ElementError> {
        if counts.element_type() == ElementType::Bool {
            return Err(without_index(CountError::Mask));
        }
        let (n_steps, n_layer, n_physical) = match *counts.shape() {
            [n_layer, n_physical] => (None, n_layer, n_physical),
            [n_steps, n_layer, n_physical] => (Some(n_steps), n_layer, n_physical),
            ref shape => {
                let shape = shape.to_vec();
                return Err(without_index(CountError::Shape { shape }));
            }
        };
        self.allocate(n_layer, map.map_or(n_physical, PhysicalMap::n_logical))?;
        for step in 0..n_steps.unwrap_or(1) {
            for layer in 0..n_layer {
                for physical in 0..n_physical {
                    let index = [step, layer, physical];
                    let index = &index[usize::from(n_steps.is_none())..];
                    self.add_one(counts, map, index, layer, physical)
                        .map_err(|error| (index.to_vec(), error))?;
                }
            }
        }
        Ok(())
    }

    fn allocate(&mut self, n_layer: usize, n_expert: usize) -> Result<(), ElementError> {
        if n_layer > MAX_ID as usize || n_expert > MAX_ID as usize {
            return Err(without_index(CountError::TooMany { n_layer, n_expert }));
        }
        if self.sums.is_empty() {
            self.n_expert = n_expert;
            self.sums = vec![0; n_layer * n_expert];
        }
        if self.sums.len() != n_layer * n_expert || self.n_expert != n_expert {
            return Err(without_index(CountError::OtherModel {
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
            return Err(CountError::NotCount {
                found: counts.shown(index).unwrap_or_default(),
                max: counts.max_integer(),
            });
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

    /// Passes on the sums, mapped to the blocks of the model, and the number of experts in a layer.
    pub(crate) fn finish(
        &self,
        options: &ImportOptions,
        output: &mut Output<'_>,
    ) -> Result<(), ForeignError> {
        if self.sums.is_empty() {
            return Ok(());
        }
        output.model_info(&ModelInfo {
            n_expert: u32::try_from(self.n_expert).ok().filter(|&n| n > 0),
            ..ModelInfo::default()
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

/// Warns if an array that was read as counts may be routing. Its shape does not distinguish them; the number of experts of the
/// model does.
pub(crate) fn warn_if_routing(array: &Array<'_>, options: &ImportOptions, output: &mut Output<'_>) {
    if options.n_expert().is_none() && may_be_routing(array) {
        output.note(format!(
            "warning: an array of shape {:?} was read as expert counts, but its numbers may be expert ids; routing needs an array of \
             integers [tokens, layers, top_k]",
            array.shape()
        ));
    }
}

/// Whether the last dimension may be the selected experts of a token: few, small and distinct numbers.
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

fn without_index(error: CountError) -> ElementError {
    (Vec::new(), error)
}
