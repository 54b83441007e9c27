//! The hot expert cache of a run: its options, its plan, and its updates.

mod budget;
mod plan;
mod prepared;
mod replay;
mod run;
mod session;
mod source;

use std::path::PathBuf;

use anyhow::bail;
use moe_placement::perf::PerfMode;
use moe_placement::plan::{LayerCurve, MAX_LANES, Strategy, Weighting};
use moe_placement::update::Payback;
use moe_trace::bounded;

use crate::env_option::{EnvOption, EnvOptionParser, InvalidVariable};
use crate::option_values::{ValueError, first_given, number, positive};
use budget::LaneBudget;

pub use plan::Machine;
pub use prepared::PreparedCache;
pub use run::{HotResults, HotRun, LaneBandwidths};

/// Values of `--update-policy`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum UpdatePolicy {
    /// The exchanges of the fork: highest gain first, up to --update-rate; none with several lanes
    #[default]
    Fork,
    /// Of these exchanges, only those that save more time within --update-horizon than the upload takes; with any number of lanes
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
    /// After the prompt of each sequence, by the activations of the prompt: its generated tokens use the new experts
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
    /// Plan of the cache (`plan -o json`), or what to plan it from: a learn file, a perf.json, or a trace
    #[arg(long, alias = "moe-hot-cache", value_name = "FILE")]
    pub hot_cache: Option<PathBuf>,
    /// Cache size in MiB, one value per lane; auto (or -1) uses the free memory of the lane's GPU; 0 keeps a lane empty [default: the
    /// budgets of the plan]
    #[arg(
        long,
        alias = "moe-hot-cache-max-mib",
        value_name = "N|auto[,…]",
        value_delimiter = ',',
        allow_hyphen_values = true
    )]
    hot_cache_mib: Vec<LaneBudget>,
    #[arg(
        long = "moe-hot-cache-second-max-mib",
        hide = true,
        allow_hyphen_values = true
    )]
    second_mib: Option<LaneBudget>,
    #[arg(
        long = "moe-hot-cache-third-max-mib",
        hide = true,
        allow_hyphen_values = true
    )]
    third_mib: Option<LaneBudget>,
    /// MiB to leave free with --hot-cache-mib auto, one value per lane [default: 1024 for the first lane, 512 for others]
    #[arg(
        long,
        alias = "moe-hot-cache-auto-reserve-mib",
        value_name = "MIB[,…]",
        value_delimiter = ','
    )]
    hot_cache_reserve_mib: Vec<u64>,
    #[arg(long = "moe-hot-cache-second-auto-reserve-mib", hide = true)]
    second_reserve_mib: Option<u64>,
    #[arg(long = "moe-hot-cache-third-auto-reserve-mib", hide = true)]
    third_reserve_mib: Option<u64>,
    /// Distribution over several lanes: warm, hot-even or even-split, as in `plan` [default: warm]
    #[arg(long, alias = "moe-hot-cache-device-strategy", value_name = "NAME")]
    hot_cache_strategy: Option<Strategy>,
    /// Function that computes scores from activations: flat, balanced, pressure, smooth or time, as in `plan` [default: flat; for
    /// gpt-oss, time]
    #[arg(
        long,
        alias = "moe-hot-cache-weighting",
        env = "LLAMA_MOE_HOT_CACHE_WEIGHTING",
        value_name = "MODE",
        value_parser = EnvOptionParser(str::parse::<Weighting>)
    )]
    hot_cache_weighting: Option<EnvOption<Weighting>>,
    /// Influence of the layer on scores with pressure, smooth or time, 0 to 1 [default: 0.5; for gpt-oss, 1]
    #[arg(
        long,
        alias = "moe-hot-cache-layer-curve",
        env = "LLAMA_MOE_HOT_CACHE_LAYER_CURVE",
        value_name = "C",
        value_parser = EnvOptionParser(curve)
    )]
    hot_cache_layer_curve: Option<EnvOption<LayerCurve>>,
    /// With 1, fill free memory with experts that were never selected, in random order [default: 0; with --auto-learn, 1]
    #[arg(
        long,
        env = "LLAMA_MOE_HOT_CACHE_FILL_RANDOM",
        value_name = "0|1",
        value_parser = EnvOptionParser(super::device::switch)
    )]
    hot_cache_fill_random: Option<EnvOption<bool>>,
    /// Maximum fraction of the cached experts to exchange at a time, 0 to 1 [default: 0; with --update-policy payback, 1]
    #[arg(long, alias = "moe-hot-cache-update-rate", value_name = "R", value_parser = rate)]
    update_rate: Option<f64>,
    /// Which experts to exchange
    #[arg(long, value_enum)]
    update_policy: Option<UpdatePolicy>,
    /// When to exchange experts
    #[arg(long, value_enum)]
    update_after: Option<UpdateAfter>,
    /// Number of tokens within which an exchange must save its upload time, with --update-policy payback [default: 1000]
    #[arg(long, value_name = "TOKENS", value_parser = positive)]
    update_horizon: Option<f64>,
    /// Bandwidths in GB/s for --update-policy payback: CPU memory, memory of the lanes, upload [default: measured]
    #[arg(long, value_name = "CPU,LANE,UPLOAD", value_delimiter = ',', value_parser = positive)]
    update_bandwidths: Vec<f64>,
    /// If the file of --hot-cache does not exist, count the prompt of --warmup-prompt, write the file, and plan from it
    #[arg(long, requires = "hot_cache")]
    auto_learn: bool,
    /// File with a prompt that is run, and not recorded, before the first sequence; its activations update the cache
    #[arg(long, value_name = "FILE", conflicts_with = "warmup_text")]
    warmup_prompt: Option<PathBuf>,
    #[arg(long = "moe-hot-cache-warmup-prompt", hide = true)]
    warmup_text: Option<String>,
    /// What to count for perf.json: off, update (activations and lanes) or full (also times)
    #[arg(
        long,
        env = "LLAMA_MOE_LAYER_PERF",
        value_name = "MODE",
        default_value = "update",
        value_parser = EnvOptionParser(str::parse::<PerfMode>)
    )]
    perf: EnvOption<PerfMode>,
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
    /// Returns the first option on the command line.
    pub fn given(&self) -> Option<&'static str> {
        let weighting = &self.hot_cache_weighting;
        let curve = &self.hot_cache_layer_curve;
        let fill = &self.hot_cache_fill_random;
        first_given([
            ("--hot-cache", self.hot_cache.is_some()),
            ("--hot-cache-mib", !self.budgets().is_empty()),
            ("--hot-cache-reserve-mib", !self.reserves().is_empty()),
            ("--hot-cache-strategy", self.hot_cache_strategy.is_some()),
            ("--hot-cache-weighting", is_given(weighting.as_ref())),
            ("--hot-cache-layer-curve", is_given(curve.as_ref())),
            ("--hot-cache-fill-random", is_given(fill.as_ref())),
            ("--update-rate", self.update_rate.is_some()),
            ("--update-policy", self.update_policy.is_some()),
            ("--update-after", self.update_after.is_some()),
            ("--update-horizon", self.update_horizon.is_some()),
            ("--update-bandwidths", !self.update_bandwidths.is_empty()),
            ("--auto-learn", self.auto_learn),
            ("--warmup-prompt", self.has_warmup()),
            ("--perf", self.perf.is_given()),
        ])
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
        self.weighting()?;
        self.curve()?;
        self.fill_random()?;
        let (budgets, reserves) = (self.budgets(), self.reserves());
        if budgets.len() > MAX_LANES {
            bail!(
                "--hot-cache-mib has {} values; a hot cache has at most {MAX_LANES} lanes",
                budgets.len()
            );
        }
        if !reserves.is_empty() && !budgets.contains(&LaneBudget::Auto) {
            bail!(
                "--hot-cache-reserve-mib has no effect without --hot-cache-mib auto; add it, or omit --hot-cache-reserve-mib"
            );
        }
        if reserves.len() > budgets.len() {
            bail!(
                "--hot-cache-reserve-mib has more values than --hot-cache-mib; pass at most one for each lane"
            );
        }
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
        if self.perf()? == PerfMode::Off && (updates || self.auto_learn) {
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

    /// Rejects options that apply to a learn file only.
    fn check_plan_options(&self) -> anyhow::Result<()> {
        let option = first_given([
            ("--hot-cache-mib", !self.budgets().is_empty()),
            ("--hot-cache-strategy", self.hot_cache_strategy.is_some()),
            (
                "--hot-cache-fill-random",
                is_given(self.hot_cache_fill_random.as_ref()),
            ),
        ]);
        match option {
            Some(option) => bail!(
                "{option} has no effect with a plan, which contains the experts of each lane; omit it, or pass a learn file"
            ),
            None => Ok(()),
        }
    }

    /// Returns the budget of each lane; empty if none is given.
    fn budgets(&self) -> Vec<LaneBudget> {
        let others = [self.second_mib, self.third_mib].into_iter().flatten();
        self.hot_cache_mib.iter().copied().chain(others).collect()
    }

    /// Returns the memory that each lane leaves free, in MiB.
    fn reserves(&self) -> Vec<u64> {
        let others = [self.second_reserve_mib, self.third_reserve_mib];
        let others = others.into_iter().flatten();
        let first = self.hot_cache_reserve_mib.iter().copied();
        first.chain(others).collect()
    }

    fn weighting(&self) -> Result<Option<Weighting>, InvalidVariable> {
        let weighting = self.hot_cache_weighting.as_ref();
        weighting.map(EnvOption::get).transpose()
    }

    fn curve(&self) -> Result<Option<LayerCurve>, InvalidVariable> {
        let curve = self.hot_cache_layer_curve.as_ref();
        curve.map(EnvOption::get).transpose()
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

    fn has_warmup(&self) -> bool {
        self.warmup_prompt.is_some() || self.warmup_text.is_some()
    }

    /// Returns what is counted.
    fn perf(&self) -> Result<PerfMode, InvalidVariable> {
        self.perf.get()
    }
}

fn is_given<T: Clone>(option: Option<&EnvOption<T>>) -> bool {
    option.is_some_and(EnvOption::is_given)
}
