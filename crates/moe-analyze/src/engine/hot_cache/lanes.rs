//! Options of the lanes of a hot cache: the size, the reserve and the device of each.

use std::collections::BTreeSet;

use anyhow::bail;
use moe_executor::{DeviceId, Devices};
use moe_files::text::counted;
use moe_placement::plan::MAX_LANES;

use crate::lane_budget::{LaneBudget, mib};

/// Options of the lanes. The fork has an option for each lane; those of the second and third are hidden.
#[derive(Clone, Debug, clap::Args)]
pub struct LaneArgs {
    /// Cache size in MiB, 0 or more, one value per lane (GPU); required unless --hot-cache is a plan, which contains the sizes. auto
    /// (or -1) uses the free memory of the lane's device, minus the memory of the model, its context and a reserve; 0 keeps a lane
    /// empty
    #[arg(
        long,
        alias = "moe-hot-cache-max-mib",
        value_name = "N|auto[,…]",
        value_delimiter = ','
    )]
    hot_cache_mib: Vec<LaneBudget>,
    #[arg(long = "moe-hot-cache-second-max-mib", hide = true)]
    second_mib: Option<LaneBudget>,
    #[arg(long = "moe-hot-cache-third-max-mib", hide = true)]
    third_mib: Option<LaneBudget>,
    /// Memory in MiB to leave free with --hot-cache-mib auto, one value per lane, each 0 or more [default: 1024 for the first lane, 512
    /// for others]
    #[arg(
        long,
        alias = "moe-hot-cache-auto-reserve-mib",
        value_name = "MIB[,…]",
        value_delimiter = ',',
        value_parser = mib
    )]
    hot_cache_reserve_mib: Vec<f64>,
    #[arg(long = "moe-hot-cache-second-auto-reserve-mib", hide = true, value_parser = mib)]
    second_reserve_mib: Option<f64>,
    #[arg(long = "moe-hot-cache-third-auto-reserve-mib", hide = true, value_parser = mib)]
    third_reserve_mib: Option<f64>,
    /// Device of each lane: CPU, or CUDA0, CUDA1, ... in the order of --device [default: the GPUs in this order; CPU without a GPU]
    #[arg(
        long,
        alias = "moe-hot-cache-device",
        value_name = "DEVICE[,…]",
        value_delimiter = ','
    )]
    hot_cache_device: Vec<DeviceId>,
    #[arg(long = "moe-hot-cache-second-device", hide = true)]
    second_device: Option<DeviceId>,
    #[arg(long = "moe-hot-cache-third-device", hide = true)]
    third_device: Option<DeviceId>,
}

/// Values of the lanes: those of a list, then those of the options for the second and the third lane.
fn of_lanes<T: Copy>(list: &[T], others: [Option<T>; 2]) -> Vec<Option<T>> {
    let mut values: Vec<Option<T>> = list.iter().copied().map(Some).collect();
    for (lane, value) in (1..).zip(others) {
        if value.is_some() {
            values.resize(values.len().max(lane + 1), None);
            values[lane] = value;
        }
    }
    values
}

impl LaneArgs {
    /// Returns the options, and whether they are on the command line.
    pub fn options(&self) -> [(&'static str, bool); 3] {
        [
            ("--hot-cache-mib", self.has_budgets()),
            ("--hot-cache-reserve-mib", !self.reserves().is_empty()),
            ("--hot-cache-device", !self.given_devices().is_empty()),
        ]
    }

    /// Rejects options that do not fit together.
    ///
    /// # Errors
    /// An option has no effect, or too many values.
    pub fn check(&self) -> anyhow::Result<()> {
        let (budgets, reserves) = (self.budgets(), self.reserves());
        for (option, n) in [
            ("--hot-cache-mib", budgets.len()),
            ("--hot-cache-device", self.given_devices().len()),
        ] {
            if n > MAX_LANES {
                bail!("{option} has {n} values; a hot cache has at most {MAX_LANES} lanes");
            }
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
        Ok(())
    }

    /// Returns whether a size is given.
    pub fn has_budgets(&self) -> bool {
        !self.budgets().is_empty()
    }

    /// Replaces the budgets by one lane of `mib` MiB.
    pub fn set_mib(&mut self, mib: u64) {
        self.hot_cache_mib = vec![LaneBudget::Mib(mib)];
        (self.second_mib, self.third_mib) = (None, None);
    }

    /// Returns the budget of each lane; empty if none is given. A lane before the last one without a budget is empty.
    pub fn budgets(&self) -> Vec<LaneBudget> {
        let budgets = of_lanes(&self.hot_cache_mib, [self.second_mib, self.third_mib]);
        let budgets = budgets.into_iter();
        budgets
            .map(|budget| budget.unwrap_or(LaneBudget::Mib(0)))
            .collect()
    }

    /// Returns the MiB that a lane leaves free, if they are given.
    pub fn reserve_mib(&self, lane: usize) -> Option<f64> {
        self.reserves().get(lane).copied().flatten()
    }

    fn reserves(&self) -> Vec<Option<f64>> {
        let others = [self.second_reserve_mib, self.third_reserve_mib];
        of_lanes(&self.hot_cache_reserve_mib, others)
    }

    fn given_devices(&self) -> Vec<Option<DeviceId>> {
        of_lanes(
            &self.hot_cache_device,
            [self.second_device, self.third_device],
        )
    }

    /// Returns the devices of `n` lanes: by default the GPUs in the order of the list, or the CPU without a GPU.
    ///
    /// # Errors
    /// A device does not exist, or two lanes are on one GPU.
    pub fn devices(&self, n: usize, devices: &Devices) -> anyhow::Result<Vec<DeviceId>> {
        let n_gpus = devices.gpus().len();
        let mut given = self.given_devices();
        if given.len() > n {
            bail!(
                "--hot-cache-device has {} for {}; pass at most one for each lane",
                counted(given.len(), "value"),
                counted(n, "lane")
            );
        }
        given.resize(n, None);
        let mut used = BTreeSet::new();
        let lanes = given.into_iter().enumerate();
        let lanes = lanes.map(|(lane, given)| {
            let device = match given {
                Some(device) => device,
                None if n_gpus == 0 => DeviceId::Cpu,
                None => DeviceId::Gpu(lane),
            };
            let DeviceId::Gpu(index) = device else {
                return Ok(device);
            };
            if index >= n_gpus {
                let list = counted(n_gpus, "GPU");
                match given {
                    Some(_) => bail!(
                        "--hot-cache-device: {device} is not in the list of devices, which has {list}; add the GPU to --device"
                    ),
                    None => bail!(
                        "the hot cache has {} for {list}; list a GPU for each lane in --device, or pass fewer values to --hot-cache-mib",
                        counted(n, "lane")
                    ),
                }
            }
            if !used.insert(index) {
                bail!("two lanes of the hot cache are on {device}; pass a different GPU for each lane to --hot-cache-device");
            }
            Ok(device)
        });
        lanes.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::of_lanes;

    #[test]
    fn options_of_a_lane_concern_only_this_lane() {
        assert_eq!(of_lanes::<u8>(&[], [None, None]), []);
        assert_eq!(of_lanes(&[1, 2], [None, Some(3)]), [1, 2, 3].map(Some));
        assert_eq!(of_lanes(&[], [Some(2), None]), [None, Some(2)]);
        assert_eq!(of_lanes(&[1], [None, Some(3)]), [Some(1), None, Some(3)]);
        assert_eq!(of_lanes(&[1, 2], [Some(4), None]), [1, 4].map(Some));
    }
}
