//! Shared by commands that record a run: the manifest, and the error of a failed recording.

use std::collections::BTreeSet;
use std::path::Path;

use moe_engine::EngineInfo;
use moe_gguf::Gguf;
use moe_gguf::map::Category;
use moe_trace::manifest::{self, Engine, Host, ModelFile};
use moe_trace::{Expansion, Manifest};
use sysinfo::{CpuRefreshKind, MemoryRefreshKind, RefreshKind, System};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::engine::device::{DeviceArgs, policy_of_run};
use crate::output::human_bytes;

/// Returns the part of the manifest that all recordings share: engine, model, host, and the current time as start time.
pub fn manifest(
    gguf: &Gguf,
    engine: &EngineInfo,
    device: &DeviceArgs,
    n_threads: usize,
) -> anyhow::Result<Manifest> {
    Ok(Manifest {
        engine: Engine {
            name: engine.name.clone(),
            version: engine.version.clone(),
        },
        command: argv(),
        model: model_entry(gguf, engine)?,
        ops: engine.ops.clone(),
        policy: device.policy_name().into(),
        n_threads: n_threads as u32,
        host: host(),
        mmap: engine.mmap.clone(),
        started: OffsetDateTime::now_utc().format(&Rfc3339)?,
        clock: "monotonic, nanoseconds, counted from the Unix time at the start".into(),
        ..Manifest::default()
    })
}

/// Stores the GPUs of a run in its manifest, and the policy, which depends on whether there are any.
pub fn set_gpus(manifest: &mut Manifest, gpus: Vec<manifest::Gpu>) {
    manifest.policy = policy_of_run(&manifest.policy, !gpus.is_empty()).to_owned();
    manifest.set_gpus(gpus);
}

/// Describes the records that were compressed while recording.
pub fn describe(expansion: Expansion) -> String {
    format!(
        "{} of records were compressed while recording, and expanded to trace.bin in {:.2} s",
        human_bytes(expansion.bytes),
        expansion.seconds
    )
}

/// Returns the command line, with bytes that are not UTF-8 replaced.
pub fn argv() -> Vec<String> {
    std::env::args_os()
        .map(|arg| arg.to_string_lossy().into_owned())
        .collect()
}

/// Returns the error of a failed recording, with the state of its run directory. `records` is the result of completing the run.
pub fn failure(
    error: anyhow::Error,
    out: &Path,
    records: Result<u64, moe_trace::Error>,
) -> anyhow::Error {
    match records {
        // Completing the run reports a failed write of the trace again.
        Err(second)
            if error
                .chain()
                .all(|cause| cause.to_string() != second.to_string()) =>
        {
            error.context(format!("{} is incomplete ({second})", out.display()))
        }
        _ => error.context(format!(
            "{} contains what was recorded until the error",
            out.display()
        )),
    }
}

fn model_entry(gguf: &Gguf, engine: &EngineInfo) -> anyhow::Result<manifest::Model> {
    let tensors = gguf.tensors().iter();
    let experts = tensors.filter(|tensor| Category::of(&tensor.name) == Category::Expert);
    let types: BTreeSet<&str> = experts.map(|tensor| tensor.ty.name()).collect();
    // From the file, because engines do not count the blocks of an MTP head.
    let n_blocks = |key: &str| -> anyhow::Result<u32> {
        let values = gguf
            .metadata()
            .per_layer(&format!("{}.{key}", engine.arch))?;
        Ok(values
            .and_then(|values| values.max())
            .unwrap_or(0)
            .try_into()?)
    };
    Ok(manifest::Model {
        path: gguf.files()[0].path.display().to_string(),
        files: gguf
            .files()
            .iter()
            .map(|file| ModelFile {
                name: file.name.clone(),
                size_bytes: file.size_bytes,
            })
            .collect(),
        header_xxh3: format!("{:016x}", gguf.header_xxh3()),
        xxh3: None,
        arch: engine.arch.clone(),
        n_layer: n_blocks("block_count")?,
        n_nextn_layer: n_blocks("nextn_predict_layers")?,
        n_expert: engine.n_expert as u32,
        n_expert_used: engine.n_expert_used as u32,
        expert_types: types.into_iter().map(str::to_owned).collect(),
    })
}

fn host() -> Host {
    let kind = RefreshKind::nothing()
        .with_cpu(CpuRefreshKind::nothing())
        .with_memory(MemoryRefreshKind::nothing().with_ram());
    let system = System::new_with_specifics(kind);
    Host {
        cpu: system
            .cpus()
            .first()
            .map(|cpu| cpu.brand().trim().to_owned())
            .unwrap_or_default(),
        ram_bytes: system.total_memory(),
        os: System::long_os_version().unwrap_or_else(|| std::env::consts::OS.into()),
    }
}
