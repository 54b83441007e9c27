//! Options of the context, and the memory of the model and its context.

use std::path::Path;

use moe_executor::placement::Rules;
use moe_executor::{CacheType, Model};
use moe_gguf::Gguf;

use crate::engine::kv_cache::CacheArgs;
use crate::model_memory::{ContextSize, Memory, n_hidden_layer, trained_context};
use crate::option_values::integer_in;

/// Heading of the options in the help.
const HEADING: &str = "Memory of the context (with --model)";

/// Options of the context, whose memory is subtracted from automatic budgets.
#[derive(Debug, clap::Args)]
#[command(
    mut_arg("cache_type_k", |arg| arg.help_heading(HEADING)),
    mut_arg("cache_type_v", |arg| arg.help_heading(HEADING)),
)]
pub struct MemoryArgs {
    /// Context size in tokens of all sequences together, 1 to 16777216; `serve --ctx-size` is the size for one request [default: the
    /// model's training context]
    #[arg(long = "ctx", visible_alias = "ctx-size", value_name = "N", value_parser = integer_in(1u32..=1 << 24), help_heading = HEADING)]
    ctx_size: Option<u32>,
    /// Number of sequences that share the context, 1 to 256
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = integer_in(1u32..=256), help_heading = HEADING)]
    parallel: u32,
    /// Prompt tokens per forward pass (llama.cpp's ubatch), 1 to 1048576
    #[arg(long, visible_alias = "ubatch-size", value_name = "N", default_value_t = 512, value_parser = integer_in(1u32..=1 << 20), help_heading = HEADING)]
    batch_size: u32,
    #[command(flatten)]
    cache: CacheArgs,
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
        [
            ("k", self.cache.cache_type_k),
            ("v", self.cache.cache_type_v),
        ]
        .into_iter()
        .filter(|(_, ty)| *ty != CacheType::default())
        .map(|(half, ty)| format!("--cache-type-{half} {ty}"))
        .collect()
    }

    /// Computes the memory of a model in both engines. `split` contains the share of the layers on the GPU of each lane, as for
    /// `--tensor-split`. The experts are in CPU memory.
    ///
    /// # Errors
    /// The model cannot be opened, or its heads do not fit the types of the cache.
    pub fn memory(&self, path: &Path, split: &[f32]) -> anyhow::Result<Memory> {
        let gguf = Gguf::open(path)?;
        let context = ContextSize {
            n_ctx: self
                .ctx_size
                .map(u64::from)
                .or_else(|| trained_context(&gguf)),
            n_seq: self.parallel.into(),
            n_batch: self.batch_size.into(),
            types: self.cache.types(),
        };
        let rules = Rules::new(n_hidden_layer(&gguf), usize::MAX, Vec::new());
        let rules = rules.split_layers(split.to_vec()).experts_on_cpu(None);
        let placement = rules.resolve(gguf.tensors().iter().map(|tensor| tensor.name.as_str()))?;
        let mut memory = Memory::of(&gguf, context, &placement, split.len());
        if let (None, Some(n_ctx)) = (memory.fault(), context.n_ctx) {
            match Model::load(&gguf) {
                Ok(model) => {
                    self.cache.params(1, 1).check(&gguf, model.hparams())?;
                    memory.add_executor(&model, &placement, context.n_batch.min(n_ctx));
                }
                Err(error) => memory
                    .unknown
                    .push(format!("buffers of this program: {error}")),
            }
        }
        Ok(memory)
    }
}
