//! `manifest.json`: what was run, on what, and how to read the trace next to it.

use std::io::Write;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use moe_files::AtomicFile;
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use xxhash_rust::xxh3::xxh3_64;

use crate::bounded;
use crate::error::Error;
use crate::fault::ManifestFault;
use crate::ops::OpTable;

/// Name of the file in a run directory.
pub const FILE_NAME: &str = "manifest.json";
/// Value of `schema`.
pub const SCHEMA: &str = "moe-analyze.run.v1";
/// Value of `record_format` for traces of this crate.
pub const RECORD_FORMAT: &str = "TensorAccessLog-1024-v4-ext1";

/// Keys that the schema requires, as JSON pointers.
const REQUIRED: [&str; 28] = [
    "/schema",
    "/run_id",
    "/engine/name",
    "/engine/version",
    "/command",
    "/model/path",
    "/model/files",
    "/model/header_xxh3",
    "/model/arch",
    "/model/n_layer",
    "/model/n_expert",
    "/model/n_expert_used",
    "/model/expert_types",
    "/record_format",
    "/ops",
    "/tokens/prompt",
    "/tokens/generated",
    "/tokens/sequences",
    "/sampling/method",
    "/policy",
    "/n_threads",
    "/host/cpu",
    "/host/ram_bytes",
    "/host/os",
    "/gpu",
    "/mmap",
    "/started",
    "/clock",
];

/// What a run directory says about itself; `schemas/run.schema.json` is its JSON Schema.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Manifest {
    /// [`SCHEMA`].
    pub schema: String,
    /// Names the run in datasets: `<started, compact>-<8 hexadecimal digits>`; see [`Manifest::new_run_id`].
    pub run_id: String,
    /// Program that recorded.
    pub engine: Engine,
    /// The command line, program first.
    pub command: Vec<String>,
    /// The model that ran.
    pub model: Model,
    /// Layout of `trace.bin`, [`RECORD_FORMAT`].
    pub record_format: String,
    /// Records in `trace.bin`; absent while recording and after a recorder that was killed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub records: Option<u64>,
    /// Why the recording ended before its time (interrupted, trace limit, full disk); absent if it did not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stopped: Option<String>,
    /// Whether this run was about to replace an earlier run, whose trace is still there or was replaced by an empty one;
    /// absent if not.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub replacing: bool,
    /// Operation numbers of the trace.
    pub ops: OpTable,
    /// How many tokens ran.
    pub tokens: Tokens,
    /// The sequences in order, each with why it ended; empty while recording, and where it is unknown.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub sequences: Vec<Sequence>,
    /// How tokens were chosen.
    pub sampling: Sampling,
    /// Placement policy: `cpu`, `gpu`, `post-fetch`, ...
    pub policy: String,
    /// Threads that computed.
    pub n_threads: u32,
    /// The machine.
    pub host: Host,
    /// The first GPU that took part, if one did.
    pub gpu: Option<Gpu>,
    /// All GPUs that took part, in the order of the list of devices; empty in runs of versions that knew one GPU only.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<Gpu>,
    /// Flags of the model's memory map (`MAP_SHARED`, `MAP_POPULATE`, ...); empty if the model was not mapped.
    pub mmap: Vec<String>,
    /// Start of the run, RFC 3339, UTC.
    pub started: String,
    /// Clock of `timestamp_ns`.
    pub clock: String,
    /// Text of the prompts, only if the user asked to keep it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompts: Option<Vec<String>>,
    /// Keys that this version does not know, kept as they are.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

/// A program and its version.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Engine {
    /// Name of the program.
    pub name: String,
    /// Its version.
    pub version: String,
}

fn is_zero(n: &u32) -> bool {
    *n == 0
}

/// The model of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Model {
    /// Path as given, or the name of an embedded model.
    pub path: String,
    /// Its files, first shard first; `source_file` and the tables' `file` count in this list.
    pub files: Vec<ModelFile>,
    /// XXH3-64 of the header's bytes, 16 hexadecimal digits.
    pub header_xxh3: String,
    /// XXH3-64 of the whole model, only if the user asked for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub xxh3: Option<String>,
    /// `general.architecture`.
    pub arch: String,
    /// Number of layers: `block_count`, the blocks of the multi-token prediction (MTP) head included.
    pub n_layer: u32,
    /// Blocks of the MTP head among them (`nextn_predict_layers`), the last ones.
    #[serde(skip_serializing_if = "is_zero")]
    pub n_nextn_layer: u32,
    /// Experts in a layer.
    pub n_expert: u32,
    /// Experts that a token is routed to.
    pub n_expert_used: u32,
    /// Types of the expert weights (`Q4_K`, ...), each once.
    pub expert_types: Vec<String>,
}

/// A file of a model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ModelFile {
    /// File name without directories.
    pub name: String,
    /// Size in bytes.
    pub size_bytes: u64,
}

/// Token counts of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Tokens {
    /// Prompt tokens, all sequences together.
    pub prompt: u64,
    /// Generated tokens, all sequences together.
    pub generated: u64,
    /// Sequences (requests).
    pub sequences: u64,
}

/// One sequence (request) of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sequence {
    /// Prompt tokens.
    pub prompt: u64,
    /// Generated tokens.
    pub generated: u64,
    /// Why it ended: `eos` (the model ended the text), `limit` (all tokens were generated), `context` (it was full),
    /// `trace` (it was full) or `interrupted`.
    pub stopped: String,
}

/// How tokens were chosen.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sampling {
    /// `greedy` or `random`; `none` where routing was replayed.
    pub method: String,
    /// Seed of the random choice.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
    /// Further parameters (`temperature`, `top_k`, `top_p`, ...).
    #[serde(flatten)]
    pub parameters: Map<String, Value>,
}

/// The machine of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Host {
    /// Model name of the processor.
    pub cpu: String,
    /// Memory in bytes.
    pub ram_bytes: u64,
    /// Operating system.
    pub os: String,
}

/// A GPU of a run: an entry in its list of devices. A physical GPU that is listed twice has two entries.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Gpu {
    /// Name in the list of devices, as in `buffers.jsonl`: `CUDA0`; absent where it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Number of the physical GPU, by the driver's count from 0; absent where it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ordinal: Option<u64>,
    /// Name of the product.
    pub name: String,
    /// Its memory in bytes.
    pub memory_bytes: u64,
    /// Version of its driver.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
    /// Bytes of its memory that the run was allowed; absent if all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit_bytes: Option<u64>,
    /// The most bytes that the run had in use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak_bytes: Option<u64>,
    /// Bytes of Post-Fetch's scratchpad; absent under other policies.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scratchpad_bytes: Option<u64>,
    /// What the processor did in its place; absent where nobody counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fallbacks: Option<Fallbacks>,
    /// Rows of a batch from which weights of the processor were copied to it for a product, 0 = never; absent where it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub offload_min_batch: Option<u64>,
    /// How Post-Fetch worked; absent under other policies.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub post_fetch: Option<PostFetch>,
}

/// What a GPU could not do, so that the processor did it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Fallbacks {
    /// Operations that failed, and layers whose transfers did not all begin.
    pub operations: u64,
    /// Tensors that found no room in its memory.
    pub tensors: u64,
    /// The first error; absent if there was none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_error: Option<String>,
}

/// The settings of Post-Fetch as they were in force, by the names of its variables (`LLAMA_POSTFETCH_…`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PostFetch {
    /// Whether anything was to travel.
    pub enable: bool,
    /// Whether the processor computed all the same.
    pub force_cpu: bool,
    /// Whether late transfers were waited for.
    pub block_on_miss: bool,
    /// Transfers of a layer at most.
    pub max_transfers: u64,
    /// Room for the transfers of a layer, MiB; 0 = what they need.
    pub scratchpad_mb: u64,
    /// Whether transfers had a stream of their own.
    pub use_dedicated_streams: bool,
    /// Experts of a token whose gate and up the processor computed; 0 = all.
    pub cpu_limit: u64,
}

impl Default for Manifest {
    fn default() -> Self {
        Self {
            schema: SCHEMA.to_owned(),
            run_id: String::new(),
            engine: Engine::default(),
            command: Vec::new(),
            model: Model::default(),
            record_format: RECORD_FORMAT.to_owned(),
            records: None,
            stopped: None,
            replacing: false,
            ops: OpTable::default(),
            tokens: Tokens::default(),
            sequences: Vec::new(),
            sampling: Sampling::default(),
            policy: String::new(),
            n_threads: 0,
            host: Host::default(),
            gpu: None,
            gpus: Vec::new(),
            mmap: Vec::new(),
            started: String::new(),
            clock: "monotonic".to_owned(),
            prompts: None,
            extra: Map::new(),
        }
    }
}

impl Manifest {
    /// Stores the GPUs that took part.
    pub fn set_gpus(&mut self, gpus: Vec<Gpu>) {
        self.gpu = gpus.first().cloned();
        self.gpus = gpus;
    }

    /// The GPUs that took part.
    pub fn gpus(&self) -> &[Gpu] {
        match self.gpus.as_slice() {
            [] => self.gpu.as_slice(),
            gpus => gpus,
        }
    }

    /// Reads `path`. Of the keys that the schema requires only `schema` itself must be there; see
    /// [`Manifest::missing_keys`].
    ///
    /// # Errors
    /// [`Error::Manifest`] for another file than a manifest, and for a schema that this version does not know.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let text = bounded::read_json(path)?;
        Self::parse(&text).map_err(Error::manifest(path))
    }

    fn parse(text: &str) -> Result<Self, ManifestFault> {
        /// What tells a manifest from other JSON.
        #[derive(Deserialize)]
        #[serde(expecting = "a JSON object")]
        struct Head {
            schema: Option<IgnoredAny>,
        }
        let head: Head = serde_json::from_str(text)?;
        if head.schema.is_none() {
            return Err(ManifestFault::NoSchema);
        }
        let manifest: Self = serde_json::from_str(text)?;
        if manifest.schema != SCHEMA {
            return Err(ManifestFault::Schema {
                found: manifest.schema,
            });
        }
        Ok(manifest)
    }

    /// The manifest of a run directory; `None` where it has none.
    ///
    /// # Errors
    /// As [`Manifest::read`]; [`Error::Replacing`] for a run that was being replaced when its recorder was killed.
    pub fn of_run(dir: &Path) -> Result<Option<Self>, Error> {
        let path = dir.join(FILE_NAME);
        if !path.exists() {
            return Ok(None);
        }
        let manifest = Self::read(&path)?;
        if manifest.replacing {
            return Err(Error::Replacing {
                path: dir.to_owned(),
            });
        }
        Ok(Some(manifest))
    }

    /// Keys that the schema requires and `path` lacks, as JSON pointers; [`Manifest::read`] does without them.
    pub fn missing_keys(path: &Path) -> Result<Vec<&'static str>, Error> {
        let text = bounded::read_json(path)?;
        let json: Value =
            serde_json::from_str(&text).map_err(|error| Error::manifest(path)(error.into()))?;
        let missing = REQUIRED
            .into_iter()
            .filter(|key| json.pointer(key).is_none());
        Ok(missing.collect())
    }

    /// Writes `path`, complete or not at all; a manifest that is there is replaced.
    pub fn write(&self, path: &Path) -> Result<(), Error> {
        Ok(self.write_pending(path)?.commit_unchecked()?)
    }

    /// Writes the manifest for `path`, which is as before until the file is committed.
    pub(crate) fn write_pending(&self, path: &Path) -> Result<AtomicFile, Error> {
        let mut json =
            serde_json::to_vec_pretty(self).map_err(|error| Error::manifest(path)(error.into()))?;
        json.push(b'\n');
        let mut file = AtomicFile::create(path, true)?;
        file.write_all(&json).map_err(Error::writing(path))?;
        Ok(file)
    }

    /// The run id as part of a path: what is no letter, digit, `.`, `_` or `-` becomes `_`.
    pub(crate) fn safe_run_id(&self) -> String {
        let safe = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        let chars = self.run_id.chars();
        chars.map(|c| if safe(c) { c } else { '_' }).collect()
    }

    /// A run id that is unique in practice and safe as a file name: `started` without punctuation, then eight
    /// hexadecimal digits of a hash of the manifest, the process and the time.
    pub fn new_run_id(&self) -> String {
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        let mut seed = format!("{self:?}").into_bytes();
        seed.extend_from_slice(&std::process::id().to_le_bytes());
        seed.extend_from_slice(&now.as_nanos().to_le_bytes());
        let started: String = self
            .started
            .chars()
            .filter(char::is_ascii_alphanumeric)
            .collect();
        let started = if started.is_empty() {
            now.as_secs().to_string()
        } else {
            started
        };
        format!("{started}-{:08x}", xxh3_64(&seed) & 0xFFFF_FFFF)
    }
}
