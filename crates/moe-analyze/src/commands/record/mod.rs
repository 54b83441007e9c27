//! `record`: runs a model and records which experts every token uses and which bytes that touches.

mod echo;
mod manifest;
mod prompts;
mod totals;
mod usage;

use std::io;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context as _, bail};
use echo::Echo;
use indicatif::{ProgressBar, ProgressStyle};
use moe_engine::{Begin, Limits, Mode, Sampler, SamplerParams, Setup, Stop, generate, max_records};
use moe_executor::cpu::threads::n_cores;
use moe_gguf::map::OffsetMap;
use moe_gguf::text::counted;
use moe_trace::manifest::Gpu;
use moe_trace::record::RECORD_SIZE;
use moe_trace::{RunOptions, RunWriter};
use prompts::Prompt;
use totals::Totals;
use usage::{Usage, UsageArgs};

use crate::context::Context;
use crate::engine::device::DeviceArgs;
use crate::engine::{self, native};
use crate::exit_status::ExitStatus;
use crate::files::OutputPath;
use crate::interrupt;
use crate::model;
use crate::option_values::{ValueError, at_least, number, whole};
use crate::output::{self, human_bytes, message};
use crate::recording;

/// Run a model and record which experts every token uses and which bytes of the file that touches
///
/// The generated text of a single sequence goes to stdout. Without --model a small model that is part of this program runs.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Model, a GGUF file (any shard of a model in several files) [default: the embedded model]
    #[arg(short, long, value_name = "FILE")]
    model: Option<PathBuf>,
    /// What runs the model
    #[arg(long, value_enum, default_value_t)]
    engine: engine::Kind,
    /// Text to go on from
    #[arg(short, long, value_name = "TEXT", conflicts_with_all = ["prompt_file", "prompts"])]
    prompt: Option<String>,
    /// Read the prompt from a file, less one newline at its end
    #[arg(long, value_name = "FILE", conflicts_with = "prompts")]
    prompt_file: Option<PathBuf>,
    /// Many sequences in one run: a line each, {"prompt": "text"} or {"tokens": [1, 2, 3]}, with "n_predict" where it differs
    #[arg(long, value_name = "FILE.jsonl")]
    prompts: Option<PathBuf>,
    /// Tokens to generate, for each sequence
    #[arg(short, long, value_name = "N", default_value_t = 64, value_parser = at_least(0u32))]
    n_predict: u32,
    /// Run directory to write [default: runs/TIME]
    #[arg(long, value_name = "DIR")]
    out: Option<OutputPath>,
    /// Replace the run directory if it exists
    #[arg(long)]
    force: bool,
    /// Threads that compute, 1 to 1024 [default: one a core]
    #[arg(short, long, value_name = "N", value_parser = whole(1..=1024u16))]
    threads: Option<u16>,
    /// Prompt tokens evaluated at once (llama.cpp's ubatch)
    #[arg(short, long, value_name = "N", default_value_t = 512, value_parser = whole(1u32..=1 << 20))]
    batch_size: u32,
    /// Positions that a sequence may have [default: the model's training context]
    #[arg(short, long, value_name = "N", value_parser = whole(1u32..=1 << 24))]
    ctx_size: Option<u32>,
    /// Temperature of the choice; 0 takes the most likely token
    #[arg(long, value_name = "T", default_value_t = 0.0, allow_negative_numbers = true, value_parser = temperature)]
    temp: f32,
    /// Choose among the K most likely tokens alone; 0 = all
    #[arg(long, value_name = "K", default_value_t = 40)]
    top_k: usize,
    /// Choose among the fewest tokens that together have probability P
    #[arg(long, value_name = "P", default_value_t = 0.95, allow_negative_numbers = true, value_parser = probability)]
    top_p: f32,
    /// Choose among tokens at least P times as probable as the best
    #[arg(long, value_name = "P", default_value_t = 0.05, allow_negative_numbers = true, value_parser = probability)]
    min_p: f32,
    /// Seed of the choice
    #[arg(short, long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Go on after a token that ends the text
    #[arg(long)]
    ignore_eos: bool,
    /// Stop, with a whole run, before trace.bin grows over this size
    #[arg(long, value_name = "N", value_parser = at_least(1u64))]
    max_trace_mib: Option<u64>,
    /// What to record: everything, the expert operations alone (a tenth of it), or nothing
    #[arg(long, value_enum, default_value_t)]
    trace: TraceMode,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    usage: UsageArgs,
    /// Store the text of the prompts in the manifest
    #[arg(long)]
    keep_prompt: bool,
    /// Hash the whole model, not its header alone (reads all of it)
    #[arg(long)]
    hash_model: bool,
}

/// Values of `--trace`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
enum TraceMode {
    /// No run directory is written
    Off,
    /// MUL_MAT_ID and ADD_ID
    Experts,
    /// Every operation
    #[default]
    All,
}

impl TraceMode {
    fn mode(self) -> Mode {
        match self {
            TraceMode::Experts => Mode::Experts,
            TraceMode::Off | TraceMode::All => Mode::All,
        }
    }
}

pub fn run(args: Args, ctx: &Context) -> anyhow::Result<ExitStatus> {
    let prompts = prompts::read(&args)?;
    let gguf = model::open(args.model.as_deref())?;
    let n_threads = args.threads.map_or_else(n_cores, usize::from);
    let engine = engine::load(args.engine, &gguf, n_threads, &args.device, ctx)?;
    let info = engine.info();
    let tokens = prompts::tokenize(&prompts, engine.as_ref())?;
    let n_ctx = args.ctx_size.map_or(info.n_ctx_train, |n| n as usize);
    check_fit(&prompts, &tokens, n_ctx, info.n_ctx_train)?;

    let limits: Vec<Limits> = prompts.iter().map(|p| limits(&args, p)).collect();
    let mode = args.trace.mode();
    let records_per_pass = |n_tokens| engine.records_per_pass(n_tokens, mode);
    let records: u64 = tokens
        .iter()
        .zip(&limits)
        .map(|(tokens, limits)| max_records(records_per_pass, tokens.len(), n_ctx, limits))
        .sum();

    let usage = Usage::new(&args.usage, info.n_layer, info.n_expert, args.force)?;
    let begin = |gpus| -> anyhow::Result<RunWriter> {
        let map = OffsetMap::new(&gguf);
        let mut manifest = manifest::manifest(&args, &gguf, &map, info, &prompts, n_threads)?;
        recording::set_gpus(&mut manifest, gpus);
        let options = RunOptions {
            force: args.force,
            max_trace_bytes: args.max_trace_mib.map(|mib| mib.saturating_mul(1 << 20)),
        };
        let writer = match &args.out {
            Some(out) => RunWriter::create(out, manifest, &map, options)?,
            None => manifest::create_default(|out| {
                RunWriter::create(out, manifest.clone(), &map, options)
            })?,
        };
        announce(ctx, &args, records, writer.dir());
        Ok(writer)
    };
    let begin: Option<Begin> = match args.trace {
        TraceMode::Off => None,
        TraceMode::Experts | TraceMode::All => Some(Box::new(|gpus| {
            begin(gpus).map_err(anyhow::Error::reallocate_into_boxed_dyn_error_without_backtrace)
        })),
    };

    let interrupted = interrupt::flag();

    let lengths = tokens.iter().zip(&limits);
    let longest = lengths
        .map(|(tokens, limits)| tokens.len() + limits.n_predict)
        .max();
    let mut session = engine.session(Setup {
        begin,
        mode,
        observer: usage.as_ref().map(Usage::observer),
        n_ctx,
        n_positions: longest.unwrap_or(n_ctx),
        n_batch: args.batch_size as usize,
    })?;
    let mut sampler = Sampler::new(sampler_params(&args));
    let progress = progress(ctx, prompts.len());
    let mut totals = Totals::default();
    let (mut failed, mut lost) = (None, None);
    for (i, (tokens, limits)) in tokens.iter().zip(&limits).enumerate() {
        session.begin_sequence(i as u32);
        let mut echo = Echo::new(&prompts, engine.as_ref());
        let started = Instant::now();
        let on_token = |token| {
            echo.token(token);
            progress.tick();
        };
        match generate(
            session.as_mut(),
            &mut sampler,
            tokens,
            limits,
            interrupted,
            on_token,
        ) {
            Ok(generated) => totals.add(generated, started.elapsed()),
            Err(error) => failed = Some(error),
        }
        lost = lost.or(echo.end());
        progress.inc(1);
        if failed.is_some() || totals.ended_early() {
            break;
        }
    }
    progress.finish_and_clear();

    let gpus = session.gpus();
    for fallbacks in native::fallbacks(&gpus) {
        ctx.remark(fallbacks);
    }
    let (writer, ended) = session.into_writer();
    failed = failed.or(ended.err());
    let out = writer.as_ref().map(|writer| writer.dir().to_owned());
    let records = writer.map(|writer| finish(writer, &totals, &failed, gpus));
    let usage = usage.map_or(Ok(()), |usage| {
        usage.finish(totals.tokens.prompt + totals.tokens.generated)
    });
    let outcome = outcome(ctx, &totals, failed, lost, out.as_deref().zip(records));
    match (outcome, usage) {
        (Ok(status), usage) => usage.map(|()| status),
        (Err(error), Ok(())) => Err(error),
        (Err(error), Err(usage)) => {
            message::print(format_args!("moe-analyze: {}", output::one_line(&usage)));
            Err(error)
        }
    }
}

/// Reports how the recording ended. `run` is the run directory with its number of records; without a trace there is none.
fn outcome(
    ctx: &Context,
    totals: &Totals,
    failed: Option<moe_engine::Error>,
    lost: Option<io::Error>,
    run: Option<(&Path, Result<u64, moe_trace::Error>)>,
) -> anyhow::Result<ExitStatus> {
    let recorded = match (failed, run) {
        (Some(error), None) => return Err(error.into()),
        (Some(error), Some((out, records))) => {
            return Err(recording::failure(error.into(), out, records));
        }
        (None, None) => None,
        (None, Some((out, records))) => Some((records?, out)),
    };
    for line in totals.summary(recorded).lines() {
        ctx.remark(line);
    }
    if let Some(error) = lost {
        return Err(error).context(match recorded {
            Some(_) => "the generated text cannot be written to stdout; the run is complete",
            None => "the generated text cannot be written to stdout",
        });
    }
    match (totals.stop, recorded) {
        (Some(Stop::Interrupted), Some((n, out))) => {
            bail!(
                "interrupted; {} is complete: {} written",
                out.display(),
                counted(n, "record")
            )
        }
        (Some(Stop::Interrupted), None) => bail!("interrupted"),
        _ => Ok(ExitStatus::Done),
    }
}

/// Completes the run directory; gives the number of records.
fn finish(
    mut writer: RunWriter,
    totals: &Totals,
    failed: &Option<moe_engine::Error>,
    gpus: Vec<Gpu>,
) -> Result<u64, moe_trace::Error> {
    let manifest = writer.manifest_mut();
    recording::set_gpus(manifest, gpus);
    manifest.tokens = totals.tokens;
    manifest.sequences.clone_from(&totals.sequences);
    manifest.stopped = match failed {
        Some(error) => Some(error.to_string()),
        None => totals.stop.and_then(totals::reason).map(str::to_owned),
    };
    writer.finish()
}

fn limits(args: &Args, prompt: &Prompt) -> Limits {
    Limits {
        n_predict: prompt.n_predict.unwrap_or(args.n_predict) as usize,
        n_batch: args.batch_size as usize,
        ignore_eos: args.ignore_eos,
    }
}

fn sampler_params(args: &Args) -> SamplerParams {
    SamplerParams {
        temperature: args.temp,
        top_k: args.top_k,
        top_p: args.top_p,
        min_p: args.min_p,
        seed: args.seed,
    }
}

/// Refuses a prompt that cannot run before anything is written.
fn check_fit(
    prompts: &[Prompt],
    tokens: &[Vec<u32>],
    n_ctx: usize,
    n_ctx_train: usize,
) -> anyhow::Result<()> {
    for (prompt, tokens) in prompts.iter().zip(tokens) {
        let error = match tokens.len() {
            0 => moe_engine::Error::EmptyPrompt,
            n if n > n_ctx => moe_engine::Error::ContextFull {
                tokens: n,
                context: n_ctx,
                trained: n_ctx_train,
            },
            _ => continue,
        };
        return Err(prompt.at_its_place(error.into()));
    }
    Ok(())
}

fn temperature(text: &str) -> Result<f32, ValueError> {
    number(text, "a number of at least 0", |value| {
        (0.0..=f32::MAX).contains(value)
    })
}

fn probability(text: &str) -> Result<f32, ValueError> {
    number(text, "a number from 0 to 1", |value| {
        (0.0..=1.0).contains(value)
    })
}

fn announce(ctx: &Context, args: &Args, records: u64, out: &Path) {
    let size = human_bytes(records.saturating_mul(RECORD_SIZE as u64));
    let limit = match args.max_trace_mib {
        Some(mib) => format!(", stopping at {mib} MiB"),
        None => String::new(),
    };
    ctx.remark(format_args!(
        "recording into {}: at most {}, {size} of trace{limit}",
        out.display(),
        counted(records, "record")
    ));
}

/// A bar over the sequences where there are several and somebody looks.
fn progress(ctx: &Context, sequences: usize) -> ProgressBar {
    if ctx.quiet || sequences < 2 {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} sequences, {eta} left")
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(sequences as u64).with_style(style)
}
