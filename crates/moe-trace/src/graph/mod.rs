//! The computation graph of a pass: which operation reads the result of which other, and which tensors of the model.
//!
//! The JSON is the one that the tools of Keri's thesis exchange (`{token_id, metadata, nodes, edges}`), with a few keys
//! more; `schemas/graph.schema.json` describes it. A recorder writes the graph of the first whole pass of each phase into
//! the run; for every other trace [`reconstruct`] makes it from the records.

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

/// Directory of a run that holds its graphs.
pub const DIRECTORY: &str = "graph";
/// Value of `schema`.
pub const SCHEMA: &str = "moe-analyze.graph.v1";
/// `operation` of a node that no operation of the graph writes: a tensor of the model, an input, a cache.
pub const LEAF: &str = "CONST";
/// Largest file of a graph that is read, in bytes.
const MAX_BYTES: u64 = 256 << 20;
/// `dtype` of a node whose type is not known.
pub const UNKNOWN_TYPE: &str = "unknown";

/// The graph of one pass.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Graph {
    /// [`SCHEMA`]; files of other programs have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub schema: Option<String>,
    /// `PROMPT` or `GENERATE`; files of other programs do not tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
    /// Position of the pass's first token in its sequence.
    pub token_id: TokenId,
    /// Counts.
    pub metadata: Metadata,
    /// Operations in order of execution, then the tensors that none of them writes.
    pub nodes: Vec<Node>,
    /// Which node reads which.
    pub edges: Vec<Edge>,
}

/// Counts of a graph.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Metadata {
    /// Length of `nodes`.
    pub total_nodes: u64,
    /// Length of `edges`.
    pub total_edges: u64,
    /// Highest layer of a node, and one.
    pub layers: u32,
    /// When the graph was made; not told.
    pub timestamp_generated: Option<String>,
    /// Tokens of the pass; files of other programs do not tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub n_tokens: Option<u32>,
}

/// A tensor: the result of an operation, or a leaf.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    /// `node_N`, `N` the place in `nodes`.
    pub id: String,
    /// Address of the data in hexadecimal, `0x0` where it is not known.
    pub address: String,
    /// Name of the tensor; of results, several nodes may have one name.
    pub label: String,
    /// Name of the ggml operation, [`LEAF`] for a leaf.
    pub operation: String,
    /// Elements in each dimension, fastest first; empty where it is not known.
    pub shape: Vec<u64>,
    /// Type of the elements in small letters (`f32`, `q4_k`), [`UNKNOWN_TYPE`] where it is not known.
    pub dtype: String,
    /// Layer.
    pub layer_id: Option<LayerId>,
    /// What it is for.
    pub category: Category,
    /// Bytes, where they are known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<u64>,
}

/// `target` reads `source`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Edge {
    /// `id` of the node that is read.
    pub source: String,
    /// `id` of the node that reads.
    pub target: String,
    /// `src N`, `N` the place among the reader's sources; then what ggml appends for a view, as ` (view) (permuted)`.
    pub label: String,
}

/// Where a run keeps the graph of a phase.
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

    /// Writes `path`, complete or not at all; a graph that is there is replaced.
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

/// Dimensions without those of one element at their end; one is left.
pub fn trimmed(ne: &[u64]) -> Vec<u64> {
    let n = ne.iter().rposition(|&n| n != 1).map_or(1, |last| last + 1);
    ne.iter().copied().take(n).collect()
}
