//! Writes a model with the true shapes and header of a known architecture, and made-up contents.
//!
//! Such a file is what tools for large models can be tried on: its offsets, types and sizes are those
//! of the real one, it runs, and its routers choose experts with a frequency that is known beforehand.
//! Written sparse, a file of any size takes no more room than its header.
//!
//! The same description and seed give the same file, whatever the number of threads.

mod blocks;
mod keys;
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

pub use spec::{Arch, LinearAttention, Spec, VocabModel, VocabSpec, Yarn};

use blocks::Blocks;
use quant::{Quant, Use};
use random::SplitMix64;
use router::Router;
use tensors::Fill;

/// Bytes that a thread makes at a time, or a row where that is more.
const PIECE: u64 = 1 << 20;
/// Pieces that are made side by side, for each thread: enough that none waits long for the others.
const PIECES_A_THREAD: usize = 4;

/// Why a model cannot be made. The text is one line.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// A number of the description makes no model.
    #[error("`{key}` of the description is of no use: {problem}")]
    Spec {
        /// The key.
        key: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// No type and no mix has that name.
    #[error("`{name}` is no type that weights are made of; these are: {}", known.join(", "))]
    Quant {
        /// The name.
        name: String,
        /// All names.
        known: Vec<&'static str>,
    },
    /// The file's header would break a rule.
    #[error("the header would be faulty: {0}")]
    Header(#[from] Fault),
}

/// What is random in a model, and how.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SynthOptions {
    /// Seed of everything random.
    pub seed: u64,
    /// Exponent of the law by which experts are chosen: the one of rank `r` in its layer is for a share
    /// of the tokens that is proportional to `1 / r^zipf`, up to 0.98. 0 chooses all alike.
    pub zipf: f64,
}

/// A model to be written.
pub struct Synth {
    header: Header,
    /// What each tensor of the header is filled with.
    fills: Vec<Fill>,
    options: SynthOptions,
    n_expert: usize,
    router: Router,
}

impl Synth {
    /// Plans the file of a model.
    ///
    /// # Errors
    /// The description makes no model.
    pub fn new(spec: &Spec, options: SynthOptions) -> Result<Synth, Error> {
        spec.check()?;
        if !(options.zipf >= 0.0 && options.zipf.is_finite()) {
            let problem = format!("it is {}, but must be 0 or more", options.zipf);
            return Err(Error::Spec {
                key: "zipf",
                problem,
            });
        }
        let quant = Quant::parse(&spec.quant).ok_or_else(|| Error::Quant {
            name: spec.quant.clone(),
            known: Quant::names(),
        })?;
        let mut header = keys::header(spec, &quant, vocab::vocab(&spec.vocab)?)?;
        let mut fills = Vec::new();
        let mut embedding = GgmlType::F32;
        for made in tensors::tensors(spec) {
            let ne0 = made.ne.first().copied().unwrap_or(1);
            let ty = quant.ty(made.usage, ne0, made.layer, spec.n_layer);
            if made.usage == Use::Embedding {
                embedding = ty;
            }
            header.tensor(&made.name, ty, &made.ne)?;
            fills.push(made.fill);
        }
        let (n_embd, n_expert) = (spec.n_embd as usize, spec.n_expert as usize);
        let n_expert_used = spec.n_expert_used as usize;
        Ok(Synth {
            header,
            fills,
            options,
            n_expert,
            router: Router::new(embedding, n_embd, n_expert, n_expert_used, options.zipf),
        })
    }

    /// The header's bytes, which are all of a sparse file that is not a hole.
    ///
    /// # Errors
    /// None that a description which could be planned gives.
    pub fn header_bytes(&self) -> Result<Vec<u8>, Error> {
        Ok(self.header.encode()?)
    }

    /// Bytes of the file.
    ///
    /// # Errors
    /// As [`Synth::header_bytes`].
    pub fn file_size(&self) -> Result<u64, Error> {
        let header = self.header.encode()?.len() as u64;
        Ok(header.saturating_add(self.header.data_size()))
    }

    /// The tensors, in the order of the file.
    pub fn tensors(&self) -> &[TensorInfo] {
        self.header.tensors()
    }

    /// Writes the file. The threads of the current rayon pool make the weights, a few MiB ahead of what is written.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write<W: Write + Send>(&self, out: W) -> io::Result<W> {
        let mut writer = Writer::new(out, self.header.clone())?;
        let n_pieces = PIECES_A_THREAD * rayon::current_num_threads();
        let mut pieces = self.pieces();
        let mut made: Vec<Vec<u8>> = Vec::new();
        loop {
            let batch: Vec<Piece> = pieces.by_ref().take(n_pieces).collect();
            let (next, written) = rayon::join(
                || batch.par_iter().map(|piece| self.make(piece)).collect(),
                || made.iter().try_for_each(|bytes| writer.write(bytes)),
            );
            written?;
            if batch.is_empty() {
                return writer.finish();
            }
            made = next;
        }
    }

    /// The data in pieces of whole rows.
    fn pieces(&self) -> impl Iterator<Item = Piece<'_>> {
        let tensors = self.tensors().iter().zip(&self.fills);
        tensors.flat_map(|(tensor, &fill)| {
            let ne0 = tensor.ne.first().copied().unwrap_or(1);
            let row_size = tensor.ty.row_size(ne0).unwrap_or(0).max(1);
            let n_rows = tensor.size_bytes / row_size;
            let rows = (PIECE / row_size).max(1);
            (0..n_rows.div_ceil(rows)).map(move |i| Piece {
                tensor,
                fill,
                row_size: row_size as usize,
                first_row: i * rows,
                n_rows: rows.min(n_rows - i * rows) as usize,
            })
        })
    }

    /// The bytes of a piece.
    fn make(&self, piece: &Piece) -> Vec<u8> {
        let Piece {
            tensor,
            row_size,
            n_rows,
            ..
        } = *piece;
        let seed = xxh3_64_with_seed(tensor.name.as_bytes(), self.options.seed);
        let mut random =
            SplitMix64::new(seed ^ xxh3_64_with_seed(&piece.first_row.to_le_bytes(), seed));
        let (std, lifted) = match piece.fill {
            Fill::Constant(value) => {
                return value
                    .to_le_bytes()
                    .repeat(row_size / size_of::<f32>() * n_rows);
            }
            Fill::Router(layer) => return self.router_rows(piece, layer, &mut random),
            Fill::Noise(std) => (std, false),
            Fill::Embedding => (1.0, true),
        };
        let mut bytes = vec![0; row_size * n_rows];
        // `Quant` gives no type that cannot be made.
        if let Some(blocks) = Blocks::new(tensor.ty, std) {
            for row in bytes.chunks_exact_mut(row_size) {
                blocks.fill_row(&mut random, lifted, row);
            }
        }
        bytes
    }

    fn router_rows(&self, piece: &Piece, layer: u32, random: &mut SplitMix64) -> Vec<u8> {
        let mut shuffle = SplitMix64::new(self.options.seed ^ u64::from(layer) << 32);
        let ranks = router::ranks(&mut shuffle, self.n_expert);
        let mut bytes = Vec::with_capacity(piece.row_size * piece.n_rows);
        let first = piece.first_row as usize;
        for rank in ranks.iter().skip(first).take(piece.n_rows) {
            self.router.row(random, *rank, &mut bytes);
        }
        bytes
    }
}

/// Some rows of a tensor.
struct Piece<'a> {
    tensor: &'a TensorInfo,
    fill: Fill,
    row_size: usize,
    first_row: u64,
    n_rows: usize,
}
