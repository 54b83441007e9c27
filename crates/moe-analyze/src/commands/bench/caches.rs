//! The hot caches that the tests run with.

use anyhow::bail;
use moe_gguf::Gguf;
use moe_gguf::map::OffsetMap;
use moe_placement::perf::PerfMode;
use moe_placement::plan::MIB;
use moe_trace::ModelInfo;

use crate::engine::device::DeviceArgs;
use crate::experts::sizes_of;
use crate::option_values::{ValueError, number};

/// Parses a percentage.
pub fn percent(text: &str) -> Result<f64, ValueError> {
    number(text, "a number from 0 to 100", |value| {
        (0.0..=100.0).contains(value)
    })
}

/// Options of the device, for each size of the cache, and what the cache counts.
pub struct Caches<'a> {
    device: DeviceArgs,
    percents: &'a [f64],
    /// Bytes of a cache that contains all experts.
    bytes: u64,
    perf_modes: Vec<PerfMode>,
}

impl<'a> Caches<'a> {
    /// # Errors
    /// The options do not fit together, or the model has no experts.
    pub fn new(
        device: &DeviceArgs,
        percents: &'a [f64],
        gguf: &Gguf,
    ) -> anyhow::Result<Caches<'a>> {
        let mut caches = Caches {
            percents,
            bytes: 0,
            perf_modes: vec![PerfMode::default()],
            device: device.clone(),
        };
        if device.has_hot_cache() {
            caches.perf_modes = caches.device.hot_cache.take_perf_modes()?;
        } else if !percents.is_empty() {
            bail!(
                "--hot-cache-percent has no effect without --policy hot-cache; add it, or omit --hot-cache-percent"
            );
        }
        if percents.is_empty() {
            return Ok(caches);
        }
        if caches.device.hot_cache.lanes.has_budgets() {
            bail!(
                "--hot-cache-percent and --hot-cache-mib both set the size of the cache; omit one of them"
            );
        }
        caches.device.hot_cache.check_percents()?;
        let n_layer = ModelInfo::from_gguf("", gguf)?.n_hidden_layer();
        caches.bytes = sizes_of(&OffsetMap::new(gguf), n_layer).bytes_of_all();
        Ok(caches)
    }

    /// Percentage of the experts, if it is given, and the options of the device, for each cache.
    pub fn devices(&self) -> Vec<(Option<f64>, DeviceArgs)> {
        if self.percents.is_empty() {
            return vec![(None, self.device.clone())];
        }
        let sized = |&percent: &f64| {
            let mut device = self.device.clone();
            let mib = (self.bytes as f64 * percent / 100.0 / MIB as f64).ceil();
            device.hot_cache.lanes.set_mib(mib as u64);
            (Some(percent), device)
        };
        self.percents.iter().map(sized).collect()
    }

    /// What the cache counts; several values if the repetitions alternate between them.
    pub fn perf_modes(&self) -> &[PerfMode] {
        &self.perf_modes
    }
}
