//! The computation graph of a forward pass: operations, and the results and model tensors that each of them reads.
//!
//! The JSON format is that of the tools of [E. Keri's BSc thesis](https://github.com/ErsjanKeri/BSC)
//! (`{token_id, metadata, nodes, edges}`) with additional keys; `schemas/graph.schema.json` describes it. A recorder writes
//! the graph of the first complete pass of each phase. For other traces, [`reconstruct`] builds a graph from the records.

mod build;
mod category;
mod dot;
mod reconstruct;

use std::io::Write;
use std::path::{Path, PathBuf};

use moe_files::AtomicFile;
use moe_ids::{LayerId, TokenId};
use serde::{Deserialize, Serialize};

use crate::bounded;
use crate::error::Error;
use crate::phase::Phase;

pub use build::{GraphBuilder, GraphSource};
pub use category::Category;
pub use reconstruct::reconstruct;

/// Directory of the graphs in a run directory.
pub const DIRECTORY: &str = "graph";
/// Value of `schema`.
pub const SCHEMA: &str = "moe-analyze.graph.v1";
/// `operation` of a node that no operation of the graph writes: a tensor of the model, an input, the KV cache.
pub const LEAF: &str = "CONST";
/// Maximum size of a graph file that is read, in bytes.
const MAX_BYTES: u64 = 256 << 20;
/// `dtype` of a node of unknown type.
pub const UNKNOWN_TYPE: &str = "unknown";

/// The graph of one pass.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Graph {
    /// [`SCHEMA`]; missing in files of other programs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub schema: Option<String>,
    /// `PROMPT` or `GENERATE`; missing in files of other programs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
    /// Position of the pass's first token in its sequence.
    pub token_id: TokenId,
    /// Counts.
    pub metadata: Metadata,
    /// Operations in order of execution, then leaves (tensors that no operation writes).
    pub nodes: Vec<Node>,
    /// The edges, from the node that is read to the node that reads it.
    pub edges: Vec<Edge>,
}

/// Counts of a graph.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Metadata {
    /// Length of `nodes`.
    pub total_nodes: u64,
    /// Length of `edges`.
    pub total_edges: u64,
    /// Highest layer of a node, plus 1.
    pub layers: u32,
    /// Always null. The key exists for compatibility with the thesis's tools.
    pub timestamp_generated: Option<String>,
    /// Number of tokens of the pass; missing in files of other programs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub n_tokens: Option<u32>,
}

/// A tensor: the result of an operation, or a leaf.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    /// `node_N`, where `N` is the index in `nodes`.
    pub id: String,
    /// Address of the data in hexadecimal; `0x0` if unknown.
    pub address: String,
    /// Name of the tensor. Several results may have the same name.
    pub label: String,
    /// Name of the ggml operation, [`LEAF`] for a leaf.
    pub operation: String,
    /// Elements in each dimension (`ne`), fastest first; empty if unknown.
    pub shape: Vec<u64>,
    /// Type of the elements in lower case (`f32`, `q4_k`); [`UNKNOWN_TYPE`] if unknown.
    pub dtype: String,
    /// Layer.
    pub layer_id: Option<LayerId>,
    /// Category.
    pub category: Category,
    /// Size in bytes, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<u64>,
}

/// An edge: the node `target` reads the node `source`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Edge {
    /// `id` of the node that is read.
    pub source: String,
    /// `id` of the node that reads.
    pub target: String,
    /// `src N`, where `N` is the index among the reader's sources, and the suffix that ggml appends for a view: ` (view)`.
    pub label: String,
}

/// Path of the graph of a phase in a run directory.
pub fn path(run: &Path, phase: Phase) -> PathBuf {
    run.join(DIRECTORY)
        .join(format!("{}.json", phase.name().to_lowercase()))
}

impl Graph {
    /// Reads a graph.
    ///
    /// # Errors
    /// [`Error::Json`] for a file that is not a graph, [`Error::TooLarge`] for one of more than 256 MiB, [`Error::Io`].
    pub fn read(path: &Path) -> Result<Graph, Error> {
        let bytes = bounded::read(path, MAX_BYTES)?;
        serde_json::from_slice(&bytes).map_err(Error::json("graph", path))
    }

    /// Writes `path` completely or not at all. An existing file is replaced.
    ///
    /// # Errors
    /// [`Error::Json`], [`Error::Write`].
    pub fn write(&self, path: &Path) -> Result<(), Error> {
        let mut json = serde_json::to_vec(self).map_err(Error::json("graph", path))?;
        json.push(b'\n');
        let mut file = AtomicFile::create(path, true)?;
        file.write_all(&json).map_err(Error::writing(path))?;
        Ok(file.commit()?)
    }
}

/// `ne` without its trailing dimensions of size 1. The first dimension is always kept.
pub fn trimmed(ne: &[u64]) -> Vec<u64> {
    let n = ne.iter().rposition(|&n| n != 1).map_or(1, |last| last + 1);
    ne.iter().copied().take(n).collect()
}
