//! A model ready to run: hyper-parameters, weights, vocabulary.

use moe_engine::Mode;
use moe_gguf::{Gguf, LayerId};
use moe_trace::buffers::{Buffer, usage};

use crate::arch;
use crate::arch::decoder::Decoder;
use crate::buffers::{Inventory, WEIGHT_BUFFERS};
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
    warnings: Vec<Warning>,
}

impl<'g> Model<'g> {
    /// Loads the model of a GGUF file with complete tensor data.
    ///
    /// # Errors
    /// The architecture, a tensor type or the vocabulary is not supported, a key or tensor is missing, a tensor shape
    /// does not match the hyper-parameters, or the tensor data is truncated.
    pub fn load(gguf: &'g Gguf) -> Result<Model<'g>> {
        let keys = Keys::new(gguf)?;
        let loader = Loader::new(gguf, keys.arch());
        let decoder = arch::find(&loader)?(&loader, &keys)?;
        loader.refuse_extra_layers(decoder.hparams().n_layer)?;
        let (n_embd, n_vocab) = (decoder.hparams().n_embd, decoder.hparams().n_vocab);
        let output = if loader.has("output.weight") {
            "output"
        } else {
            "token_embd"
        };
        let (hp, spec) = (decoder.hparams(), decoder.spec());
        let mut model = Model {
            gguf,
            converted_bytes: 0,
            warnings: hparams::ignored(&keys),
            tokenizer: read_tokenizer(gguf, n_vocab)?,
            tok_embd: loader.matrix("token_embd.weight", n_embd, n_vocab)?,
            output_norm: Norm::load(&loader, hp, spec.output_norm.tensor, n_embd, hp.norm_bias)?,
            output: loader.linear(output, [n_embd, n_vocab, 1], spec.logits_bias)?,
            decoder,
        };
        loader.check_all_used()?;
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

    /// Whether a layer is a MoE layer.
    pub fn has_experts(&self, layer: LayerId) -> bool {
        self.decoder.moe(layer).is_some()
    }

    /// Vocabulary.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Adds the buffers of the weights: each memory-mapped model file, and the vectors converted to f32.
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
        for (i, file) in (1..).zip(self.gguf.files()) {
            let address = file.contents().as_ptr() as u64;
            inventory.add(weights(i, &file.name, "mmap", address, file.size_bytes));
        }
    }

    /// Upper bound of the number of records that a forward pass over `n_tokens` tokens writes.
    pub fn records_per_pass(&self, n_tokens: usize, mode: Mode) -> u64 {
        // The embedding lookup, two operations of the final norm, and the output product.
        const OUTSIDE_LAYERS: usize = 4;
        let (pass, token) = self.decoder.ops();
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
