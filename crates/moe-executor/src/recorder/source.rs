//! Sources of operations, and record templates.

use moe_trace::TensorAccessLog;
use moe_trace::record::{self, MAX_SOURCES};

use crate::activation::{Activation, NodeName};
use crate::buffers::id_at_home;
use crate::weights::{Matrix, Place, Vector};

/// A tensor that an operation reads.
#[derive(Clone, Copy)]
pub enum Source<'a> {
    /// A tensor of the model file, the address of its values, and the suffix that llama.cpp appends to the name of a view.
    Weight(&'a Place, u64, &'static str),
    /// A buffer of the executor.
    Buffer {
        /// Name of the node that wrote it.
        name: NodeName,
        /// Suffix that llama.cpp appends to the name of a view, for example ` (reshaped)`.
        suffix: &'static str,
        /// Id of the buffer.
        buffer_id: u64,
        /// Address of the first byte.
        address: u64,
        /// Bytes read.
        size_bytes: u64,
        /// Elements per row, number of rows.
        ne: [u64; 2],
        /// Element type.
        dtype: &'static str,
    },
}

impl<'a> From<&'a Matrix<'_>> for Source<'a> {
    fn from(matrix: &'a Matrix<'_>) -> Self {
        Source::Weight(&matrix.place, matrix.address(), "")
    }
}

impl<'a> From<&'a Vector> for Source<'a> {
    fn from(vector: &'a Vector) -> Self {
        Source::of_vector(vector, "")
    }
}

impl From<&Activation> for Source<'_> {
    fn from(activation: &Activation) -> Self {
        Source::view(activation, "")
    }
}

impl<'a> Source<'a> {
    /// A view of a vector; `suffix` is the suffix of its name in llama.cpp.
    pub fn of_vector(vector: &'a Vector, suffix: &'static str) -> Self {
        Source::Weight(&vector.place, vector.data.as_ptr() as u64, suffix)
    }

    /// A view of an activation; `suffix` is the suffix of its name in llama.cpp.
    pub fn view(activation: &Activation, suffix: &'static str) -> Self {
        Source::Buffer {
            name: activation.name,
            suffix,
            buffer_id: id_at_home(activation.buffer_id, &activation.values),
            address: activation.address(),
            size_bytes: activation.size_bytes(),
            ne: [activation.width as u64, activation.rows as u64],
            dtype: "f32",
        }
    }

    /// A part of an activation that is a tensor of its own in ggml: `width` elements of each row.
    pub fn part(activation: &Activation, width: usize) -> Self {
        Source::Buffer {
            name: activation.name,
            suffix: "",
            buffer_id: id_at_home(activation.buffer_id, &activation.values),
            address: activation.address(),
            size_bytes: (activation.rows * width * size_of::<f32>()) as u64,
            ne: [width as u64, activation.rows as u64],
            dtype: "f32",
        }
    }

    /// A view of one of the `n_expert_used` rows of each token. Like in ggml, its size is the number of bytes from the start
    /// of its first row to the end of its last.
    pub fn slots(experts: &Activation, n_expert_used: usize) -> Self {
        let tokens = experts.rows / n_expert_used;
        let rows = (tokens.saturating_sub(1) * n_expert_used + 1).min(experts.rows);
        Source::Buffer {
            name: experts.name,
            suffix: " (view)",
            buffer_id: id_at_home(experts.buffer_id, &experts.values),
            address: experts.address(),
            size_bytes: (rows * experts.width * size_of::<f32>()) as u64,
            ne: [experts.width as u64, tokens as u64],
            dtype: "f32",
        }
    }
}

/// The record of an operation with the fields that are constant during a run.
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
            Source::Weight(place, address, suffix) => {
                record::set_name(&mut log.name, &format!("{}{suffix}", place.name));
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
