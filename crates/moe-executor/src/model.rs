//! A model ready to run: hyper-parameters, weights, vocabulary.

use moe_engine::Mode;
use moe_gguf::{Gguf, LayerId};
use moe_trace::buffers::{Buffer, usage};

use crate::adapter::{AdaptedTensor, Adapter, Adapters};
use crate::arch;
use crate::arch::decoder::Decoder;
use crate::buffers::{Inventory, WEIGHT_BUFFERS};
use crate::devices::Devices;
use crate::error::{Error, Result, Warning};
use crate::hparams::{self, HParams, Keys};
use crate::norm::Norm;
use crate::tokenizer::{self, Tokenizer};
use crate::weights::{Linear, Loader, Matrix};

/// A model whose weights stay in the mapped file.
pub struct Model<'g> {
    gguf: &'g Gguf,
    tokenizer: Tokenizer,
    /// `(n_embd, n_vocab)`
    pub(crate) tok_embd: Matrix<'g>,
    /// `(n_embd)`
    pub(crate) output_norm: Norm,
    /// `(n_embd, n_vocab)`; the token embeddings in a model without `output.weight` (tied embeddings).
    pub(crate) output: Linear<'g>,
    pub(crate) decoder: Decoder<'g>,
    /// Bytes of the vectors that were converted to f32.
    converted_bytes: u64,
    /// Files of the adapters.
    adapters: Vec<&'g Gguf>,
    /// Matrices that adapters change.
    adapted: Vec<AdaptedTensor>,
    warnings: Vec<Warning>,
}

impl<'g> Model<'g> {
    /// Loads the model of a GGUF file with complete tensor data.
    ///
    /// # Errors
    /// The architecture, a tensor type or the vocabulary is not supported, a key or tensor is missing, a tensor shape
    /// does not match the hyper-parameters, or the tensor data is truncated.
    pub fn load(gguf: &'g Gguf) -> Result<Model<'g>> {
        Model::load_with_adapters(gguf, &[])
    }

    /// Like [`Model::load`], with LoRA adapters, which are added to the products of the model's matrices in this order.
    ///
    /// # Errors
    /// Those of [`Model::load`]; [`Error::Adapter`] if a file is not an adapter of this model, or changes a tensor whose adapter is
    /// not supported.
    pub fn load_with_adapters(gguf: &'g Gguf, adapters: &[Adapter<'g>]) -> Result<Model<'g>> {
        let keys = Keys::new(gguf)?;
        let read = Adapters::read(gguf, keys.arch(), adapters)?;
        let loader = Loader::new(gguf, keys.arch()).with_adapters(read);
        let decoder = arch::find(&loader)?(&loader, &keys)?;
        loader.refuse_extra_layers(decoder.hparams().n_layer)?;
        let (n_embd, n_vocab) = (decoder.hparams().n_embd, decoder.hparams().n_vocab);
        let (hp, spec) = (decoder.hparams(), decoder.spec());
        let output = if spec.requires_output || loader.has("output.weight") {
            "output"
        } else {
            "token_embd"
        };
        let mut model = Model {
            gguf,
            converted_bytes: 0,
            adapters: adapters.iter().map(|adapter| adapter.gguf).collect(),
            adapted: Vec::new(),
            warnings: hparams::ignored(&keys),
            tokenizer: read_tokenizer(gguf, n_vocab)?,
            tok_embd: loader.matrix("token_embd.weight", n_embd, n_vocab)?,
            output_norm: Norm::load(&loader, hp, spec.output_norm.tensor, n_embd, hp.norm_bias)?,
            output: loader.linear(output, [n_embd, n_vocab, 1], spec.logits_bias)?,
            decoder,
        };
        loader.check_all_used()?;
        loader.adapters.check_all_used()?;
        model.adapted = loader.adapters.tensors();
        model.warnings.extend(loader.adapters.warnings());
        let of_vocabulary = model.tokenizer.warnings().iter().cloned();
        model.warnings.extend(of_vocabulary.map(Warning::from));
        model.converted_bytes = loader.converted_bytes();
        Ok(model)
    }

    /// The file.
    pub fn gguf(&self) -> &'g Gguf {
        self.gguf
    }

    /// Hyper-parameters.
    pub fn hparams(&self) -> &HParams {
        self.decoder.hparams()
    }

    /// Problems of the file that do not prevent running it.
    pub fn warnings(&self) -> &[Warning] {
        &self.warnings
    }

    /// Files of the adapters.
    pub(crate) fn adapter_files(&self) -> &[&'g Gguf] {
        &self.adapters
    }

    /// Matrices that adapters change.
    pub(crate) fn adapted(&self) -> &[AdaptedTensor] {
        &self.adapted
    }

    /// Checks that `devices` can run the model's adapters, which have no GPU kernels.
    ///
    /// # Errors
    /// [`Error::CpuOnly`] if the model has adapters and `devices` contains a GPU.
    pub fn check_adapters(&self, devices: &Devices) -> Result<()> {
        if self.adapters.is_empty() || devices.gpus().is_empty() {
            return Ok(());
        }
        Err(Error::CpuOnly {
            file: self.gguf.files()[0].path.clone(),
            arch: self.hparams().arch.clone(),
            part: "LoRA adapters",
        })
    }

    /// Checks that no adapter changes experts, because a cache of experts computes them without adapters.
    ///
    /// # Errors
    /// [`Error::AdaptedExperts`].
    pub(crate) fn check_cached_experts(&self) -> Result<()> {
        match self.adapted.iter().find(|tensor| tensor.is_stacked) {
            Some(tensor) => Err(Error::AdaptedExperts {
                file: tensor.file.clone(),
            }),
            None => Ok(()),
        }
    }

    /// Whether a layer is a MoE layer.
    pub fn has_experts(&self, layer: LayerId) -> bool {
        self.decoder.moe(layer).is_some()
    }

    /// Vocabulary.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Adds the buffers of the weights: each memory-mapped file of the model and its adapters, and the vectors converted to f32.
    pub(crate) fn buffers(&self, inventory: &mut Inventory) {
        let weights = |i: u64, name: &str, backend: &str, address, size| Buffer {
            buffer_id: WEIGHT_BUFFERS + i,
            buffer_ptr: address,
            size,
            name: name.to_owned(),
            backend: backend.to_owned(),
            usage: usage::WEIGHTS,
            layer: None,
        };
        inventory.add(weights(0, "vectors as f32", "CPU", 0, self.converted_bytes));
        let adapters = self.adapters.iter().flat_map(|adapter| adapter.files());
        for (i, file) in (1..).zip(self.gguf.files().iter().chain(adapters)) {
            let address = file.contents().as_ptr() as u64;
            inventory.add(weights(i, &file.name, "mmap", address, file.size_bytes));
        }
    }

    /// Upper bound of the number of records that a forward pass over `n_tokens` tokens writes.
    pub fn records_per_pass(&self, n_tokens: usize, mode: Mode) -> u64 {
        // The embedding lookup, two operations of the final norm, and the output product.
        const OUTSIDE_LAYERS: usize = 4;
        let (mut pass, mut token) = self.decoder.ops();
        for tensor in &self.adapted {
            let (of_pass, of_token) = tensor.ops();
            pass += of_pass;
            token += of_token;
        }
        let n_expert_used = self.hparams().n_expert_used;
        let per_token = token * n_expert_used.div_ceil(moe_trace::record::MAX_EXPERTS);
        let others = match mode {
            Mode::All => pass + OUTSIDE_LAYERS,
            Mode::Experts => 0,
        };
        (per_token * n_tokens + others) as u64
    }
}

/// The tokenizer of a model with `n_vocab` rows of token embeddings. A file without a vocabulary may have any number of rows.
///
/// # Errors
/// The vocabulary is not supported or invalid, or has another number of tokens.
fn read_tokenizer(gguf: &Gguf, n_vocab: usize) -> Result<Tokenizer> {
    let file = || gguf.files()[0].path.clone();
    let tokenizer = Tokenizer::from_gguf(gguf.metadata()).map_err(|source| match source {
        tokenizer::Error::Metadata(source) => Error::Gguf(source), // names the file
        source => Error::Vocabulary {
            file: file(),
            source: Box::new(source),
        },
    })?;
    let n_tokens = tokenizer.n_vocab();
    if n_tokens != n_vocab && tokenizer.has_vocabulary() {
        return Err(Error::BadKey {
            file: file(),
            key: "tokenizer.ggml.tokens".into(),
            value: format!("a list of {n_tokens} tokens"),
            reason: format!("`token_embd.weight` has {n_vocab} rows"),
        });
    }
    Ok(tokenizer)
}
