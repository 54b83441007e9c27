//! `serve`: an HTTP server over the executor.

mod backend;

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, bail};
use moe_engine::{Engine as _, Mode, Setup};
use moe_executor::cpu::threads::n_cores;
use moe_files::text::counted;
use moe_gguf::Gguf;
use moe_server::http::{self, ApiKey, Log, Options, Ui};
use moe_server::recent::RecentRequests;
use moe_server::recording::{Recording, RecordingParams};
use moe_server::scheduler::{Handle, Scheduler, SchedulerParams};
use moe_trace::{ModelInfo, bounded};
use tokio::net::TcpListener;

use self::backend::ServedModel;
use crate::chat::ModelChat;
use crate::context::Context;
use crate::engine::device::DeviceArgs;
use crate::engine::hot_cache;
use crate::engine::kv_cache::CacheArgs;
use crate::engine::lora::{LoraArgs, LoraFile};
use crate::engine::native::Native;
use crate::exit_status::ExitStatus;
use crate::files::OutputPath;
use crate::interrupt;
use crate::model;
use crate::option_values::{ValueError, integer_in, number};
use crate::output::{self, message};

/// Default context of a request, in tokens, unless the model was trained with less.
const DEFAULT_CONTEXT: usize = 4096;

/// Maximum size of the file with the API key, in bytes.
const MAX_API_KEY_BYTES: u64 = 64 << 10;

/// Number of requests that the page of --ui shows.
const RECENT_REQUESTS: usize = 32;

/// How often the server looks for an interrupt.
const INTERRUPT_INTERVAL: Duration = Duration::from_millis(50);

/// Serve a model over HTTP: OpenAI's API, endpoints of llama-server, expert counters and cache updates
///
/// Evaluates up to --parallel requests together. Listens on this machine only, unless --host and an API key are given. SIGTERM or Ctrl-C
/// ends the server after the running and queued requests, at most 60 seconds later; a second one ends it at once. docs/http-api.md
/// describes the endpoints.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  moe-analyze serve -m model.gguf --parallel 4\n  \
        moe-analyze serve -m model.gguf --policy hot-cache --hot-cache learn.json --hot-cache-mib auto",
    mut_arg("perf", |arg| {
        arg.help("Counters of /moe-layer-perf: off (none), update (activations and lanes of each expert) or full (also times)")
    }),
    mut_arg("warmup_prompt", |arg| {
        arg.help(
            "File with a prompt that is run before the first request; its activations update the cache if --update-rate is above 0",
        )
    }),
    mut_arg("auto_learn", |arg| {
        arg.help(
            "If the file of --hot-cache does not exist, run the prompt of --warmup-prompt, write the file with the counts of its \
             experts, and plan from them",
        )
    })
)]
pub struct Args {
    /// Model, a GGUF file [default: the embedded model]
    #[arg(short, long, value_name = "FILE")]
    model: Option<PathBuf>,
    #[command(flatten)]
    lora: LoraArgs,
    /// IP address to listen on; an address other than a loopback address (127.0.0.1, ::1) needs an API key
    #[arg(
        long,
        value_name = "ADDRESS",
        default_value = "127.0.0.1",
        value_parser = ip_address,
        help_heading = "Server"
    )]
    host: IpAddr,
    /// Port to listen on, 0 to 65535; 0 selects a free port, which is printed
    #[arg(long, value_name = "PORT", default_value_t = 8080, value_parser = integer_in(0..=u16::MAX), help_heading = "Server")]
    port: u16,
    /// File with the API key that requests must send
    #[arg(long, value_name = "FILE", help_heading = "Server")]
    api_key_file: Option<PathBuf>,
    /// API key that requests must send; other users of this machine can read it on the command line, unlike a file
    #[arg(
        long,
        value_name = "KEY",
        env = "MOE_ANALYZE_API_KEY",
        hide_env_values = true,
        conflicts_with = "api_key_file",
        help_heading = "Server"
    )]
    api_key: Option<String>,
    /// Name of the model in responses and in /v1/models/NAME [default: name of the model's file without its extension]
    #[arg(long, value_name = "NAME", help_heading = "Server")]
    alias: Option<String>,
    /// Number of requests that are evaluated at the same time, 1 to 256; short name: -np
    #[arg(short, long, visible_alias = "np", value_name = "N", default_value_t = 4, value_parser = integer_in(1..=256u16), help_heading = "Server")]
    parallel: u16,
    /// Number of requests that wait while --parallel requests are evaluated, 0 or more; further requests get status 429
    #[arg(long, value_name = "N", default_value_t = 64, help_heading = "Server")]
    max_queue: usize,
    /// Time limit of a request in seconds, 1 to 1000000
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = integer_in(1..=1_000_000u32), help_heading = "Server")]
    timeout: u32,
    /// Maximum size of the body of a request in KiB, 1 to 1048576
    #[arg(long, value_name = "KIB", default_value_t = 4096, value_parser = integer_in(1u32..=1 << 20), help_heading = "Server")]
    max_body_kib: u32,
    /// Jinja file with the chat template [default: the template of the model]
    #[arg(long, value_name = "FILE", help_heading = "Server")]
    chat_template: Option<PathBuf>,
    /// Write the routing of each request to a directory in DIR. If the disk cannot keep up, traces are dropped and counted
    #[arg(long, value_name = "DIR", help_heading = "Server")]
    record: Option<OutputPath>,
    /// Show the live state of the server as a page at GET /: hit rate, lanes, queue, tokens/s, and the experts of recent requests
    #[arg(long, help_heading = "Server")]
    ui: bool,
    /// Also show the text of prompts and answers in the page of --ui, to everyone who can use the server
    #[arg(long, requires = "ui", help_heading = "Server")]
    ui_text: bool,
    /// Number of CPU threads, 1 to 1024 [default: number of cores]
    #[arg(short, long, value_name = "N", value_parser = integer_in(1..=1024u16))]
    threads: Option<u16>,
    /// Tokens per forward pass (llama.cpp's ubatch), 1 to 1048576
    #[arg(short, long, value_name = "N", default_value_t = 512, value_parser = integer_in(1u32..=1 << 20))]
    batch_size: u32,
    /// Context size of each request in tokens, 1 to 16777216 [default: 4096, or the model's training context if it is shorter]
    #[arg(short, long, value_name = "N", value_parser = integer_in(1u32..=1 << 24))]
    ctx_size: Option<u32>,
    #[command(flatten)]
    cache: CacheArgs,
    // Last, because its headings apply to all options after it.
    #[command(flatten)]
    device: DeviceArgs,
}

pub fn run(args: Args, ctx: &Context) -> anyhow::Result<ExitStatus> {
    args.device.hot_cache.check_serve()?;
    let api_key = api_key(&args)?;
    let address = SocketAddr::new(args.host, args.port);
    if !args.host.is_loopback() && api_key.is_none() {
        bail!(
            "other machines can reach {}; pass an API key with --api-key-file FILE",
            args.host
        );
    }
    // Before the model is loaded, so that an occupied port is reported at once.
    let listener = std::net::TcpListener::bind(address)
        .with_context(|| format!("cannot listen on {address}"))?;
    listener.set_nonblocking(true)?;
    let address = listener.local_addr()?;

    // The threads of the endpoints use the tokenizer until the process ends.
    let gguf: &'static Gguf = Box::leak(Box::new(model::open(args.model.as_deref())?));
    let chat = chat(&args, gguf)?;
    let n_threads = args.threads.map_or_else(n_cores, usize::from);
    let adapters: &'static [LoraFile] = args.lora.open()?.leak();
    let device = args.device.clone();
    let native = Native::load(gguf, adapters, n_threads, device, args.cache, *ctx)?;
    let engine: &'static Native = Box::leak(Box::new(native));
    let trained = engine.info().n_ctx_train;
    let n_ctx = args
        .ctx_size
        .map_or(trained.min(DEFAULT_CONTEXT), |n| n as usize);
    let setup = Setup {
        create_run: None,
        mode: Mode::All,
        observer: None,
        n_ctx,
        n_positions: n_ctx,
        n_batch: args.batch_size as usize,
        n_sequences: usize::from(args.parallel),
    };
    let mut session = engine.native_session(setup)?;
    session.count_activations(args.device.hot_cache.check_perf()?)?;
    let recording = recording(&args, gguf, ctx.quiet)?;
    let params = SchedulerParams {
        n_batch: args.batch_size as usize,
        n_queue: args.max_queue,
        ..SchedulerParams::default()
    };
    let mut scheduler = Scheduler::new(&session, params, recording);
    let recent = args
        .ui
        .then(|| RecentRequests::new(RECENT_REQUESTS, args.ui_text));
    if let Some(recent) = &recent {
        scheduler = scheduler.watch(recent.clone());
    }
    let handle = scheduler.handle();
    let served = ServedModel {
        info: http::ModelInfo {
            name: name(&args, gguf),
            created: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .unwrap_or_default()
                .as_secs(),
            n_ctx,
            n_vocab: engine.info().n_vocab,
        },
        engine,
        chat,
        handle: handle.clone(),
        recent,
        learn_file: learn_file(&args)?,
        hot_tiers: session.hot_tiers(),
    };
    let ui = if args.ui {
        let page = moe_report::live_page(&format!("{} – moe-analyze", name(&args, gguf)))?;
        Some(Ui::new(page, args.ui_text))
    } else {
        None
    };
    let quiet = ctx.quiet;
    let options = Options {
        api_key,
        max_body_bytes: args.max_body_kib as usize * 1024,
        request_timeout: Duration::from_secs(args.timeout.into()),
        log: Log::new(move |line| {
            if !quiet {
                message::print(line);
            }
        }),
        ui,
        ..Options::default()
    };
    ctx.note(format_args!(
        "listening on http://{address}, {} at the same time, {} each",
        counted(args.parallel, "request"),
        counted(n_ctx, "token")
    ));
    let interrupted = interrupt::flag();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("cannot start the threads of the server")?;
    let served = std::thread::scope(|scope| {
        let endpoints = scope.spawn(|| {
            let served = runtime.block_on(async {
                let listener = TcpListener::from_std(listener)?;
                http::serve(
                    listener,
                    Arc::new(served),
                    options,
                    interruption(interrupted, &handle),
                )
                .await
            });
            handle.shutdown();
            served
        });
        scheduler.run(&mut session);
        endpoints.join()
    });
    match served {
        Ok(Ok(())) => Ok(ExitStatus::Done),
        Ok(Err(error)) => Err(error.into()),
        Err(_) => bail!("the threads of the endpoints failed"),
    }
}

/// Ends when the user interrupts the program, or the scheduler ends because of a panic.
async fn interruption(interrupted: &'static AtomicBool, handle: &Handle) {
    while !interrupted.load(Ordering::Relaxed) && handle.is_accepting() {
        tokio::time::sleep(INTERRUPT_INTERVAL).await;
    }
}

fn ip_address(text: &str) -> Result<IpAddr, ValueError> {
    number(text, "an IP address such as 127.0.0.1 or ::1", |_| true)
}

fn api_key(args: &Args) -> anyhow::Result<Option<ApiKey>> {
    let (key, place) = match (&args.api_key_file, &args.api_key) {
        (Some(file), _) => {
            let text = bounded::read_text_or_pipe(file, MAX_API_KEY_BYTES)?;
            (text.trim().to_owned(), file.display().to_string())
        }
        // An empty variable is treated as unset.
        (None, Some(key)) if !key.is_empty() => (key.clone(), "--api-key".to_owned()),
        (None, _) => return Ok(None),
    };
    match ApiKey::new(key) {
        Some(key) => Ok(Some(key)),
        None => bail!("{place}: an API key consists of one or more visible ASCII characters"),
    }
}

/// The template of the model or of the file. A model without a template can still complete texts.
fn chat(args: &Args, gguf: &Gguf) -> anyhow::Result<Result<ModelChat, String>> {
    let file = args.chat_template.as_deref();
    match ModelChat::new(gguf, file) {
        Ok(chat) => Ok(Ok(chat)),
        Err(error) if file.is_none() => Ok(Err(output::one_line(&error))),
        Err(error) => Err(error),
    }
}

/// The file of `--hot-cache`, unless it is a plan, which a learn file must not replace.
fn learn_file(args: &Args) -> anyhow::Result<Option<PathBuf>> {
    let Some(path) = args.device.hot_cache_file() else {
        return Ok(None);
    };
    let is_plan = path.exists() && hot_cache::is_plan(path)?;
    Ok((!is_plan).then(|| path.to_owned()))
}

fn recording(args: &Args, gguf: &Gguf, quiet: bool) -> anyhow::Result<Option<Recording>> {
    let Some(dir) = &args.record else {
        return Ok(None);
    };
    if dir.exists() && !dir.is_dir() {
        bail!(
            "cannot record to {}: it is a file, not a directory; pass a directory",
            dir.display()
        );
    }
    let path = gguf.files()[0].path.to_string_lossy();
    let params = RecordingParams::new(dir.to_path_buf(), ModelInfo::from_gguf(&path, gguf)?);
    let started = Recording::start(params, move |error| {
        if !quiet {
            message::print(format_args!("warning: a trace cannot be written: {error}"));
        }
    });
    let started = started.with_context(|| format!("cannot record to {}", dir.display()));
    started.map(Some)
}

fn name(args: &Args, gguf: &Gguf) -> String {
    let file = || gguf.files()[0].path.file_stem().unwrap_or_default();
    args.alias
        .clone()
        .unwrap_or_else(|| file().to_string_lossy().into_owned())
}
