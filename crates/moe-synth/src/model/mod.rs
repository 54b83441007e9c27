//! Synthetic models: the header and tensor shapes of a known architecture, with random weights.
//!
//! Synthetic models are for tests of tools with large models. Offsets, types and sizes are those of the published model, the
//! model can run, and its routers select experts with known frequencies. A sparse file needs only the disk space of its header.
//!
//! The same description and seed produce the same file for any number of threads.

mod blocks;
mod described_presets;
mod description;
mod keys;
mod mixed;
mod presets;
mod quant;
mod random;
mod router;
mod spec;
mod tensors;
mod vocab;

use std::io::{self, Write};

use moe_gguf::{Fault, GgmlType};
use rayon::prelude::*;
use thiserror::Error;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::write::{Header, TensorInfo, Writer};

pub use description::{Description, Key, LayerTensors};
pub use spec::{Arch, LinearAttention, Spec, VocabModel, VocabSpec, Yarn};

use blocks::Blocks;
use quant::{Quant, Use};
use random::SplitMix64;
use router::Router;
use tensors::Fill;

/// Bytes that a thread generates at a time; at least one row.
const CHUNK_SIZE: u64 = 1 << 20;
/// Chunks per thread in a batch. Several chunks per thread balance the load.
const CHUNKS_PER_THREAD: usize = 4;

/// Why a model cannot be generated. The message is one line.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// A value of the description is invalid.
    #[error("`{key}` is invalid: {problem}")]
    Spec {
        /// The key.
        key: &'static str,
        /// What is wrong with the value.
        problem: String,
    },
    /// The name of the weight type is unknown.
    #[error("weight type `{name}` is not supported; supported types: {}", known.join(", "))]
    Quant {
        /// The name.
        name: String,
        /// All supported names.
        known: Vec<&'static str>,
    },
    /// The header would violate a rule of the format.
    #[error("the header would be invalid: {0}")]
    Header(#[from] Fault),
}

/// Parameters of the random contents of a model.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SynthOptions {
    /// Random seed.
    pub seed: u64,
    /// Exponent of the routing distribution (Zipf's law). The fraction of tokens that select the expert of rank `r` in its layer
    /// is proportional to `1 / r^zipf`, at most 0.98. 0 is a uniform router.
    pub zipf: f64,
}

impl SynthOptions {
    fn check(self) -> Result<(), Error> {
        if self.zipf >= 0.0 && self.zipf.is_finite() {
            return Ok(());
        }
        let problem = format!("{} is out of range (0 or more)", self.zipf);
        Err(Error::Spec {
            key: "zipf",
            problem,
        })
    }
}

fn parse_quant(name: &str) -> Result<Quant, Error> {
    Quant::parse(name).ok_or_else(|| Error::Quant {
        name: name.to_owned(),
        known: Quant::names(),
    })
}

/// A planned model.
pub struct Synth {
    header: Header,
    /// The contents of each tensor of the header.
    fills: Vec<Fill>,
    options: SynthOptions,
    /// The routers of the layers, and the number of experts. `None` if routers are random matrices.
    routers: Option<(Router, usize)>,
}

impl Synth {
    /// Plans the file of a model.
    ///
    /// # Errors
    /// The description is invalid.
    pub fn new(spec: &Spec, options: SynthOptions) -> Result<Synth, Error> {
        spec.check()?;
        options.check()?;
        let quant = parse_quant(&spec.quant)?;
        let mut header = keys::header(spec, &quant, vocab::vocab(&spec.vocab)?)?;
        let mut fills = Vec::new();
        let mut embedding = GgmlType::F32;
        for tensor in tensors::tensors(spec) {
            let ne0 = tensor.ne.first().copied().unwrap_or(1);
            let ty = quant.ty(tensor.usage, ne0, tensor.layer, spec.n_layer);
            if tensor.usage == Use::Embedding {
                embedding = ty;
            }
            header.tensor(&tensor.name, ty, &tensor.ne)?;
            fills.push(tensor.fill);
        }
        let (n_embd, n_expert) = (spec.n_embd as usize, spec.n_expert as usize);
        let n_expert_used = spec.n_expert_used as usize;
        Ok(Synth {
            header,
            fills,
            options,
            routers: Some((
                Router::new(embedding, n_embd, n_expert, n_expert_used, options.zipf),
                n_expert,
            )),
        })
    }

    /// Plans a described model with the types of [`Description::quant`], and routers that follow `options.zipf`.
    ///
    /// The factors of [`Description::scales`] do not apply to embeddings, routers, and matrices whose results are added to the
    /// residual stream. Weights of types whose blocks do not divide their rows have the types to which llama.cpp's quantizer
    /// falls back.
    ///
    /// # Errors
    /// The description or its type is invalid, or no matrix can have the type.
    pub fn of_description(
        description: &Description,
        options: SynthOptions,
    ) -> Result<Synth, Error> {
        options.check()?;
        let quant = parse_quant(&description.quant)?;
        let mixed::Planned {
            header,
            fills,
            routers,
        } = mixed::plan(description, &quant, options.zipf)?;
        Ok(Synth {
            header,
            fills,
            options,
            routers,
        })
    }

    /// Plans a described model with matrices of type `ty`, all of which are random. For tests.
    ///
    /// # Errors
    /// The vocabulary, a tensor or the type is invalid.
    pub fn described(description: &Description, ty: GgmlType, seed: u64) -> Result<Synth, Error> {
        let (header, fills) = description.plan(ty)?;
        Ok(Synth {
            header,
            fills,
            options: SynthOptions { seed, zipf: 0.0 },
            routers: None,
        })
    }

    /// Returns the encoded header: the only part of a sparse file that is not a hole.
    ///
    /// # Errors
    /// The header is invalid, which is impossible for a planned model.
    pub fn header_bytes(&self) -> Result<Vec<u8>, Error> {
        Ok(self.header.encode()?)
    }

    /// Size of the file in bytes.
    ///
    /// # Errors
    /// The errors of [`Synth::header_bytes`].
    pub fn file_size(&self) -> Result<u64, Error> {
        let header = self.header.encode()?.len() as u64;
        Ok(header.saturating_add(self.header.data_size()))
    }

    /// The tensors, in the order of the file.
    pub fn tensors(&self) -> &[TensorInfo] {
        self.header.tensors()
    }

    /// Writes the file. The threads of the current rayon pool generate the weights, a few MiB ahead of the output.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write<W: Write + Send>(&self, out: W) -> io::Result<W> {
        let mut writer = Writer::new(out, self.header.clone())?;
        let n_chunks = CHUNKS_PER_THREAD * rayon::current_num_threads();
        let mut chunks = self.chunks();
        let mut generated: Vec<Vec<u8>> = Vec::new();
        loop {
            let batch: Vec<Chunk> = chunks.by_ref().take(n_chunks).collect();
            let (next, written) = rayon::join(
                || batch.par_iter().map(|chunk| self.generate(chunk)).collect(),
                || generated.iter().try_for_each(|bytes| writer.write(bytes)),
            );
            written?;
            if batch.is_empty() {
                return writer.finish();
            }
            generated = next;
        }
    }

    /// Splits the data into chunks of complete rows.
    fn chunks(&self) -> impl Iterator<Item = Chunk<'_>> {
        let tensors = self.tensors().iter().zip(&self.fills);
        tensors.flat_map(|(tensor, &fill)| {
            let ne0 = tensor.ne.first().copied().unwrap_or(1);
            let row_size = tensor.ty.row_size(ne0).unwrap_or(0).max(1);
            let n_rows = tensor.size_bytes / row_size;
            let rows = (CHUNK_SIZE / row_size).max(1);
            (0..n_rows.div_ceil(rows)).map(move |i| Chunk {
                tensor,
                fill,
                row_size: row_size as usize,
                first_row: i * rows,
                n_rows: rows.min(n_rows - i * rows) as usize,
            })
        })
    }

    /// Generates the bytes of a chunk.
    fn generate(&self, chunk: &Chunk) -> Vec<u8> {
        let Chunk {
            tensor,
            row_size,
            n_rows,
            ..
        } = *chunk;
        let seed = xxh3_64_with_seed(tensor.name.as_bytes(), self.options.seed);
        let mut random =
            SplitMix64::new(seed ^ xxh3_64_with_seed(&chunk.first_row.to_le_bytes(), seed));
        let (std, lifted) = match chunk.fill {
            Fill::Constant(value) => {
                return value
                    .to_le_bytes()
                    .repeat(row_size / size_of::<f32>() * n_rows);
            }
            Fill::Router(layer) => return self.router_rows(chunk, layer, &mut random),
            Fill::Norm | Fill::Decay => {
                let n = row_size / size_of::<f32>() * n_rows;
                let sign = if chunk.fill == Fill::Decay { -1.0 } else { 1.0 };
                let values =
                    (0..n).map(|_| sign * (1.0 + 0.1 * random::uniform(&mut random) as f32));
                return values.flat_map(f32::to_le_bytes).collect();
            }
            Fill::Noise(std) => (std, false),
            Fill::Embedding => (1.0, true),
        };
        let mut bytes = vec![0; row_size * n_rows];
        // Always `Some`: `Quant` returns supported types only.
        if let Some(blocks) = Blocks::new(tensor.ty, std) {
            for row in bytes.chunks_exact_mut(row_size) {
                blocks.fill_row(&mut random, lifted, row);
            }
        }
        bytes
    }

    fn router_rows(&self, chunk: &Chunk, layer: u32, random: &mut SplitMix64) -> Vec<u8> {
        let Some((router, n_expert)) = &self.routers else {
            return Vec::new();
        };
        let mut shuffle = SplitMix64::new(self.options.seed ^ u64::from(layer) << 32);
        let ranks = router::ranks(&mut shuffle, *n_expert);
        let mut bytes = Vec::with_capacity(chunk.row_size * chunk.n_rows);
        let first = chunk.first_row as usize;
        for rank in ranks.iter().skip(first).take(chunk.n_rows) {
            router.row(random, *rank, &mut bytes);
        }
        bytes
    }
}

/// Consecutive rows of a tensor.
struct Chunk<'a> {
    tensor: &'a TensorInfo,
    fill: Fill,
    row_size: usize,
    first_row: u64,
    n_rows: usize,
}
