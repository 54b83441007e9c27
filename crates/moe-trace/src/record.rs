//! The 1024-byte record. Each operation has one record; expert operations have one for each token of the batch.
//!
//! Bytes 0 to 856 have the published layout v4. The following bytes, which are padding in v4, contain an extension.
//! All fields are little-endian and packed, so a mapped file is a slice of records on any machine.

use std::borrow::Cow;
use std::mem::{offset_of, size_of};

use moe_gguf::names::is_chunked;
use moe_ids::{LayerId, TokenId};
use zerocopy::little_endian::{F32, I32, U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::fault::RecordFault;
use crate::phase::Phase;

/// `layer_id` of an operation or source that belongs to no layer.
pub const NO_LAYER: u16 = u16::MAX;
/// `tensor_idx` of a source that is not a tensor of the model's files.
pub const NO_TENSOR: u32 = u32::MAX;

/// `phase` of an operation on the prompt.
pub const PHASE_PROMPT: u8 = 0;
/// `phase` of an operation on generated tokens.
pub const PHASE_GENERATE: u8 = 1;

/// `memory_source` of a tensor in the model's files.
pub const SOURCE_DISK: u8 = 0;
/// `memory_source` of a buffer that was allocated at run time.
pub const SOURCE_BUFFER: u8 = 1;

/// `ext_version` of a record without extension; its extension fields are undefined.
pub const EXT_NONE: u8 = 0;
/// `ext_version` of the extension described here.
pub const EXT_V1: u8 = 1;

/// Flag: the record contains further experts of the token in the preceding record (more than 16 experts).
pub const FLAG_CONTINUATION: u8 = 1 << 0;
/// Flag: the operation was assigned to the GPU and fell back to the CPU.
pub const FLAG_CPU_FALLBACK: u8 = 1 << 1;
/// Flag: the operation has more than four sources; the record contains the first four in ggml's order.
pub const FLAG_SOURCES_OMITTED: u8 = 1 << 2;

/// Maximum number of sources of a record.
pub const MAX_SOURCES: usize = 4;
/// Maximum number of experts of a record. Further experts of a token are in continuation records.
pub const MAX_EXPERTS: usize = 16;
/// Size of a name field in bytes, including the terminating NUL.
pub const NAME_SIZE: usize = 128;
/// Size of a record in bytes.
pub const RECORD_SIZE: usize = 1024;

/// Where an expert was computed (`expert_lane`).
pub mod lane {
    /// Unknown.
    pub const UNKNOWN: u8 = 0;
    /// On the CPU.
    pub const CPU: u8 = 1;
    /// On the GPU, with weights that are always in GPU memory.
    pub const GPU_RESIDENT: u8 = 2;
    /// On the GPU, with weights in the hot cache.
    pub const HOT_CACHE: u8 = 3;
    /// On the GPU, with weights copied after the router selected the expert (Post-Fetch).
    pub const POST_FETCHED: u8 = 4;
    /// On the CPU, because the copy of the weights was not complete in time.
    pub const POST_FETCH_MISS: u8 = 5;
    /// On the GPU: hit in the dynamic cache.
    pub const CACHE_HIT: u8 = 6;
    /// Miss in the dynamic cache.
    pub const CACHE_MISS: u8 = 7;

    /// Names of the lanes in tables, indexed by number.
    pub const NAMES: [&str; 8] = [
        "unknown",
        "cpu",
        "gpu_resident",
        "hot_cache",
        "post_fetched",
        "post_fetch_miss",
        "cache_hit",
        "cache_miss",
    ];
}

/// A tensor that an operation read: 160 bytes.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct SourceLog {
    /// Name, terminated by a NUL.
    pub name: [u8; NAME_SIZE],
    /// Address of the data during the recording.
    pub tensor_ptr: U64,
    /// Low 32 bits of the size in bytes; see [`TensorAccessLog::source_size`].
    pub size_bytes: U32,
    /// Layer of the tensor, or [`NO_LAYER`].
    pub layer_id: U16,
    /// [`SOURCE_DISK`] or [`SOURCE_BUFFER`].
    pub memory_source: u8,
    /// Zero.
    pub pad: u8,
    /// Offset in the model's file in bytes (DISK) or id of the buffer (BUFFER).
    pub offset_or_buffer_id: U64,
    /// Index in the GGUF's tensor table, or [`NO_TENSOR`].
    pub tensor_idx: U32,
    /// Zero.
    pub pad2: [u8; 4],
}

/// An operation, or a token of an expert operation: 1024 bytes.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct TensorAccessLog {
    /// Start of the operation on a monotonic clock, nanoseconds; equal in all its records. 0 ends the trace.
    pub timestamp_ns: U64,
    /// Position of the token in its sequence. Other than expert operations have the position, the phase and the sequence of the
    /// first token of the batch, which may have tokens of several sequences.
    pub token_id: U32,
    /// Layer, or [`NO_LAYER`].
    pub layer_id: U16,
    /// Id of the thread that wrote the record.
    pub thread_id: U16,
    /// Number of the ggml operation; the manifest's `ops` contains the names.
    pub operation_type: u8,
    /// [`PHASE_PROMPT`] or [`PHASE_GENERATE`].
    pub phase: u8,
    /// Sources in use, 0 to 4.
    pub num_sources: u8,
    /// Zero.
    pub pad: [u8; 5],
    /// Name of the result, terminated by a NUL.
    pub dst_name: [u8; NAME_SIZE],
    /// The sources of the operation, in ggml's order.
    pub sources: [SourceLog; MAX_SOURCES],
    /// Ids of the experts that the router selected for the token, best first.
    pub expert_ids: [I32; MAX_EXPERTS],
    /// Entries of `expert_ids` in use.
    pub num_experts: u8,
    /// [`EXT_NONE`]: the following fields are undefined. [`EXT_V1`]: they have the documented meaning.
    pub ext_version: u8,
    /// [`FLAG_CONTINUATION`], [`FLAG_CPU_FALLBACK`], [`FLAG_SOURCES_OMITTED`].
    pub flags: u8,
    /// Rank of `expert_ids[0]` in the token's top-k.
    pub expert_slot_base: u8,
    /// Duration of the operation, nanoseconds; 0 if unknown.
    pub duration_ns: U64,
    /// Tokens in the operation's batch.
    pub n_tokens: U32,
    /// Sequence (request) of the token.
    pub sequence_id: U32,
    /// High 32 bits of each source's size.
    pub size_bytes_high: [U32; MAX_SOURCES],
    /// Router weight as applied, parallel to `expert_ids`.
    pub expert_weights: [F32; MAX_EXPERTS],
    /// Where each expert was computed, a [`lane`], parallel to `expert_ids`.
    pub expert_lane: [u8; MAX_EXPERTS],
    /// Index of the file (GGUF shard) of each source, from 0.
    pub source_file: [U16; MAX_SOURCES],
    /// Zero.
    pub reserved: [u8; 44],
}

macro_rules! assert_layout {
    ($type:ty, $size:literal, $($offset:literal $field:ident),+ $(,)?) => {
        const _: () = {
            assert!(size_of::<$type>() == $size);
            assert!(align_of::<$type>() == 1);
            $(assert!(offset_of!($type, $field) == $offset);)+
        };
    };
}

assert_layout!(
    SourceLog, 160,
    0 name, 128 tensor_ptr, 136 size_bytes, 140 layer_id, 142 memory_source, 143 pad,
    144 offset_or_buffer_id, 152 tensor_idx, 156 pad2,
);
assert_layout!(
    TensorAccessLog, 1024,
    0 timestamp_ns, 8 token_id, 12 layer_id, 14 thread_id, 16 operation_type, 17 phase, 18 num_sources, 19 pad,
    24 dst_name, 152 sources, 792 expert_ids, 856 num_experts,
    857 ext_version, 858 flags, 859 expert_slot_base, 860 duration_ns, 868 n_tokens, 872 sequence_id,
    876 size_bytes_high, 892 expert_weights, 956 expert_lane, 972 source_file, 980 reserved,
);

impl Default for TensorAccessLog {
    fn default() -> Self {
        Self::new_zeroed()
    }
}

impl Default for SourceLog {
    fn default() -> Self {
        Self::new_zeroed()
    }
}

impl SourceLog {
    /// The bytes of the name up to its NUL.
    pub fn name_bytes(&self) -> &[u8] {
        name_bytes(&self.name)
    }

    /// The name; bytes that are not UTF-8 are replaced.
    pub fn name(&self) -> Cow<'_, str> {
        String::from_utf8_lossy(self.name_bytes())
    }

    /// Layer of the tensor, if it belongs to one.
    pub fn layer(&self) -> Option<LayerId> {
        some_layer(self.layer_id)
    }

    /// Whether the source is a tensor in the model's files.
    pub fn is_disk(&self) -> bool {
        self.memory_source == SOURCE_DISK
    }
}

impl TensorAccessLog {
    /// The bytes of the result's name up to its NUL.
    pub fn dst_name_bytes(&self) -> &[u8] {
        name_bytes(&self.dst_name)
    }

    /// The result's name; bytes that are not UTF-8 are replaced.
    pub fn dst_name(&self) -> Cow<'_, str> {
        String::from_utf8_lossy(self.dst_name_bytes())
    }

    /// Layer of the operation, if it belongs to one.
    pub fn layer(&self) -> Option<LayerId> {
        some_layer(self.layer_id)
    }

    /// Position of the token in its sequence.
    pub fn token(&self) -> TokenId {
        TokenId(self.token_id.get())
    }

    /// The phase; `None` if its number is unknown.
    pub fn phase(&self) -> Option<Phase> {
        Phase::from_number(self.phase)
    }

    /// The sources in use. A count above 4 is treated as 4.
    pub fn sources(&self) -> &[SourceLog] {
        &self.sources[..usize::from(self.num_sources).min(MAX_SOURCES)]
    }

    /// The expert ids in use. A count above 16 is treated as 16.
    pub fn expert_ids(&self) -> &[I32] {
        &self.expert_ids[..usize::from(self.num_experts).min(MAX_EXPERTS)]
    }

    /// Whether the counts of sources and experts are within the limits of a record.
    pub fn counts_fit(&self) -> bool {
        usize::from(self.num_sources) <= MAX_SOURCES && usize::from(self.num_experts) <= MAX_EXPERTS
    }

    /// Whether the bytes can be a record: they have a timestamp, a known phase, known memory sources, the name of a result, and
    /// no control characters in names. The version of the extension may be unknown.
    pub(crate) fn is_plausible(&self) -> bool {
        // A name may be truncated within a character, so it is not always UTF-8.
        let is_name =
            |name: &[u8]| name.len() < NAME_SIZE && !name.iter().any(u8::is_ascii_control);
        self.timestamp_ns.get() != 0
            && self.counts_fit()
            && self.phase().is_some()
            && !self.dst_name_bytes().is_empty()
            && is_name(self.dst_name_bytes())
            && self
                .sources()
                .iter()
                .all(|source| source.memory_source <= SOURCE_BUFFER && is_name(source.name_bytes()))
    }

    /// Whether it is an operation on chunk experts (`_chexps`, in GroveMoE). Their ids are chunks of several experts, not experts
    /// that the router selected, and a token may have a chunk twice.
    pub fn reads_chunk_experts(&self) -> bool {
        self.sources()
            .iter()
            .any(|source| is_chunked(&source.name()))
    }

    /// Whether this crate supports the version of the extension.
    pub fn is_version_known(&self) -> bool {
        self.ext_version <= EXT_V1
    }

    /// Checks that this crate can read the record.
    ///
    /// # Errors
    /// [`RecordFault::Version`], [`RecordFault::Counts`].
    pub fn check_readable(&self) -> Result<(), RecordFault> {
        if !self.is_version_known() {
            return Err(RecordFault::Version {
                found: self.ext_version,
            });
        }
        if !self.counts_fit() {
            return Err(RecordFault::Counts {
                sources: self.num_sources,
                experts: self.num_experts,
            });
        }
        Ok(())
    }

    /// Whether the record has an extension.
    pub fn has_extension(&self) -> bool {
        self.ext_version >= EXT_V1
    }

    /// Whether the record contains further experts of the token in the preceding record.
    pub fn is_continuation(&self) -> bool {
        self.has_flag(FLAG_CONTINUATION)
    }

    /// Whether `flag` is set. Records without extension have no flags.
    pub fn has_flag(&self, flag: u8) -> bool {
        self.has_extension() && self.flags & flag != 0
    }

    /// Size of source `i` in bytes. The high 32 bits come from the extension and are 0 without it.
    ///
    /// Returns 0 if `i` is not below [`MAX_SOURCES`].
    pub fn source_size(&self, i: usize) -> u64 {
        let (Some(source), Some(high)) = (self.sources.get(i), self.size_bytes_high.get(i)) else {
            return 0;
        };
        let high = if self.has_extension() {
            u64::from(high.get())
        } else {
            0
        };
        high << 32 | u64::from(source.size_bytes.get())
    }

    /// Sets the size of source `i`, both halves. Panics if `i` is not below [`MAX_SOURCES`].
    pub fn set_source_size(&mut self, i: usize, size_bytes: u64) {
        self.sources[i].size_bytes = U32::new((size_bytes & 0xFFFF_FFFF) as u32);
        self.size_bytes_high[i] = U32::new((size_bytes >> 32) as u32);
    }
}

/// Writes `name` into a name field, truncated to 127 bytes at a character boundary and padded with zeros.
pub fn set_name(field: &mut [u8; NAME_SIZE], name: &str) {
    let mut n = name.len().min(NAME_SIZE - 1);
    while !name.is_char_boundary(n) {
        n -= 1;
    }
    field[..n].copy_from_slice(&name.as_bytes()[..n]);
    field[n..].fill(0);
}

/// The bytes of a name field up to its NUL, or all of them if it has none.
pub fn name_bytes(field: &[u8; NAME_SIZE]) -> &[u8] {
    let end = field.iter().position(|&b| b == 0).unwrap_or(NAME_SIZE);
    &field[..end]
}

fn some_layer(layer_id: U16) -> Option<LayerId> {
    let layer = layer_id.get();
    (layer != NO_LAYER).then_some(LayerId(layer))
}

/// The number of a layer in records and in `buffers.jsonl`; [`NO_LAYER`] for `None`.
pub fn layer_number(layer: Option<LayerId>) -> u16 {
    layer.map_or(NO_LAYER, |layer| layer.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stores_sizes_above_4_gib() {
        let mut record = TensorAccessLog {
            ext_version: EXT_V1,
            ..Default::default()
        };
        record.set_source_size(2, 5 << 32 | 7);
        assert_eq!(record.sources[2].size_bytes.get(), 7);
        assert_eq!(record.source_size(2), 5 << 32 | 7);
        record.ext_version = EXT_NONE;
        assert_eq!(record.source_size(2), 7);
        assert_eq!(record.source_size(4), 0);
    }

    #[test]
    fn truncates_names_at_character_boundaries() {
        let mut field = [0xff; NAME_SIZE];
        set_name(&mut field, &format!("{}é", "a".repeat(126)));
        assert_eq!(name_bytes(&field), "a".repeat(126).as_bytes());
        assert!(field[126..].iter().all(|&b| b == 0));
        assert_eq!(name_bytes(&[b'x'; NAME_SIZE]).len(), NAME_SIZE);
    }

    #[test]
    fn clamps_counts_to_array_lengths() {
        let record = TensorAccessLog {
            num_sources: 255,
            num_experts: 255,
            ..Default::default()
        };
        assert_eq!(record.sources().len(), 4);
        assert_eq!(record.expert_ids().len(), 16);
    }
}
