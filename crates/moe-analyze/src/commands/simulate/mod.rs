//! `simulate`: hit rates of expert caches by policy and size.

mod budget;
mod inputs;
mod machine;
mod offload;
mod prefetch;
mod report;
mod sample;

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use moe_analysis::simulate::{self, Offload, PolicyResult, SimulateOptions};
use moe_placement::cache::{BuildError, OnlinePolicy, PolicyName};
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

/// Simulate expert caches on a trace: hit rates and bytes copied by policy and cache size
///
/// Prints one row per cache size and policy: hit rates of all lookups and of decode lookups, MiB read for misses, bytes copied, regret (MiB
/// copied in excess of Belady's policy) and evictions. With --pcie-gb-s, adds bounds on tokens/s: without any overlap of copies and
/// computation, and with perfect overlap. With --cpu-expert-us, adds the speedup over no cache. docs/cache-policies.md describes the
/// policies.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  moe-analyze simulate runs/first --budget-mib 256..4096 --policy lru,lfu,belady --plot hits.svg\n  \
        moe-analyze simulate runs/first --budget-mib 1024 --pcie-gb-s 25 --predictor previous"
)]
pub struct Args {
    /// Run directory, trace.bin, directory of tables, or a trace of another tool with tokens in order
    #[arg(value_name = "TRACE")]
    path: PathBuf,
    /// Cache sizes in MiB: integers of 0 or more, A..B (doubling from A to B) or A..B+STEP [default: up to 8 sizes, 1/8 to 8/8 of the
    /// size of all experts, rounded up to MiB]
    #[arg(long, value_name = "MIB[,…]", value_delimiter = ',')]
    budget_mib: Vec<Budgets>,
    /// Cache policies: belady, beladysize, lru, lfu, lfuda, lfru, slru, s3fifo, arc, clock, random, static, staticoracle, staticlearn,
    /// hotcache, or layerNAME for a separate cache per layer (NAME is one of lru to random; layer means layerlru). all selects every
    /// policy, but layerNAME only as layer and layerlfu, and staticlearn and hotcache only with --learn
    #[arg(
        long,
        value_name = "NAME[,…]",
        value_delimiter = ',',
        default_value = "belady,lru,lfu,random,layer,layerlfu"
    )]
    policy: Vec<PolicyChoice>,
    /// Learn file (or a trace to count) that the policies staticlearn and hotcache start from
    #[arg(long, value_name = "FILE", help_heading = "Policies")]
    learn: Option<PathBuf>,
    /// Fraction of the lookups that the policy static counts before it fills the cache, 0 to 1
    #[arg(long, alias = "first", value_name = "FRACTION", default_value_t = 0.1, value_parser = fraction, help_heading = "Policies")]
    train_fraction: f64,
    /// Maximum fraction of the cache that the policy hotcache exchanges after a request, 0 to 1
    #[arg(long, value_name = "FRACTION", default_value_t = 0.1, value_parser = fraction, help_heading = "Policies")]
    update_rate: f64,
    /// Estimate the hit rate from this fraction of the experts, above 0 and at most 1, for very long traces, with --policy lru; adds the
    /// half-width of the 95 % confidence interval
    #[arg(long, value_name = "RATE", value_parser = sample::rate, help_heading = "Policies",
          conflicts_with_all = ["predictor", "predictions", "offload", "pcie_gb_s"])]
    sample: Option<f64>,
    /// Random seed for the policy random and for --sample
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Policies")]
    seed: u64,
    /// CSV file with the size of each expert, and the header layer,expert,bytes [default: sizes from the trace or --model]
    #[arg(long, value_name = "FILE.csv", conflicts_with = "model")]
    sizes: Option<PathBuf>,
    /// Format of the rows on stdout
    #[arg(short, long = "output", value_name = "FORMAT", default_value = "table")]
    output: Format,
    /// Plot hit rates by cache size; the extension selects the format: png, svg
    #[arg(long, value_name = "FILE.png|svg")]
    plot: Option<OutputPath>,
    /// Replace the file of --plot if it exists
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    trace: TraceArgs,
    #[command(flatten)]
    machine: MachineArgs,
    /// Print one row per batch size instead of one per cache: the time of the batch's experts on the CPU, and on the GPU including H2D
    /// copies; needs --cpu-expert-us
    #[arg(long, requires = "cpu_expert_us", help_heading = "Speed model (needs --pcie-gb-s; use measured values)",
          conflicts_with_all = ["plot", "predictor", "predictions", "policy", "budget_mib"])]
    offload: bool,
    #[command(flatten)]
    prefetch: PrefetchArgs,
}

/// A value of `--policy`.
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

fn fraction(text: &str) -> Result<f64, ValueError> {
    number(text, "a number from 0 to 1", |fraction| {
        (0.0..=1.0).contains(fraction)
    })
}

pub fn run(args: Args, ctx: &Context) -> anyhow::Result<ExitStatus> {
    if let Some(plot) = &args.plot {
        plot::check_extension(plot)?;
        files::check_output(plot, args.force)?;
    }
    let policies = policies(&args, ctx)?;
    let lru = PolicyName::Shared(OnlinePolicy::Lru);
    if args.sample.is_some() && policies != [lru] {
        bail!("--sample supports only the policy lru; pass --policy lru");
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
        if machine
            .is_some_and(|machine| machine.device.is_none() && machine.memory_bytes_per_s.is_none())
        {
            ctx.note(
                "warning: the time of an expert on the GPU is unknown and counts as 0; \
                 specify --gpu-expert-us or --memory-gb-s",
            );
        }
        offload::print_crossover(offload, ctx);
    }
    if args.offload {
        let offload = offload.context("the trace contains no selected experts")?;
        output::to_stdout(args.output, |stdout| {
            offload::print(&offload, stdout, args.output)
        })?;
        return Ok(ExitStatus::Done);
    }
    let budgets = budget::bytes(&args.budget_mib, batches.experts().total_bytes());
    report::print_notes(&inputs, &budgets, &policies, ctx);

    let options = SimulateOptions {
        learn: inputs.learn,
        train_fraction: args.train_fraction,
        update_rate: args.update_rate,
        seed: args.seed,
    };
    if let (true, Some(machine)) = (args.prefetch.is_given(), machine) {
        let how = args.prefetch.prefetch(&machine, batches, ctx)?;
        let plan = prefetch::Plan {
            batches,
            budgets: &budgets,
            policies: &policies,
            policy_inputs: &simulate::policy_inputs(batches, &policies, &options)?,
        };
        let rows = args
            .prefetch
            .rows(&plan, &how, inputs.predictions.as_ref(), ctx)?;
        output::to_stdout(args.output, |stdout| {
            prefetch::print(stdout, args.output, &rows, batches.workload().tokens)
        })?;
        return Ok(ExitStatus::Done);
    }

    if let Some(rate) = args.sample {
        let estimates = simulate::sampled_lru(batches, &budgets, rate, args.seed)?;
        if let Some(plot) = &args.plot {
            let rows = estimates.iter().map(|estimate| PolicyResult {
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

    // Regret needs Belady's policy, even if it is not printed.
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
        workload: batches.workload(),
        rows: &rows,
        policies: &policies,
        machine,
    };
    results.print_notes(ctx);
    output::to_stdout(args.output, |stdout| results.print(stdout, args.output))?;
    Ok(ExitStatus::Done)
}

/// Returns the policies of `--policy` in their order, without duplicates.
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
                    bail!("{policy} needs a learn file; pass --learn");
                }
                ctx.note(format_args!("omitted {policy}, because it needs --learn"));
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
    rows: impl Iterator<Item = PolicyResult>,
    ctx: &Context,
) -> anyhow::Result<()> {
    let source = args.path.file_name().unwrap_or(args.path.as_os_str());
    let figure = curves(&source.to_string_lossy(), policies, rows);
    files::commit(vec![figure.prepare(plot, args.force)?])?;
    ctx.note(format_args!("wrote {}", plot.display()));
    Ok(())
}

/// Returns the plot of decode hit rates, or of all hit rates if the trace does not contain phases.
fn curves(
    source: &str,
    policies: &[PolicyName],
    rows: impl Iterator<Item = PolicyResult>,
) -> Figure {
    let rows: Vec<PolicyResult> = rows.collect();
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
    let lookups = if is_decode {
        "lookups of generated tokens"
    } else {
        "all lookups"
    };
    let highest = rows.iter().map(|row| row.budget).max().unwrap_or(0);
    Chart {
        title: "Hit rate of an expert cache".into(),
        subtitle: format!("{source}: {lookups}"),
        x: Axis::integers("cache size (MiB)", 0.0, highest as f64 / MIB as f64),
        y: Axis::numbers("hit rate (%)", 0.0, 100.0),
        lines: lines.collect(),
    }
    .figure()
}

/// Returns whether a policy evicts by recency. Such a cache has no hits across tokens if it is smaller than the experts of one token in
/// all layers.
fn evicts_by_recency(policy: PolicyName) -> bool {
    matches!(
        policy,
        PolicyName::Shared(OnlinePolicy::Lru | OnlinePolicy::Clock | OnlinePolicy::Slru)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lru_clock_and_slru_evict_by_recency() {
        let mut policies = PolicyName::all();
        policies.retain(|policy| evicts_by_recency(*policy));
        let names: Vec<String> = policies.iter().map(PolicyName::to_string).collect();
        assert_eq!(names, ["lru", "slru", "clock"]);
    }
}
