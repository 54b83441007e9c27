//! Memory of a model and its context, in addition to the cache: on each GPU, computed from the header.

use std::path::Path;

use moe_executor::Model;
use moe_executor::placement::{DeviceId, Placement, Rules};
use moe_gguf::kv_cache::{Cells, KvShape, KvTypes, LayerBytes};
use moe_gguf::names::{Category, Role};
use moe_gguf::text::counted;
use moe_gguf::{GgmlType, Gguf, LayerId, Tensor};

use crate::option_values::integer_in;

/// Heading of the options in the help.
const HEADING: &str = "Memory of the context (with --model)";

/// Values of `--cache-type-k` and `--cache-type-v`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
enum CacheTypeArg {
    F32,
    #[default]
    F16,
    #[value(name = "q8_0")]
    Q8_0,
}

impl CacheTypeArg {
    fn ty(self) -> GgmlType {
        match self {
            CacheTypeArg::F32 => GgmlType::F32,
            CacheTypeArg::F16 => GgmlType::F16,
            CacheTypeArg::Q8_0 => GgmlType::Q8_0,
        }
    }

    fn name(self) -> &'static str {
        match self {
            CacheTypeArg::F32 => "f32",
            CacheTypeArg::F16 => "f16",
            CacheTypeArg::Q8_0 => "q8_0",
        }
    }
}

/// Options of the context, whose memory is subtracted from automatic budgets.
#[derive(Debug, clap::Args)]
pub struct MemoryArgs {
    /// Context size in tokens of all sequences together, 1 to 16777216 [default: the model's training context]
    #[arg(long = "ctx", visible_alias = "ctx-size", value_name = "N", value_parser = integer_in(1u32..=1 << 24), help_heading = HEADING)]
    ctx_size: Option<u32>,
    /// Number of sequences that share the context, 1 to 256
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = integer_in(1u32..=256), help_heading = HEADING)]
    parallel: u32,
    /// Prompt tokens per forward pass (llama.cpp's ubatch), 1 to 1048576
    #[arg(long, visible_alias = "ubatch-size", value_name = "N", default_value_t = 512, value_parser = integer_in(1u32..=1 << 20), help_heading = HEADING)]
    batch_size: u32,
    /// Type of the keys in the KV cache
    #[arg(long, value_enum, value_name = "TYPE", default_value_t, help_heading = HEADING)]
    cache_type_k: CacheTypeArg,
    /// Type of the values in the KV cache
    #[arg(long, value_enum, value_name = "TYPE", default_value_t, help_heading = HEADING)]
    cache_type_v: CacheTypeArg,
}

impl MemoryArgs {
    /// Options of llama.cpp with the same context. Options with default values are omitted.
    pub fn of_llama_cpp(&self) -> Vec<String> {
        let mut options = Vec::new();
        options.extend(self.ctx_size.map(|n| format!("--ctx-size {n}")));
        if self.parallel != 1 {
            options.push(format!("--parallel {}", self.parallel));
        }
        if self.batch_size != 512 {
            options.push(format!("--ubatch-size {}", self.batch_size));
        }
        options.extend(self.cache_types());
        options
    }

    /// Options of `record` with the context of one sequence. Options with default values are omitted.
    pub fn of_record(&self) -> Vec<String> {
        let mut options = Vec::new();
        let n_ctx = self.ctx_size.map(|n| n.div_ceil(self.parallel));
        options.extend(n_ctx.map(|n| format!("--ctx-size {n}")));
        if self.batch_size != 512 {
            options.push(format!("--batch-size {}", self.batch_size));
        }
        options.extend(self.cache_types());
        options
    }

    fn cache_types(&self) -> Vec<String> {
        [("k", self.cache_type_k), ("v", self.cache_type_v)]
            .into_iter()
            .filter(|(_, ty)| *ty != CacheTypeArg::default())
            .map(|(half, ty)| format!("--cache-type-{half} {}", ty.name()))
            .collect()
    }

    fn types(&self) -> KvTypes {
        KvTypes {
            k: self.cache_type_k.ty(),
            v: self.cache_type_v.ty(),
        }
    }
}

/// Memory of an engine on a GPU in bytes; `None` if it cannot be computed from the header.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EngineMemory {
    /// KV cache.
    pub kv: Option<u64>,
    /// Recurrent state.
    pub state: Option<u64>,
    /// Activations and scratch memory of a pass; an estimate.
    pub compute: Option<u64>,
    /// Copies of the experts of one layer, for prompts; an estimate.
    pub expert_copies: Option<u64>,
}

impl EngineMemory {
    /// Sum of the known parts.
    pub fn known(&self) -> u64 {
        let parts = [self.kv, self.state, self.compute, self.expert_copies];
        parts.into_iter().flatten().fold(0, u64::saturating_add)
    }
}

/// Memory on the GPU of a lane in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GpuMemory {
    /// Tensors without experts.
    pub tensors: u64,
    /// Memory of this program.
    pub own: EngineMemory,
    /// Memory of llama.cpp.
    pub llama_cpp: EngineMemory,
}

impl GpuMemory {
    /// Bytes that are not available for the cache: the tensors and the larger known size of each other part.
    pub fn needed(&self) -> u64 {
        let (a, b) = (&self.own, &self.llama_cpp);
        let pairs = [
            (a.kv, b.kv),
            (a.state, b.state),
            (a.compute, b.compute),
            (a.expert_copies, b.expert_copies),
        ];
        let parts = pairs.into_iter().filter_map(|(a, b)| a.max(b));
        parts.fold(self.tensors, u64::saturating_add)
    }
}

/// Bytes of llama.cpp's KV cache and recurrent state of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerMemory {
    /// Bytes of the layer.
    pub bytes: LayerBytes,
    /// The lane on whose GPU the layer is.
    pub lane: usize,
}

/// Bytes of tensors and buffers in CPU memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HostMemory {
    /// Tensors of all routed experts.
    pub experts: u64,
    /// Token embeddings, which the CPU reads.
    pub embeddings: u64,
    /// Tensors that are copied to GPUs.
    pub on_gpus: u64,
    /// Tensors that are not used: those of an MTP head.
    pub unused: u64,
    /// Buffers of this program: activations, and the KV cache, which has a copy in CPU memory; `None` if unknown.
    pub buffers: Option<u64>,
}

/// Memory of a model and its context.
#[derive(Debug)]
pub struct Memory {
    /// Context size of all sequences together in tokens; `None` if it is unknown.
    pub n_ctx: Option<u64>,
    /// Number of sequences.
    pub n_seq: u64,
    /// Tokens per forward pass.
    pub n_batch: u64,
    /// Types of the KV cache.
    pub types: KvTypes,
    /// GPU of each lane.
    pub gpus: Vec<GpuMemory>,
    /// Layers with a KV cache or a recurrent state.
    pub layers: Vec<LayerMemory>,
    /// CPU memory.
    pub host: HostMemory,
    /// Why a part is unknown.
    pub unknown: Vec<String>,
}

impl Memory {
    /// Computes the memory of a model. `split` contains the share of the layers on the GPU of each lane, as for `--tensor-split`.
    ///
    /// # Errors
    /// The model cannot be opened.
    pub fn of(path: &Path, args: &MemoryArgs, split: &[f32]) -> anyhow::Result<Memory> {
        let gguf = Gguf::open(path)?;
        let mut memory = Memory {
            n_ctx: args
                .ctx_size
                .map(u64::from)
                .or_else(|| trained_context(&gguf)),
            n_seq: args.parallel.into(),
            n_batch: args.batch_size.into(),
            types: args.types(),
            gpus: vec![GpuMemory::default(); split.len()],
            layers: Vec::new(),
            host: HostMemory::default(),
            unknown: Vec::new(),
        };
        let shape = KvShape::of(&gguf);
        let n_layer = match &shape {
            Ok(shape) => shape.layers().len(),
            Err(_) => n_hidden_layer(&gguf),
        };
        let rules = Rules::new(n_layer, usize::MAX, Vec::new()).split_layers(split.to_vec());
        let placement = rules.resolve([])?;
        memory.add_tensors(&gguf, n_layer, &placement);
        match (shape, memory.n_ctx) {
            (Ok(shape), Some(n_ctx)) => memory.add_context(&gguf, &shape, n_ctx, &placement),
            (Ok(_), None) => memory
                .unknown
                .push("the size of the KV cache: the model does not contain its training context, pass --ctx".into()),
            (Err(error), _) => memory.unknown.push(error.to_string()),
        }
        Ok(memory)
    }

    fn add_tensors(&mut self, gguf: &Gguf, n_layer: usize, placement: &Placement) {
        let is_tied = gguf.tensor("output.weight").is_none();
        for tensor in gguf.tensors() {
            let role = Role::of(&tensor.name);
            let bytes = tensor.size_bytes;
            let device = match role.layer_id {
                Some(layer) if layer.index() >= n_layer => {
                    self.host.unused += bytes;
                    continue;
                }
                _ if is_expert(tensor) => {
                    self.host.experts += bytes;
                    continue;
                }
                _ if role.category == Category::Embedding => {
                    self.host.embeddings += bytes;
                    if !is_tied || tensor.name != "token_embd.weight" {
                        continue;
                    }
                    // The output uses a copy.
                    self.gpu(placement.output()).tensors += bytes;
                    continue;
                }
                Some(layer) => placement.layer(layer),
                None => placement.output(),
            };
            self.gpu(device).tensors += bytes;
            self.host.on_gpus += bytes;
        }
    }

    fn add_context(&mut self, gguf: &Gguf, shape: &KvShape, n_ctx: u64, placement: &Placement) {
        let (n_seq, n_batch) = (self.n_seq, self.n_batch);
        let cells = Cells::of_llama_cpp(n_ctx, n_seq, n_batch, shape.window());
        match shape.bytes(self.types, cells) {
            Ok(layers) => self.add_layers(&layers, placement, |gpu| &mut gpu.llama_cpp),
            Err(error) => return self.unknown.push(error.to_string()),
        }
        let lane_of = |layer: LayerId| match placement.layer(layer) {
            DeviceId::Gpu(lane) => lane,
            DeviceId::Cpu => 0,
        };
        let layers = shape.bytes(self.types, cells).unwrap_or_default();
        self.layers = layers
            .into_iter()
            .filter(|bytes| bytes.total() > 0)
            .map(|bytes| LayerMemory {
                bytes,
                lane: lane_of(bytes.layer),
            })
            .collect();
        let model = match Model::load(gguf) {
            Ok(model) => model,
            Err(error) => {
                return self
                    .unknown
                    .push(format!("buffers of this program: {error}"));
            }
        };
        let cells = Cells::uniform(n_ctx.div_ceil(n_seq), n_seq);
        match shape.bytes(self.types, cells) {
            Ok(layers) => self.add_layers(&layers, placement, |gpu| &mut gpu.own),
            Err(error) => return self.unknown.push(error.to_string()),
        }
        let n_tokens = usize::try_from(n_batch.min(n_ctx)).unwrap_or(usize::MAX);
        let compute = model.compute_memory(n_tokens);
        for gpu in &mut self.gpus {
            gpu.own.compute = Some(compute.gpu_bytes);
            gpu.own.expert_copies = Some(compute.expert_copy_bytes);
        }
        let kv = self.gpus.iter().filter_map(|gpu| gpu.own.kv);
        let buffers = kv.fold(compute.cpu_bytes(), u64::saturating_add);
        self.host.buffers = Some(buffers);
    }

    fn add_layers(
        &mut self,
        layers: &[LayerBytes],
        placement: &Placement,
        engine: impl Fn(&mut GpuMemory) -> &mut EngineMemory,
    ) {
        for gpu in &mut self.gpus {
            let engine = engine(gpu);
            (engine.kv, engine.state) = (Some(0), Some(0));
        }
        for layer in layers {
            let engine = engine(self.gpu(placement.layer(layer.layer)));
            let add = |sum: &mut Option<u64>, n| *sum = Some(sum.unwrap_or(0).saturating_add(n));
            add(&mut engine.kv, layer.kv());
            add(&mut engine.state, layer.state);
        }
    }

    /// The memory of a GPU. All layers are on GPUs.
    fn gpu(&mut self, device: DeviceId) -> &mut GpuMemory {
        let last = self.gpus.len().saturating_sub(1);
        let lane = match device {
            DeviceId::Gpu(lane) => lane.min(last),
            DeviceId::Cpu => 0,
        };
        &mut self.gpus[lane]
    }

    /// The reason why automatic budgets cannot be computed: the size of the KV cache is unknown.
    pub fn fault(&self) -> Option<&str> {
        let has_kv = self.gpus.iter().all(|gpu| gpu.llama_cpp.kv.is_some());
        let reason = self.unknown.first().map_or("", String::as_str);
        (!has_kv).then_some(reason)
    }

    /// One line about the context: `a context of 4096 tokens, 1 sequence, …`.
    pub fn context(&self) -> String {
        let n_ctx = match self.n_ctx {
            Some(n) => counted(n, "token"),
            None => "unknown size".into(),
        };
        format!(
            "a context of {n_ctx}, {}, {} per pass, and a KV cache of {} and {}",
            counted(self.n_seq, "sequence"),
            counted(self.n_batch, "token"),
            self.types.k.name().to_ascii_lowercase(),
            self.types.v.name().to_ascii_lowercase()
        )
    }
}

/// Whether `--cpu-moe` keeps a tensor in CPU memory.
fn is_expert(tensor: &Tensor) -> bool {
    let category = Role::of(&tensor.name).category;
    matches!(category, Category::Expert | Category::ExpertBias)
}

/// A number of the model's architecture.
fn number(gguf: &Gguf, suffix: &str) -> Option<u64> {
    let metadata = gguf.metadata();
    let arch = metadata.str("general.architecture").ok()??;
    metadata.u64(&format!("{arch}.{suffix}")).ok()?
}

fn trained_context(gguf: &Gguf) -> Option<u64> {
    number(gguf, "context_length").filter(|n| (1..=1 << 32).contains(n))
}

/// Number of layers without an MTP head, from the header or the names of tensors.
fn n_hidden_layer(gguf: &Gguf) -> usize {
    let n_nextn = number(gguf, "nextn_predict_layers").unwrap_or(0);
    let n = number(gguf, "block_count").map(|n| n.saturating_sub(n_nextn));
    let layers = gguf.tensors().iter();
    let layers = layers.filter_map(|tensor| Role::of(&tensor.name).layer_id);
    let named = layers.map(|layer| layer.index() + 1).max().unwrap_or(0);
    let n = n.and_then(|n| usize::try_from(n).ok());
    n.map_or(named, |n| n.min(named))
}
