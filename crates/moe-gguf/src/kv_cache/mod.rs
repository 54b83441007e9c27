//! Sizes of the KV cache and of the recurrent state of a model in bytes, computed from the header.
//!
//! [`KvShape::of`] reads the widths of a cache, by layer. [`KvShape::bytes`] multiplies them with a number of positions ([`Cells`])
//! and the size of a row of the cache's type. The rules are those of llama.cpp (llama-cpp-sys-2 0.1.161): `llama_hparams` and the
//! constructors of `llama_kv_cache`, `llama_kv_cache_iswa` and `llama_memory_recurrent`, with flash attention.
//!
//! ```no_run
//! use moe_gguf::kv_cache::{Cells, KvShape, KvTypes};
//!
//! let shape = KvShape::of(&moe_gguf::Gguf::open("model.gguf")?)?;
//! let cells = Cells::of_llama_cpp(8192, 1, 512, shape.window());
//! let bytes: u64 = shape.bytes(KvTypes::default(), cells)?.iter().map(|layer| layer.total()).sum();
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod rules;

use std::path::PathBuf;

use moe_ids::LayerId;
use thiserror::Error;

use crate::error;
use crate::gguf::Gguf;
use crate::metadata::Metadata;
use crate::per_layer::PerLayer;
use crate::types::GgmlType;
use crate::value::{Value, ValueType};

use rules::{Recurrence, WindowRule};

/// Positions are allocated in multiples of this number.
const PADDING: u64 = 256;

/// Maximum number of layers: 65,535 means "no layer" in traces.
const MAX_LAYERS: u64 = 65_535;

/// Why the sizes of a cache cannot be computed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum KvError {
    /// A key has a value of the wrong type.
    #[error(transparent)]
    Metadata(#[from] error::Error),
    /// A key that determines the size is missing.
    #[error("{}: metadata key {key:?} is missing, which determines the size of the KV cache; convert the model again", path.display())]
    MissingKey {
        /// The first file of the model.
        path: PathBuf,
        /// The key.
        key: String,
    },
    /// The number of layers is out of range.
    #[error("{}: {n} in metadata key {key:?} is out of range (1..=65535); convert the model again", path.display())]
    Layers {
        /// The first file of the model.
        path: PathBuf,
        /// The key.
        key: String,
        /// Its value.
        n: u64,
    },
    /// The architecture has a cache of another structure.
    #[error("the size of the KV cache is not known for the architecture {arch:?}")]
    Architecture {
        /// `general.architecture`.
        arch: String,
    },
    /// A row of the cache is not a multiple of the block size of the type.
    #[error("layer {layer}: a cache of type {ty} needs rows of a multiple of {} elements, but they have {width}; use f16", ty.block_size())]
    Type {
        /// The layer.
        layer: LayerId,
        /// Type of the cache.
        ty: GgmlType,
        /// Elements of a row.
        width: u64,
    },
    /// A size does not fit 64 bits.
    #[error("layer {layer}: the size of the cache does not fit 64 bits; reduce the context size")]
    TooLarge {
        /// The layer.
        layer: LayerId,
    },
}

/// Types of keys and values in a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvTypes {
    /// Type of the keys.
    pub k: GgmlType,
    /// Type of the values.
    pub v: GgmlType,
}

/// F16, like in llama.cpp.
impl Default for KvTypes {
    fn default() -> KvTypes {
        KvTypes {
            k: GgmlType::F16,
            v: GgmlType::F16,
        }
    }
}

/// Number of positions of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cells {
    /// Positions of a stream in a layer without a window.
    pub full: u64,
    /// Positions of a stream in a layer with a sliding window.
    pub windowed: u64,
    /// Number of streams, each with its own positions: one per sequence.
    pub n_streams: u64,
}

impl Cells {
    /// Returns the same number of positions for all layers: `n_ctx` for each of `n_seq` sequences.
    pub fn uniform(n_ctx: u64, n_seq: u64) -> Cells {
        Cells {
            full: n_ctx,
            windowed: n_ctx,
            n_streams: n_seq,
        }
    }

    /// Returns the positions of llama.cpp's cache without `--kv-unified` and `--swa-full`.
    ///
    /// `n_ctx` positions (`--ctx-size`) are divided by `n_seq` sequences (`--parallel`); both numbers are padded to a multiple of
    /// 256. A layer with a window of `window` positions needs the window and a batch of `n_ubatch` tokens.
    pub fn of_llama_cpp(n_ctx: u64, n_seq: u64, n_ubatch: u64, window: Option<u64>) -> Cells {
        let n_ubatch = n_ubatch.min(n_ctx);
        let n_seq = n_seq.max(1);
        let full = padded(padded(n_ctx) / n_seq).max(PADDING);
        let windowed = window.map_or(full, |window| {
            padded(full.min(window.saturating_add(n_ubatch)))
        });
        Cells {
            full,
            windowed,
            n_streams: n_seq,
        }
    }
}

/// Returns the next multiple of 256, at most 2^64 - 256.
fn padded(n: u64) -> u64 {
    n.checked_next_multiple_of(PADDING)
        .unwrap_or(u64::MAX / PADDING * PADDING)
}

/// Cache and recurrent state of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerShape {
    /// The layer.
    pub layer: LayerId,
    /// Elements of the keys of a position; 0 in a layer without a cache.
    pub k: u64,
    /// Elements of the values of a position; 0 in a layer without a cache, and with multi-head latent attention (MLA), which
    /// computes the values from the keys.
    pub v: u64,
    /// Whether the layer attends to a sliding window.
    pub is_windowed: bool,
    /// Elements of the recurrent state of a sequence, F32; 0 in a layer with attention only.
    pub state: u64,
}

/// Bytes of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerBytes {
    /// The layer.
    pub layer: LayerId,
    /// Bytes of the keys.
    pub k: u64,
    /// Bytes of the values.
    pub v: u64,
    /// Bytes of the recurrent state.
    pub state: u64,
}

impl LayerBytes {
    /// Bytes of keys and values.
    pub fn kv(&self) -> u64 {
        self.k.saturating_add(self.v)
    }

    /// Bytes of keys, values and recurrent state.
    pub fn total(&self) -> u64 {
        self.kv().saturating_add(self.state)
    }
}

/// The widths of a model's KV cache and recurrent state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvShape {
    layers: Vec<LayerShape>,
    window: Option<u64>,
}

impl KvShape {
    /// Reads the widths from the header. Layers of an MTP head (`nextn_predict_layers`) have no cache and are omitted.
    ///
    /// An architecture with a sliding window that this crate does not know is treated as one without a window, so that sizes are
    /// upper bounds.
    ///
    /// # Errors
    /// The architecture has another kind of cache, or a key is missing or has a wrong type.
    pub fn of(gguf: &Gguf) -> Result<KvShape, KvError> {
        let header = Header::of(gguf)?;
        let arch = header.arch;
        let is_unknown = rules::UNKNOWN.contains(&arch)
            || header.number("attention.indexer.key_length")?.is_some();
        if is_unknown {
            return Err(KvError::Architecture {
                arch: arch.to_owned(),
            });
        }
        let n_all = header.n_layer()?;
        let n_nextn = header.number("nextn_predict_layers")?.unwrap_or(0);
        let n_layer = if n_nextn < n_all {
            n_all - n_nextn
        } else {
            n_all
        };
        let heads = Heads::read(&header)?;
        let window = WindowRule::of(arch).map_or(Ok(None), |rule| rule.read(&header, n_layer))?;
        let state = State::read(&header)?;
        let n_shared = header.number("attention.shared_kv_layers")?.unwrap_or(0);
        let n_with_kv = match arch {
            "gemma4" => n_all.saturating_sub(n_shared),
            _ => n_all,
        };
        let recurrence = Recurrence::read(&header, n_layer)?;
        let layers = (0u16..).take(usize::try_from(n_layer).unwrap_or(0));
        let layers = layers.map(|il| {
            let index = usize::from(il);
            let is_windowed = window.as_ref().is_some_and(|window| window.layers[index]);
            let has_kv = u64::from(il) < n_with_kv && recurrence.has_attention(index);
            let n_head_kv = if has_kv { heads.n_kv(index) } else { 0 };
            let [k, v] = heads.widths(is_windowed);
            let is_recurrent = recurrence.is_recurrent(index);
            LayerShape {
                layer: LayerId(il),
                k: k.saturating_mul(n_head_kv),
                v: if heads.is_mla {
                    0
                } else {
                    v.saturating_mul(n_head_kv)
                },
                is_windowed,
                state: if is_recurrent { state.elements() } else { 0 },
            }
        });
        Ok(KvShape {
            layers: layers.collect(),
            window: window.map(|window| window.n_positions),
        })
    }

    /// The layers in order.
    pub fn layers(&self) -> &[LayerShape] {
        &self.layers
    }

    /// Positions of the sliding window; `None` for a model without one.
    pub fn window(&self) -> Option<u64> {
        self.window
    }

    /// Returns the bytes of each layer. The recurrent state has one entry per stream.
    ///
    /// # Errors
    /// A row is not a multiple of the block size of the type, or a size does not fit 64 bits.
    pub fn bytes(&self, types: KvTypes, cells: Cells) -> Result<Vec<LayerBytes>, KvError> {
        let layers = self.layers.iter().map(|shape| {
            let layer = shape.layer;
            let n = if shape.is_windowed {
                cells.windowed
            } else {
                cells.full
            };
            let rows = |width: u64, ty: GgmlType| {
                if width == 0 {
                    return Ok(0);
                }
                if !width.is_multiple_of(ty.block_size()) {
                    return Err(KvError::Type { layer, ty, width });
                }
                let size = ty
                    .row_size(width)
                    .and_then(|row| row.checked_mul(n)?.checked_mul(cells.n_streams));
                size.ok_or(KvError::TooLarge { layer })
            };
            let state = shape
                .state
                .checked_mul(4)
                .and_then(|bytes| bytes.checked_mul(cells.n_streams));
            Ok(LayerBytes {
                layer,
                k: rows(shape.k, types.k)?,
                v: rows(shape.v, types.v)?,
                state: state.ok_or(KvError::TooLarge { layer })?,
            })
        });
        layers.collect()
    }
}

/// The keys of the model's architecture.
struct Header<'g> {
    gguf: &'g Gguf,
    arch: &'g str,
}

impl<'g> Header<'g> {
    fn of(gguf: &'g Gguf) -> Result<Header<'g>, KvError> {
        const KEY: &str = "general.architecture";
        let arch = gguf.metadata().str(KEY)?;
        let arch = arch.ok_or_else(|| KvError::MissingKey {
            path: gguf.files()[0].path.clone(),
            key: KEY.to_owned(),
        })?;
        Ok(Header { gguf, arch })
    }

    fn metadata(&self) -> &'g Metadata {
        self.gguf.metadata()
    }

    fn key(&self, suffix: &str) -> String {
        format!("{}.{suffix}", self.arch)
    }

    fn missing(&self, suffix: &str) -> KvError {
        KvError::MissingKey {
            path: self.gguf.files()[0].path.clone(),
            key: self.key(suffix),
        }
    }

    /// A number, or a list with the same number for each layer.
    fn number(&self, suffix: &str) -> Result<Option<u64>, KvError> {
        let values = self.values(suffix).ok().flatten();
        match values.and_then(|values| values.uniform()) {
            Some(number) => Ok(Some(number)),
            None => Ok(self.metadata().u64(&self.key(suffix))?),
        }
    }

    fn required(&self, suffix: &str) -> Result<u64, KvError> {
        self.number(suffix)?.ok_or_else(|| self.missing(suffix))
    }

    fn values(&self, suffix: &str) -> Result<Option<PerLayer>, KvError> {
        Ok(self.metadata().per_layer(&self.key(suffix))?)
    }

    /// A list of flags, booleans or integers, or a number.
    fn flags(&self, suffix: &str) -> Result<Option<PerLayer>, KvError> {
        let key = self.key(suffix);
        match self.metadata().get(&key) {
            Some(Value::Array(list)) if list.element_type() == ValueType::Bool => {
                let n = usize::try_from(MAX_LAYERS).unwrap_or(usize::MAX);
                let flags = list
                    .iter()
                    .take(n)
                    .map(|flag| matches!(flag, Value::Bool(true)));
                Ok(Some(PerLayer::Each(flags.map(u64::from).collect())))
            }
            _ => self.values(suffix),
        }
    }

    fn n_layer(&self) -> Result<u64, KvError> {
        const KEY: &str = "block_count";
        match self.required(KEY)? {
            n @ 1..=MAX_LAYERS => Ok(n),
            n => Err(KvError::Layers {
                path: self.gguf.files()[0].path.clone(),
                key: self.key(KEY),
                n,
            }),
        }
    }
}

/// Heads of keys and values.
struct Heads {
    n_kv: PerLayer,
    /// Elements of a head of keys and of values, in layers without and with a window.
    widths: [[u64; 2]; 2],
    is_mla: bool,
}

impl Heads {
    fn read(header: &Header) -> Result<Heads, KvError> {
        const HEADS: &str = "attention.head_count";
        let n_head = header.values(HEADS)?.ok_or_else(|| header.missing(HEADS))?;
        let n_kv = header.values("attention.head_count_kv")?;
        let first = n_head.get(0).unwrap_or(0);
        // A model whose first layer has no heads has no widths in llama.cpp either.
        let full = match first {
            0 => [0, 0],
            n => {
                let mut default = None;
                let mut width = |suffix| match header.number(suffix)? {
                    Some(width) => Ok::<_, KvError>(width),
                    None => match default {
                        Some(width) => Ok(width),
                        None => Ok(*default.insert(header.required("embedding_length")? / n)),
                    },
                };
                [
                    width("attention.key_length")?,
                    width("attention.value_length")?,
                ]
            }
        };
        let of_window = |suffix, full| Ok::<_, KvError>(header.number(suffix)?.unwrap_or(full));
        let windowed = [
            of_window("attention.key_length_swa", full[0])?,
            of_window("attention.value_length_swa", full[1])?,
        ];
        let is_set = |suffix| Ok::<_, KvError>(header.number(suffix)?.unwrap_or(0) > 0);
        Ok(Heads {
            n_kv: n_kv.unwrap_or(n_head),
            widths: [full, windowed],
            is_mla: is_set("attention.key_length_mla")? && is_set("attention.value_length_mla")?,
        })
    }

    fn n_kv(&self, layer: usize) -> u64 {
        self.n_kv.get(layer).unwrap_or(0)
    }

    /// Elements of a head: keys, values.
    fn widths(&self, is_windowed: bool) -> [u64; 2] {
        self.widths[usize::from(is_windowed)]
    }
}

/// Recurrent state of a state-space, linear-attention or short-convolution layer.
struct State {
    convolution: u64,
    state: u64,
}

impl State {
    fn read(header: &Header) -> Result<State, KvError> {
        let number = |suffix| Ok::<_, KvError>(header.number(suffix)?.unwrap_or(0));
        let n_short = number("shortconv.l_cache")?;
        if n_short > 0 {
            return Ok(State {
                convolution: header
                    .required("embedding_length")?
                    .saturating_mul(n_short - 1),
                state: 0,
            });
        }
        let width = number("kda.head_dim")?;
        if width > 0 {
            let heads = header.values("attention.head_count")?;
            let n_head = heads.and_then(|heads| heads.get(0)).unwrap_or(0);
            let n_inner = n_head.saturating_mul(width);
            let n_past = match number("ssm.conv_kernel")? {
                0 => 3,
                n => n - 1,
            };
            // Queries, keys and values are convolved.
            return Ok(State {
                convolution: n_past.saturating_mul(n_inner).saturating_mul(3),
                state: n_inner.saturating_mul(width),
            });
        }
        let (n_conv, n_inner) = (number("ssm.conv_kernel")?, number("ssm.inner_size")?);
        let (n_group, n_state) = (number("ssm.group_count")?, number("ssm.state_size")?);
        let channels = n_group
            .saturating_mul(n_state)
            .saturating_mul(2)
            .saturating_add(n_inner);
        Ok(State {
            convolution: n_conv.saturating_sub(1).saturating_mul(channels),
            state: n_state.saturating_mul(n_inner),
        })
    }

    fn elements(&self) -> u64 {
        self.convolution.saturating_add(self.state)
    }
}
