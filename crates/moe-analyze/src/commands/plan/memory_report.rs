//! The memory of a plan as text and JSON: on each GPU, and on the CPU.

use std::io::{self, Write};

use moe_placement::plan::Plan;
use serde_json::{Value, json};

use crate::model_memory::{EngineMemory, Memory};
use crate::output::{Format, Table, human_bytes};

/// Bytes of the experts in the cache, without the empty experts.
fn cached_bytes(plan: &Plan) -> u64 {
    let cached = plan.selected().map(|(_, selected)| selected.bytes);
    cached.fold(0, u64::saturating_add)
}

/// A size, or `unknown`.
fn size(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| "unknown".into(), human_bytes)
}

/// Writes a table of the GPU memory, and the CPU memory.
pub fn write(out: &mut dyn Write, memory: &Memory, plan: &Plan) -> io::Result<()> {
    let lanes = memory.gpus.iter().zip(&plan.lanes).enumerate();
    let rows = lanes.flat_map(|(number, (gpu, lane))| {
        let engines = [("moe-analyze", gpu.own), ("llama.cpp", gpu.llama_cpp)];
        engines.map(|(name, engine)| (number, name, gpu.tensors, engine, lane.used_bytes))
    });
    writeln!(out, "GPU memory for {}:", memory.describe_context())?;
    Table::of(rows)
        .shown("lane", |&(lane, ..)| lane)
        .shown("engine", |&(_, name, ..)| name)
        .shown("tensors without experts", |&(.., tensors, _, _)| {
            human_bytes(tensors)
        })
        .shown("KV cache", |(.., engine, _)| size(engine.kv))
        .shown("recurrent state", |(.., engine, _)| size(engine.state))
        .shown("compute buffers (estimate)", |(.., engine, _)| {
            size(engine.compute)
        })
        .shown("copied experts (estimate)", |(.., engine, _)| {
            size(engine.expert_copies)
        })
        .shown("hot cache", |&(.., used)| human_bytes(used))
        .shown("total of known sizes", |&(_, _, tensors, engine, used)| {
            let total = engine.known().saturating_add(tensors).saturating_add(used);
            human_bytes(total)
        })
        .write(out, Format::Table)?;
    for reason in &memory.unknown {
        writeln!(out, "  unknown: {reason}")?;
    }
    let host = &memory.host;
    let cached = cached_bytes(plan).min(host.experts);
    writeln!(
        out,
        "CPU memory in use: {} of uncached experts, {} of token embeddings, {} of buffers",
        human_bytes(host.experts - cached),
        human_bytes(host.embeddings),
        size(host.buffers)
    )?;
    writeln!(
        out,
        "  droppable after loading: {} of cached experts (needed again if an update evicts them), {} of tensors on GPUs, {} of unused tensors",
        human_bytes(cached),
        human_bytes(host.on_gpus),
        human_bytes(host.unused)
    )?;
    writeln!(
        out,
        "  useful to pin: {} of uncached experts, which are copied to the GPU for prompts\n",
        human_bytes(host.experts - cached)
    )
}

/// Returns the memory as JSON.
pub fn to_json(memory: &Memory, plan: &Plan) -> Value {
    let engine = |engine: &EngineMemory| {
        json!({
            "kv_bytes": engine.kv,
            "state_bytes": engine.state,
            "compute_bytes": engine.compute,
            "expert_copy_bytes": engine.expert_copies,
        })
    };
    let gpus = memory.gpus.iter().zip(&plan.lanes).enumerate();
    let gpus = gpus.map(|(number, (gpu, lane))| {
        json!({
            "lane": number,
            "tensor_bytes": gpu.tensors,
            "hot_cache_bytes": lane.used_bytes,
            "needed_bytes": gpu.needed(),
            "moe_analyze": engine(&gpu.own),
            "llama_cpp": engine(&gpu.llama_cpp),
        })
    });
    let layers = memory.layers.iter().map(|layer| {
        json!({
            "layer": layer.bytes.layer,
            "lane": layer.lane,
            "k_bytes": layer.bytes.k,
            "v_bytes": layer.bytes.v,
            "state_bytes": layer.bytes.state,
        })
    });
    let host = &memory.host;
    let cached = cached_bytes(plan).min(host.experts);
    json!({
        "ctx": memory.context.n_ctx,
        "parallel": memory.context.n_seq,
        "batch_size": memory.context.n_batch,
        "cache_type_k": memory.context.types.k.name().to_ascii_lowercase(),
        "cache_type_v": memory.context.types.v.name().to_ascii_lowercase(),
        "gpus": gpus.collect::<Vec<_>>(),
        "layers": layers.collect::<Vec<_>>(),
        "cpu": {
            "uncached_expert_bytes": host.experts - cached,
            "embedding_bytes": host.embeddings,
            "buffer_bytes": host.buffers,
            "droppable_expert_bytes": cached,
            "droppable_tensor_bytes": host.on_gpus,
            "unused_tensor_bytes": host.unused,
            "pin_bytes": host.experts - cached,
        },
        "unknown": memory.unknown,
    })
}
