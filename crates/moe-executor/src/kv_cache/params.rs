//! Types and sizes of a key-value cache.

use std::fmt;
use std::str::FromStr;

use moe_gguf::{GgmlType, Gguf};
use zerocopy::IntoBytes;

use crate::cpu::quant::quantize_q8_0_block;
use crate::error::{Error, Result};
use crate::hparams::{HParams, LayerCache};

/// Type of the keys or the values in a cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum CacheType {
    /// 32-bit floating point: keys and values are not converted.
    F32,
    /// Half precision, the default as in llama.cpp.
    #[default]
    F16,
    /// Blocks of 32 elements with 8-bit codes and a half-precision scale.
    Q8_0,
}

impl CacheType {
    /// All types.
    pub const ALL: [CacheType; 3] = [CacheType::F32, CacheType::F16, CacheType::Q8_0];

    /// The name in ggml: `f32`, `f16`, `q8_0`.
    pub fn name(self) -> &'static str {
        match self {
            CacheType::F32 => "f32",
            CacheType::F16 => "f16",
            CacheType::Q8_0 => "q8_0",
        }
    }

    /// The same type in GGUF files.
    pub fn ggml(self) -> GgmlType {
        match self {
            CacheType::F32 => GgmlType::F32,
            CacheType::F16 => GgmlType::F16,
            CacheType::Q8_0 => GgmlType::Q8_0,
        }
    }

    /// Converts a row to the memory layout of the type, with ggml's rounding: to the nearest value, ties to even.
    ///
    /// # Panics
    /// If `out` has not the size of the row.
    pub fn convert(self, values: &[f32], out: &mut [u8]) {
        assert_eq!(out.len(), self.row_size(values.len()), "bytes of a row");
        match self {
            CacheType::F32 => out.copy_from_slice(values.as_bytes()),
            CacheType::F16 => {
                for (value, out) in values.iter().zip(out.as_chunks_mut::<2>().0) {
                    *out = half::f16::from_f32(*value).to_bits().to_ne_bytes();
                }
            }
            CacheType::Q8_0 => {
                let blocks = values.as_chunks::<32>().0.iter();
                for (values, out) in blocks.zip(out.as_chunks_mut::<34>().0) {
                    let (scale, codes) = quantize_q8_0_block(values);
                    let (scale_bytes, code_bytes) = out.split_at_mut(2);
                    scale_bytes
                        .copy_from_slice(&half::f16::from_f32(scale).to_bits().to_ne_bytes());
                    code_bytes.copy_from_slice(codes.as_bytes());
                }
            }
        }
    }

    /// Bytes of `n` elements, a multiple of the block size.
    pub(super) fn row_size(self, n: usize) -> usize {
        let bytes = self.ggml().row_size(n as u64).unwrap_or(0);
        usize::try_from(bytes).unwrap_or(usize::MAX)
    }
}

impl fmt::Display for CacheType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A name that is not that of a cache type.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the type of a KV cache is f32, f16 or q8_0, not `{0}`")]
pub struct UnknownCacheType(String);

impl FromStr for CacheType {
    type Err = UnknownCacheType;

    fn from_str(name: &str) -> Result<CacheType, UnknownCacheType> {
        let named = CacheType::ALL.into_iter().find(|ty| ty.name() == name);
        named.ok_or_else(|| UnknownCacheType(name.to_owned()))
    }
}

/// Size and types of a key-value cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CacheParams {
    /// Context length: maximum number of positions of a sequence.
    pub n_ctx: usize,
    /// Number of positions that the longest sequence is expected to have. Memory grows in steps up to this number, and only for
    /// longer sequences up to `n_ctx`.
    pub n_positions: usize,
    /// Number of sequences, at least 1.
    pub n_seq: usize,
    /// Type of the keys.
    pub k: CacheType,
    /// Type of the values.
    pub v: CacheType,
}

impl CacheParams {
    /// A cache of one sequence with the default types.
    pub fn new(n_ctx: usize) -> CacheParams {
        CacheParams {
            n_ctx,
            n_positions: n_ctx,
            n_seq: 1,
            k: CacheType::default(),
            v: CacheType::default(),
        }
    }

    /// A cache of one sequence with keys and values of type `ty`.
    pub fn of_type(ty: CacheType, n_ctx: usize) -> CacheParams {
        CacheParams {
            k: ty,
            v: ty,
            ..CacheParams::new(n_ctx)
        }
    }

    /// The same with `n_seq` sequences.
    pub fn with_sequences(self, n_seq: usize) -> CacheParams {
        CacheParams { n_seq, ..self }
    }

    /// Bytes of the keys and values of `n_positions` positions of each sequence in all layers that have them; `u64::MAX` if the number is too
    /// large.
    pub fn size_bytes(&self, hp: &HParams, n_positions: usize) -> u64 {
        self.bytes(&hp.row_widths(), n_positions)
    }

    /// Bytes of the recurrent states of all sequences in all layers, which are allocated at the first pass.
    pub fn state_bytes(&self, hp: &HParams) -> u64 {
        let sizes = hp.caches.iter().map(|layer| match layer {
            LayerCache::State(shape) => shape.size_bytes(),
            LayerCache::KeysAndValues | LayerCache::Keys | LayerCache::Nothing => 0,
        });
        let bytes = sizes.fold(0, u64::saturating_add);
        bytes.saturating_mul(self.n_seq.max(1) as u64)
    }

    /// Like [`CacheParams::size_bytes`] for layers with rows of `widths` elements (keys, values).
    pub(crate) fn bytes(&self, widths: &[[usize; 2]], n_positions: usize) -> u64 {
        let rows = (n_positions as u64).saturating_mul(self.n_seq as u64);
        let sizes = widths.iter().map(|&[k, v]| {
            let row = self.k.row_size(k).saturating_add(self.v.row_size(v));
            rows.saturating_mul(row as u64)
        });
        sizes.fold(0, u64::saturating_add)
    }

    /// Checks that heads consist of complete blocks of the types, and that the types are equal if keys contain the values.
    ///
    /// # Errors
    /// [`Error::CacheType`], [`Error::CacheTypes`].
    pub fn check(&self, gguf: &Gguf, hp: &HParams) -> Result<()> {
        let file = || gguf.files()[0].path.clone();
        for heads in &hp.heads {
            for (what, ty, head_dim) in [
                ("keys", self.k, heads.k_dim),
                ("values", self.v, heads.v_dim),
            ] {
                let block = ty.ggml().block_size();
                if !(head_dim as u64).is_multiple_of(block) {
                    return Err(Error::CacheType {
                        file: file(),
                        what,
                        ty,
                        block,
                        head_dim,
                    });
                }
            }
        }
        if self.k != self.v && hp.caches.contains(&LayerCache::Keys) {
            return Err(Error::CacheTypes {
                file: file(),
                k: self.k,
                v: self.v,
            });
        }
        Ok(())
    }
}
