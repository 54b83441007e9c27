//! What a run says of itself: model, machine, command line.

use std::collections::BTreeSet;
use std::path::Path;

use moe_engine::About;
use moe_gguf::Gguf;
use moe_gguf::map::{Category, OffsetMap};
use moe_trace::manifest::{self, Engine, Host, ModelFile, Sampling};
use moe_trace::{Error as TraceError, Manifest, RunWriter};
use sysinfo::{CpuRefreshKind, MemoryRefreshKind, RefreshKind, System};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use time::macros::format_description;
use xxhash_rust::xxh3::Xxh3;

use super::Args;
use super::prompts::Prompt;
use crate::engine::device::DeviceArgs;

/// Directories that are tried for one time.
const MAX_DEFAULT_DIRS: u32 = 1000;

/// Creates a run in `runs/<time>`, with a number after it while another run has that directory.
pub fn create_default(
    create: impl Fn(&Path) -> Result<RunWriter, TraceError>,
) -> Result<RunWriter, TraceError> {
    let format = format_description!("[year][month][day]-[hour][minute][second]");
    let now = OffsetDateTime::now_utc()
        .format(&format)
        .unwrap_or_else(|_| "run".into());
    let runs = Path::new("runs");
    let mut created = create(&runs.join(&now));
    for n in 2..MAX_DEFAULT_DIRS {
        match created {
            Err(TraceError::Exists { .. } | TraceError::InUse { .. }) => {
                created = create(&runs.join(format!("{now}-{n}")));
            }
            _ => break,
        }
    }
    created
}

/// The manifest at the start of a run.
pub fn manifest(
    args: &Args,
    gguf: &Gguf,
    map: &OffsetMap,
    about: &About,
    prompts: &[Prompt],
    n_threads: usize,
) -> anyhow::Result<Manifest> {
    let kept = args
        .keep_prompt
        .then(|| prompts.iter().filter_map(|p| p.prompt.clone()).collect());
    let mut manifest = Manifest {
        command: command(argv(), args.keep_prompt),
        sampling: sampling(args),
        prompts: kept,
        ..of_engine(gguf, map, about, &args.device, n_threads)?
    };
    if args.hash_model {
        let mut hash = Xxh3::new();
        for file in gguf.files() {
            hash.update(file.contents());
        }
        manifest.model.xxh3 = Some(format!("{:016x}", hash.digest()));
    }
    if args.model.is_none() {
        manifest.mmap.clear();
    }
    Ok(manifest)
}

/// What any run has in its manifest: engine, model, machine, and that it begins now.
pub fn of_engine(
    gguf: &Gguf,
    map: &OffsetMap,
    about: &About,
    device: &DeviceArgs,
    n_threads: usize,
) -> anyhow::Result<Manifest> {
    Ok(Manifest {
        engine: Engine {
            name: about.name.clone(),
            version: about.version.clone(),
        },
        command: argv(),
        model: about_model(gguf, map, about)?,
        ops: about.ops.clone(),
        policy: device.policy_name().into(),
        n_threads: n_threads as u32,
        host: host(),
        mmap: about.mmap.clone(),
        started: OffsetDateTime::now_utc().format(&Rfc3339)?,
        clock: "monotonic, nanoseconds, counted from the Unix time at the start".into(),
        ..Manifest::default()
    })
}

/// Tells which GPU takes part. Without one the processor computes, whatever was asked for with `--device auto`.
pub fn tell_gpu(manifest: &mut Manifest, gpu: Option<manifest::Gpu>) {
    if gpu.is_none() {
        manifest.policy = "cpu".into();
    }
    manifest.gpu = gpu;
}

/// The command line; bytes that are not UTF-8 are replaced.
fn argv() -> Vec<String> {
    std::env::args_os()
        .map(|arg| arg.to_string_lossy().into_owned())
        .collect()
}

/// The command line, without the prompt's text unless it is to be kept.
fn command(mut argv: Vec<String>, keep_prompt: bool) -> Vec<String> {
    if keep_prompt {
        return argv;
    }
    const HIDDEN: &str = "<prompt>";
    let mut hide_next = false;
    for arg in &mut argv {
        if std::mem::take(&mut hide_next) {
            *arg = HIDDEN.into();
        } else if matches!(arg.as_str(), "-p" | "--prompt") {
            hide_next = true;
        } else if arg.starts_with("--prompt=") {
            *arg = format!("--prompt={HIDDEN}");
        } else if arg.starts_with("-p") && !arg.starts_with("--") {
            *arg = format!("-p{HIDDEN}");
        }
    }
    argv
}

fn about_model(gguf: &Gguf, map: &OffsetMap, about: &About) -> anyhow::Result<manifest::Model> {
    let experts = map
        .rows
        .iter()
        .filter(|row| row.category == Category::Expert);
    let types: BTreeSet<&str> = experts.map(|row| row.ty.name()).collect();
    // From the file: engines do not count the blocks of an MTP head.
    let n_blocks = |key: &str| -> anyhow::Result<u32> {
        let values = gguf
            .metadata()
            .per_layer(&format!("{}.{key}", about.arch))?;
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
        arch: about.arch.clone(),
        n_layer: n_blocks("block_count")?,
        n_nextn_layer: n_blocks("nextn_predict_layers")?,
        n_expert: about.n_expert as u32,
        n_expert_used: about.n_expert_used as u32,
        expert_types: types.into_iter().map(str::to_owned).collect(),
    })
}

fn sampling(args: &Args) -> Sampling {
    if args.temp <= 0.0 {
        return Sampling {
            method: "greedy".into(),
            ..Sampling::default()
        };
    }
    let parameters = serde_json::json!({
        "temperature": args.temp,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "min_p": args.min_p,
    });
    Sampling {
        method: "random".into(),
        seed: Some(args.seed),
        parameters: parameters.as_object().cloned().unwrap_or_default(),
    }
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

#[cfg(test)]
mod tests {
    use super::command;

    #[test]
    fn the_prompt_is_kept_out_of_the_command_line() {
        let argv = |args: &[&str]| args.iter().map(|s| s.to_string()).collect::<Vec<_>>();
        for (given, hidden) in [
            (
                &["record", "--prompt", "secret", "-n", "4"][..],
                &["record", "--prompt", "<prompt>", "-n", "4"][..],
            ),
            (
                &["record", "--prompt=secret"],
                &["record", "--prompt=<prompt>"],
            ),
            (&["record", "-p", "secret"], &["record", "-p", "<prompt>"]),
            (&["record", "-psecret"], &["record", "-p<prompt>"]),
            (
                &["record", "--prompt-file", "f"],
                &["record", "--prompt-file", "f"],
            ),
        ] {
            assert_eq!(command(argv(given), false), argv(hidden));
            assert_eq!(command(argv(given), true), argv(given));
        }
    }
}
