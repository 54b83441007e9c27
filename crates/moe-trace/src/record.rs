//! The 1024-byte record, one for each operation (expert operations: one for each token of the batch).
//!
//! Offsets 0 to 856 are the published v4 layout; the bytes behind it, padding to readers of v4, carry an extension.
//! Everything is little-endian and packed, so a mapped file is a slice of records on any machine.

use std::borrow::Cow;
use std::mem::{offset_of, size_of};

use moe_ids::{LayerId, TokenId};
use zerocopy::little_endian::{F32, I32, U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::fault::RecordFault;
use crate::phase::Phase;

/// `layer_id` of an operation or source that belongs to no layer.
pub const NO_LAYER: u16 = u16::MAX;
/// `tensor_idx` of a source that is no tensor of the model's file.
pub const NO_TENSOR: u32 = u32::MAX;

/// `phase` of an operation on the prompt.
pub const PHASE_PROMPT: u8 = 0;
/// `phase` of an operation on generated tokens.
pub const PHASE_GENERATE: u8 = 1;

/// `memory_source` of a tensor in the model's file.
pub const SOURCE_DISK: u8 = 0;
/// `memory_source` of a buffer made while running.
pub const SOURCE_BUFFER: u8 = 1;

/// `ext_version` of a record whose extension fields mean nothing.
pub const EXT_NONE: u8 = 0;
/// `ext_version` of the extension described here.
pub const EXT_V1: u8 = 1;

/// Flag: the record goes on with the experts of the token in the record before it (more than 16 experts).
pub const FLAG_CONTINUATION: u8 = 1 << 0;
/// Flag: the operation was meant for the GPU and ran on the CPU.
pub const FLAG_CPU_FALLBACK: u8 = 1 << 1;
/// Flag: the operation has more than four sources; the first four in ggml's order stayed.
pub const FLAG_SOURCES_OMITTED: u8 = 1 << 2;

/// Sources that a record can hold.
pub const MAX_SOURCES: usize = 4;
/// Experts that a record can hold; a token with more goes on in a continuation record.
pub const MAX_EXPERTS: usize = 16;
/// Bytes of a name, its closing NUL included.
pub const NAME_SIZE: usize = 128;
/// Bytes of a record.
pub const RECORD_SIZE: usize = 1024;

/// Where an expert was computed (`expert_lane`).
pub mod lane {
    /// Not known.
    pub const UNKNOWN: u8 = 0;
    /// On the CPU.
    pub const CPU: u8 = 1;
    /// On the GPU, where its weights always are.
    pub const GPU_RESIDENT: u8 = 2;
    /// On the GPU, from the hot cache.
    pub const HOT_CACHE: u8 = 3;
    /// On the GPU, with weights copied after the router chose it.
    pub const POST_FETCHED: u8 = 4;
    /// On the CPU, because the copy was not there in time.
    pub const POST_FETCH_MISS: u8 = 5;
    /// On the GPU: the dynamic cache held it.
    pub const CACHE_HIT: u8 = 6;
    /// The dynamic cache did not hold it.
    pub const CACHE_MISS: u8 = 7;

    /// Names of the lanes in tables, by number.
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

/// One tensor that an operation read: 160 bytes.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct SourceLog {
    /// Name, closed by a NUL.
    pub name: [u8; NAME_SIZE],
    /// Address of the data while recording.
    pub tensor_ptr: U64,
    /// Low 32 bits of the size in bytes; see [`TensorAccessLog::source_size`].
    pub size_bytes: U32,
    /// Layer of the tensor, or [`NO_LAYER`].
    pub layer_id: U16,
    /// [`SOURCE_DISK`] or [`SOURCE_BUFFER`].
    pub memory_source: u8,
    /// Zero.
    pub pad: u8,
    /// Offset in the model's file (DISK) or the buffer's id (BUFFER).
    pub offset_or_buffer_id: U64,
    /// Index in the GGUF's tensor table, or [`NO_TENSOR`].
    pub tensor_idx: U32,
    /// Zero.
    pub pad2: [u8; 4],
}

/// One operation, or one token of an expert operation: 1024 bytes.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct TensorAccessLog {
    /// Monotonic start of the operation; equal in all its records. Zero ends the file.
    pub timestamp_ns: U64,
    /// Position of the token in its sequence; the first one of a batch.
    pub token_id: U32,
    /// Layer, or [`NO_LAYER`].
    pub layer_id: U16,
    /// Thread that logged.
    pub thread_id: U16,
    /// Number of the operation; the manifest's `ops` names it.
    pub operation_type: u8,
    /// [`PHASE_PROMPT`] or [`PHASE_GENERATE`].
    pub phase: u8,
    /// Sources in use, 0 to 4.
    pub num_sources: u8,
    /// Zero.
    pub pad: [u8; 5],
    /// Name of the result, closed by a NUL.
    pub dst_name: [u8; NAME_SIZE],
    /// What the operation read, in ggml's order.
    pub sources: [SourceLog; MAX_SOURCES],
    /// Experts that the router chose for the token, best first.
    pub expert_ids: [I32; MAX_EXPERTS],
    /// Entries of `expert_ids` in use.
    pub num_experts: u8,
    /// [`EXT_NONE`]: everything below means nothing. [`EXT_V1`]: as described.
    pub ext_version: u8,
    /// [`FLAG_CONTINUATION`], [`FLAG_CPU_FALLBACK`], [`FLAG_SOURCES_OMITTED`].
    pub flags: u8,
    /// Rank of `expert_ids[0]` in the token's top-k.
    pub expert_slot_base: u8,
    /// Duration of the operation; 0 = unknown.
    pub duration_ns: U64,
    /// Tokens in the operation's batch.
    pub n_tokens: U32,
    /// Sequence (request) of the token.
    pub sequence_id: U32,
    /// High 32 bits of each source's size.
    pub size_bytes_high: [U32; MAX_SOURCES],
    /// Router weight as applied, parallel to `expert_ids`.
    pub expert_weights: [F32; MAX_EXPERTS],
    /// [`lane`], parallel to `expert_ids`.
    pub expert_lane: [u8; MAX_EXPERTS],
    /// Shard of each source; 0 is the first file.
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
    /// The name's bytes, up to its NUL.
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

    /// Whether the bytes come from the model's file.
    pub fn is_disk(&self) -> bool {
        self.memory_source == SOURCE_DISK
    }
}

impl TensorAccessLog {
    /// The result's name, up to its NUL.
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

    /// The phase; `None` if there is none with that number.
    pub fn phase(&self) -> Option<Phase> {
        Phase::of(self.phase)
    }

    /// The sources in use; a count beyond four counts as four.
    pub fn sources(&self) -> &[SourceLog] {
        &self.sources[..usize::from(self.num_sources).min(MAX_SOURCES)]
    }

    /// The expert ids in use; a count beyond sixteen counts as sixteen.
    pub fn expert_ids(&self) -> &[I32] {
        &self.expert_ids[..usize::from(self.num_experts).min(MAX_EXPERTS)]
    }

    /// Whether the counts of sources and experts are not beyond what a record holds.
    pub fn counts_fit(&self) -> bool {
        usize::from(self.num_sources) <= MAX_SOURCES && usize::from(self.num_experts) <= MAX_EXPERTS
    }

    /// Whether the bytes can be a record: a time, a phase and a memory source that exist, the name of a result, and names without
    /// control characters. The version of the extension may be unknown.
    pub(crate) fn is_plausible(&self) -> bool {
        // A name may be cut within a character, so it need not be UTF-8.
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

    /// Whether this version knows what the extension's bytes mean.
    pub fn is_version_known(&self) -> bool {
        self.ext_version <= EXT_V1
    }

    /// Whether the record can be read.
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

    /// Whether the extension fields mean anything.
    pub fn has_extension(&self) -> bool {
        self.ext_version >= EXT_V1
    }

    /// Whether the record goes on with the experts of the token in the record before it.
    pub fn is_continuation(&self) -> bool {
        self.has_flag(FLAG_CONTINUATION)
    }

    /// Whether `flag` is set; a plain v4 record has none.
    pub fn has_flag(&self, flag: u8) -> bool {
        self.has_extension() && self.flags & flag != 0
    }

    /// Size of source `i` in bytes, its high half from the extension.
    ///
    /// A plain v4 record has the low 32 bits alone. `i` beyond the fourth source gives 0.
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

/// Writes `name` into a name field: cut at 127 bytes (between characters), zeros behind it.
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

/// The number of a layer in a record and in `buffers.jsonl`: [`NO_LAYER`] for none.
pub fn layer_number(layer: Option<LayerId>) -> u16 {
    layer.map_or(NO_LAYER, |layer| layer.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_above_4_gib_keep_their_high_half() {
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
    fn names_are_cut_between_characters() {
        let mut field = [0xff; NAME_SIZE];
        set_name(&mut field, &format!("{}é", "a".repeat(126)));
        assert_eq!(name_bytes(&field), "a".repeat(126).as_bytes());
        assert!(field[126..].iter().all(|&b| b == 0));
        assert_eq!(name_bytes(&[b'x'; NAME_SIZE]).len(), NAME_SIZE);
    }

    #[test]
    fn counts_beyond_the_arrays_are_clamped() {
        let record = TensorAccessLog {
            num_sources: 255,
            num_experts: 255,
            ..Default::default()
        };
        assert_eq!(record.sources().len(), 4);
        assert_eq!(record.expert_ids().len(), 16);
    }
}
