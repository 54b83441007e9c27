//! `manifest.json`: model, command, machine and settings of a run, and the layout of its trace.

mod gpu;

use std::io::Write;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use moe_files::AtomicFile;
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use xxhash_rust::xxh3::xxh3_64;

use crate::bounded;
use crate::dynamic_cache::DynamicCache;
use crate::error::Error;
use crate::fault::ManifestFault;
use crate::hot_cache::HotCache;
use crate::ops::OpTable;
use crate::rest::Expansion;

pub use gpu::{Fallbacks, Gpu, PostFetch};

/// Name of the file in a run directory.
pub const FILE_NAME: &str = "manifest.json";
/// Value of `schema`.
pub const SCHEMA: &str = "moe-analyze.run.v1";
/// Value of `record_format` for traces of this crate.
pub const RECORD_FORMAT: &str = "TensorAccessLog-1024-v4-ext1";

/// Required keys of the schema, as JSON pointers.
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

/// The manifest of a run directory. Its JSON Schema is `schemas/run.schema.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Manifest {
    /// [`SCHEMA`].
    pub schema: String,
    /// Id of the run, for example in datasets: `<compact start time>-<8 hexadecimal digits>`; see [`Manifest::new_run_id`].
    pub run_id: String,
    /// The recording program.
    pub engine: Engine,
    /// The command line, program first.
    pub command: Vec<String>,
    /// The model that ran.
    pub model: Model,
    /// LoRA adapters of the model, in the order in which they are added. Empty if there are none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub adapters: Vec<Adapter>,
    /// Layout of `trace.bin`, [`RECORD_FORMAT`].
    pub record_format: String,
    /// Number of records in `trace.bin`; missing while recording and if the recorder was killed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub records: Option<u64>,
    /// Records that were compressed while recording, because the disk could not keep up; missing if there were none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expansion: Option<Expansion>,
    /// Why the recording ended early (interrupted, trace limit, full disk); missing if it ended normally.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stopped: Option<String>,
    /// Set while this run replaces an earlier one: `trace.bin` is that of the earlier run, or empty. Otherwise missing.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub replacing: bool,
    /// Names of the trace's operation numbers.
    pub ops: OpTable,
    /// Token counts.
    pub tokens: Tokens,
    /// The sequences in order, each with the reason for its end. Empty while recording, or if unknown.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub sequences: Vec<Sequence>,
    /// How tokens were sampled.
    pub sampling: Sampling,
    /// The chat template of the sequences that are conversations; missing if there are none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chat_template: Option<ChatTemplate>,
    /// Placement policy of the experts: `cpu`, `gpu`, `post-fetch`, `hot-cache`, `dynamic`, ...
    pub policy: String,
    /// The hot expert cache of policy `hot-cache`; missing for other policies.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hot_cache: Option<HotCache>,
    /// The dynamic expert cache of policy `dynamic`; missing for other policies.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dynamic_cache: Option<DynamicCache>,
    /// Number of compute threads.
    pub n_threads: u32,
    /// The KV cache; missing if the run has none, or if unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_cache: Option<KvCache>,
    /// The machine.
    pub host: Host,
    /// The first GPU that the run used, if any.
    pub gpu: Option<Gpu>,
    /// All GPUs that the run used, in the order of the device list. Empty in runs of versions that supported one GPU only.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<Gpu>,
    /// Flags of the model's memory mapping (`MAP_SHARED`, `MAP_POPULATE`, ...); empty if the model was not mapped.
    pub mmap: Vec<String>,
    /// Start of the run, RFC 3339 in UTC.
    pub started: String,
    /// Clock of `timestamp_ns`.
    pub clock: String,
    /// Text of the prompts, if the user requested that it is stored. Conversations are rendered with the chat template.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompts: Option<Vec<String>>,
    /// Vocabulary ids of the tokens of each sequence by position, if the user requested that the prompts are stored. The generated
    /// tokens follow those of the prompt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<Vec<u32>>>,
    /// Unknown keys, unchanged.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

/// A program and its version.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Engine {
    /// Name of the program.
    pub name: String,
    /// Version of the program.
    pub version: String,
}

fn is_zero(n: &u32) -> bool {
    *n == 0
}

/// The model of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Model {
    /// Path on the command line, or the name of an embedded model.
    pub path: String,
    /// Files of the model, first shard first, and then those of its adapters. `source_file` of records and `file` of tables are indices
    /// into this list.
    pub files: Vec<ModelFile>,
    /// XXH3-64 hash of the GGUF header, 16 hexadecimal digits.
    pub header_xxh3: String,
    /// XXH3-64 hash of the complete model, if the user requested it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub xxh3: Option<String>,
    /// `general.architecture`.
    pub arch: String,
    /// Number of layers (`block_count`), including the blocks of the multi-token prediction (MTP) head.
    pub n_layer: u32,
    /// Number of blocks of the MTP head (`nextn_predict_layers`); they are the last layers.
    #[serde(skip_serializing_if = "is_zero")]
    pub n_nextn_layer: u32,
    /// Experts in a layer (`expert_count`).
    pub n_expert: u32,
    /// Selected experts for a token (`expert_used_count`).
    pub n_expert_used: u32,
    /// Distinct types of the expert weights (`Q4_K`, ...).
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

/// A LoRA adapter of a model.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Adapter {
    /// Path on the command line.
    pub path: String,
    /// Factor of its products.
    pub scale: f32,
    /// XXH3-64 hash of its GGUF header, 16 hexadecimal digits.
    pub header_xxh3: String,
}

/// Token counts of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Tokens {
    /// Prompt tokens of all sequences.
    pub prompt: u64,
    /// Generated tokens of all sequences.
    pub generated: u64,
    /// Number of sequences (requests).
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
    /// Why it ended: `eos` (end-of-generation token), `limit` (all requested tokens were generated), `context` (context full),
    /// `trace` (trace limit reached) or `interrupted`.
    pub stopped: String,
}

/// How tokens were sampled.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sampling {
    /// `greedy` or `random`; `none` for a replay, which samples no tokens.
    pub method: String,
    /// Random seed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
    /// Further parameters (`temperature`, `top_k`, `top_p`, ...).
    #[serde(flatten)]
    pub parameters: Map<String, Value>,
}

/// The chat template of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ChatTemplate {
    /// `model` for the template of the model file, `file` for another one.
    pub origin: String,
    /// XXH3-64 hash of its text, 16 hexadecimal digits.
    pub xxh3: String,
}

/// The KV cache of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct KvCache {
    /// Type of the keys (`f32`, `f16`, `q8_0`).
    pub type_k: String,
    /// Type of the values.
    pub type_v: String,
    /// Number of sequences with positions of their own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub n_seq: Option<u64>,
    /// Maximum number of positions of a sequence in this run; missing if unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub n_positions: Option<u64>,
    /// Bytes of the keys and values of these positions in all layers; missing if unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<u64>,
    /// Bytes of the recurrent states of these sequences in all layers; missing for a model without them, and if unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state_bytes: Option<u64>,
}

/// The machine of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Host {
    /// Model name of the CPU.
    pub cpu: String,
    /// Size of the main memory in bytes.
    pub ram_bytes: u64,
    /// Operating system.
    pub os: String,
}

impl Default for Manifest {
    fn default() -> Self {
        Self {
            schema: SCHEMA.to_owned(),
            run_id: String::new(),
            engine: Engine::default(),
            command: Vec::new(),
            model: Model::default(),
            adapters: Vec::new(),
            record_format: RECORD_FORMAT.to_owned(),
            records: None,
            expansion: None,
            stopped: None,
            replacing: false,
            ops: OpTable::default(),
            tokens: Tokens::default(),
            sequences: Vec::new(),
            sampling: Sampling::default(),
            chat_template: None,
            policy: String::new(),
            hot_cache: None,
            dynamic_cache: None,
            n_threads: 0,
            kv_cache: None,
            host: Host::default(),
            gpu: None,
            gpus: Vec::new(),
            mmap: Vec::new(),
            started: String::new(),
            clock: "monotonic".to_owned(),
            prompts: None,
            token_ids: None,
            extra: Map::new(),
        }
    }
}

impl Manifest {
    /// Stores the GPUs that the run used.
    pub fn set_gpus(&mut self, gpus: Vec<Gpu>) {
        self.gpu = gpus.first().cloned();
        self.gpus = gpus;
    }

    /// The GPUs that the run used.
    pub fn gpus(&self) -> &[Gpu] {
        match self.gpus.as_slice() {
            [] => self.gpu.as_slice(),
            gpus => gpus,
        }
    }

    /// Reads `path`. Only the key `schema` is required; [`Manifest::missing_keys`] lists the other missing keys.
    ///
    /// # Errors
    /// [`Error::Manifest`] for a file that is not a manifest, or whose schema is unknown.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let text = bounded::read_json(path)?;
        Self::parse(&text).map_err(Error::manifest(path))
    }

    fn parse(text: &str) -> Result<Self, ManifestFault> {
        /// The key that distinguishes a manifest from other JSON.
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

    /// The manifest of a run directory; `None` if it has none.
    ///
    /// # Errors
    /// Those of [`Manifest::read`]; [`Error::Replacing`] if the recorder was killed while it replaced the run.
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

    /// Required keys of the schema that are missing in `path`, as JSON pointers. [`Manifest::read`] does not need them.
    ///
    /// # Errors
    /// [`Error::Manifest`] for a file that is not JSON; [`Error::TooLarge`], [`Error::Io`].
    pub fn missing_keys(path: &Path) -> Result<Vec<&'static str>, Error> {
        let text = bounded::read_json(path)?;
        let json: Value =
            serde_json::from_str(&text).map_err(|error| Error::manifest(path)(error.into()))?;
        let missing = REQUIRED
            .into_iter()
            .filter(|key| json.pointer(key).is_none());
        Ok(missing.collect())
    }

    /// Writes `path` completely or not at all. An existing manifest is replaced.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Write`] or [`Error::Output`] if the file cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), Error> {
        Ok(self.write_pending(path)?.commit_unchecked()?)
    }

    /// Writes the manifest to a temporary file. `path` does not change until the file is committed.
    pub(crate) fn write_pending(&self, path: &Path) -> Result<AtomicFile, Error> {
        let mut json =
            serde_json::to_vec_pretty(self).map_err(|error| Error::manifest(path)(error.into()))?;
        json.push(b'\n');
        let mut file = AtomicFile::create(path, true)?;
        file.write_all(&json).map_err(Error::writing(path))?;
        Ok(file)
    }

    /// The run id as a file name: other characters than ASCII letters, digits, `.`, `_` and `-` become `_`.
    pub(crate) fn safe_run_id(&self) -> String {
        let safe = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        let chars = self.run_id.chars();
        chars.map(|c| if safe(c) { c } else { '_' }).collect()
    }

    /// A run id that is unique in practice and a valid file name: `started` without punctuation, then eight hexadecimal digits
    /// of a hash over the manifest, the process id and the time.
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
