//! The engines: this program's executor, and llama.cpp.

pub mod cache_run;
pub mod device;
mod device_list;
pub mod dynamic;
pub mod hot_cache;
pub mod kv_cache;
#[cfg(feature = "llama-cpp")]
mod llama_cpp;
pub mod lora;
pub mod native;
pub mod native_session;
mod post_fetch;
mod scratchpad;

use moe_engine::{Engine, Error};
use moe_gguf::Gguf;

use crate::context::Context;
use device::DeviceArgs;
use device_list::DeviceList;
use kv_cache::CacheArgs;
use lora::LoraFile;

/// Values of `--engine`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Kind {
    /// Instrumented executor of this program
    #[default]
    Native,
    /// llama.cpp, linked into this program
    #[value(name = "llama.cpp")]
    LlamaCpp,
}

/// Loads a model with LoRA adapters into an engine that runs on `n_threads` CPU threads and on the GPUs of `device`, with the KV cache of `cache`.
pub fn load<'g>(
    kind: Kind,
    gguf: &'g Gguf,
    adapters: &'g [LoraFile],
    n_threads: usize,
    device: &DeviceArgs,
    cache: CacheArgs,
    ctx: &Context,
) -> anyhow::Result<Box<dyn Engine + 'g>> {
    if kind != Kind::Native {
        let is_gpu = device.device != DeviceList::Cpu;
        let option = is_gpu.then_some("--device").or(device.gpu_option());
        if let Some(option) = option.or(device.cache_option()) {
            anyhow::bail!(
                "{option} has no effect with --engine llama.cpp; omit one of the options"
            );
        }
    }
    match kind {
        Kind::Native => Ok(Box::new(native::Native::load(
            gguf,
            adapters,
            n_threads,
            device.clone(),
            cache,
            *ctx,
        )?)),
        #[cfg(feature = "llama-cpp")]
        Kind::LlamaCpp => Ok(Box::new(llama_cpp::LlamaCpp::load(
            gguf, adapters, n_threads, cache, *ctx,
        )?)),
        #[cfg(not(feature = "llama-cpp"))]
        Kind::LlamaCpp => anyhow::bail!(
            "this program was built without llama.cpp; build it with `cargo install --path crates/moe-analyze --features llama-cpp` (needs cmake and libclang)"
        ),
    }
}

/// Converts an error of a session, and keeps its type for [`advice`](crate::advice).
fn boxed(error: anyhow::Error) -> Error {
    Error::Engine(error.reallocate_into_boxed_dyn_error_without_backtrace())
}
