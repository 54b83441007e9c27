//! `record`: runs a model and records the selected experts of every token and the bytes of the file that operations read.

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
use moe_engine::{
    CreateRun, Limits, Mode, Sampler, SamplerParams, SessionInfo, Setup, Stop, generate,
    max_records,
};
use moe_executor::cpu::threads::n_cores;
use moe_files::text::counted;
use moe_trace::manifest::Gpu;
use moe_trace::record::RECORD_SIZE;
use moe_trace::{Expansion, RunOptions, RunWriter};
use prompts::Prompt;
use totals::Totals;
use usage::{Usage, UsageArgs};

use crate::chat::ModelChat;
use crate::context::Context;
use crate::engine::device::DeviceArgs;
use crate::engine::kv_cache::CacheArgs;
use crate::engine::lora::{self, LoraArgs};
use crate::engine::{self, native};
use crate::exit_status::ExitStatus;
use crate::files::OutputPath;
use crate::interrupt;
use crate::model;
use crate::option_values::{ValueError, at_least, first_given, integer_in, number};
use crate::output::{self, human_bytes, message};
use crate::recording;
use crate::trace_mode::TraceMode;

/// Run a model and record the experts that each token uses and the bytes that each operation reads
///
/// Writes a run directory: trace.bin with one or more records per operation, manifest.json, gguf-map.parquet, the computation graphs
/// and buffer events. Prints the generated text of a single sequence on stdout. Without --model, runs a small embedded model.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  moe-analyze record --out runs/first\n  \
        moe-analyze record -m model.gguf -p \"The capital of France is\" -n 32 --out runs/france")]
pub struct Args {
    /// Model, a GGUF file (any file of a split model) [default: the embedded model]
    #[arg(short, long, value_name = "FILE")]
    model: Option<PathBuf>,
    #[command(flatten)]
    lora: LoraArgs,
    /// Engine that runs the model
    #[arg(long, value_enum, default_value_t)]
    engine: engine::Kind,
    /// Prompt text [default: a short built-in prompt]
    #[arg(short, long, value_name = "TEXT", conflicts_with_all = ["prompt_file", "prompts"], help_heading = "Prompt")]
    prompt: Option<String>,
    /// File with the prompt text; one newline at the end is removed
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with = "prompts",
        help_heading = "Prompt"
    )]
    prompt_file: Option<PathBuf>,
    /// File with the prompts of several sequences, one JSON object per line: {"prompt": "text"}, {"tokens": [1, 2, 3]} or
    /// {"messages": [{"role": "user", "content": "text"}]} with optional "tools"; each with an optional "n_predict"
    #[arg(long, value_name = "FILE.jsonl", help_heading = "Prompt")]
    prompts: Option<PathBuf>,
    /// Format each prompt text as the message of a user, with the model's chat template
    #[arg(long, help_heading = "Prompt")]
    chat: bool,
    /// Jinja template for conversations [default: the chat template of the model]
    #[arg(long, value_name = "FILE", help_heading = "Prompt")]
    chat_template: Option<PathBuf>,
    /// Number of tokens to generate per sequence, 0 or more
    #[arg(short, long, value_name = "N", default_value_t = 64, value_parser = at_least(0u32), help_heading = "Prompt")]
    n_predict: u32,
    /// Run directory to write [default: runs/TIME, with the start time]
    #[arg(long, value_name = "DIR", help_heading = "Output")]
    out: Option<OutputPath>,
    /// Replace the run directory and the file of --expert-trace-output if they exist
    #[arg(long, help_heading = "Output")]
    force: bool,
    /// Number of CPU threads, 1 to 1024 [default: number of cores]
    #[arg(short, long, value_name = "N", value_parser = integer_in(1..=1024u16))]
    threads: Option<u16>,
    /// Prompt tokens per forward pass (llama.cpp's ubatch), 1 to 1048576
    #[arg(short, long, value_name = "N", default_value_t = 512, value_parser = integer_in(1u32..=1 << 20))]
    batch_size: u32,
    /// Context size in tokens, 1 to 16777216 [default: the model's training context]
    #[arg(short, long, value_name = "N", value_parser = integer_in(1u32..=1 << 24))]
    ctx_size: Option<u32>,
    /// Sampling temperature, 0 or more; 0 selects the most likely token
    #[arg(long, value_name = "T", default_value_t = 0.0, allow_negative_numbers = true, value_parser = temperature, help_heading = "Sampling (with --temp above 0)")]
    temp: f32,
    /// Sample from the K most likely tokens, 0 or more; 0 disables the limit
    #[arg(
        long,
        value_name = "K",
        default_value_t = 40,
        help_heading = "Sampling (with --temp above 0)"
    )]
    top_k: usize,
    /// Sample from the smallest set of tokens with total probability P, 0 to 1; 1 disables the limit
    #[arg(long, value_name = "P", default_value_t = 0.95, allow_negative_numbers = true, value_parser = probability, help_heading = "Sampling (with --temp above 0)")]
    top_p: f32,
    /// Sample from tokens that are at least P times as likely as the most likely token, 0 to 1; 0 disables the limit
    #[arg(long, value_name = "P", default_value_t = 0.05, allow_negative_numbers = true, value_parser = probability, help_heading = "Sampling (with --temp above 0)")]
    min_p: f32,
    /// Random seed for sampling
    #[arg(
        short,
        long,
        value_name = "N",
        default_value_t = 0,
        help_heading = "Sampling (with --temp above 0)"
    )]
    seed: u64,
    /// Continue to generate after an end-of-generation token
    #[arg(long, help_heading = "Prompt")]
    ignore_eos: bool,
    /// Stop recording before trace.bin exceeds N MiB, at least 1; the records written until then are complete [default: no limit]
    #[arg(long, value_name = "N", value_parser = at_least(1u64), help_heading = "Output")]
    max_trace_mib: Option<u64>,
    /// Compress the records while recording, and expand them to trace.bin at the end; without this option, this happens only if
    /// the disk cannot keep up
    #[arg(long, help_heading = "Output")]
    compress_trace: bool,
    /// Operations to record
    #[arg(long, value_enum, default_value_t, help_heading = "Output")]
    trace: TraceMode,
    #[command(flatten)]
    cache: CacheArgs,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    usage: UsageArgs,
    /// Store the texts of the prompts, and the ids of all tokens, in the manifest; `report` then shows the text of each token
    #[arg(long, help_heading = "Output")]
    keep_prompt: bool,
    /// Store a hash of the entire model in the manifest, in addition to the hash of its header; reads the entire file
    #[arg(long, help_heading = "Output")]
    hash_model: bool,
}

impl Args {
    /// Returns the first option that is given and applies to the run directory only.
    fn run_option(&self) -> Option<&'static str> {
        first_given([
            ("--out", self.out.is_some()),
            ("--max-trace-mib", self.max_trace_mib.is_some()),
            ("--compress-trace", self.compress_trace),
            ("--keep-prompt", self.keep_prompt),
            ("--hash-model", self.hash_model),
        ])
    }
}

pub fn run(args: Args, ctx: &Context) -> anyhow::Result<ExitStatus> {
    if let (TraceMode::Off, Some(option)) = (args.trace, args.run_option()) {
        bail!("{option} has no effect with --trace off; omit one of the options");
    }
    let mut prompts = prompts::read(&args)?;
    let gguf = model::open(args.model.as_deref())?;
    let adapters = args.lora.open()?;
    let mut chat = None;
    if prompts.iter().any(Prompt::is_chat) {
        let template = ModelChat::new(&gguf, args.chat_template.as_deref())?;
        prompts::render(&mut prompts, &template)?;
        chat = Some(template);
    }
    let n_threads = args.threads.map_or_else(n_cores, usize::from);
    let engine = engine::load(
        args.engine,
        &gguf,
        &adapters,
        n_threads,
        &args.device,
        args.cache,
        ctx,
    )?;
    let info = engine.info();
    let tokens = prompts::tokenize(&prompts, chat.as_ref(), engine.as_ref())?;
    let n_ctx = args.ctx_size.map_or(info.n_ctx_train, |n| n as usize);
    check_fit(&prompts, &tokens, n_ctx, info.n_ctx_train)?;

    let limits: Vec<Limits> = prompts.iter().map(|p| limits(&args, p)).collect();
    let mode = args.trace.mode().unwrap_or(Mode::All);
    let records_per_pass = |n_tokens| engine.records_per_pass(n_tokens, mode);
    let records: u64 = tokens
        .iter()
        .zip(&limits)
        .map(|(tokens, limits)| max_records(records_per_pass, tokens.len(), n_ctx, limits))
        .sum();

    let usage = Usage::new(&args.usage, info.n_layer, info.n_expert, args.force)?;
    let create_run = |session: SessionInfo| -> anyhow::Result<RunWriter> {
        let map = lora::offset_map(&gguf, &adapters);
        let mut manifest = manifest::manifest(&args, &gguf, info, &prompts, n_threads)?;
        lora::describe(&mut manifest, &adapters);
        recording::set_gpus(&mut manifest, session.gpus);
        manifest.kv_cache = session.kv_cache;
        manifest.chat_template = chat.as_ref().map(|chat| chat.description().clone());
        let options = RunOptions {
            force: args.force,
            max_trace_bytes: args.max_trace_mib.map(|mib| mib.saturating_mul(1 << 20)),
            compress: args.compress_trace,
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
    let create_run: Option<CreateRun> = match args.trace {
        TraceMode::Off => None,
        TraceMode::Experts | TraceMode::All => Some(Box::new(|session| {
            create_run(session)
                .map_err(anyhow::Error::reallocate_into_boxed_dyn_error_without_backtrace)
        })),
    };

    let interrupted = interrupt::flag();

    let lengths = tokens.iter().zip(&limits);
    let longest = lengths
        .map(|(tokens, limits)| tokens.len() + limits.n_predict)
        .max();
    let mut session = engine.session(Setup {
        create_run,
        mode,
        observer: usage.as_ref().map(Usage::observer),
        n_ctx,
        n_positions: longest.unwrap_or(n_ctx),
        n_sequences: 1,
        n_batch: args.batch_size as usize,
    })?;
    let mut sampler = Sampler::new(sampler_params(&args));
    let progress = progress(ctx, prompts.len());
    let mut totals = Totals::default();
    let (mut failed, mut lost) = (None, None);
    let mut token_ids = Vec::new();
    for (i, (tokens, limits)) in tokens.iter().zip(&limits).enumerate() {
        session.begin_sequence(i as u32);
        let mut echo = Echo::new(&prompts, engine.as_ref());
        let started = Instant::now();
        let mut ids = tokens.clone();
        let on_token = |token| {
            echo.token(token);
            ids.push(token);
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
        token_ids.push(ids);
        lost = lost.or(echo.end());
        progress.inc(1);
        if failed.is_some() || totals.ended_early() {
            break;
        }
    }
    progress.finish_and_clear();

    let gpus = session.gpus();
    for fallbacks in native::fallbacks(&gpus) {
        ctx.note(fallbacks);
    }
    let (writer, ended) = session.into_writer();
    failed = failed.or(ended.err());
    let out = writer.as_ref().map(|writer| writer.dir().to_owned());
    let token_ids = args.keep_prompt.then_some(token_ids);
    let records = writer.map(|writer| finish(writer, &totals, &failed, gpus, token_ids));
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

/// Number of records of a complete run, and the records that were compressed while recording.
type Recorded = (u64, Option<Expansion>);

/// Reports how the recording ended. `run` is the run directory with what it contains, or `None` without a trace.
fn outcome(
    ctx: &Context,
    totals: &Totals,
    failed: Option<moe_engine::Error>,
    lost: Option<io::Error>,
    run: Option<(&Path, Result<Recorded, moe_trace::Error>)>,
) -> anyhow::Result<ExitStatus> {
    let (recorded, expansion) = match (failed, run) {
        (Some(error), None) => return Err(error.into()),
        (Some(error), Some((out, recorded))) => {
            let records = recorded.map(|(records, _)| records);
            return Err(recording::failure(error.into(), out, records));
        }
        (None, None) => (None, None),
        (None, Some((out, recorded))) => {
            let (records, expansion) = recorded?;
            (Some((records, out)), expansion)
        }
    };
    for line in totals.summary(recorded).lines() {
        ctx.note(line);
    }
    if let Some(expansion) = expansion {
        ctx.note(recording::describe(expansion));
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

/// Completes the run directory.
fn finish(
    mut writer: RunWriter,
    totals: &Totals,
    failed: &Option<moe_engine::Error>,
    gpus: Vec<Gpu>,
    token_ids: Option<Vec<Vec<u32>>>,
) -> Result<Recorded, moe_trace::Error> {
    let manifest = writer.manifest_mut();
    manifest.token_ids = token_ids;
    recording::set_gpus(manifest, gpus);
    manifest.tokens = totals.tokens;
    manifest.sequences.clone_from(&totals.sequences);
    manifest.stopped = match failed {
        Some(error) => Some(error.to_string()),
        None => totals.stop.and_then(totals::reason).map(str::to_owned),
    };
    writer.finish_with_expansion()
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

/// Rejects an empty prompt or a prompt longer than the context, before anything is written.
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
        return Err(prompt.with_place(error.into()));
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
        Some(mib) => format!("; the limit is {mib} MiB"),
        None => String::new(),
    };
    ctx.note(format_args!(
        "recording to {}: at most {}, {size}{limit}",
        out.display(),
        counted(records, "record")
    ));
}

/// Returns a progress bar over several sequences.
fn progress(ctx: &Context, sequences: usize) -> ProgressBar {
    if ctx.quiet || sequences < 2 {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} sequences, {eta} left")
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(sequences as u64).with_style(style)
}
