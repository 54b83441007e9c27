//! `bench`: speed of prompt processing and decoding, like llama-bench.

mod batches;
mod caches;
mod numbers;
mod paired;
mod report;
mod variants;
mod weights;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::bail;
use clap::ValueEnum;
use moe_engine::{CreateRun, Engine, Logits, Mode, Observer, Session, Setup};
use moe_executor::cpu::bandwidth::read_bandwidth;
use moe_executor::cpu::threads::{Threads, n_cores};
use moe_files::TemporaryDirectory;
use moe_files::text::counted;
use moe_gguf::Gguf;
use moe_trace::{LayerId, Manifest, Phase, RunOptions, RunWriter};

use self::caches::Caches;
use self::numbers::Numbers;
use self::paired::PairedRatio;
use self::report::Measured;
use self::variants::Variants;
use self::weights::Weights;
use crate::context::Context;
use crate::engine::device::{DeviceArgs, policy_of_run};
use crate::engine::kv_cache::CacheArgs;
use crate::engine::lora::{self, LoraArgs, LoraFile};
use crate::engine::{self, native, native::BANDWIDTH_BYTES};
use crate::exit_status::ExitStatus;
use crate::model;
use crate::option_values::{at_least, integer_in};
use crate::output::{self, Format};
use crate::progress::Progress;
use crate::trace_mode::TraceMode;

/// Measure tokens/s of prompt processing and decoding, and the fraction of memory bandwidth used
///
/// Prints one row per test. Each test runs twice to warm up and then -r times, on pseudo-random tokens, like
/// llama-bench. -p, -n and -t take comma-separated numbers and ranges: FIRST-LAST, FIRST-LAST+STEP or FIRST-LAST*FACTOR. With several
/// values of --perf (only with --policy hot-cache) or --trace, repetitions alternate between them; the rows contain the median ratio of
/// their times to those of the first value. With --parallel N, a test evaluates N sequences at the same time, each with the tokens of -p
/// or -n, as
/// `serve` does; tokens/s are those of all sequences together.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  moe-analyze bench -m model.gguf -p 512 -n 128 -t 4-16*2")]
pub struct Args {
    /// Model, a GGUF file [default: the embedded model]
    #[arg(short, long, value_name = "FILE")]
    model: Option<PathBuf>,
    #[command(flatten)]
    lora: LoraArgs,
    /// Engine that runs the model
    #[arg(long, value_enum, default_value_t)]
    engine: engine::Kind,
    /// Prompt lengths in tokens, 0 or more, at most the model's training context; 0 skips the test
    #[arg(
        short = 'p',
        long,
        value_name = "N",
        value_delimiter = ',',
        default_value = "512"
    )]
    n_prompt: Vec<Numbers>,
    /// Numbers of tokens to decode, 0 or more, at most the model's training context; 0 skips the test
    #[arg(
        short = 'n',
        long,
        value_name = "N",
        value_delimiter = ',',
        default_value = "128"
    )]
    n_gen: Vec<Numbers>,
    /// Numbers of tokens in the context before a test, 0 or more; with the tokens of the test, at most the model's training context.
    /// They are evaluated before each repetition and not measured. Above 0 only with --parallel 1
    #[arg(
        short = 'd',
        long,
        value_name = "N",
        value_delimiter = ',',
        default_value = "0"
    )]
    n_depth: Vec<Numbers>,
    /// Measured repetitions of each test, at least 1
    #[arg(short, long, value_name = "N", default_value_t = 5, value_parser = at_least(1u32))]
    repetitions: u32,
    /// Numbers of CPU threads, 1 to 1024 [default: number of cores]
    #[arg(
        short,
        long,
        value_name = "N",
        value_delimiter = ',',
        value_parser = |text: &str| Numbers::within(text, 1..=1024)
    )]
    threads: Vec<Numbers>,
    /// Prompt tokens per forward pass (llama.cpp's ubatch), 1 to 1048576
    #[arg(short = 'b', long, value_name = "N", default_value_t = 512, value_parser = integer_in(1usize..=1 << 20))]
    batch_size: usize,
    /// Numbers of sequences that are evaluated at the same time, 1 to 256; short name: -np
    #[arg(
        long,
        visible_alias = "np",
        value_name = "N",
        value_delimiter = ',',
        default_value = "1",
        value_parser = |text: &str| Numbers::within(text, 1..=256)
    )]
    parallel: Vec<Numbers>,
    /// Format of the rows on stdout
    #[arg(short, long, value_name = "FORMAT", default_value = "table")]
    output: Format,
    /// Sizes of the hot cache in percent of the size of all experts, 0 to 100, rounded up to MiB; replaces --hot-cache-mib. Needs
    /// --policy hot-cache, and counts (not a plan) in --hot-cache
    #[arg(long, value_name = "PERCENT[,…]", value_delimiter = ',', value_parser = caches::percent)]
    hot_cache_percent: Vec<f64>,
    /// What the repetitions record: off, experts (expert operations), all; several values alternate. The trace is in a temporary
    /// directory (TMPDIR) and is removed at the end [default: off]
    #[arg(long, value_name = "WHAT[,…]", value_delimiter = ',', value_enum)]
    trace: Vec<TraceMode>,
    #[command(flatten)]
    cache: CacheArgs,
    // Last, because its headings apply to all options after it.
    #[command(flatten)]
    device: DeviceArgs,
}

/// A test: prompt processing or decoding.
#[derive(Clone, Copy)]
struct Test {
    n_prompt: usize,
    n_gen: usize,
    /// Number of tokens in the context before the test.
    n_depth: usize,
    /// Number of sequences that are evaluated at the same time, each with these numbers of tokens.
    n_parallel: usize,
}

impl Test {
    /// Number of tokens of a sequence that are measured.
    fn n_measured(&self) -> usize {
        self.n_prompt + self.n_gen
    }

    /// Number of tokens of a sequence.
    fn n_positions(&self) -> usize {
        self.n_depth + self.n_measured()
    }

    /// Number of measured tokens of all sequences.
    fn n_tokens(&self) -> usize {
        self.n_measured() * self.n_parallel
    }

    fn phase(&self) -> Phase {
        if self.n_prompt > 0 {
            Phase::Prompt
        } else {
            Phase::Generate
        }
    }

    /// Maximum number of tokens of a forward pass. A batch of a prompt has `n_batch` tokens.
    fn pass_size(&self, n_batch: usize) -> usize {
        match self.phase() {
            Phase::Prompt => n_batch,
            Phase::Generate => self.n_parallel,
        }
    }
}

pub fn run(args: Args, ctx: &Context) -> anyhow::Result<ExitStatus> {
    let prompts = Numbers::of(&args.n_prompt).map(|n| (n, 0));
    let decodes = Numbers::of(&args.n_gen).map(|n| (0, n));
    let lengths: Vec<_> = prompts.chain(decodes).filter(|&n| n != (0, 0)).collect();
    let depths: Vec<_> = Numbers::of(&args.n_depth).collect();
    let at_depths = Numbers::of(&args.parallel)
        .flat_map(|n_parallel| depths.iter().map(move |&n_depth| (n_parallel, n_depth)));
    let tests = at_depths.flat_map(|(n_parallel, n_depth)| {
        let test = move |&(n_prompt, n_gen)| Test {
            n_prompt,
            n_gen,
            n_depth,
            n_parallel,
        };
        lengths.iter().map(test)
    });
    let tests: Vec<Test> = tests.collect();
    if tests
        .iter()
        .any(|test| test.n_parallel > 1 && test.n_depth > 0)
    {
        bail!("--n-depth above 0 applies only to a single sequence; omit it or --parallel");
    }
    if args.engine != engine::Kind::Native && tests.iter().any(|test| test.n_parallel > 1) {
        bail!("--parallel above 1 needs the executor of this program; omit it or --engine");
    }
    if args.engine != engine::Kind::Native && !args.trace.is_empty() {
        bail!("--trace needs the executor of this program; omit it or --engine");
    }
    if tests.is_empty() {
        bail!("there is no test to run; pass a number above 0 to -p or -n");
    }

    let gguf = model::open(args.model.as_deref())?;
    let adapters = args.lora.open()?;
    let threads = if args.threads.is_empty() {
        vec![n_cores()]
    } else {
        Numbers::of(&args.threads).collect()
    };

    let weights = Weights::of(&gguf, &lora::offset_map(&gguf, &adapters))?;
    let caches = Caches::new(&args.device, &args.hot_cache_percent, &gguf)?;
    let variants = Variants::new(&args.trace, caches.perf_modes())?;
    let mut rows = Vec::new();
    for n in threads {
        let bandwidth = read_bandwidth(&Threads::new(n)?, BANDWIDTH_BYTES);
        for (percent, device) in caches.devices() {
            let engine = engine::load(args.engine, &gguf, &adapters, n, &device, args.cache, ctx)?;
            let n_ctx = engine.info().n_ctx_train;
            if let Some(test) = tests.iter().find(|t| t.n_positions() > n_ctx) {
                bail!(
                    "a test has {} tokens, but the model's training context has {n_ctx}; reduce -p, -n or -d",
                    test.n_positions()
                );
            }
            let bench = Bench {
                args: &args,
                ctx,
                gguf: &gguf,
                adapters: &adapters,
                weights: &weights,
                engine: engine.as_ref(),
                n_threads: n,
                bandwidth,
                percent,
                variants: &variants,
            };
            for &test in &tests {
                ctx.note(format_args!(
                    "test with {}{}{}: {} prompt and {} generated tokens",
                    counted(n, "thread"),
                    match test.n_parallel {
                        1 => String::new(),
                        n => format!(", {n} sequences"),
                    },
                    percent.map_or(String::new(), |percent| format!(
                        ", a cache of {percent} % of the size of all experts"
                    )),
                    test.n_prompt,
                    test.n_gen
                ));
                rows.extend(bench.measure(test)?);
            }
        }
    }
    output::to_stdout(args.output, |out| report::print(out, args.output, &rows))?;
    Ok(ExitStatus::Done)
}

/// Number of distinct experts selected per batch, summed over batches, by layer.
type SelectedCounts = Arc<Mutex<BTreeMap<LayerId, u64>>>;

/// What all tests of a thread count share.
struct Bench<'a> {
    args: &'a Args,
    ctx: &'a Context,
    gguf: &'a Gguf,
    adapters: &'a [LoraFile],
    weights: &'a Weights,
    engine: &'a dyn Engine,
    n_threads: usize,
    /// Measured memory bandwidth of the CPU, bytes/s.
    bandwidth: f64,
    /// Size of the hot cache in percent of the size of all experts, if it was given this way.
    percent: Option<f64>,
    /// The repetitions alternate between them.
    variants: &'a Variants,
}

impl Bench<'_> {
    /// Runs a test, and returns a row for each variant.
    fn measure(&self, test: Test) -> anyhow::Result<Vec<Measured>> {
        let selected: SelectedCounts = Arc::default();
        let dir = self.variants.trace_directory()?;
        let mut session = self.session(
            test,
            selected.clone(),
            dir.as_ref().map(TemporaryDirectory::path),
        )?;
        let n = self.variants.len();
        let n_runs = self.args.repetitions as usize * n;
        let progress = Progress::items(self.ctx, "runs", 2 + n_runs as u64);
        // The first run counts selected experts, which waits for the router. The second run is like the measured runs.
        self.begin(session.as_mut(), test)?;
        let counts = || selected.lock().unwrap_or_else(PoisonError::into_inner);
        counts().clear();
        self.time_measured(session.as_mut(), test)?;
        progress.inc(1);
        session.stop_observing();
        self.time(session.as_mut(), test)?;
        progress.inc(1);
        let bytes = self.weight_bytes(test, &counts());
        let mut times = vec![Vec::new(); n];
        for i in 0..n_runs {
            // Each round starts with another variant, so that none always follows the same one.
            let variant = (i + i / n) % n;
            self.variants.start(variant, session.as_mut())?;
            times[variant].push(self.time(session.as_mut(), test)?.as_nanos() as f64);
            progress.inc(1);
        }
        self.variants.end(session.as_mut())?;
        drop(progress);
        let hit_rate = session.hit_rate();
        let gpus = session.gpus();
        // With weights in CPU and GPU memory, no single bandwidth applies.
        let policy = policy_of_run(self.args.device.policy_name(), !gpus.is_empty());
        let bandwidth = match (!gpus.is_empty(), policy) {
            (false, _) => Some(self.bandwidth),
            (true, "gpu") if !self.args.device.places_experts() => session
                .gpu_bandwidth()
                .and_then(|measured| native::gpu_bandwidth(measured, self.ctx)),
            _ => None,
        };
        let row = |(variant, ns): (usize, &Vec<f64>)| Measured {
            model: self.gguf.files()[0].name.clone(),
            model_bytes: self.gguf.tensors().iter().map(|t| t.size_bytes).sum(),
            n_batch: self.args.batch_size,
            n_threads: self.n_threads,
            test,
            ns: report::mean(ns.iter().copied()),
            tokens_per_s: report::mean(ns.iter().map(|ns| test.n_tokens() as f64 / ns * 1e9)),
            bytes_per_token: bytes as f64 / test.n_tokens() as f64,
            bandwidth,
            engine: self.engine_name(),
            policy,
            hit_rate,
            gpus: gpus.clone(),
            percent: self.percent,
            perf: self.variants.perf(variant),
            trace: self.variants.trace(variant),
            ratio: PairedRatio::new(ns, &times[0]).filter(|_| n > 1),
        };
        Ok(times.iter().enumerate().map(row).collect())
    }

    /// Returns the engine's name in `--engine`.
    fn engine_name(&self) -> String {
        let kind = self.args.engine.to_possible_value();
        kind.map_or(String::new(), |kind| kind.get_name().to_owned())
    }

    /// Creates a session that adds the number of distinct experts of each batch to `selected`. Its trace, if any, is paused.
    fn session<'s>(
        &'s self,
        test: Test,
        selected: SelectedCounts,
        trace: Option<&Path>,
    ) -> anyhow::Result<Box<dyn Session + 's>> {
        let observer: Observer = Box::new(move |routed| {
            let distinct: BTreeSet<i32> = routed.ids.iter().copied().collect();
            let mut selected = selected.lock().unwrap_or_else(PoisonError::into_inner);
            *selected.entry(routed.layer).or_default() += distinct.len() as u64;
        });
        let create_run = trace.map(|dir| {
            let dir = dir.join("run");
            let create: CreateRun = Box::new(move |_| {
                let map = lora::offset_map(self.gguf, self.adapters);
                Ok(RunWriter::create(
                    &dir,
                    Manifest::default(),
                    &map,
                    RunOptions::default(),
                )?)
            });
            create
        });
        let mut session = self.engine.session(Setup {
            create_run,
            mode: Mode::All,
            observer: Some(observer),
            n_ctx: self.engine.info().n_ctx_train,
            n_positions: test.n_positions(),
            n_batch: self.args.batch_size,
            n_sequences: test.n_parallel,
        })?;
        session.set_trace(None)?;
        Ok(session)
    }

    /// Runs a test once, from the start of its sequences. Returns the time of the measured tokens.
    fn time(&self, session: &mut dyn Session, test: Test) -> anyhow::Result<Duration> {
        self.begin(session, test)?;
        self.time_measured(session, test)
    }

    /// Starts a sequence, and evaluates the tokens before a test.
    fn begin(&self, session: &mut dyn Session, test: Test) -> anyhow::Result<()> {
        session.begin_sequence(0);
        let before = tokens(self.engine.info().n_vocab, test.n_depth);
        for batch in before.chunks(self.args.batch_size) {
            session.decode(batch, Phase::Prompt, Logits::None)?;
        }
        Ok(())
    }

    fn time_measured(&self, session: &mut dyn Session, test: Test) -> anyhow::Result<Duration> {
        let tokens = tokens(self.engine.info().n_vocab, test.n_tokens());
        if let Some(session) = session.batches().filter(|_| test.n_parallel > 1) {
            return batches::time(session, test, &tokens, self.args.batch_size);
        }
        let start = Instant::now();
        if test.phase() == Phase::Prompt {
            let batches = tokens.chunks(self.args.batch_size);
            let last = batches.len() - 1;
            for (i, batch) in batches.enumerate() {
                let wanted = if i == last {
                    Logits::Last
                } else {
                    Logits::None
                };
                session.decode(batch, Phase::Prompt, wanted)?;
            }
        } else {
            for token in tokens {
                session.decode(&[token], Phase::Generate, Logits::Last)?;
            }
        }
        Ok(start.elapsed())
    }

    /// Returns the bytes of weights that a test reads, with the given numbers of selected experts.
    fn weight_bytes(&self, test: Test, selected: &BTreeMap<LayerId, u64>) -> u64 {
        let passes = test
            .n_tokens()
            .div_ceil(test.pass_size(self.args.batch_size));
        self.weights.read(passes as u64, selected)
    }
}

/// Returns pseudo-random token ids, the same in every run.
fn tokens(n_vocab: usize, n: usize) -> Vec<u32> {
    let n_vocab = (n_vocab as u64).max(1);
    let mut state = 1u64;
    (0..n)
        .map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            ((state >> 33) % n_vocab) as u32
        })
        .collect()
}
