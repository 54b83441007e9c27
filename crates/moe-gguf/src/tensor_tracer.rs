//! The offset map in the formats of the tensor tracer of E. Keri's BSc thesis: the CSV of `gguf-dump`, and `memory-map.json`.
//!
//! The tracer is at <https://github.com/ErsjanKeri/BSC>. Its `gguf-dump` computes wrong sizes for several types and ignores
//! `general.alignment`; here the format is the same and the values are correct. Both formats have no column for the file, so
//! offsets of a model in several files are ambiguous.

use std::io::{self, Write};

use moe_files::csv::RecordWriter;
use moe_ids::{ExpertId, LayerId};
use serde::{Serialize, Serializer};

use crate::gguf::Gguf;
use crate::map::{Category, MapRow, OffsetMap, Projection};

/// Columns of the CSV.
const CSV_COLUMNS: [&str; 10] = [
    "tensor_name",
    "file_offset",
    "size_bytes",
    "layer_id",
    "component_type",
    "n_dims",
    "dim0",
    "dim1",
    "dim2",
    "dim3",
];

/// The contents of `memory-map.json`.
#[derive(Clone, Debug, Serialize)]
pub struct MemoryMap<'a> {
    /// Name of the first file, without its extension.
    pub model_name: String,
    /// Offset of the byte after the last tensor.
    pub total_size_bytes: u64,
    /// Dimensions of the model.
    pub metadata: MemoryMapMetadata,
    /// The entries, ordered by offset.
    pub tensors: MemoryMapTensors<'a>,
}

/// The list of tensors in `memory-map.json`.
///
/// Entries are created one at a time, because a header of a few bytes can declare many experts.
#[derive(Clone, Debug)]
pub struct MemoryMapTensors<'a> {
    gguf: &'a Gguf,
    map: &'a OffsetMap,
    /// Indices of the rows of the map, ordered by offset.
    order: Vec<u32>,
}

impl MemoryMapTensors<'_> {
    /// Iterates over the entries, ordered by offset.
    pub fn iter(&self) -> impl Iterator<Item = MemoryMapTensor> {
        let rows = self.order.iter().map(|&i| &self.map.rows[i as usize]);
        rows.map(|row| entry(self.gguf, row))
    }
}

impl Serialize for MemoryMapTensors<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.iter())
    }
}

/// The key `metadata` of `memory-map.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryMapMetadata {
    /// Number of layers.
    pub n_layers: u32,
    /// Number of tokens in the vocabulary.
    pub n_vocab: u64,
    /// Width of the residual stream.
    pub n_embd: u64,
    /// Number of entries of the list. Each expert of a stacked tensor is an entry.
    pub n_tensors: usize,
}

/// A tensor, or one expert of a stacked tensor, in `memory-map.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryMapTensor {
    /// Name of the tensor; `NAME[3]` for expert 3 of a stacked tensor.
    pub name: String,
    /// Offset of the first byte from the start of the file.
    pub offset_start: u64,
    /// Offset of the byte after the last byte.
    pub offset_end: u64,
    /// Size in bytes.
    pub size_bytes: u64,
    /// Number of elements in each dimension, innermost first.
    pub shape: Vec<u64>,
    /// `embedding`, `attention`, `ffn`, `norm`, `output` or `other`.
    pub category: &'static str,
    /// The layer, for tensors named `blk.N.…`.
    pub layer_id: Option<LayerId>,
    /// `query`, `key`, `value`, `output`, `gate`, `up`, `down`, `norm` or `other`.
    pub component: &'static str,
    /// Description of `component` and expert: `FFN Up Expert 3`.
    pub component_type: String,
    /// The expert, for expert weights.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expert_id: Option<ExpertId>,
}

/// Returns the `memory-map.json` of a model.
pub fn memory_map<'a>(gguf: &'a Gguf, map: &'a OffsetMap) -> MemoryMap<'a> {
    let rows = &map.rows;
    let mut order: Vec<u32> = (0..).take(rows.len()).collect();
    order.sort_unstable_by_key(|&i| (rows[i as usize].file_offset, i));

    let model_name = gguf.files().first().map_or("", |file| &file.name);
    let n_layers = rows.iter().filter_map(|row| row.layer_id).max();
    let end = rows
        .iter()
        .map(|row| row.file_offset + row.size_bytes)
        .max();
    let [n_embd, n_vocab, ..] = gguf.tensor("token_embd.weight").map_or([0; 4], |t| t.ne);
    MemoryMap {
        model_name: model_name
            .strip_suffix(".gguf")
            .unwrap_or(model_name)
            .to_owned(),
        total_size_bytes: end.unwrap_or(0),
        metadata: MemoryMapMetadata {
            n_layers: n_layers.map_or(0, |layer| u32::from(layer.0) + 1),
            n_vocab,
            n_embd,
            n_tensors: order.len(),
        },
        tensors: MemoryMapTensors { gguf, map, order },
    }
}

/// Writes the CSV of `gguf-dump` for a model, in the order of its tensor table.
///
/// # Errors
/// `out` cannot be written.
pub fn write_gguf_dump_csv(out: &mut dyn Write, gguf: &Gguf, map: &OffsetMap) -> io::Result<()> {
    let mut csv = RecordWriter::new(out);
    csv.record(CSV_COLUMNS)?;
    for row in &map.rows {
        let shape = shape(gguf, row);
        let dim = |i: usize| shape.get(i).copied().unwrap_or(0).to_string();
        csv.record([
            name(gguf, row),
            row.file_offset.to_string(),
            row.size_bytes.to_string(),
            row.layer_id
                .map_or(-1, |layer| i32::from(layer.0))
                .to_string(),
            component_type(row),
            shape.len().to_string(),
            dim(0),
            dim(1),
            dim(2),
            dim(3),
        ])?;
    }
    csv.flush()
}

fn entry(gguf: &Gguf, row: &MapRow) -> MemoryMapTensor {
    MemoryMapTensor {
        name: name(gguf, row),
        offset_start: row.file_offset,
        offset_end: row.file_offset + row.size_bytes,
        size_bytes: row.size_bytes,
        shape: shape(gguf, row),
        category: category(row),
        layer_id: row.layer_id,
        component: component(row),
        component_type: component_type(row),
        expert_id: row.expert_id,
    }
}

/// Whether a row is one expert of a stacked tensor.
fn is_slice(gguf: &Gguf, row: &MapRow) -> bool {
    let tensor = gguf.tensors().get(row.tensor_idx as usize);
    row.expert_id.is_some() && tensor.is_some_and(|tensor| tensor.n_dims >= 3)
}

fn name(gguf: &Gguf, row: &MapRow) -> String {
    match row.expert_id.filter(|_| is_slice(gguf, row)) {
        Some(expert) => format!("{}[{expert}]", row.tensor),
        None => row.tensor.to_string(),
    }
}

/// Returns the dimensions listed in the file; two for an expert of a stacked tensor.
fn shape(gguf: &Gguf, row: &MapRow) -> Vec<u64> {
    let tensor = gguf.tensors().get(row.tensor_idx as usize);
    let n_dims = if is_slice(gguf, row) {
        2
    } else {
        tensor.map_or(4, |tensor| tensor.n_dims)
    };
    row.ne.iter().copied().take(n_dims as usize).collect()
}

/// Whether the tensor is an attention tensor `attn_{part}`, except norms.
fn is_attention(row: &MapRow, part: &str) -> bool {
    row.category == Category::Attention && row.tensor.contains(&format!(".attn_{part}."))
}

fn component_type(row: &MapRow) -> String {
    let name = match (row.category, row.projection) {
        (Category::Embedding, _) => "Token Embeddings",
        (Category::Output, _) => "Output Projection",
        (Category::Norm, _) if row.tensor.contains("attn") => "Attention Norm",
        (Category::Norm, _) if row.tensor.contains("ffn") => "FFN Norm",
        (Category::Norm, _) => "Norm",
        (_, Some(Projection::Gate)) => "FFN Gate",
        (_, Some(Projection::Up)) => "FFN Up",
        (_, Some(Projection::Down)) => "FFN Down",
        (_, Some(Projection::GateUp)) => "FFN Gate Up",
        (Category::Router, _) => "FFN Router",
        _ if is_attention(row, "q") => "Attention Q",
        _ if is_attention(row, "k") => "Attention K",
        _ if is_attention(row, "v") => "Attention V",
        _ if is_attention(row, "output") => "Attention Output",
        _ => "Other",
    };
    match row.expert_id {
        Some(expert) => format!("{name} Expert {expert}"),
        None => name.to_owned(),
    }
}

fn category(row: &MapRow) -> &'static str {
    match row.category {
        Category::Embedding => "embedding",
        Category::Attention | Category::Recurrent => "attention",
        Category::Norm => "norm",
        Category::Output => "output",
        Category::Expert
        | Category::ExpertBias
        | Category::SharedExpert
        | Category::Router
        | Category::DenseFfn => "ffn",
        Category::Indexer | Category::RopeFactors | Category::Other => "other",
    }
}

fn component(row: &MapRow) -> &'static str {
    match (row.category, row.projection) {
        (Category::Norm, _) => "norm",
        (Category::Output, _) => "output",
        (_, Some(Projection::Gate)) => "gate",
        (_, Some(Projection::Up)) => "up",
        (_, Some(Projection::Down)) => "down",
        _ if is_attention(row, "q") => "query",
        _ if is_attention(row, "k") => "key",
        _ if is_attention(row, "v") => "value",
        _ if is_attention(row, "output") => "output",
        _ => "other",
    }
}
