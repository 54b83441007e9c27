//! Predictors beside a cache, on the command line.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::bail;
use moe_analysis::simulate::{Batches, Machine, Prefetch, Prefetched, prefetch};
use moe_placement::cache::{PolicyName, Setting};
use moe_placement::plan::MIB;
use moe_placement::predict::{Given, Predictor, PredictorName};

use super::report::rounded;
use crate::context::Context;
use crate::option_values::not_negative;
use crate::output::{Format, Table};
use crate::progress::Progress;

/// Which predictors, and what they are asked for.
#[derive(Debug, clap::Args)]
pub struct PrefetchArgs {
    /// Prefetch what these predict, and tell what became of it: previous, hottest, markov, coactivation
    #[arg(
        long,
        value_name = "NAME[,…]",
        value_delimiter = ',',
        requires = "link_gb_s"
    )]
    predictor: Vec<PredictorName>,
    /// Prefetch what a trace of predictions names: its n-th generated token in a layer is what is predicted for that one
    #[arg(
        long,
        value_name = "TRACE",
        requires = "link_gb_s",
        conflicts_with = "plot"
    )]
    predictions: Option<PathBuf>,
    /// Layers from a choice to the layer that is predicted then
    #[arg(long, value_name = "N", default_value_t = 1)]
    depth: usize,
    /// Experts to predict [default: as many as the layer before chose]
    #[arg(long, value_name = "N")]
    n_predict: Option<usize>,
    /// Time that each layer works, in which experts can come [default: each layer's own, from the trace's times]
    #[arg(long, value_name = "µS", value_parser = not_negative)]
    window_us: Option<f64>,
}

/// What is simulated.
pub struct Plan<'a> {
    /// The trace.
    pub batches: &'a Batches,
    /// Sizes of the cache, bytes.
    pub budgets: &'a [u64],
    /// Its policies.
    pub policies: &'a [PolicyName],
    /// What policies are made from.
    pub setting: &'a Setting,
}

impl PrefetchArgs {
    /// Whether something is to be predicted.
    pub fn is_asked(&self) -> bool {
        !self.predictor.is_empty() || self.predictions.is_some()
    }

    /// The trace of predictions.
    pub fn predictions(&self) -> Option<&Path> {
        self.predictions.as_deref()
    }

    /// How to prefetch; what is not named, the trace must tell.
    pub fn prefetch(
        &self,
        machine: &Machine,
        batches: &Batches,
        ctx: &Context,
    ) -> anyhow::Result<Prefetch> {
        let n_layer = batches.experts().n_layer();
        if self.depth == 0 || self.depth >= n_layer {
            bail!(
                "--depth {}: predictions are for 1 to {} layers ahead",
                self.depth,
                n_layer.saturating_sub(1)
            );
        }
        let windows_s = match (self.window_us, batches.windows_s()) {
            (Some(us), _) => vec![us * 1e-6; n_layer],
            (None, Some(windows)) => {
                let us = |seconds: f64| rounded(1e6 * seconds, 1);
                let least = windows.iter().copied().fold(f64::INFINITY, f64::min);
                let most = windows.iter().copied().fold(0.0, f64::max);
                ctx.remark(format_args!(
                    "layers work for {} to {} µs by the trace's times, {} µs a token",
                    us(least),
                    us(most),
                    us(windows.iter().sum())
                ));
                windows.to_vec()
            }
            (None, None) => {
                bail!("the trace has no times; tell with --window-us how long a layer works")
            }
        };
        Ok(Prefetch {
            link_bytes_per_s: machine.link_bytes_per_s,
            link_latency_s: machine.link_latency_s,
            windows_s,
            depth: self.depth,
            n_predict: self.n_predict,
        })
    }

    /// A row for each budget, policy and predictor, and one without prediction.
    pub fn rows(
        &self,
        plan: &Plan,
        how: &Prefetch,
        given: Option<&Given>,
        ctx: &Context,
    ) -> anyhow::Result<Vec<Row>> {
        let experts = plan.batches.experts();
        let n_layer = experts.n_layer();
        let mut rows = Vec::new();
        let n_predictors = 1 + self.predictor.len() + usize::from(given.is_some());
        let n_rows = plan.budgets.len() * plan.policies.len() * n_predictors;
        let progress = Progress::items(ctx, "caches", n_rows as u64);
        for &budget in plan.budgets {
            for &policy in plan.policies {
                let mut predictors: Vec<(String, Box<dyn Predictor>)> =
                    vec![("none".into(), Box::new(Given::new(n_layer)))];
                predictors.extend(
                    self.predictor
                        .iter()
                        .map(|name| (name.to_string(), name.predictor(experts, how.depth))),
                );
                if let Some(given) = given {
                    predictors.push(("given".into(), Box::new(given.clone())));
                }
                for (predictor, mut predicts) in predictors {
                    let mut cache = plan.setting.policy(policy, experts, budget)?;
                    let result = prefetch(plan.batches, cache.as_mut(), predicts.as_mut(), how);
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

/// What a cache and a predictor do together.
pub struct Row {
    budget: u64,
    policy: PolicyName,
    predictor: String,
    result: Prefetched,
}

/// Prints a row for each of them; `tokens` were generated.
pub fn print(out: &mut dyn Write, format: Format, rows: &[Row], tokens: u64) -> io::Result<()> {
    let tokens = tokens as f64;
    Table::of(rows)
        .column("budget_mib", "budget (MiB)", |row| row.budget / MIB)
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
            let speed = tokens / (row.result.stall_s + row.result.work_s);
            speed.is_finite().then(|| rounded(speed, 3))
        })
        .write(out, format)
}

fn percent(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| rounded(100.0 * part as f64 / whole as f64, 3))
}
