//! How many bytes each lane may take: as told, or what a GPU has left.

use std::process::Command;
use std::str::FromStr;

use anyhow::{Context as _, anyhow, bail};
use moe_placement::plan::{MIB, auto_budget_bytes, mib_to_bytes};

use crate::context::Context;
use crate::option_values::{ValueError, number};

/// MiB that the runtime leaves free on the first lane's GPU, and on those of the others.
const RESERVE_MIB: [f64; 2] = [1024.0, 512.0];

/// The budget of a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Budget {
    /// So many MiB.
    Mib(u64),
    /// What is free less the keys and values and a reserve.
    Auto,
}

impl FromStr for Budget {
    type Err = ValueError;

    /// A number, or `auto`, which the runtime calls -1.
    fn from_str(text: &str) -> Result<Budget, ValueError> {
        match text {
            "auto" | "-1" => Ok(Budget::Auto),
            _ => number(text, "an integer of MiB, or auto", |_| true).map(Budget::Mib),
        }
    }
}

/// What an automatic budget is made from; lists are by lane.
#[derive(Debug, clap::Args)]
pub struct Room {
    /// Free memory of the GPU for --budget-mib auto [default: what nvidia-smi tells]
    #[arg(long, value_name = "MIB[,…]", value_delimiter = ',', value_parser = mib)]
    free_mib: Vec<f64>,
    /// Keep room for the keys and values of the context [default: 0, they are there already]
    #[arg(long, value_name = "MIB[,…]", value_delimiter = ',', value_parser = mib)]
    kv_mib: Vec<f64>,
    /// Keep this much free [default: 1024; of further lanes, 512]
    #[arg(long, value_name = "MIB[,…]", value_delimiter = ',', value_parser = mib)]
    reserve_mib: Vec<f64>,
}

fn mib(text: &str) -> Result<f64, ValueError> {
    number(text, "a number of MiB", |value| {
        (0.0..=1e12).contains(value)
    })
}

/// The bytes of each lane.
pub fn lanes(
    mib: &[Budget],
    bytes: &[u64],
    room: &Room,
    ctx: &Context,
) -> anyhow::Result<Vec<u64>> {
    if !mib.contains(&Budget::Auto) {
        for (list, name) in room.lists() {
            if !list.is_empty() {
                bail!("{name} is for --budget-mib auto; leave it out, or pass auto");
            }
        }
    }
    let n_lanes = mib.len().max(bytes.len());
    for (list, name) in room.lists() {
        if list.len() > n_lanes {
            bail!("{name} has more numbers than there are lanes; give a budget for each lane");
        }
    }
    let mib = mib.iter().enumerate().map(|(lane, budget)| match budget {
        Budget::Mib(mib) => Ok(mib_to_bytes(*mib)),
        Budget::Auto => room.budget(lane, ctx),
    });
    let mut lanes = mib.collect::<anyhow::Result<Vec<u64>>>()?;
    lanes.extend(bytes);
    Ok(lanes)
}

impl Room {
    fn lists(&self) -> [(&[f64], &str); 3] {
        [
            (&self.free_mib, "--free-mib"),
            (&self.kv_mib, "--kv-mib"),
            (&self.reserve_mib, "--reserve-mib"),
        ]
    }

    fn budget(&self, lane: usize, ctx: &Context) -> anyhow::Result<u64> {
        let free = match self.free_mib.get(lane) {
            Some(&free) => free,
            None => free_mib_of_gpu(lane).with_context(|| {
                format!("the free memory of GPU {lane} cannot be read; pass --free-mib, or a number to --budget-mib")
            })?,
        };
        let kv = self.kv_mib.get(lane).copied().unwrap_or(0.0);
        let default = RESERVE_MIB[lane.min(1)];
        let reserve = self.reserve_mib.get(lane).copied().unwrap_or(default);
        let bytes = |mib: f64| (mib * MIB as f64) as u64;
        let budget = auto_budget_bytes(bytes(free), bytes(kv), bytes(reserve));
        ctx.remark(format_args!(
            "lane {lane}: {free} MiB free, less {kv} for keys and values and {reserve} in reserve, leave {} MiB",
            budget / MIB
        ));
        Ok(budget)
    }
}

/// Asks the driver's own tool, so that no GPU library is needed.
fn free_mib_of_gpu(gpu: usize) -> anyhow::Result<f64> {
    let asked = Command::new("nvidia-smi")
        .args(["--query-gpu=memory.free", "--format=csv,noheader,nounits"])
        .output()
        .map_err(|error| anyhow!("nvidia-smi: {error}"))?;
    if !asked.status.success() {
        bail!("nvidia-smi failed with {}", asked.status);
    }
    free_mib_of(&String::from_utf8_lossy(&asked.stdout), gpu)
}

/// A line for each GPU, MiB on it.
fn free_mib_of(answer: &str, gpu: usize) -> anyhow::Result<f64> {
    let line = answer
        .lines()
        .nth(gpu)
        .context("nvidia-smi tells of no such GPU")?;
    let free = line.trim().parse();
    free.with_context(|| format!("nvidia-smi tells {line:?}, which is no number of MiB"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_are_whole_mib_or_auto() {
        assert_eq!("auto".parse(), Ok(Budget::Auto));
        assert_eq!("-1".parse(), Ok(Budget::Auto));
        assert_eq!("2048".parse(), Ok(Budget::Mib(2048)));
        assert!("1.5".parse::<Budget>().is_err());
        assert!("-2".parse::<Budget>().is_err());
    }

    #[test]
    fn the_answer_of_nvidia_smi() {
        assert_eq!(free_mib_of("23028\n80994\n", 1).unwrap(), 80994.0);
        assert!(free_mib_of("23028\n", 1).is_err());
        assert!(free_mib_of("[N/A]\n", 0).is_err());
    }
}
