//! Writes a model anew with its tensors, and the experts inside them, in another order.
//!
//! Every key-value and every tensor stays byte for byte what it was. Where experts move, all that
//! belongs to an expert moves with it: its slice of the stacked weights, biases and scales, and its
//! row of the router and of the router's biases. The model then computes the same, but for the order
//! in which a softmax over all experts is summed, and for the choice between experts whose scores
//! are exactly equal.
//!
//! A model in several files becomes one: its `split.*` keys, which would be untrue, are left out.

mod experts;
mod order;

use std::io::{self, Write};

use moe_gguf::check::check;
use moe_gguf::names::Role;
use moe_gguf::{ExpertId, Fault, Gguf, LayerId, Tensor};
use thiserror::Error;

use crate::write::{Header, Writer};

pub use experts::{ExpertOrders, keep_groups, n_experts, n_groups};
pub use order::TensorOrder;

use experts::Share;

/// Bytes written at a time, so that a writer that reports progress can do so.
const PIECE: usize = 4 << 20;

/// Why a model cannot be laid out so. The text is one line.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// The model cannot be read.
    #[error(transparent)]
    Gguf(#[from] moe_gguf::Error),
    /// The new file's header would break a rule.
    #[error("the new header would be faulty: {0}")]
    Header(#[from] Fault),
    /// An order for experts of a layer that has none.
    #[error(
        "there is an order for the experts of layer {layer}, but the model has none there: is it of another model?"
    )]
    NoExperts {
        /// The layer.
        layer: LayerId,
    },
    /// Tensors claim the same bytes, which a new file would give to each of them.
    #[error(
        "the model is faulty: {overlap} (overlaps in all: {count}), which a new file would hide; fetch the model again"
    )]
    Overlap {
        /// The first overlap.
        overlap: String,
        /// Overlaps that the model has.
        count: usize,
    },
    /// An order that is none.
    #[error("the order of the experts of layer {layer} is of no use: {problem}")]
    NotAnOrder {
        /// The layer.
        layer: LayerId,
        /// What is wrong with it.
        problem: String,
    },
    /// The router chooses groups of experts first, and the order tears them apart.
    #[error(
        "the router chooses among {n_group} groups of experts first, and the order for layer {layer} tears groups apart: keep each group's experts together"
    )]
    Groups {
        /// The layer.
        layer: LayerId,
        /// Groups that the model has.
        n_group: u32,
    },
    /// The number of groups is not one number.
    #[error("metadata key {key:?} is {values}, but one number for all layers is needed")]
    GroupCount {
        /// The key.
        key: String,
        /// Its values.
        values: String,
    },
    /// A layer whose router is not known by its name.
    #[error(
        "the experts of layer {layer} cannot change places: the model has no tensor blk.{layer}.ffn_gate_inp.weight whose rows could \
         move with them; leave out the layer"
    )]
    NoRouter {
        /// The layer.
        layer: LayerId,
    },
    /// A tensor whose experts cannot be told apart.
    #[error(
        "the experts of tensor {tensor:?} cannot change places: {problem}; leave out its layer"
    )]
    Immovable {
        /// The tensor.
        tensor: String,
        /// Why not.
        problem: &'static str,
    },
}

/// A tensor in its new place.
#[derive(Clone, Debug)]
struct Placed {
    /// Index of the tensor in the model as it is.
    source: u32,
    name: String,
    /// The slices that it is made of; `None` where it stays as it is.
    slices: Option<Vec<u32>>,
    /// Whether an expert of it changes its number.
    is_permuted: bool,
}

/// How a model will lie in its new file.
#[derive(Clone, Debug)]
pub struct Layout {
    tensors: Vec<Placed>,
    header: Header,
    experts: ExpertOrders,
}

impl Layout {
    /// Plans the new file. The table comes in the order of the data, as llama.cpp demands.
    ///
    /// # Errors
    /// An order of experts does not fit the model, or moves what cannot be moved, or the model's data
    /// is cut or claimed twice.
    pub fn new(gguf: &Gguf, order: TensorOrder, experts: &ExpertOrders) -> Result<Layout, Error> {
        experts::check(gguf, experts)?;
        for tensor in gguf.tensors() {
            gguf.data(tensor)?;
        }
        let overlaps = check(gguf).overlaps;
        if let Some(first) = overlaps.first() {
            return Err(Error::Overlap {
                overlap: first.describe(gguf),
                count: overlaps.len(),
            });
        }
        let placed = gguf.tensors().iter().map(|tensor| place(tensor, experts));
        let mut tensors = placed.collect::<Result<Vec<_>, _>>()?;
        let tied = gguf.tensor("output.weight").is_none();
        tensors.sort_by_cached_key(|placed| order::key(order, &placed.name, tied));

        let mut header = Header::like(gguf, |key| is_dropped(gguf, key))?;
        for placed in &tensors {
            let source = &gguf.tensors()[placed.source as usize];
            let ne = source
                .ne
                .get(..source.n_dims as usize)
                .unwrap_or(&source.ne);
            header.tensor(&placed.name, source.ty, ne)?;
        }
        header.encode()?;
        Ok(Layout {
            tensors,
            header,
            experts: experts.clone(),
        })
    }

    /// Bytes of the new file.
    pub fn file_size(&self) -> u64 {
        let header = self.header.encode().map_or(0, |bytes| bytes.len() as u64);
        header.saturating_add(self.header.data_size())
    }

    /// Tensors whose experts change places.
    pub fn n_permuted(&self) -> usize {
        self.tensors.iter().filter(|t| t.is_permuted).count()
    }

    /// Writes the new file. Data is copied from the mapped model a piece at a time.
    ///
    /// # Errors
    /// The model's data is cut, or the file cannot be written.
    pub fn write<W: Write>(&self, gguf: &Gguf, out: W) -> io::Result<W> {
        let mut writer = Writer::new(out, self.header.clone())?;
        for placed in &self.tensors {
            for slice in placed.slices(gguf).map_err(io::Error::other)? {
                for piece in slice.chunks(PIECE) {
                    writer.write(piece)?;
                }
            }
        }
        writer.finish()
    }

    /// What in `new`, which was written after this plan, is not as the model `gguf` has it; empty
    /// where all is well. Reads both files whole.
    ///
    /// # Errors
    /// The data of a tensor is cut.
    pub fn differences(&self, gguf: &Gguf, new: &Gguf) -> Result<Vec<String>, moe_gguf::Error> {
        let mut found = Vec::new();
        let keys = gguf.metadata().iter_raw();
        let kept = keys.filter(|(key, _)| !is_dropped(gguf, key));
        if !kept.eq(new.metadata().iter_raw()) {
            found.push("the key-values differ".to_owned());
        }
        if new.tensors().len() != self.tensors.len() {
            let (is, was) = (new.tensors().len(), self.tensors.len());
            found.push(format!("there are {is} tensors, not {was}"));
        }
        for placed in &self.tensors {
            let source = &gguf.tensors()[placed.source as usize];
            let name = &placed.name;
            let Some(tensor) = new.tensor(name) else {
                found.push(format!("tensor {name:?} is missing"));
                continue;
            };
            if (tensor.ty, tensor.ne, tensor.n_dims) != (source.ty, source.ne, source.n_dims) {
                found.push(format!("tensor {name:?} has another type or shape"));
                continue;
            }
            let mut rest = new.data(tensor)?;
            let same = placed.slices(gguf)?.all(|slice| {
                let (now, later) = rest.split_at(slice.len().min(rest.len()));
                rest = later;
                now == slice
            });
            if !same || !rest.is_empty() {
                found.push(format!("the data of tensor {name:?} differs"));
            }
        }
        found.extend(self.router_differences(gguf, new)?);
        Ok(found)
    }
}

impl Layout {
    /// Rows of routers in `new` that do not select the experts that they selected in `gguf`.
    ///
    /// Looks at the data alone, not at what was planned: in each layer, the row of a place must be the old row of the expert
    /// that is there now, and the rows behind the experts must be the old ones.
    fn router_differences(&self, gguf: &Gguf, new: &Gguf) -> Result<Vec<String>, moe_gguf::Error> {
        let mut found = Vec::new();
        for old in gguf.tensors() {
            let layer = Role::of(&old.name).layer_id;
            let order = layer.and_then(|layer| self.experts.get(&layer));
            let n_rows = experts::router_rows(old).filter(|&n| n > 0);
            let (Some(order), Some(n_rows), Some(tensor)) = (order, n_rows, new.tensor(&old.name))
            else {
                continue;
            };
            let (was, now) = (gguf.data(old)?, new.data(tensor)?);
            let row_size = (was.len() / n_rows as usize).max(1);
            let mut rows = now.chunks_exact(row_size).enumerate();
            let wrong = rows.find(|&(place, row)| {
                let expert = order.get(place).map_or(place, |expert| expert.index());
                was.chunks_exact(row_size).nth(expert) != Some(row)
            });
            if let Some((place, _)) = wrong {
                found.push(format!(
                    "row {place} of {:?} is not that of the expert that is there",
                    old.name
                ));
            }
        }
        Ok(found)
    }
}

impl Placed {
    /// The slices of the model's data that the tensor is made of, in order.
    fn slices<'g>(
        &'g self,
        gguf: &'g Gguf,
    ) -> Result<impl Iterator<Item = &'g [u8]>, moe_gguf::Error> {
        let data = gguf.data(&gguf.tensors()[self.source as usize])?;
        let slices = self.slices.as_deref();
        let size = slices.map_or(data.len(), |slices| data.len() / slices.len().max(1));
        let whole = slices.is_none().then_some(data);
        let slices = slices.unwrap_or_default().iter().map(move |&slice| {
            // `experts::check` and `experts::share` have checked that every number is below the number of slices.
            let start = slice as usize * size;
            data.get(start..start + size).unwrap_or_default()
        });
        Ok(whole.into_iter().chain(slices))
    }
}

/// Whether a key would be untrue of the new file.
fn is_dropped(gguf: &Gguf, key: &str) -> bool {
    gguf.files().len() > 1 && key.starts_with("split.")
}

/// What becomes of a tensor.
fn place(tensor: &Tensor, experts: &ExpertOrders) -> Result<Placed, Error> {
    let role = Role::of(&tensor.name);
    let mut placed = Placed {
        source: tensor.index,
        name: tensor.name.clone(),
        slices: None,
        is_permuted: false,
    };
    let order = role.layer_id.and_then(|layer| experts.get(&layer));
    let Some(order) = order else {
        return Ok(placed);
    };
    let n_expert = u32::try_from(order.len()).unwrap_or(u32::MAX);
    match experts::share(tensor, &role, n_expert)? {
        Share::None => {}
        Share::Slices(n) => {
            // What is behind the experts stays.
            let slices = order.iter().map(|expert| expert.0).chain(n_expert..n);
            placed.slices = Some(slices.collect());
            placed.is_permuted = !order.is_sorted();
        }
        Share::One(expert) => {
            let places = experts::places(order);
            if let Some(place) = places.get(expert.index()) {
                placed.name = renamed(&tensor.name, expert, *place);
                placed.is_permuted = *place != expert;
            }
        }
    }
    Ok(placed)
}

/// `blk.0.ffn_up.5.weight` with another expert's number. The layer comes before it and may be equal.
fn renamed(name: &str, expert: ExpertId, place: ExpertId) -> String {
    let (old, new) = (format!(".{expert}."), format!(".{place}."));
    match name.rfind(&old) {
        Some(at) => format!("{}{new}{}", &name[..at], &name[at + old.len()..]),
        None => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_the_expert_changes_not_that_of_the_layer() {
        assert_eq!(
            renamed("blk.5.ffn_up.5.weight", ExpertId(5), ExpertId(7)),
            "blk.5.ffn_up.7.weight"
        );
        assert_eq!(
            renamed("blk.5.ffn_up_exps.12.bias", ExpertId(12), ExpertId(0)),
            "blk.5.ffn_up_exps.0.bias"
        );
    }
}
