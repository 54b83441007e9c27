//! LoRA adapters in GGUF files: pairs of matrices whose product is added to a matrix of the model ("LoRA: Low-Rank Adaptation of Large
//! Language Models", Hu et al., 2021).
//!
//! The format and its checks are those of `llama-adapter.cpp`: `general.type` is `adapter`, `adapter.type` is `lora`, and a tensor
//! `NAME.lora_a` of `ne = [n_in, rank, n_expert]` and `NAME.lora_b` of `ne = [rank, n_out, n_expert]` belong to the tensor `NAME` of
//! the model. The factor of their product is the scale of the adapter, times `adapter.lora.alpha / rank` unless alpha is 0 or missing.

mod fault;
mod pairs;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use moe_gguf::map::Start;
use moe_gguf::names::Role;
use moe_gguf::{GgmlType, Gguf, Tensor};

use crate::cpu::quant::Kernel;
use crate::error::{Error, Result, Warning};
use crate::weights::{LowRank, Matrix, Place};

pub use fault::AdapterFault;

/// A LoRA adapter of a model.
#[derive(Clone, Copy, Debug)]
pub struct Adapter<'g> {
    /// Its file.
    pub gguf: &'g Gguf,
    /// Factor of its products. With 0 the adapter has no effect and no operations, as in llama.cpp.
    pub scale: f32,
}

/// The adapters of a model while it is loaded.
#[derive(Default)]
pub(crate) struct Adapters<'g> {
    files: Vec<AdapterFile<'g>>,
}

/// The matrices of an adapter for one tensor of the model.
struct Pair<'g> {
    a: &'g Tensor,
    b: &'g Tensor,
}

/// An adapter with checked tensors.
struct AdapterFile<'g> {
    gguf: &'g Gguf,
    /// Numbers of its first file and its first tensor in traces.
    start: Start,
    /// `adapter.lora.alpha`, 0 if the key is missing.
    alpha: f32,
    scale: f32,
    /// By the name of the model's tensor.
    pairs: BTreeMap<&'g str, Pair<'g>>,
    /// Names of the tensors that the model multiplies with.
    used: RefCell<BTreeSet<String>>,
    /// Names of tensors without effect.
    ignored: Vec<&'g str>,
}

/// A matrix of the model that an adapter changes.
pub(crate) struct AdaptedTensor {
    /// File of the adapter.
    pub file: PathBuf,
    /// Name of the model's tensor.
    pub name: String,
    /// Length of a row of the model's tensor, elements.
    pub n_in: u64,
    /// Rank of the adapter.
    pub rank: u64,
    /// Rows of the model's tensor, or of one of its matrices.
    pub n_out: u64,
    /// Types of the two matrices.
    pub types: [GgmlType; 2],
    /// Whether the tensor has a matrix for each expert.
    pub is_stacked: bool,
}

impl AdaptedTensor {
    /// The number of operations that write one record per pass, and of those that write one record per token: two products, the
    /// multiplication by the scale, and the addition.
    pub(crate) fn ops(&self) -> (usize, usize) {
        if self.is_stacked { (2, 2) } else { (4, 0) }
    }
}

impl<'g> Adapters<'g> {
    /// Reads the headers of adapters, and checks them against the model of architecture `arch`.
    ///
    /// # Errors
    /// [`Error::Adapter`]; [`Error::Gguf`] for a key of the wrong type.
    pub(crate) fn read(model: &Gguf, arch: &str, adapters: &[Adapter<'g>]) -> Result<Adapters<'g>> {
        let starts = Start::of_adapters(model, adapters.iter().map(|adapter| adapter.gguf));
        let files = adapters.iter().zip(starts);
        let files = files.map(|(adapter, start)| AdapterFile::read(model, arch, adapter, start));
        Ok(Adapters {
            files: files.collect::<Result<_>>()?,
        })
    }

    /// The matrices of the adapters for a tensor of the model of `ne = [n_in, n_out, n_expert]`.
    ///
    /// # Errors
    /// The data of a matrix is truncated, or its type has no kernel.
    pub(crate) fn low_rank(&self, name: &str, ne: [usize; 3]) -> Result<Vec<LowRank<'g>>> {
        let mut found = Vec::new();
        for file in &self.files {
            found.extend(file.low_rank(name, ne)?);
        }
        Ok(found)
    }

    /// Checks that the model multiplies with each tensor that an adapter changes. Ignoring a pair would change the results.
    ///
    /// # Errors
    /// [`AdapterFault::NotApplied`].
    pub(crate) fn check_all_used(&self) -> Result<()> {
        for file in &self.files {
            let used = file.used.borrow();
            if let Some(name) = file.pairs.keys().find(|name| !used.contains(**name)) {
                return Err(file.error(AdapterFault::NotApplied {
                    tensor: (*name).to_owned(),
                    reason: "no matrix product of the model reads it",
                }));
            }
        }
        Ok(())
    }

    /// The matrices that adapters with a scale other than 0 change.
    pub(crate) fn tensors(&self) -> Vec<AdaptedTensor> {
        let files = self.files.iter().filter(|file| file.scale != 0.0);
        let tensors = files.flat_map(|file| {
            file.pairs.iter().map(move |(name, pair)| AdaptedTensor {
                file: file.path(),
                name: (*name).to_owned(),
                n_in: pair.a.ne[0],
                rank: pair.a.ne[1],
                n_out: pair.b.ne[1],
                types: [pair.a.ty, pair.b.ty],
                is_stacked: Role::of(name).stacked,
            })
        });
        tensors.collect()
    }

    /// A warning for each tensor without effect.
    pub(crate) fn warnings(&self) -> impl Iterator<Item = Warning> {
        self.files.iter().flat_map(|file| {
            let warning = move |name: &&str| Warning::IgnoredAdapterTensor {
                adapter: file.path(),
                tensor: (*name).to_owned(),
            };
            file.ignored.iter().map(warning)
        })
    }
}

impl<'g> AdapterFile<'g> {
    fn path(&self) -> PathBuf {
        self.gguf.files()[0].path.clone()
    }

    fn error(&self, source: AdapterFault) -> Error {
        Error::Adapter {
            file: self.path(),
            source: Box::new(source),
        }
    }

    /// The matrices for a tensor of the model, if the adapter changes it.
    fn low_rank(
        &self,
        name: &str,
        [n_in, n_out, n_expert]: [usize; 3],
    ) -> Result<Option<LowRank<'g>>> {
        let Some(pair) = self.pairs.get(name) else {
            return Ok(None);
        };
        self.used.borrow_mut().insert(name.to_owned());
        if self.scale == 0.0 {
            return Ok(None);
        }
        let rank = usize::try_from(pair.a.ne[1]).unwrap_or(usize::MAX);
        let scale = if self.alpha == 0.0 {
            self.scale
        } else {
            self.scale * self.alpha / rank as f32
        };
        Ok(Some(LowRank {
            a: self.matrix(pair.a, [n_in, rank, n_expert])?,
            b: self.matrix(pair.b, [rank, n_out, n_expert])?,
            scale,
        }))
    }

    fn matrix(&self, tensor: &Tensor, ne: [usize; 3]) -> Result<Matrix<'g>> {
        let kernel = Kernel::for_type(tensor.ty).map_err(|source| Error::Kernel {
            file: self.path(),
            tensor: tensor.name.clone(),
            source,
        })?;
        let place = Place::of(tensor);
        let place = Place {
            tensor_idx: self.start.tensor_idx.saturating_add(place.tensor_idx),
            file: self.start.file.saturating_add(place.file),
            ..place
        };
        Ok(Matrix::new(place, kernel, ne, self.gguf.data(tensor)?))
    }
}
