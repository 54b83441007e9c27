//! Memory of a model and its context, in addition to the cache: on each GPU, computed from the header.

use moe_executor::placement::Placement;
use moe_executor::{DeviceId, Model};
use moe_files::text::counted;
use moe_gguf::Gguf;
use moe_gguf::kv_cache::{Cells, KvShape, KvTypes, LayerBytes};
use moe_gguf::names::{Category, Role};

/// Number and length of the sequences of a context.
#[derive(Debug, Clone, Copy)]
pub struct ContextSize {
    /// Context size of all sequences together in tokens; `None` if it is unknown.
    pub n_ctx: Option<u64>,
    /// Number of sequences, at least 1.
    pub n_seq: u64,
    /// Maximum number of tokens of a forward pass.
    pub n_batch: u64,
    /// Types of the KV cache.
    pub types: KvTypes,
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
    /// Bytes of the tensors and of the known parts of this program.
    pub fn needed_by_executor(&self) -> u64 {
        self.tensors.saturating_add(self.own.known())
    }

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

/// Bytes of llama.cpp's KV cache and recurrent state of a layer on a GPU.
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
    /// Buffers of this program: activations, the KV cache, which has a copy in CPU memory, and recurrent states; `None` if unknown.
    pub buffers: Option<u64>,
}

/// Memory of a model and its context.
#[derive(Debug)]
pub struct Memory {
    /// The context.
    pub context: ContextSize,
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
    /// Computes the memory of a model's tensors, and of a context of llama.cpp, on `n_gpus` GPUs and in CPU memory.
    pub fn of(gguf: &Gguf, context: ContextSize, placement: &Placement, n_gpus: usize) -> Memory {
        let mut memory = Memory {
            context,
            gpus: vec![GpuMemory::default(); n_gpus],
            layers: Vec::new(),
            host: HostMemory::default(),
            unknown: Vec::new(),
        };
        memory.add_tensors(gguf, placement);
        if let Err(reason) = memory.add_llama_cpp(gguf, placement) {
            memory.unknown.push(reason);
        }
        memory
    }

    fn add_tensors(&mut self, gguf: &Gguf, placement: &Placement) {
        let n_layer = n_hidden_layer(gguf);
        let is_tied = gguf.tensor("output.weight").is_none();
        for tensor in gguf.tensors() {
            let role = Role::of(&tensor.name);
            let bytes = tensor.size_bytes;
            if role.layer_id.is_some_and(|layer| layer.index() >= n_layer) {
                self.host.unused += bytes;
                continue;
            }
            if role.category == Category::Embedding {
                self.host.embeddings += bytes;
                // The output uses a copy.
                if let (true, "token_embd.weight", Some(gpu)) =
                    (is_tied, tensor.name.as_str(), self.gpu(placement.output()))
                {
                    gpu.tensors += bytes;
                }
                continue;
            }
            let is_expert = matches!(role.category, Category::Expert | Category::ExpertBias);
            match self.gpu(placement.named(&tensor.name, role.layer_id)) {
                Some(gpu) => {
                    gpu.tensors += bytes;
                    self.host.on_gpus += bytes;
                }
                None if is_expert => self.host.experts += bytes,
                None => {}
            }
        }
    }

    /// Adds the KV cache and the recurrent state of llama.cpp, or returns why their size is unknown.
    fn add_llama_cpp(&mut self, gguf: &Gguf, placement: &Placement) -> Result<(), String> {
        let ContextSize {
            n_ctx,
            n_seq,
            n_batch,
            types,
        } = self.context;
        let shape = KvShape::of(gguf).map_err(|error| error.to_string())?;
        let n_ctx = n_ctx.ok_or(
            "the size of the KV cache: the model does not contain its training context, pass --ctx",
        )?;
        let cells = Cells::of_llama_cpp(n_ctx, n_seq, n_batch, shape.window());
        let layers = shape.bytes(types, cells);
        let layers = layers.map_err(|error| error.to_string())?;
        self.add_layers(&layers, placement, |gpu| &mut gpu.llama_cpp);
        let with_memory = layers.into_iter().filter(|bytes| bytes.total() > 0);
        let on_gpus = with_memory.filter_map(|bytes| match placement.layer(bytes.layer) {
            DeviceId::Gpu(lane) => Some(LayerMemory { bytes, lane }),
            DeviceId::Cpu => None,
        });
        self.layers = on_gpus.collect();
        Ok(())
    }

    /// Adds the KV cache, the recurrent states and the buffers of this program for passes of `n_tokens` tokens. An unknown context needs no memory.
    pub fn add_executor(&mut self, model: &Model, placement: &Placement, n_tokens: u64) {
        let ContextSize { n_seq, types, .. } = self.context;
        let n_ctx = self.context.n_ctx.unwrap_or(0);
        let cells = Cells::uniform(n_ctx.div_ceil(n_seq), n_seq);
        let layers = KvShape::of(model.gguf()).and_then(|shape| shape.bytes(types, cells));
        let layers = match layers {
            Ok(layers) => layers,
            Err(error) => return self.unknown.push(error.to_string()),
        };
        self.add_layers(&layers, placement, |gpu| &mut gpu.own);
        let n_tokens = usize::try_from(n_tokens).unwrap_or(usize::MAX);
        let compute = model.compute_memory(n_tokens);
        for gpu in &mut self.gpus {
            gpu.own.compute = Some(compute.gpu_bytes);
            gpu.own.expert_copies = Some(compute.expert_copy_bytes);
        }
        let caches = layers.iter().map(LayerBytes::total);
        self.host.buffers = Some(caches.fold(compute.cpu_bytes(), u64::saturating_add));
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
            let Some(gpu) = self.gpu(placement.layer(layer.layer)) else {
                continue;
            };
            let engine = engine(gpu);
            let add = |sum: &mut Option<u64>, n| *sum = Some(sum.unwrap_or(0).saturating_add(n));
            add(&mut engine.kv, layer.kv());
            add(&mut engine.state, layer.state);
        }
    }

    /// The memory of a GPU; `None` for the CPU.
    fn gpu(&mut self, device: DeviceId) -> Option<&mut GpuMemory> {
        match device {
            DeviceId::Gpu(index) => self.gpus.get_mut(index),
            DeviceId::Cpu => None,
        }
    }

    /// The reason why automatic budgets cannot be computed: the size of the KV cache is unknown.
    pub fn fault(&self) -> Option<&str> {
        let has_kv = self.gpus.iter().all(|gpu| gpu.llama_cpp.kv.is_some());
        let reason = self.unknown.first().map_or("", String::as_str);
        (!has_kv).then_some(reason)
    }

    /// One line about the context: `a context of 4096 tokens, 1 sequence, …`.
    pub fn describe_context(&self) -> String {
        let ContextSize {
            n_ctx,
            n_seq,
            n_batch,
            types,
        } = &self.context;
        let n_ctx = match *n_ctx {
            Some(n) => counted(n, "token"),
            None => "unknown size".into(),
        };
        format!(
            "a context of {n_ctx}, {}, {} per pass, and a KV cache of {} keys and {} values",
            counted(*n_seq, "sequence"),
            counted(*n_batch, "token"),
            types.k.name().to_ascii_lowercase(),
            types.v.name().to_ascii_lowercase()
        )
    }
}

/// A number of the model's architecture.
fn number(gguf: &Gguf, suffix: &str) -> Option<u64> {
    let metadata = gguf.metadata();
    let arch = metadata.str("general.architecture").ok()??;
    metadata.u64(&format!("{arch}.{suffix}")).ok()?
}

/// Returns the context size that a model was trained with; `None` if it is missing or out of range.
pub fn trained_context(gguf: &Gguf) -> Option<u64> {
    number(gguf, "context_length").filter(|n| (1..=1 << 32).contains(n))
}

/// Returns the number of layers without an MTP head, from the header or the names of tensors.
pub fn n_hidden_layer(gguf: &Gguf) -> usize {
    if let Ok(shape) = KvShape::of(gguf) {
        return shape.layers().len();
    }
    let n_nextn = number(gguf, "nextn_predict_layers").unwrap_or(0);
    let n = number(gguf, "block_count").map(|n| n.saturating_sub(n_nextn));
    let layers = gguf.tensors().iter();
    let layers = layers.filter_map(|tensor| Role::of(&tensor.name).layer_id);
    let named = layers.map(|layer| layer.index() + 1).max().unwrap_or(0);
    let n = n.and_then(|n| usize::try_from(n).ok());
    n.map_or(named, |n| n.min(named))
}
