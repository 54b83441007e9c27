//! Options and rows of prefetching into a cache.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::bail;
use moe_analysis::simulate::{Batches, Machine, PrefetchOptions, PrefetchOutcome, prefetch};
use moe_files::text::counted;
use moe_placement::cache::{PolicyInputs, PolicyName};
use moe_placement::plan::MIB;
use moe_placement::predict::{ExternalPredictions, Predictor, PredictorName};

use crate::context::Context;
use crate::option_values::not_negative;
use crate::output::{Cell, Format, Table, round, rounded};
use crate::progress::Progress;

/// Options of prefetching.
#[derive(Debug, clap::Args)]
#[command(
    next_help_heading = "Prefetching",
    group = clap::ArgGroup::new("predicts").args(["predictor", "predictions"]).multiple(true)
)]
pub struct PrefetchArgs {
    /// Prefetch with these predictors and count timely, late, missed and wasted copies: previous, hottest, markov, coactivation; needs
    /// --pcie-gb-s
    #[arg(
        long,
        value_name = "NAME[,…]",
        value_delimiter = ',',
        requires = "pcie_gb_s"
    )]
    predictor: Vec<PredictorName>,
    /// Trace with predicted experts to prefetch: the experts of its n-th generated token in a layer are the prediction for the n-th
    /// generated token in that layer; needs --pcie-gb-s
    #[arg(
        long,
        value_name = "TRACE",
        requires = "pcie_gb_s",
        conflicts_with = "plot"
    )]
    predictions: Option<PathBuf>,
    /// Number of layers between a prediction and the predicted layer, from 1 to the number of MoE layers minus 1
    #[arg(
        long = "prefetch-depth",
        alias = "depth",
        value_name = "N",
        default_value_t = 1,
        requires = "predicts"
    )]
    depth: usize,
    /// Number of experts to predict per layer, 0 or more [default: number of experts that the predicting layer selected]
    #[arg(
        long = "prefetch-experts",
        alias = "n-predict",
        value_name = "N",
        requires = "predicts"
    )]
    n_predict: Option<usize>,
    /// Compute time of each layer in µs, 0 or more, during which copies are hidden [default: from the trace's timestamps]
    #[arg(long, value_name = "µS", requires = "predicts", value_parser = not_negative)]
    window_us: Option<f64>,
}

/// The caches to simulate.
pub struct Plan<'a> {
    /// The trace.
    pub batches: &'a Batches,
    /// Cache sizes in bytes.
    pub budgets: &'a [u64],
    /// Cache policies.
    pub policies: &'a [PolicyName],
    /// Inputs of the policies.
    pub policy_inputs: &'a PolicyInputs,
}

impl PrefetchArgs {
    /// Returns whether a predictor or predictions are given.
    pub fn is_given(&self) -> bool {
        !self.predictor.is_empty() || self.predictions.is_some()
    }

    /// Returns the path of `--predictions`.
    pub fn predictions(&self) -> Option<&Path> {
        self.predictions.as_deref()
    }

    /// Returns the parameters of prefetching. Compute times that are not given come from the trace.
    ///
    /// # Errors
    /// The trace has one layer, `--prefetch-depth` is out of range, or the trace contains no times.
    pub fn prefetch(
        &self,
        machine: &Machine,
        batches: &Batches,
        ctx: &Context,
    ) -> anyhow::Result<PrefetchOptions> {
        let n_layer = batches.experts().n_layer();
        if n_layer < 2 {
            bail!(
                "prefetching needs at least 2 MoE layers, but the trace has {n_layer}; omit {}",
                match self.predictions {
                    Some(_) => "--predictions",
                    None => "--predictor",
                }
            );
        }
        if self.depth == 0 || self.depth >= n_layer {
            bail!(
                "--prefetch-depth {} is out of range (1..={}) for {}",
                self.depth,
                n_layer.saturating_sub(1),
                counted(n_layer as u64, "layer")
            );
        }
        let windows_s = match (self.window_us, batches.windows_s()) {
            (Some(us), _) => vec![us * 1e-6; n_layer],
            (None, Some(windows)) => {
                let us = |seconds: f64| round(1e6 * seconds, 1);
                let least = windows.iter().copied().fold(f64::INFINITY, f64::min);
                let most = windows.iter().copied().fold(0.0, f64::max);
                ctx.note(format_args!(
                    "compute time per layer from the trace's timestamps: {} to {} µs, {} µs/token",
                    us(least),
                    us(most),
                    us(windows.iter().sum())
                ));
                windows.to_vec()
            }
            (None, None) => {
                bail!(
                    "the trace contains no timestamps; pass the compute time of a layer with --window-us"
                )
            }
        };
        Ok(PrefetchOptions {
            link_bytes_per_s: machine.link_bytes_per_s,
            link_latency_s: machine.link_latency_s,
            windows_s,
            depth: self.depth,
            n_predict: self.n_predict,
        })
    }

    /// Returns one row per cache size, policy and predictor, and one row without prediction.
    pub fn rows(
        &self,
        plan: &Plan,
        options: &PrefetchOptions,
        predictions: Option<&ExternalPredictions>,
        ctx: &Context,
    ) -> anyhow::Result<Vec<Row>> {
        let experts = plan.batches.experts();
        let n_layer = experts.n_layer();
        let mut rows = Vec::new();
        let n_predictors = 1 + self.predictor.len() + usize::from(predictions.is_some());
        let n_rows = plan.budgets.len() * plan.policies.len() * n_predictors;
        let progress = Progress::items(ctx, "caches", n_rows as u64);
        for &budget in plan.budgets {
            for &policy in plan.policies {
                let mut predictors: Vec<(String, Box<dyn Predictor>)> =
                    vec![("none".into(), Box::new(ExternalPredictions::new(n_layer)))];
                predictors.extend(
                    self.predictor
                        .iter()
                        .map(|name| (name.to_string(), name.predictor(experts, options.depth))),
                );
                if let Some(predictions) = predictions {
                    predictors.push(("predictions".into(), Box::new(predictions.clone())));
                }
                for (predictor, mut predicts) in predictors {
                    let mut cache = plan.policy_inputs.policy(policy, experts, budget)?;
                    let result = prefetch(plan.batches, cache.as_mut(), predicts.as_mut(), options);
                    rows.push(Row {
                        budget,
                        policy,
                        predictor,
                        result,
                    });
                    progress.inc(1);
                }
            }
        }
        Ok(rows)
    }
}

/// Results of a cache with a predictor.
pub struct Row {
    budget: u64,
    policy: PolicyName,
    predictor: String,
    result: PrefetchOutcome,
}

/// Prints the rows. `tokens` is the number of generated tokens.
pub fn print(out: &mut dyn Write, format: Format, rows: &[Row], tokens: u64) -> io::Result<()> {
    let tokens = tokens as f64;
    Table::of(rows)
        .column("budget_mib", "cache size (MiB)", |row| row.budget / MIB)
        .column("policy", "policy", |row| row.policy.to_string())
        .column("predictor", "predictor", |row| row.predictor.as_str())
        .column("hit_pct_decode", "hit rate, decode (%)", |row| {
            percent(row.result.hits, row.result.look_ups)
        })
        .column("hits", "hits", |row| row.result.hits)
        .column("timely", "timely", |row| row.result.timely)
        .column("late", "late", |row| row.result.late)
        .column("missed", "missed", |row| row.result.missed)
        .column("wasted", "wasted", |row| row.result.wasted)
        .column("precision_pct", "precision (%)", |row| {
            percent(row.result.correct, row.result.predicted)
        })
        .column("moved_bytes", "copied (bytes)", |row| {
            row.result.moved_bytes
        })
        .column("stall_ms_token", "stall (ms/token)", move |row| {
            (tokens > 0.0).then(|| rounded(1e3 * row.result.stall_s / tokens, 3))
        })
        .column("tokens_s", "tokens/s", move |row| {
            let speed = tokens / (row.result.stall_s + row.result.compute_s);
            speed.is_finite().then(|| rounded(speed, 3))
        })
        .write(out, format)
}

fn percent(part: u64, whole: u64) -> Option<Cell<'static>> {
    (whole > 0).then(|| rounded(100.0 * part as f64 / whole as f64, 3))
}
