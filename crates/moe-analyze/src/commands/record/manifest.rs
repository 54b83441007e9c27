//! The manifest at the start of a run, and the default run directory.

use std::path::Path;

use moe_engine::EngineInfo;
use moe_gguf::Gguf;
use moe_trace::manifest::Sampling;
use moe_trace::{Error as TraceError, Manifest, RunWriter};
use time::OffsetDateTime;
use time::macros::format_description;
use xxhash_rust::xxh3::Xxh3;

use super::Args;
use super::prompts::Prompt;
use crate::recording::{self, argv};

/// Number of directory names to try for one start time.
const MAX_DEFAULT_DIRS: u32 = 1000;

/// Creates a run in `runs/<time>`, or in `runs/<time>-<n>` if the directory exists.
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

/// Returns the manifest at the start of a run.
pub fn manifest(
    args: &Args,
    gguf: &Gguf,
    engine: &EngineInfo,
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
        ..recording::manifest(gguf, engine, &args.device, n_threads)?
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

/// Returns the command line; without `keep_prompt`, the prompt text is replaced.
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

#[cfg(test)]
mod tests {
    use super::command;

    #[test]
    fn replaces_the_prompt_in_the_command_line() {
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
