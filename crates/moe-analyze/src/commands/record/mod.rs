//! `record`: runs a model and records which experts every token uses and which bytes that touches.

mod about;
pub mod model;
mod prompts;

use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use indicatif::{ProgressBar, ProgressStyle};
use moe_executor::cpu::threads::Threads;
use moe_executor::generate::{Generated, Limits, Stop, generate, max_records};
use moe_executor::recorder::Recorder;
use moe_executor::sampler::{Sampler, SamplerParams};
use moe_executor::{Model, Session};
use moe_gguf::map::OffsetMap;
use moe_trace::manifest::Tokens;
use moe_trace::record::RECORD_SIZE;
use moe_trace::{RunOptions, RunWriter};
use prompts::Prompt;

use crate::cli::{Context, ExitStatus};
use crate::output::human_bytes;

/// Run a model and record which experts every token uses and which bytes of the file that touches
///
/// The generated text goes to stdout (not with --prompts). Without --model a small model that is part of this program runs.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Model, a GGUF file (any shard of a model in several files) [default: the embedded model]
    #[arg(short, long, value_name = "FILE")]
    model: Option<PathBuf>,
    /// Text to go on from
    #[arg(short, long, value_name = "TEXT", conflicts_with_all = ["prompt_file", "prompts"])]
    prompt: Option<String>,
    /// Read the prompt from a file, less one newline at its end
    #[arg(long, value_name = "FILE", conflicts_with = "prompts")]
    prompt_file: Option<PathBuf>,
    /// Many sequences in one run: a line each, {"prompt": "text"} or {"tokens": [ids]}, with "n_predict" where it differs
    #[arg(long, value_name = "FILE.jsonl")]
    prompts: Option<PathBuf>,
    /// Tokens to generate, for each sequence
    #[arg(short, long, value_name = "N", default_value_t = 64)]
    n_predict: usize,
    /// Run directory to write [default: runs/<time>]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Replace the run directory if it exists
    #[arg(long)]
    force: bool,
    /// Threads that compute, 1 to 1024 [default: one a core]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Prompt tokens evaluated at once (llama.cpp's ubatch)
    #[arg(short, long, value_name = "N", default_value_t = 512)]
    batch_size: usize,
    /// Positions that a sequence may have [default: the model's training context]
    #[arg(short, long, value_name = "N")]
    ctx_size: Option<usize>,
    /// Temperature of the choice; 0 takes the most likely token
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    temp: f32,
    /// Choose among the K most likely tokens alone; 0 = all
    #[arg(long, value_name = "K", default_value_t = 40)]
    top_k: usize,
    /// Choose among the fewest tokens that together have probability P
    #[arg(long, value_name = "P", default_value_t = 0.95)]
    top_p: f32,
    /// Choose among tokens at least P times as probable as the best
    #[arg(long, value_name = "P", default_value_t = 0.05)]
    min_p: f32,
    /// Seed of the choice
    #[arg(short, long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Go on after a token that ends the text
    #[arg(long)]
    ignore_eos: bool,
    /// Stop, with a whole run, before trace.bin grows over this size
    #[arg(long, value_name = "N")]
    max_trace_mib: Option<u64>,
    /// Store the text of the prompts in the manifest
    #[arg(long)]
    keep_prompt: bool,
    /// Hash the whole model, not its header alone (reads all of it)
    #[arg(long)]
    hash_model: bool,
}

pub fn run(args: Args, ctx: &Context) -> anyhow::Result<ExitStatus> {
    if args.batch_size == 0 {
        bail!("--batch-size is 0; a batch needs a token");
    }
    if !(args.temp.is_finite() && args.top_p.is_finite() && args.min_p.is_finite()) {
        bail!("--temp, --top-p and --min-p must be finite numbers");
    }
    let prompts = prompts::read(&args)?;
    let gguf = model::open(args.model.as_deref())?;
    let model = Model::load(&gguf)?;
    let tokens = prompts::tokenize(&prompts, &model)?;
    let n_ctx = args.ctx_size.unwrap_or(model.hparams().n_ctx_train);
    check_fit(&tokens, n_ctx, &model, &args)?;
    let n_threads = args
        .threads
        .map(usize::from)
        .unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    let threads = Threads::new(n_threads)?;

    let out = match &args.out {
        Some(out) => out.clone(),
        None => about::default_run_dir(),
    };
    let limits: Vec<Limits> = prompts.iter().map(|p| limits(&args, p)).collect();
    let records: u64 = tokens
        .iter()
        .zip(&limits)
        .map(|(t, l)| max_records(&model, t.len(), n_ctx, l))
        .sum();

    let manifest = about::manifest(&args, &model, &prompts, threads.n())?;
    let options = RunOptions {
        force: args.force,
        max_trace_bytes: args.max_trace_mib.map(|mib| mib.saturating_mul(1 << 20)),
    };
    let writer = RunWriter::create(&out, manifest, &OffsetMap::new(&gguf), options)?;
    announce(ctx, &args, records, &out);

    let interrupted = Arc::new(AtomicBool::new(false));
    let flag = interrupted.clone();
    ctrlc::set_handler(move || flag.store(true, Ordering::Relaxed))
        .context("cannot catch Ctrl-C")?;

    let mut session = Session::new(&model, &threads, Recorder::new(Some(writer)), n_ctx);
    let mut sampler = Sampler::new(sampler_params(&args));
    let progress = progress(ctx, prompts.len());
    let mut totals = Totals::default();
    let mut failed = None;
    for (i, (tokens, limits)) in tokens.iter().zip(&limits).enumerate() {
        session.begin_sequence(i as u32);
        let mut echo = Echo::new(&prompts, &model);
        let started = Instant::now();
        let on_token = |token| {
            echo.token(token);
            progress.tick();
        };
        match generate(
            &mut session,
            &mut sampler,
            tokens,
            limits,
            &interrupted,
            on_token,
        ) {
            Ok(generated) => totals.add(generated, started.elapsed()),
            Err(error) => failed = Some(error),
        }
        echo.end();
        progress.inc(1);
        if failed.is_some() || totals.ended_early() {
            break;
        }
    }
    progress.finish_and_clear();

    let mut writer = session
        .into_recorder()
        .into_writer()
        .context("the recorder has lost its writer")?;
    writer.manifest_mut().tokens = totals.tokens;
    writer.manifest_mut().stopped = match (&failed, totals.stop) {
        (Some(error), _) => Some(error.to_string()),
        (None, stop) => stop.and_then(reason).map(str::to_owned),
    };
    let finished = writer.finish();
    if let Some(error) = failed {
        return Err(error).with_context(|| format!("{} keeps what was recorded", out.display()));
    }
    let records = finished?;
    ctx.remark(totals.summary(records, &out));
    if totals.stop == Some(Stop::Interrupted) {
        bail!(
            "interrupted; {} is whole up to the {records} records written",
            out.display()
        );
    }
    Ok(ExitStatus::Done)
}

fn limits(args: &Args, prompt: &Prompt) -> Limits {
    Limits {
        n_predict: prompt.n_predict.unwrap_or(args.n_predict),
        n_batch: args.batch_size,
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
fn check_fit(tokens: &[Vec<u32>], n_ctx: usize, model: &Model, args: &Args) -> anyhow::Result<()> {
    for (i, tokens) in tokens.iter().enumerate() {
        if tokens.is_empty() || tokens.len() > n_ctx {
            let error = match tokens.len() {
                0 => moe_executor::Error::EmptyPrompt,
                n => moe_executor::Error::ContextFull {
                    tokens: n,
                    context: n_ctx,
                    trained: model.hparams().n_ctx_train,
                },
            };
            let error = anyhow::Error::new(error);
            return Err(match &args.prompts {
                Some(file) => error.context(format!("{}, sequence {}", file.display(), i + 1)),
                None => error,
            });
        }
    }
    Ok(())
}

fn announce(ctx: &Context, args: &Args, records: u64, out: &std::path::Path) {
    let size = human_bytes(records.saturating_mul(RECORD_SIZE as u64));
    let limit = match args.max_trace_mib {
        Some(mib) => format!(", stopping at {mib} MiB"),
        None => String::new(),
    };
    ctx.remark(format_args!(
        "recording into {}: at most {records} records, {size} of trace{limit}",
        out.display()
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

/// Shows the generated text of a single sequence as it comes.
struct Echo<'a> {
    model: Option<&'a Model<'a>>,
    wrote: bool,
}

impl<'a> Echo<'a> {
    fn new(prompts: &[Prompt], model: &'a Model<'a>) -> Echo<'a> {
        Echo {
            model: (prompts.len() == 1).then_some(model),
            wrote: false,
        }
    }

    fn token(&mut self, token: u32) {
        if let Some(model) = self.model {
            // A reader who has gone away does not end the recording.
            let mut stdout = io::stdout().lock();
            let _ = stdout.write_all(model.tokenizer().piece(token));
            let _ = stdout.flush();
            self.wrote = true;
        }
    }

    fn end(&self) {
        if self.wrote {
            let _ = io::stdout().lock().write_all(b"\n");
        }
    }
}

/// What all sequences came to.
#[derive(Default)]
struct Totals {
    tokens: Tokens,
    time: Duration,
    stop: Option<Stop>,
    contexts_full: usize,
}

impl Totals {
    fn add(&mut self, generated: Generated, time: Duration) {
        self.tokens.prompt += generated.n_prompt as u64;
        self.tokens.generated += generated.n_generated as u64;
        self.tokens.sequences += 1;
        self.time += time;
        self.stop = Some(generated.stop);
        self.contexts_full += usize::from(generated.stop == Stop::ContextFull);
    }

    fn ended_early(&self) -> bool {
        matches!(self.stop, Some(Stop::Interrupted | Stop::TraceFull))
    }

    fn summary(&self, records: u64, out: &std::path::Path) -> String {
        let Tokens {
            prompt,
            generated,
            sequences,
        } = self.tokens;
        let n = prompt + generated;
        let mut text = format!(
            "{prompt} prompt and {generated} generated tokens in {sequences} sequence{}, {:.0} tokens/s; {records} records, \
             {}, in {}",
            if sequences == 1 { "" } else { "s" },
            n as f64 / self.time.as_secs_f64().max(1e-9),
            human_bytes(records * RECORD_SIZE as u64),
            out.display()
        );
        if self.contexts_full > 0 {
            text += &format!(
                "\nthe context was full before all tokens were generated, {} times",
                self.contexts_full
            );
        }
        if self.stop == Some(Stop::TraceFull) {
            text += "\nstopped at --max-trace-mib; the run is whole up to there";
        }
        text
    }
}

/// What the manifest says of a run that ended before its time.
fn reason(stop: Stop) -> Option<&'static str> {
    match stop {
        Stop::Interrupted => Some("interrupted"),
        Stop::TraceFull => Some("trace limit reached"),
        Stop::Length | Stop::EndOfGeneration | Stop::ContextFull => None,
    }
}
