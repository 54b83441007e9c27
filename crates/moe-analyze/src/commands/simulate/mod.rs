//! `simulate`: what a cache of experts would have hit, under which policy, with how many bytes.

mod budget;
mod inputs;
mod machine;
mod offload;
mod prefetch;
mod report;
mod sample;

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use moe_analysis::simulate::{self, Offload, Row, SimulateOptions};
use moe_placement::cache::{BuildError, Online, PolicyName};
use moe_placement::plan::MIB;

use crate::context::Context;
use crate::exit_status::ExitStatus;
use crate::files::{self, OutputPath};
use crate::option_values::{ValueError, number};
use crate::output::{self, Format};
use crate::plot::{self, Axis, Chart, Figure, Line};
use crate::progress::Progress;
use crate::traces::TraceArgs;
use budget::Budgets;
use inputs::Inputs;
use machine::MachineArgs;
use prefetch::PrefetchArgs;

/// Simulate caches of experts: hit rates and bytes moved, for every policy and budget
///
/// A row for each budget and policy: hits of all look-ups and of those of generated tokens, in percent; MiB read for what was
/// missed; bytes moved, with what was loaded without being asked for; MiB moved beyond Belady's policy; experts evicted. With
/// --link-gb-s, tokens per second, if nothing overlaps and if loads are hidden as well as can be; with --cpu-expert-us, how
/// many times those without a cache.
/// docs/cache-policies.md describes the policies.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A run, a trace, a directory of tables, or a trace of another tool that tells the tokens in order
    #[arg(value_name = "TRACE")]
    path: PathBuf,
    /// Sizes of the cache: numbers, A..B (doubling from A to B) or A..B+STEP [default: eighths of all experts]
    #[arg(long, value_name = "MIB[,…]", value_delimiter = ',')]
    budget_mib: Vec<Budgets>,
    /// Policies: all, or belady, beladysize, lru, lfu, lfuda, lfru, slru, s3fifo, arc, clock, random; layer and one of them
    /// for a cache in each layer (layer alone: LRU); static, staticoracle, staticlearn, hotcache
    #[arg(
        long,
        value_name = "NAME[,…]",
        value_delimiter = ',',
        default_value = "belady,lru,lfu,random,layer,layerlfu"
    )]
    policy: Vec<PolicyChoice>,
    /// Learn file, or anything that `hotness` counts, that staticlearn and hotcache start from
    #[arg(long, value_name = "FILE")]
    learn: Option<PathBuf>,
    /// Share of the look-ups that static learns from, before it holds anything
    #[arg(long, value_name = "SHARE", default_value_t = 0.1, value_parser = share)]
    first: f64,
    /// Share of the hot cache that is exchanged after a request, at most
    #[arg(long, value_name = "SHARE", default_value_t = 0.1, value_parser = share)]
    update_rate: f64,
    /// Estimate LRU's hits from this share of the experts, for very long traces; half of the 95 % interval is told beside them
    #[arg(long, value_name = "RATE", value_parser = sample::rate, conflicts_with_all = ["predictor", "predictions", "offload", "link_gb_s"])]
    sample: Option<f64>,
    /// Seed of random and of --sample
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Bytes of each expert as CSV, layer,expert,bytes [default: what the trace or --model tells]
    #[arg(long, value_name = "FILE.csv", conflicts_with = "model")]
    sizes: Option<PathBuf>,
    /// How rows are printed
    #[arg(short, long = "output", value_name = "FORMAT", default_value = "table")]
    output: Format,
    /// Draw hit rates against budgets; the extension chooses: png, svg
    #[arg(long, value_name = "FILE.png|svg")]
    plot: Option<OutputPath>,
    /// Replace the file of --plot if it exists
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    trace: TraceArgs,
    #[command(flatten)]
    machine: MachineArgs,
    /// Print instead, by size of a batch, what its experts take on the CPU, and on the GPU after they were copied there
    #[arg(long, requires = "cpu_expert_us", conflicts_with_all = ["plot", "predictor", "predictions", "policy", "budget_mib"])]
    offload: bool,
    #[command(flatten)]
    prefetch: PrefetchArgs,
}

/// What is named on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PolicyChoice {
    All,
    One(PolicyName),
}

impl std::str::FromStr for PolicyChoice {
    type Err = BuildError;

    fn from_str(name: &str) -> Result<PolicyChoice, BuildError> {
        match name {
            "all" => Ok(PolicyChoice::All),
            _ => name.parse().map(PolicyChoice::One),
        }
    }
}

fn share(text: &str) -> Result<f64, ValueError> {
    number(text, "a number from 0 to 1", |share| {
        (0.0..=1.0).contains(share)
    })
}

pub fn run(args: Args, ctx: &Context) -> anyhow::Result<ExitStatus> {
    if let Some(plot) = &args.plot {
        plot::check_extension(plot)?;
        files::check_output(plot, args.force)?;
    }
    let policies = policies(&args, ctx)?;
    let lru = PolicyName::Shared(Online::Lru);
    if args.sample.is_some() && policies != [lru] {
        bail!("--sample estimates lru alone; give --policy lru");
    }
    let inputs = Inputs::read(
        &args.path,
        args.sizes.as_deref(),
        args.learn.as_deref(),
        args.prefetch.predictions(),
        &args.trace,
        ctx,
    )?;
    let batches = &inputs.batches;
    let machine = args.machine.machine();
    let offload = machine.and_then(|machine| Offload::new(batches, &machine));
    if let Some(offload) = &offload {
        offload::remark(offload, ctx);
    }
    if args.offload {
        let offload = offload.context("the trace chooses no experts")?;
        output::to_stdout(args.output, |stdout| {
            offload::print(&offload, stdout, args.output)
        })?;
        return Ok(ExitStatus::Done);
    }
    let budgets = budget::bytes(&args.budget_mib, batches.experts().total_bytes());
    report::remark(&inputs, &budgets, &policies, ctx);

    let options = SimulateOptions {
        learn: inputs.learn,
        first: args.first,
        update_rate: args.update_rate,
        seed: args.seed,
    };
    if let (true, Some(machine)) = (args.prefetch.is_asked(), machine) {
        let how = args.prefetch.prefetch(&machine, batches, ctx)?;
        let plan = prefetch::Plan {
            batches,
            budgets: &budgets,
            policies: &policies,
            setting: &simulate::setting(batches, &policies, &options)?,
        };
        let rows = args
            .prefetch
            .rows(&plan, &how, inputs.predictions.as_ref(), ctx)?;
        output::to_stdout(args.output, |stdout| {
            prefetch::print(stdout, args.output, &rows, batches.needs().tokens)
        })?;
        return Ok(ExitStatus::Done);
    }

    if let Some(rate) = args.sample {
        let estimates = simulate::sampled_lru(batches, &budgets, rate, args.seed)?;
        if let Some(plot) = &args.plot {
            let rows = estimates.iter().map(|estimate| Row {
                budget: estimate.budget,
                policy: lru,
                outcome: estimate.outcome,
            });
            draw(&args, plot, &policies, rows, ctx)?;
        }
        output::to_stdout(args.output, |stdout| {
            sample::print(stdout, args.output, &estimates)
        })?;
        return Ok(ExitStatus::Done);
    }

    // Regret is against Belady's policy, asked for or not.
    let mut simulated = policies.clone();
    if !simulated.contains(&PolicyName::Belady) {
        simulated.push(PolicyName::Belady);
    }
    let n_rows = budgets.len() * simulated.len();
    let progress = Progress::items(ctx, "caches", n_rows as u64);
    let rows = simulate::simulate(batches, &budgets, &simulated, &options, || progress.inc(1))?;
    drop(progress);
    if let Some(plot) = &args.plot {
        let wanted = rows.iter().filter(|row| policies.contains(&row.policy));
        draw(&args, plot, &policies, wanted.copied(), ctx)?;
    }
    let results = report::Results {
        needs: batches.needs(),
        rows: &rows,
        policies: &policies,
        machine,
    };
    results.remark(ctx);
    output::to_stdout(args.output, |stdout| results.print(stdout, args.output))?;
    Ok(ExitStatus::Done)
}

/// The policies that are named, each once, in their order.
fn policies(args: &Args, ctx: &Context) -> anyhow::Result<Vec<PolicyName>> {
    let mut policies: Vec<PolicyName> = Vec::new();
    for choice in &args.policy {
        let named = match choice {
            PolicyChoice::One(policy) => vec![*policy],
            PolicyChoice::All => PolicyName::all(),
        };
        for policy in named {
            if policy.needs_learn_file() && args.learn.is_none() {
                if *choice != PolicyChoice::All {
                    bail!("{policy} starts from a learn file; name one with --learn");
                }
                ctx.remark(format_args!("{policy} is left out: it needs --learn"));
            } else if !policies.contains(&policy) {
                policies.push(policy);
            }
        }
    }
    Ok(policies)
}

fn draw(
    args: &Args,
    plot: &Path,
    policies: &[PolicyName],
    rows: impl Iterator<Item = Row>,
    ctx: &Context,
) -> anyhow::Result<()> {
    let source = args.path.file_name().unwrap_or(args.path.as_os_str());
    let figure = curves(&source.to_string_lossy(), policies, rows);
    files::commit(vec![figure.prepare(plot, args.force)?])?;
    ctx.remark(format_args!("drew {}", plot.display()));
    Ok(())
}

/// Hit rates of generated tokens, or of all where the trace does not tell them.
fn curves(source: &str, policies: &[PolicyName], rows: impl Iterator<Item = Row>) -> Figure {
    let rows: Vec<Row> = rows.collect();
    let is_decode = rows
        .iter()
        .all(|row| row.outcome.hit_pct_decode().is_some());
    let lines = policies.iter().map(|policy| {
        let rows = rows.iter().filter(|row| row.policy == *policy);
        let points = rows.map(|row| {
            let hit_pct = match row.outcome.hit_pct_decode() {
                Some(hit_pct) if is_decode => hit_pct,
                _ => row.outcome.hit_pct_cum(),
            };
            (row.budget as f64 / MIB as f64, hit_pct)
        });
        Line::new(policy.to_string(), points.collect())
    });
    let look_ups = if is_decode {
        "look-ups of generated tokens"
    } else {
        "all look-ups"
    };
    let highest = rows.iter().map(|row| row.budget).max().unwrap_or(0);
    Chart {
        title: "Hit rate of an expert cache".into(),
        subtitle: format!("{source}: {look_ups}"),
        x: Axis::integers("cache size (MiB)", 0.0, highest as f64 / MIB as f64),
        y: Axis::numbers("hit rate (%)", 0.0, 100.0),
        lines: lines.collect(),
    }
    .figure()
}

/// LRU and its like forget everything below a token's cycle of layers.
fn goes_by_last_use(policy: PolicyName) -> bool {
    matches!(
        policy,
        PolicyName::Shared(Online::Lru | Online::Clock | Online::Slru | Online::S3Fifo)
    )
}
