//! `replay`: the MoE layers of a model with the routing of a trace, measured.

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
use moe_executor::{Devices, Model};
use moe_gguf::Gguf;
use moe_gguf::map::OffsetMap;
use moe_gguf::text::counted;
use moe_trace::manifest::{Gpu, Sampling, Tokens};
use moe_trace::{LayerId, RunOptions, RunWriter};

use crate::context::Context;
use crate::engine::device::DeviceArgs;
use crate::engine::native::{self, BANDWIDTH_BYTES};
use crate::exit_status::ExitStatus;
use crate::files::OutputPath;
use crate::interrupt;
use crate::model;
use crate::option_values::{at_least, whole};
use crate::output::{self, Format};
use crate::progress::Progress;
use crate::recording;
use crate::traces::{self, TraceArgs};
use report::{Bandwidths, ReplayReport};

/// Run the MoE layers of a model with the routing of a trace, and measure them
///
/// The router and all that is no MoE layer is left out; what follows the router is what `record` runs. Activations are random,
/// the same for the same --seed. A row for each layer and phase, and one without a layer for all of them: time for a token, bytes of
/// the chosen experts (each once a batch) and of shared ones, the share of the memory's measured bandwidth, and how many experts
/// were computed where. A run before the measured ones warms up.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A run, a trace, a directory of tables, or a trace of another tool that tells the tokens in order
    #[arg(value_name = "TRACE")]
    path: PathBuf,
    #[command(flatten)]
    trace: TraceArgs,
    /// Threads that compute, 1 to 1024 [default: one a core]
    #[arg(short, long, value_name = "N", value_parser = whole(1..=1024u16))]
    threads: Option<u16>,
    /// Stop after the pass that the N-th token of the trace is in [default: all]
    #[arg(long, value_name = "N", value_parser = at_least(1u64))]
    tokens: Option<u64>,
    /// Prompt tokens computed at once, where the trace does not tell its batches
    #[arg(short, long, value_name = "N", default_value_t = 512, value_parser = whole(1u32..=1 << 20))]
    batch_size: u32,
    /// Seed of the activations
    #[arg(short, long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Measured runs over the trace; times are their mean
    #[arg(short, long, value_name = "N", default_value_t = 3, value_parser = at_least(1u32))]
    repetitions: u32,
    /// Record one more run over the trace, its expert operations, into a run directory
    #[arg(long, value_name = "DIR")]
    out: Option<OutputPath>,
    /// Replace the run directory if it exists
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    device: DeviceArgs,
    /// Format on stdout
    #[arg(short, long, value_name = "FORMAT", default_value = "table")]
    output: Format,
}

pub fn run(args: Args, ctx: &Context) -> anyhow::Result<ExitStatus> {
    let Some(path) = args.trace.model() else {
        bail!("replay computes with the weights of a model; name it with --model FILE.gguf");
    };
    args.device.check()?;
    let gguf = model::open(Some(path))?;
    let model = Model::load(&gguf)?;
    native::print_warnings(&model, ctx);
    let routes = read(&args, ctx)?;
    check_layers(&model, &routes, path, ctx)?;
    let n_threads = args.threads.map_or_else(n_cores, usize::from);
    let threads = Threads::new(n_threads)?;
    let devices = args.device.open(&model, ctx)?;
    if let Some(out) = &args.out {
        RunWriter::check(out, args.force)?;
    }
    let interrupted = interrupt::flag();

    let silent = Recorder::new(None);
    let mut replay = Replay::new(&model, &threads, devices, silent, args.seed);
    let n_passes = routes.passes().count() as u64;
    let n_runs = 1 + u64::from(args.repetitions) + u64::from(args.out.is_some());
    let progress = Progress::items(ctx, "passes", n_passes * n_runs);
    let over_the_trace = |replay: &mut Replay, report: &mut ReplayReport| -> anyhow::Result<()> {
        for pass in routes.passes() {
            if interrupted.load(Ordering::Relaxed) {
                bail!("interrupted");
            }
            report.add(pass.phase, &replay.run(&pass)?);
            progress.inc(1);
        }
        Ok(())
    };
    over_the_trace(&mut replay, &mut ReplayReport::default())?;
    let mut report = ReplayReport::default();
    for _ in 0..args.repetitions {
        over_the_trace(&mut replay, &mut report)?;
    }
    let recorded = args.out.as_deref().map_or(Ok(()), |out| {
        // Not before: until then a run that it replaces is as it was.
        let writer = begin_run(&args, out, &gguf, &model, n_threads, replay.devices())?;
        replay.record(Recorder::new(Some(writer)).with_mode(Mode::Experts));
        let ran = over_the_trace(&mut replay, &mut ReplayReport::default());
        let gpus = replay.devices().describe();
        match replay.record(Recorder::new(None)).into_writer() {
            Some(writer) => finish_run(writer, ran, gpus, &routes, ctx),
            None => ran,
        }
    });
    for fallbacks in native::fallbacks(&replay.devices().describe()) {
        ctx.remark(fallbacks);
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

/// The routing of the trace.
fn read(args: &Args, ctx: &Context) -> anyhow::Result<Routes> {
    args.trace.check(&[&args.path])?;
    let options = args.trace.options()?;
    let input = traces::open(&args.path, &options)?;
    let mut collector = Collector::new(args.tokens.unwrap_or(u64::MAX), args.batch_size);
    traces::read(&args.path, &input, &options, &mut collector, ctx)?;
    let routes = collector.finish();
    let routes = routes.with_context(|| args.path.display().to_string())?;
    if routes.has_even_weights() {
        ctx.remark("the trace lacks router weights: all experts of a token weigh the same");
    }
    Ok(routes)
}

/// Tells which layers are not replayed.
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
            "no layer of the trace has experts in {}; give the model that it was traced with",
            path.display()
        );
    }
    let list = |layers: &mut dyn Iterator<Item = &LayerId>| {
        let layers: Vec<String> = layers.map(LayerId::to_string).collect();
        layers.join(", ")
    };
    let dense = list(&mut in_trace.difference(&with_experts));
    if !dense.is_empty() {
        ctx.remark(format_args!(
            "left out: the model has no experts in layer {dense}"
        ));
    }
    let missing = list(&mut with_experts.difference(&in_trace));
    if !missing.is_empty() {
        ctx.remark(format_args!(
            "left out: the trace has nothing of layer {missing}"
        ));
    }
    let mut used = routes.n_expert_used().iter().filter_map(|(&layer, &k)| {
        let own = hp.n_expert_used_by_layer.get(layer.index())?;
        Some((layer, k, *own))
    });
    if let Some((layer, k, own)) = used.find(|&(_, k, own)| own > 0 && k != own) {
        ctx.remark(format_args!(
            "in layer {layer} a token has {} here, {own} in the model",
            counted(k as u64, "expert")
        ));
    }
    Ok(())
}

fn begin_run(
    args: &Args,
    out: &Path,
    gguf: &Gguf,
    model: &Model,
    n_threads: usize,
    devices: &Devices,
) -> anyhow::Result<RunWriter> {
    let map = OffsetMap::new(gguf);
    let info = native::info(model);
    let mut manifest = recording::manifest(gguf, &map, &info, &args.device, n_threads)?;
    recording::set_gpus(&mut manifest, native::gpus_at_start(devices));
    manifest.sampling = Sampling {
        method: "none".into(),
        ..Sampling::default()
    };
    let options = RunOptions {
        force: args.force,
        max_trace_bytes: None,
    };
    Ok(RunWriter::create(out, manifest, &map, options)?)
}

/// Completes the run, also where the pass over the trace failed or was interrupted.
fn finish_run(
    mut writer: RunWriter,
    ran: anyhow::Result<()>,
    gpus: Vec<Gpu>,
    routes: &Routes,
    ctx: &Context,
) -> anyhow::Result<()> {
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
    ctx.remark(format_args!(
        "recorded {} into {}",
        counted(records?, "record"),
        dir.display()
    ));
    Ok(())
}

/// Tokens of the layer that routes most, in each phase.
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
