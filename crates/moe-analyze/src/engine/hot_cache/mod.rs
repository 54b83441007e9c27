//! The hot expert cache of a run: its options, its plan, and its updates.

mod lanes;
mod plan;
mod prepared;
mod run;
#[cfg(feature = "serve")]
mod serve;
mod source;

use std::path::PathBuf;

use anyhow::bail;
use moe_placement::perf::PerfMode;
use moe_placement::plan::{LayerCurve, Strategy, Weighting};
use moe_placement::update::Payback;
use moe_trace::bounded;

use crate::env_option::{EnvOption, EnvOptionParser, InvalidVariable};
use crate::files;
use crate::option_values::{ValueError, first_given, number, positive, switch};

use lanes::LaneArgs;

pub use plan::Machine;
pub(super) use plan::sizes;
pub use prepared::PreparedCache;
pub use run::{HotResults, HotRun, LaneBandwidths};
pub use source::is_plan;

/// End of the error of an option that applies to a learn file only.
const NO_EFFECT_WITH_PLAN: &str = "has no effect with a plan, which contains the experts of each lane; omit it, or pass a learn file";

/// Values of `--update-policy`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum UpdatePolicy {
    /// As in the fork (github.com/adrianhoehne/llama.cpp): exchanges with the highest gain first, up to --update-rate; none with
    /// several lanes
    #[default]
    Fork,
    /// Only exchanges that save more time within --update-horizon than their upload takes, up to --update-rate; with any number of
    /// lanes
    Payback,
}

impl UpdatePolicy {
    fn name(self) -> &'static str {
        match self {
            UpdatePolicy::Fork => "fork",
            UpdatePolicy::Payback => "payback",
        }
    }
}

/// Values of `--update-after`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum UpdateAfter {
    /// After each sequence, by all its activations
    #[default]
    Request,
    /// After the prompt of each sequence, by the activations of the prompt; the generated tokens of the sequence use the new experts. Not in
    /// `serve`
    Prompt,
}

impl UpdateAfter {
    fn name(self) -> &'static str {
        match self {
            UpdateAfter::Request => "request",
            UpdateAfter::Prompt => "prompt",
        }
    }
}

/// Options of `--policy hot-cache`. Hidden options are spellings of the hot expert cache's fork of llama.cpp.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Hot cache (with --policy hot-cache)")]
pub struct HotCacheArgs {
    /// Plan of the cache (`plan -o json`), or counts to plan it from: a learn file, the perf.json of a run, or a trace
    #[arg(long, alias = "moe-hot-cache", value_name = "FILE")]
    pub hot_cache: Option<PathBuf>,
    #[command(flatten)]
    pub lanes: LaneArgs,
    /// Distribution of the experts over several lanes: warm, hot-even or even-split, as in `plan`; only without a plan [default: warm]
    #[arg(long, alias = "moe-hot-cache-device-strategy", value_name = "NAME")]
    hot_cache_strategy: Option<Strategy>,
    /// Function that computes scores from activations, for the plan and its updates: flat, balanced, pressure, smooth or time, as in
    /// `plan` [default: that of the plan; without a plan, flat, or time for gpt-oss]
    #[arg(
        long,
        alias = "moe-hot-cache-weighting",
        env = "LLAMA_MOE_HOT_CACHE_WEIGHTING",
        value_name = "MODE",
        value_parser = EnvOptionParser(str::parse::<Weighting>)
    )]
    hot_cache_weighting: Option<EnvOption<Weighting>>,
    #[arg(
        long = "moe-hot-cache-qwen-weighting",
        env = "LLAMA_MOE_HOT_CACHE_QWEN_WEIGHTING",
        hide = true,
        value_parser = EnvOptionParser(str::parse::<Weighting>)
    )]
    qwen_weighting: Option<EnvOption<Weighting>>,
    /// Strength of the layer weights with pressure, smooth or time, 0 to 1; 0 weights all layers equally [default: that of the plan;
    /// without a plan, 0.5, or 1 for gpt-oss]
    #[arg(
        long,
        alias = "moe-hot-cache-layer-curve",
        env = "LLAMA_MOE_HOT_CACHE_LAYER_CURVE",
        value_name = "C",
        value_parser = EnvOptionParser(curve)
    )]
    hot_cache_layer_curve: Option<EnvOption<LayerCurve>>,
    #[arg(
        long = "moe-hot-cache-qwen-layer-curve",
        env = "LLAMA_MOE_HOT_CACHE_QWEN_LAYER_CURVE",
        hide = true,
        value_parser = EnvOptionParser(curve)
    )]
    qwen_curve: Option<EnvOption<LayerCurve>>,
    #[arg(
        long = "moe-hot-cache-gemma4-layer-curve",
        env = "LLAMA_MOE_HOT_CACHE_GEMMA4_LAYER_CURVE",
        hide = true,
        value_parser = EnvOptionParser(curve)
    )]
    gemma4_curve: Option<EnvOption<LayerCurve>>,
    /// With 1, fill the rest of the cache with experts that were never selected, in random order; only without a plan [default: 0; with
    /// --auto-learn, 1]
    #[arg(
        long,
        env = "LLAMA_MOE_HOT_CACHE_FILL_RANDOM",
        value_name = "0|1",
        value_parser = EnvOptionParser(switch)
    )]
    hot_cache_fill_random: Option<EnvOption<bool>>,
    /// Maximum fraction of the cached experts to exchange in an update, 0 to 1 [default: 0; with --update-policy payback, 1]
    #[arg(long, alias = "moe-hot-cache-update-rate", value_name = "R", value_parser = rate)]
    update_rate: Option<f64>,
    /// Which experts to exchange [default: fork]
    #[arg(long, value_enum)]
    update_policy: Option<UpdatePolicy>,
    /// When to exchange experts [default: request]
    #[arg(long, value_enum)]
    update_after: Option<UpdateAfter>,
    /// Number of tokens within which an exchange must save more time than its upload takes, above 0, with --update-policy payback
    /// [default: 1000]
    #[arg(long, value_name = "TOKENS", value_parser = positive)]
    update_horizon: Option<f64>,
    /// Bandwidths in 10^9 bytes/s for --update-policy payback, each above 0: CPU memory, memory of the lanes, copies to the lanes
    /// [default: measured]
    #[arg(long, value_name = "CPU,LANE,UPLOAD", value_delimiter = ',', value_parser = positive)]
    update_bandwidths: Vec<f64>,
    /// If the file of --hot-cache does not exist, run the prompt of --warmup-prompt, write the file with the counts of its experts, and
    /// plan from them; not in `replay`
    #[arg(long, requires = "hot_cache")]
    auto_learn: bool,
    /// File with a prompt that is run before the first sequence and is not recorded; its activations update the cache if --update-rate
    /// is above 0; not in `replay`
    #[arg(long, value_name = "FILE", conflicts_with = "warmup_text")]
    warmup_prompt: Option<PathBuf>,
    #[arg(long = "moe-hot-cache-warmup-prompt", hide = true)]
    warmup_text: Option<String>,
    /// Counters of the expert cache, which a run directory contains as perf.json: off (none), update (activations and lanes of each
    /// expert) or full (also times). `bench` with --policy
    /// hot-cache accepts several values, and alternates between them
    #[arg(
        long,
        env = "LLAMA_MOE_LAYER_PERF",
        value_name = "MODE",
        value_delimiter = ',',
        default_value = "update",
        value_parser = EnvOptionParser(str::parse::<PerfMode>)
    )]
    perf: Vec<EnvOption<PerfMode>>,
}

fn rate(text: &str) -> Result<f64, ValueError> {
    number(text, "a number from 0 to 1", |rate| {
        (0.0..=1.0).contains(rate)
    })
}

fn curve(text: &str) -> Result<LayerCurve, ValueError> {
    let value = number(text, "a number from 0 to 1", |&value: &f64| {
        LayerCurve::is_valid(value)
    });
    value.map(LayerCurve::new)
}

impl HotCacheArgs {
    /// Returns the first option on the command line that is not in `allowed`.
    pub fn given_except(&self, allowed: &[&str]) -> Option<&'static str> {
        let options = [
            ("--hot-cache", self.hot_cache.is_some()),
            ("--hot-cache-strategy", self.hot_cache_strategy.is_some()),
            ("--hot-cache-weighting", are_given(&self.weightings())),
            ("--hot-cache-layer-curve", are_given(&self.curves())),
            (
                "--hot-cache-fill-random",
                are_given(&[self.hot_cache_fill_random.as_ref()]),
            ),
            ("--update-rate", self.update_rate.is_some()),
            ("--update-policy", self.update_policy.is_some()),
            ("--update-after", self.update_after.is_some()),
            ("--update-horizon", self.update_horizon.is_some()),
            ("--update-bandwidths", !self.update_bandwidths.is_empty()),
            ("--auto-learn", self.auto_learn),
            ("--warmup-prompt", self.has_warmup()),
            ("--perf", self.perf.first().is_some_and(EnvOption::is_given)),
        ];
        let options = options.into_iter().chain(self.lanes.options());
        let mut given = options.filter(|(name, is_given)| *is_given && !allowed.contains(name));
        given.next().map(|(name, _)| name)
    }

    /// Rejects options that do not fit together, and invalid variables.
    ///
    /// # Errors
    /// A setting is missing, invalid, or has no effect with the others.
    pub fn check(&self) -> anyhow::Result<()> {
        if self.hot_cache.is_none() {
            bail!(
                "--policy hot-cache needs experts to cache; pass a plan or a learn file with --hot-cache FILE"
            );
        }
        if self.auto_learn && !self.has_warmup() {
            bail!("--auto-learn needs a prompt to count; pass --warmup-prompt FILE");
        }
        if let (true, Some(path)) = (self.must_learn(), &self.hot_cache) {
            files::check_output(path, false)?;
            if !self.lanes.has_budgets() {
                bail!(
                    "--auto-learn needs the size of the cache; pass --hot-cache-mib N or --hot-cache-mib auto"
                );
            }
        }
        self.weighting()?;
        self.curve()?;
        self.fill_random()?;
        self.lanes.check()?;
        let is_payback = self.update_policy() == UpdatePolicy::Payback;
        let payback = first_given([
            ("--update-horizon", self.update_horizon.is_some()),
            ("--update-bandwidths", !self.update_bandwidths.is_empty()),
        ]);
        if let (false, Some(option)) = (is_payback, payback) {
            bail!(
                "{option} has no effect without --update-policy payback; add it, or omit {option}"
            );
        }
        if !matches!(self.update_bandwidths.len(), 0 | 3) {
            bail!(
                "--update-bandwidths needs three values: CPU memory, memory of the lanes, upload"
            );
        }
        let updates = self.update_rate() > 0.0;
        if self.check_perf()? == PerfMode::Off && (updates || self.auto_learn) {
            bail!(
                "--perf off counts nothing, but {} needs counts; pass --perf update",
                if updates {
                    "an update of the cache"
                } else {
                    "--auto-learn"
                }
            );
        }
        let without_updates = first_given([
            ("--update-policy", self.update_policy.is_some()),
            ("--update-after", self.update_after.is_some()),
        ]);
        if let (false, Some(option)) = (updates, without_updates) {
            bail!("{option} has no effect with an update rate of 0; pass --update-rate R above 0");
        }
        Ok(())
    }

    /// Rejects options that need a prompt.
    ///
    /// # Errors
    /// An option needs a prompt.
    pub fn check_replay(&self) -> anyhow::Result<()> {
        let option = first_given([
            ("--auto-learn", self.auto_learn),
            ("--warmup-prompt", self.has_warmup()),
        ]);
        match option {
            Some(option) => bail!(
                "{option} needs a prompt, but replay runs only the MoE layers; omit it, or use `record`"
            ),
            None => Ok(()),
        }
    }

    /// Rejects what a server of several requests at the same time cannot do.
    ///
    /// # Errors
    /// `--update-after prompt`.
    #[cfg(feature = "serve")]
    pub fn check_serve(&self) -> anyhow::Result<()> {
        if self.update_after() == UpdateAfter::Prompt {
            bail!(
                "serve exchanges experts when a request ends; pass --update-after request, or omit it"
            );
        }
        Ok(())
    }

    /// Returns the learn file, trace or plan of the cache.
    #[cfg(feature = "serve")]
    pub fn file(&self) -> Option<&std::path::Path> {
        self.hot_cache.as_deref()
    }

    /// Returns what is counted.
    ///
    /// # Errors
    /// `--perf` has several values, or the environment variable is invalid.
    pub fn check_perf(&self) -> anyhow::Result<PerfMode> {
        if self.perf.len() > 1 {
            bail!(
                "--perf has several values, which only `bench --policy hot-cache` accepts; pass one"
            );
        }
        Ok(self.perf()?)
    }

    /// Rejects `--hot-cache-percent` with a plan.
    ///
    /// # Errors
    /// The file of `--hot-cache` is a plan, or cannot be read.
    pub fn check_percents(&self) -> anyhow::Result<()> {
        match &self.hot_cache {
            Some(path) if !self.must_learn() && is_plan(path)? => {
                bail!("--hot-cache-percent {NO_EFFECT_WITH_PLAN}")
            }
            _ => Ok(()),
        }
    }

    /// Rejects options that apply to a learn file only.
    fn check_plan_options(&self) -> anyhow::Result<()> {
        let option = first_given([
            ("--hot-cache-mib", self.lanes.has_budgets()),
            ("--hot-cache-strategy", self.hot_cache_strategy.is_some()),
            (
                "--hot-cache-fill-random",
                are_given(&[self.hot_cache_fill_random.as_ref()]),
            ),
        ]);
        match option {
            Some(option) => bail!("{option} {NO_EFFECT_WITH_PLAN}"),
            None => Ok(()),
        }
    }

    /// The weighting and its spellings in the fork, in the order of precedence.
    fn weightings(&self) -> [Option<&EnvOption<Weighting>>; 2] {
        [
            self.hot_cache_weighting.as_ref(),
            self.qwen_weighting.as_ref(),
        ]
    }

    /// The curve and its spellings in the fork, in the order of precedence.
    fn curves(&self) -> [Option<&EnvOption<LayerCurve>>; 3] {
        [
            self.hot_cache_layer_curve.as_ref(),
            self.qwen_curve.as_ref(),
            self.gemma4_curve.as_ref(),
        ]
    }

    fn weighting(&self) -> Result<Option<Weighting>, InvalidVariable> {
        first_value(&self.weightings())
    }

    fn curve(&self) -> Result<Option<LayerCurve>, InvalidVariable> {
        first_value(&self.curves())
    }

    fn fill_random(&self) -> Result<bool, InvalidVariable> {
        let fill = self.hot_cache_fill_random.as_ref();
        fill.map_or(Ok(self.auto_learn), EnvOption::get)
    }

    fn strategy(&self) -> Strategy {
        self.hot_cache_strategy.unwrap_or_default()
    }

    fn update_policy(&self) -> UpdatePolicy {
        self.update_policy.unwrap_or_default()
    }

    fn update_after(&self) -> UpdateAfter {
        self.update_after.unwrap_or_default()
    }

    fn update_rate(&self) -> f64 {
        let default = match self.update_policy() {
            UpdatePolicy::Fork => 0.0,
            UpdatePolicy::Payback => 1.0,
        };
        self.update_rate.unwrap_or(default)
    }

    /// Returns the horizon and the given bandwidths of an update by payback.
    fn payback(&self) -> (f64, Option<Payback>) {
        let horizon = self.update_horizon.unwrap_or(1000.0);
        let given = match self.update_bandwidths[..] {
            [cold, hot, upload] => Some(Payback {
                horizon,
                cold: cold * 1e9,
                hot: hot * 1e9,
                upload: upload * 1e9,
            }),
            _ => None,
        };
        (horizon, given)
    }

    /// Returns the warm-up prompt, if one is given. One newline at the end of a file is removed.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn warmup_text(&self) -> anyhow::Result<Option<String>> {
        let Some(path) = &self.warmup_prompt else {
            return Ok(self.warmup_text.clone());
        };
        let text = bounded::read_text(path)?;
        Ok(Some(text.strip_suffix('\n').unwrap_or(&text).to_owned()))
    }

    /// Whether the activations of a warm-up prompt are used: to update the cache, or to learn the file of `--hot-cache`.
    pub fn uses_warmup(&self) -> bool {
        self.auto_learn || self.update_rate() > 0.0
    }

    /// Whether the learn file of `--hot-cache` must be learned first: it does not exist.
    fn must_learn(&self) -> bool {
        let path = self.hot_cache.as_ref();
        self.auto_learn && path.is_some_and(|path| !path.exists())
    }

    fn has_warmup(&self) -> bool {
        self.warmup_prompt.is_some() || self.warmup_text.is_some()
    }

    /// Returns what is counted.
    pub(super) fn perf(&self) -> Result<PerfMode, InvalidVariable> {
        let first = self.perf.first();
        first.map_or(Ok(PerfMode::default()), EnvOption::get)
    }

    /// Removes all values of `--perf` but the first one, and returns all of them.
    ///
    /// # Errors
    /// The environment variable is invalid.
    pub fn take_perf_modes(&mut self) -> Result<Vec<PerfMode>, InvalidVariable> {
        let modes = self.perf.iter().map(EnvOption::get).collect();
        self.perf.truncate(1);
        modes
    }
}

/// Whether one of the options is on the command line.
fn are_given<T: Clone>(options: &[Option<&EnvOption<T>>]) -> bool {
    options.iter().flatten().any(|option| option.is_given())
}

/// Returns the value of the first option on the command line, else of the first variable.
fn first_value<T: Clone>(options: &[Option<&EnvOption<T>>]) -> Result<Option<T>, InvalidVariable> {
    let mut options: Vec<_> = options.iter().flatten().collect();
    options.sort_by_key(|option| !option.is_given());
    options.first().map(|option| option.get()).transpose()
}
