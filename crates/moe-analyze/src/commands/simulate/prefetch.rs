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
use crate::output::{Cell, Format, write_rows};
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

const COLUMNS: [&str; 13] = [
    "budget_mib",
    "policy",
    "predictor",
    "hit_pct_decode",
    "hits",
    "timely",
    "late",
    "missed",
    "wasted",
    "precision_pct",
    "moved_bytes",
    "stall_ms_token",
    "tokens_s",
];

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
    ) -> anyhow::Result<Vec<Vec<Cell<'static>>>> {
        let experts = plan.batches.experts();
        let tokens = plan.batches.needs().tokens as f64;
        let n_layer = experts.n_layer();
        let mut rows: Vec<Vec<Cell>> = Vec::new();
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
                for (name, mut predictor) in predictors {
                    let mut cache = plan.setting.policy(policy, experts, budget)?;
                    let result = prefetch(plan.batches, cache.as_mut(), predictor.as_mut(), how);
                    rows.push(cells(budget, policy, name, &result, tokens));
                    progress.inc(1);
                }
            }
        }
        Ok(rows)
    }
}

/// Prints them.
pub fn print(out: &mut dyn Write, format: Format, rows: Vec<Vec<Cell>>) -> io::Result<()> {
    write_rows(out, format, &COLUMNS, rows)
}

fn cells(
    budget: u64,
    policy: PolicyName,
    predictor: String,
    result: &Prefetched,
    tokens: f64,
) -> Vec<Cell<'static>> {
    let percent =
        |part: u64, whole: u64| (whole > 0).then(|| rounded(100.0 * part as f64 / whole as f64, 3));
    let tokens_s = tokens / (result.stall_s + result.work_s);
    vec![
        (budget / MIB).into(),
        policy.to_string().into(),
        predictor.into(),
        percent(result.hits, result.look_ups).into(),
        result.hits.into(),
        result.timely.into(),
        result.late.into(),
        result.missed.into(),
        result.wasted.into(),
        percent(result.correct, result.predicted).into(),
        result.moved_bytes.into(),
        (tokens > 0.0)
            .then(|| rounded(1e3 * result.stall_s / tokens, 3))
            .into(),
        Some(tokens_s)
            .filter(|speed| speed.is_finite())
            .map(|speed| rounded(speed, 3))
            .into(),
    ]
}
