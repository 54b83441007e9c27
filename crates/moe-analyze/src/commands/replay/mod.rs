//! `replay`: measures the MoE layers of a model with the routing of a trace.

mod report;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use anyhow::{Context as _, bail};
use moe_engine::Mode;
use moe_executor::cpu::bandwidth::read_bandwidth;
use moe_executor::cpu::threads::{Threads, n_cores};
use moe_executor::recorder::Recorder;
use moe_executor::replay::{Collector, Replay, Routes};
use moe_executor::{CacheParams, Devices, Model};
use moe_files::text::counted;
use moe_gguf::Gguf;
use moe_trace::manifest::{Gpu, Sampling, Tokens};
use moe_trace::{LayerId, Phase, RunOptions, RunWriter};

use crate::context::Context;
use crate::engine::cache_run::{CacheResults, PreparedCacheRun};
use crate::engine::device::DeviceArgs;
use crate::engine::hot_cache::Machine;
use crate::engine::lora::{self, LoraArgs, LoraFile};
use crate::engine::native::{self, BANDWIDTH_BYTES};
use crate::exit_status::ExitStatus;
use crate::files::OutputPath;
use crate::interrupt;
use crate::model;
use crate::option_values::{at_least, integer_in};
use crate::output::{self, Format};
use crate::progress::Progress;
use crate::recording;
use crate::traces::{self, TraceArgs};
use report::{Bandwidths, ReplayReport};

/// Run only the MoE layers of a model, with the routing of a trace, and measure them
///
/// Needs --model. Uses the experts of the trace instead of the router's, and random layer inputs; skips attention and dense layers.
/// Prints one row per layer and phase, and one row per phase for all layers: time per token, bytes read (each selected expert once per
/// batch, and shared experts), the fraction of memory bandwidth used, and the number of experts per lane (where an expert was computed,
/// see docs/glossary.md). One warm-up run precedes the measured runs.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  moe-analyze replay runs/first --model model.gguf --device cuda --policy gpu",
    // A replay does not evaluate prompts, so these options are rejected.
    mut_arg("auto_learn", |arg| arg.hide(true)),
    mut_arg("warmup_prompt", |arg| arg.hide(true))
)]
pub struct Args {
    /// Run directory, trace.bin, directory of tables, or a trace of another tool with tokens in order
    #[arg(value_name = "TRACE")]
    path: PathBuf,
    #[command(flatten)]
    trace: TraceArgs,
    #[command(flatten)]
    lora: LoraArgs,
    /// Number of CPU threads, 1 to 1024 [default: number of cores]
    #[arg(short, long, value_name = "N", value_parser = integer_in(1..=1024u16))]
    threads: Option<u16>,
    /// Stop after the forward pass that contains the N-th token of the trace, at least 1 [default: entire trace]
    #[arg(long, value_name = "N", value_parser = at_least(1u64))]
    tokens: Option<u64>,
    /// Prompt tokens per forward pass if the trace does not contain its batches, 1 to 1048576
    #[arg(short, long, value_name = "N", default_value_t = 512, value_parser = integer_in(1u32..=1 << 20))]
    batch_size: u32,
    /// Random seed for the layer inputs
    #[arg(short, long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Number of measured runs over the trace, at least 1; times are their mean
    #[arg(short, long, value_name = "N", default_value_t = 3, value_parser = at_least(1u32))]
    repetitions: u32,
    /// Record the expert operations of one more run over the trace to a run directory
    #[arg(long, value_name = "DIR")]
    out: Option<OutputPath>,
    /// Replace the run directory of --out if it exists
    #[arg(long)]
    force: bool,
    /// Format of the rows on stdout
    #[arg(short, long, value_name = "FORMAT", default_value = "table")]
    output: Format,
    // Last, because its headings apply to all options after it.
    #[command(flatten)]
    device: DeviceArgs,
}

pub fn run(args: Args, ctx: &Context) -> anyhow::Result<ExitStatus> {
    let Some(path) = args.trace.model() else {
        bail!("replay needs the weights of the model; pass --model FILE.gguf");
    };
    args.device.hot_cache.check_replay()?;
    args.device.check()?;
    let gguf = model::open(Some(path))?;
    let adapters = args.lora.open()?;
    let model = Model::load_with_adapters(&gguf, &lora::adapters(&adapters))?;
    native::print_warnings(&model, ctx);
    let routes = read(&args, ctx)?;
    check_layers(&model, &routes, path, ctx)?;
    let n_threads = args.threads.map_or_else(n_cores, usize::from);
    let threads = Threads::new(n_threads)?;
    let devices = args.device.open(&model, ctx)?;
    model.check_adapters(&devices)?;
    let machine = Machine {
        model: &model,
        devices: &devices,
        kv_cache: CacheParams::new(0),
        n_batch: args.batch_size as usize,
    };
    let prepared = PreparedCacheRun::new(&args.device, &machine, None, &threads, *ctx)?;
    if let Some(out) = &args.out {
        RunWriter::check(out, args.force)?;
    }
    let interrupted = interrupt::flag();

    let silent = Recorder::new(None);
    let mut replay = Replay::new(&model, &threads, devices, silent, args.seed);
    let mut cache = match prepared {
        Some(prepared) => Some(prepared.enable(&mut replay.expert_cache())?),
        None => None,
    };
    let n_passes = routes.passes().count() as u64;
    let n_runs = 1 + u64::from(args.repetitions) + u64::from(args.out.is_some());
    let progress = Progress::items(ctx, "passes", n_passes * n_runs);
    let mut over_the_trace =
        |replay: &mut Replay, report: &mut ReplayReport| -> anyhow::Result<()> {
            if let Some(cache) = &mut cache {
                cache.restart(&mut replay.expert_cache())?;
            }
            let mut last = None;
            for pass in routes.passes() {
                if interrupted.load(Ordering::Relaxed) {
                    bail!("interrupted");
                }
                let now = (pass.sequence_id, pass.phase);
                if let (Some(cache), Some((sequence, phase))) = (&mut cache, last.replace(now)) {
                    if sequence != pass.sequence_id {
                        cache.end_sequence(&mut replay.expert_cache(), false);
                    } else if (phase, pass.phase) == (Phase::Prompt, Phase::Generate) {
                        cache.end_prompt(&mut replay.expert_cache());
                    }
                }
                report.add(pass.phase, &replay.run(&pass)?);
                progress.inc(1);
            }
            if let Some(cache) = &mut cache {
                cache.end_sequence(&mut replay.expert_cache(), true);
            }
            Ok(())
        };
    over_the_trace(&mut replay, &mut ReplayReport::default())?;
    let mut report = ReplayReport::default();
    for _ in 0..args.repetitions {
        over_the_trace(&mut replay, &mut report)?;
    }
    let ran = match args.out.as_deref() {
        None => Ok(()),
        // Only now, so that a run that it replaces stays unchanged until here.
        Some(out) => {
            let files = (&gguf, adapters.as_slice());
            begin_run(&args, out, files, &model, n_threads, replay.devices()).and_then(|writer| {
                replay.record(Recorder::new(Some(writer)).with_mode(Mode::Experts));
                over_the_trace(&mut replay, &mut ReplayReport::default())
            })
        }
    };
    let results = cache.and_then(|cache| cache.finish(&replay.expert_cache()));
    let gpus = replay.devices().describe();
    let recorded = match replay.record(Recorder::new(None)).into_writer() {
        Some(writer) => finish_run(writer, ran, gpus, results, &routes, ctx),
        None => ran,
    };
    for fallbacks in native::fallbacks(&replay.devices().describe()) {
        ctx.note(fallbacks);
    }
    let first_gpu = replay.devices().gpus().first();
    let bandwidths = Bandwidths {
        host: read_bandwidth(&threads, BANDWIDTH_BYTES),
        gpu: first_gpu.and_then(|gpu| native::gpu_bandwidth(gpu.bandwidth(), ctx)),
    };
    let rows = report.rows();
    output::to_stdout(args.output, |out| {
        report::table(&rows, args.repetitions, &bandwidths).write(out, args.output)
    })?;
    // The measurement is complete without the recorded run.
    recorded?;
    Ok(ExitStatus::Done)
}

/// Reads the routing of the trace.
fn read(args: &Args, ctx: &Context) -> anyhow::Result<Routes> {
    args.trace.check(&[&args.path])?;
    let options = args.trace.options()?;
    let input = traces::open(&args.path, &options)?;
    let mut collector = Collector::new(args.tokens.unwrap_or(u64::MAX), args.batch_size);
    traces::read(&args.path, &input, &options, &mut collector, ctx)?;
    let routes = collector.finish();
    let routes = routes.with_context(|| args.path.display().to_string())?;
    if routes.has_uniform_weights() {
        ctx.note(
            "the trace contains no router weights: all experts of a token get the same weight",
        );
    }
    Ok(routes)
}

/// Prints which layers are not replayed.
///
/// # Errors
/// No layer of the trace has experts in the model.
fn check_layers(model: &Model, routes: &Routes, path: &Path, ctx: &Context) -> anyhow::Result<()> {
    let passes = routes.passes();
    let in_trace: BTreeSet<LayerId> = passes
        .flat_map(|pass| pass.layers())
        .map(|chosen| chosen.layer)
        .collect();
    let hp = model.hparams();
    let with_experts = hp.layers().filter(|&layer| model.has_experts(layer));
    let with_experts: BTreeSet<LayerId> = with_experts.collect();
    if with_experts.is_disjoint(&in_trace) {
        bail!(
            "no layer of the trace has experts in {}; pass the model of the trace",
            path.display()
        );
    }
    let list = |layers: &mut dyn Iterator<Item = &LayerId>| {
        let layers: Vec<String> = layers.map(LayerId::to_string).collect();
        layers.join(", ")
    };
    let dense = list(&mut in_trace.difference(&with_experts));
    if !dense.is_empty() {
        ctx.note(format_args!(
            "warning: layers {dense} of the trace are skipped, because the model has no experts in these layers"
        ));
    }
    let missing = list(&mut with_experts.difference(&in_trace));
    if !missing.is_empty() {
        ctx.note(format_args!(
            "warning: layers {missing} of the model are skipped, because the trace has no routing in these layers"
        ));
    }
    let mut used = routes.n_expert_used().iter().filter_map(|(&layer, &k)| {
        let own = hp.n_expert_used_by_layer.get(layer.index())?;
        Some((layer, k, *own))
    });
    if let Some((layer, k, own)) = used.find(|&(_, k, own)| own > 0 && k != own) {
        ctx.note(format_args!(
            "warning: a token selects {} in layer {layer} of the trace, but {own} in the model",
            counted(k as u64, "expert")
        ));
    }
    Ok(())
}

fn begin_run(
    args: &Args,
    out: &Path,
    (gguf, adapters): (&Gguf, &[LoraFile]),
    model: &Model,
    n_threads: usize,
    devices: &Devices,
) -> anyhow::Result<RunWriter> {
    let map = lora::offset_map(gguf, adapters);
    let info = native::info(model);
    let mut manifest = recording::manifest(gguf, &info, &args.device, n_threads)?;
    lora::describe(&mut manifest, adapters);
    recording::set_gpus(&mut manifest, native::gpus_at_start(devices));
    manifest.sampling = Sampling {
        method: "none".into(),
        ..Sampling::default()
    };
    let options = RunOptions {
        force: args.force,
        ..RunOptions::default()
    };
    Ok(RunWriter::create(out, manifest, &map, options)?)
}

/// Completes the run, also if the pass over the trace failed or was interrupted.
fn finish_run(
    mut writer: RunWriter,
    ran: anyhow::Result<()>,
    gpus: Vec<Gpu>,
    results: Option<CacheResults>,
    routes: &Routes,
    ctx: &Context,
) -> anyhow::Result<()> {
    if let Some(results) = results {
        // `finish` returns the error of a failed write.
        let _ = results.write(&mut writer);
    }
    let manifest = writer.manifest_mut();
    recording::set_gpus(manifest, gpus);
    match &ran {
        Ok(()) => manifest.tokens = tokens(routes),
        Err(error) => manifest.stopped = Some(error.to_string()),
    }
    let dir = writer.dir().to_owned();
    let records = writer.finish();
    if let Err(error) = ran {
        return Err(recording::failure(error, &dir, records));
    }
    ctx.note(format_args!(
        "recorded {} to {}",
        counted(records?, "record"),
        dir.display()
    ));
    Ok(())
}

/// Returns the number of tokens of the layer with the most routed tokens, in each phase.
fn tokens(routes: &Routes) -> Tokens {
    let mut layers = std::collections::BTreeMap::<LayerId, [u64; 2]>::new();
    for pass in routes.passes() {
        for chosen in pass.layers() {
            let phase = usize::from(pass.phase.number());
            layers.entry(chosen.layer).or_default()[phase] += chosen.positions.len() as u64;
        }
    }
    let most = |phase: usize| layers.values().map(|n| n[phase]).max().unwrap_or(0);
    let sequences: BTreeSet<u32> = routes.passes().map(|pass| pass.sequence_id).collect();
    Tokens {
        prompt: most(0),
        generated: most(1),
        sequences: sequences.len() as u64,
    }
}
