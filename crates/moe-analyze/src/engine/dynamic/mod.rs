//! The dynamic expert cache of a run: its options, and what a run stores of it.

mod run;

use anyhow::{Context as _, bail};
use moe_executor::DeviceId;
use moe_executor::hot_cache::DynamicParams;
use moe_placement::cache::{BuildError, Experts, OnlinePolicy, PolicyName};
use moe_placement::dynamic::{Error, Settings};
use moe_placement::predict::PredictorName;

use super::hot_cache::{HotCacheArgs, Machine, sizes};
use crate::context::Context;
use crate::option_values::{at_least, first_given};

pub use run::{DynamicResults, DynamicRun};

/// Options of a hot cache that a dynamic cache has, too.
pub const HOT_CACHE_OPTIONS: [&str; 4] = [
    "--hot-cache-mib",
    "--hot-cache-reserve-mib",
    "--hot-cache-device",
    "--perf",
];

/// Options of `--policy dynamic`. The size of the cache is that of a hot cache.
#[derive(Clone, Debug, clap::Args)]
#[command(
    next_help_heading = "Dynamic cache (with --policy dynamic; also --hot-cache-mib, required, and --hot-cache-reserve-mib, --hot-cache-device, --perf)"
)]
pub struct DynamicArgs {
    /// Which experts to evict: lru, lfu, lfuda, lfru, slru, s3fifo, arc, clock or random; layerNAME for a separate cache per layer,
    /// such as layerlfu (layer is layerlru) [default: lru]
    #[arg(long, value_name = "NAME", value_parser = cache_policy)]
    cache_policy: Option<PolicyName>,
    /// Predictor of the experts to copy before a layer selects them: previous, hottest, markov or coactivation [default: no
    /// prefetching]
    #[arg(long, value_name = "NAME")]
    predictor: Option<PredictorName>,
    /// Number of layers between a prediction and the predicted layer, from 1 to the number of MoE layers minus 1 [default: 1]
    #[arg(long, value_name = "N", requires = "predictor", value_parser = at_least(1usize))]
    prefetch_depth: Option<usize>,
    /// Number of experts to predict per layer, at least 1 [default: number of experts that the predicting layer selected]
    #[arg(long, value_name = "N", requires = "predictor", value_parser = at_least(1usize))]
    prefetch_experts: Option<usize>,
}

/// Parses the name of a policy. The error lists only the policies of a dynamic cache.
fn cache_policy(name: &str) -> Result<PolicyName, String> {
    name.parse().map_err(|_: BuildError| {
        format!(
            "unknown policy {name:?}; use {}",
            OnlinePolicy::alternatives()
        )
    })
}

impl DynamicArgs {
    /// Returns the first option on the command line.
    pub fn given(&self) -> Option<&'static str> {
        first_given([
            ("--cache-policy", self.cache_policy.is_some()),
            ("--predictor", self.predictor.is_some()),
            ("--prefetch-depth", self.prefetch_depth.is_some()),
            ("--prefetch-experts", self.prefetch_experts.is_some()),
        ])
    }

    /// Rejects settings that do not fit together. `size` contains the size of the cache.
    ///
    /// # Errors
    /// A setting is missing, invalid, or has no effect.
    pub fn check(&self, size: &HotCacheArgs) -> anyhow::Result<()> {
        if let Some(option) = size.given_except(&HOT_CACHE_OPTIONS) {
            bail!("{option} has no effect with --policy dynamic; omit it");
        }
        match size.lanes.budgets().len() {
            0 => bail!(
                "--policy dynamic needs the size of the cache; pass --hot-cache-mib N or --hot-cache-mib auto"
            ),
            1 => {}
            n => bail!(
                "--hot-cache-mib has {n} values; a dynamic cache is on one device, so pass one value"
            ),
        }
        size.lanes.check()?;
        size.check_perf()?;
        self.settings(0).check_policy().context("--cache-policy")
    }

    fn settings(&self, budget_bytes: u64) -> Settings {
        let lru = PolicyName::Shared(OnlinePolicy::Lru);
        Settings {
            predictor: self.predictor,
            depth: self.prefetch_depth.unwrap_or(1),
            n_predict: self.prefetch_experts,
            ..Settings::new(self.cache_policy.unwrap_or(lru), budget_bytes)
        }
    }

    /// Returns the cache to build.
    ///
    /// # Errors
    /// The model cannot be described, or the settings do not fit to it.
    pub fn params(
        &self,
        size: &HotCacheArgs,
        machine: &Machine,
        ctx: &Context,
    ) -> anyhow::Result<DynamicParams> {
        let devices = size.lanes.devices(1, machine.devices)?;
        let budgets = machine.budgets(&size.lanes, &devices, ctx);
        let budget = budgets.first().copied().unwrap_or(0);
        let device = devices.first().copied().unwrap_or(DeviceId::Cpu);
        let (settings, sizes) = (self.settings(budget), sizes(machine.model)?);
        let n_layer = Experts::new(&sizes).n_layer();
        match settings.check_depth(n_layer) {
            Err(error @ Error::OneLayer { .. }) => bail!("{error}; omit --predictor"),
            Err(Error::Depth {
                depth,
                max,
                n_layer,
            }) => bail!(
                "--prefetch-depth {depth} is out of range (1..={max}) for {n_layer} MoE layers"
            ),
            checked => checked?,
        }
        Ok(DynamicParams {
            settings,
            sizes,
            device,
        })
    }
}
