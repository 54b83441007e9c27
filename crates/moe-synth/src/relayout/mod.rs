//! Rewrites a model with its tensors, and the experts inside them, in another order.
//!
//! Key-values and tensor data are copied exactly. If experts are permuted, all parts of an expert move with it: its slices of
//! stacked weights, biases and scales, and its rows of the router and the router's biases. The new model computes the same
//! function, with two exceptions: a softmax over all experts is summed in another order, and ties between equal scores may be
//! resolved differently.
//!
//! A model in several files becomes a single file without `split.*` keys.

mod error;
mod experts;
mod order;

use std::io::{self, Write};

use moe_gguf::check::check;
use moe_gguf::names::Role;
use moe_gguf::{ExpertId, Gguf, Tensor};

use crate::write::{Header, Writer};

pub use error::{Error, ImmovableReason, OrderFault};
pub use experts::{ExpertOrders, keep_groups, n_experts, n_groups};
pub use order::TensorOrder;

use experts::Share;

/// Bytes written at a time, so that a writer can report progress.
const CHUNK_SIZE: usize = 4 << 20;

/// A tensor of the new file.
#[derive(Clone, Debug)]
struct Placed {
    /// Index of the tensor in the old model.
    source: u32,
    name: String,
    /// Indices of the old slices in the new order; `None` if the data is unchanged.
    slices: Option<Vec<u32>>,
    /// Whether the id of an expert in the tensor changes.
    is_permuted: bool,
}

/// The plan of the new file.
#[derive(Clone, Debug)]
pub struct Layout {
    tensors: Vec<Placed>,
    header: Header,
    experts: ExpertOrders,
}

impl Layout {
    /// Plans the new file. The tensor table has the order of the data, as llama.cpp requires.
    ///
    /// # Errors
    /// An order of experts does not match the model or moves a tensor that cannot be permuted; the data of the model is
    /// truncated; tensors overlap.
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

    /// Size of the new file in bytes.
    pub fn file_size(&self) -> u64 {
        let header = self.header.encode().map_or(0, |bytes| bytes.len() as u64);
        header.saturating_add(self.header.data_size())
    }

    /// Number of tensors whose experts change their id.
    pub fn n_permuted(&self) -> usize {
        self.tensors.iter().filter(|t| t.is_permuted).count()
    }

    /// Writes the new file. Copies the data of the mapped model in chunks of 4 MiB.
    ///
    /// # Errors
    /// The data of the model is truncated; the file cannot be written.
    pub fn write<W: Write>(&self, gguf: &Gguf, out: W) -> io::Result<W> {
        let mut writer = Writer::new(out, self.header.clone())?;
        for placed in &self.tensors {
            for slice in placed.slices(gguf).map_err(io::Error::other)? {
                for chunk in slice.chunks(CHUNK_SIZE) {
                    writer.write(chunk)?;
                }
            }
        }
        writer.finish()
    }

    /// Compares the written file `new` with this plan of the model `gguf`. Returns one line per difference.
    ///
    /// Reads all data of both files.
    ///
    /// # Errors
    /// The data of a tensor is truncated.
    pub fn differences(&self, gguf: &Gguf, new: &Gguf) -> Result<Vec<String>, moe_gguf::Error> {
        let mut found = Vec::new();
        let keys = gguf.metadata().iter_raw();
        let kept = keys.filter(|(key, _)| !is_dropped(gguf, key));
        if !kept.eq(new.metadata().iter_raw()) {
            found.push("the key-values differ".to_owned());
        }
        if new.tensors().len() != self.tensors.len() {
            let (n, expected) = (new.tensors().len(), self.tensors.len());
            found.push(format!("the file has {n} tensors instead of {expected}"));
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
    /// Returns one line for each router of `new` with a row that does not select the same expert as in `gguf`.
    ///
    /// Does not use the planned slices, only the orders: row `i` must be the old row of the expert at position `i`, and rows
    /// after those of the experts must be unchanged.
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
            let (old_data, new_data) = (gguf.data(old)?, new.data(tensor)?);
            let row_size = (old_data.len() / n_rows as usize).max(1);
            let mut rows = new_data.chunks_exact(row_size).enumerate();
            let wrong = rows.find(|&(i, row)| {
                let expert = order.get(i).map_or(i, |expert| expert.index());
                old_data.chunks_exact(row_size).nth(expert) != Some(row)
            });
            if let Some((row, _)) = wrong {
                found.push(format!(
                    "row {row} of {:?} does not select the expert at position {row}",
                    old.name
                ));
            }
        }
        Ok(found)
    }
}

impl Placed {
    /// Returns the slices of the old data, in the order of the new tensor.
    fn slices<'g>(
        &'g self,
        gguf: &'g Gguf,
    ) -> Result<impl Iterator<Item = &'g [u8]>, moe_gguf::Error> {
        let data = gguf.data(&gguf.tensors()[self.source as usize])?;
        let slices = self.slices.as_deref();
        let size = slices.map_or(data.len(), |slices| data.len() / slices.len().max(1));
        let unchanged = slices.is_none().then_some(data);
        let slices = slices.unwrap_or_default().iter().map(move |&slice| {
            // In range: `experts::check` and `experts::share` have checked all indices.
            let start = slice as usize * size;
            data.get(start..start + size).unwrap_or_default()
        });
        Ok(unchanged.into_iter().chain(slices))
    }
}

/// Whether a key is not copied, because it would be wrong in the new file.
fn is_dropped(gguf: &Gguf, key: &str) -> bool {
    gguf.files().len() > 1 && key.starts_with("split.")
}

/// Plans the new name and slices of a tensor.
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
            // Slices after those of the experts stay in place.
            let slices = order.iter().map(|expert| expert.0).chain(n_expert..n);
            placed.slices = Some(slices.collect());
            placed.is_permuted = !order.is_sorted();
        }
        Share::One(expert) => {
            let new_ids = experts::new_ids(order);
            if let Some(&new_id) = new_ids.get(expert.index()) {
                placed.name = renamed(&tensor.name, expert, new_id);
                placed.is_permuted = new_id != expert;
            }
        }
    }
    Ok(placed)
}

/// Replaces the expert in `blk.5.ffn_up.5.weight`: the last of two numbers, which may be equal.
fn renamed(name: &str, expert: ExpertId, new_id: ExpertId) -> String {
    let (old, new) = (format!(".{expert}."), format!(".{new_id}."));
    match name.rfind(&old) {
        Some(start) => format!("{}{new}{}", &name[..start], &name[start + old.len()..]),
        None => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn renames_the_expert_and_not_the_layer() {
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
