//! What operations read, and the record that is made ready from it.

use moe_trace::TensorAccessLog;
use moe_trace::record::{self, MAX_SOURCES};

use crate::activation::{Activation, NodeName};
use crate::buffers::twin_id;
use crate::weights::{Matrix, Place, Vector};

/// What an operation reads.
#[derive(Clone, Copy)]
pub enum Source<'a> {
    /// A tensor of the model's file.
    Weight(&'a Place, u64),
    /// Memory that the executor owns.
    Buffer {
        /// Name of the node that wrote it.
        name: NodeName,
        /// What llama.cpp appends when the node is read through a view, such as ` (reshaped)`.
        suffix: &'static str,
        /// Identity of the memory.
        buffer_id: u64,
        /// Address of the first byte.
        address: u64,
        /// Bytes read.
        size_bytes: u64,
        /// Elements of a row, and rows.
        ne: [u64; 2],
        /// Type of the elements.
        dtype: &'static str,
    },
}

impl<'a> From<&'a Matrix<'_>> for Source<'a> {
    fn from(matrix: &'a Matrix<'_>) -> Self {
        Source::Weight(&matrix.place, matrix.address())
    }
}

impl<'a> From<&'a Vector> for Source<'a> {
    fn from(vector: &'a Vector) -> Self {
        Source::Weight(&vector.place, vector.data.as_ptr() as u64)
    }
}

impl From<&Activation> for Source<'_> {
    fn from(activation: &Activation) -> Self {
        Source::view(activation, "")
    }
}

impl Source<'_> {
    /// A buffer read through a view that llama.cpp names with a suffix.
    pub fn view(activation: &Activation, suffix: &'static str) -> Self {
        Source::Buffer {
            name: activation.name,
            suffix,
            buffer_id: twin_id(activation.buffer_id, &activation.values),
            address: activation.address(),
            size_bytes: activation.size_bytes(),
            ne: [activation.width as u64, activation.rows as u64],
            dtype: "f32",
        }
    }

    /// One of `n_expert_used` rows of every token, a view. As ggml counts, it takes the bytes from its first row to its last.
    pub fn slots(experts: &Activation, n_expert_used: usize) -> Self {
        let tokens = experts.rows / n_expert_used;
        let rows = (tokens.saturating_sub(1) * n_expert_used + 1).min(experts.rows);
        Source::Buffer {
            name: experts.name,
            suffix: " (view)",
            buffer_id: twin_id(experts.buffer_id, &experts.values),
            address: experts.address(),
            size_bytes: (rows * experts.width * size_of::<f32>()) as u64,
            ne: [experts.width as u64, tokens as u64],
            dtype: "f32",
        }
    }
}

/// The record of an operation, with all that stays alike from pass to pass.
pub(super) fn template(op: u8, dst: NodeName, sources: &[Source]) -> TensorAccessLog {
    let mut record = TensorAccessLog::default();
    record.ext_version = record::EXT_V1;
    record.operation_type = op;
    record.layer_id.set(record::layer_number(dst.layer()));
    record::set_name(&mut record.dst_name, &dst.to_string());
    record.num_sources = sources.len().min(MAX_SOURCES) as u8;
    if sources.len() > MAX_SOURCES {
        record.flags |= record::FLAG_SOURCES_OMITTED;
    }
    for (at, source) in sources.iter().take(MAX_SOURCES).enumerate() {
        let log = &mut record.sources[at];
        match source {
            Source::Weight(place, address) => {
                record::set_name(&mut log.name, &place.name);
                log.tensor_ptr.set(*address);
                log.layer_id.set(record::layer_number(place.layer));
                log.memory_source = record::SOURCE_DISK;
                log.offset_or_buffer_id.set(place.offset);
                log.tensor_idx.set(place.tensor_idx);
                record.source_file[at].set(place.file);
                record.set_source_size(at, place.size_bytes);
            }
            Source::Buffer {
                name,
                suffix,
                buffer_id,
                address,
                size_bytes,
                ..
            } => {
                record::set_name(&mut log.name, &format!("{name}{suffix}"));
                log.tensor_ptr.set(*address);
                log.layer_id.set(record::layer_number(name.layer()));
                log.memory_source = record::SOURCE_BUFFER;
                log.offset_or_buffer_id.set(*buffer_id);
                log.tensor_idx.set(moe_trace::NO_TENSOR);
                record.set_source_size(at, *size_bytes);
            }
        }
    }
    record
}
