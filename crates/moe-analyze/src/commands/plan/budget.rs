//! The budget of each lane: a number, or the free memory of a GPU.

use std::process::Command;
use std::str::FromStr;

use anyhow::{Context as _, anyhow, bail};
use moe_gguf::text::counted;
use moe_placement::plan::{MIB, auto_budget_bytes, mib_to_bytes};

use super::memory::Memory;
use crate::context::Context;
use crate::option_values::{ValueError, number};

/// MiB that the fork leaves free on the GPU of the first lane, and on the GPUs of the other lanes.
const RESERVE_MIB: [f64; 2] = [1024.0, 512.0];

/// The budget of a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Budget {
    /// A number of MiB.
    Mib(u64),
    /// The free memory minus the KV cache and a reserve.
    Auto,
}

impl FromStr for Budget {
    type Err = ValueError;

    /// Parses a number, or `auto`, which is -1 in the fork.
    fn from_str(text: &str) -> Result<Budget, ValueError> {
        match text {
            "auto" | "-1" => Ok(Budget::Auto),
            _ => number(text, "an integer number of MiB, or auto", |_| true).map(Budget::Mib),
        }
    }
}

/// Options of automatic budgets, a value per lane.
#[derive(Debug, clap::Args)]

pub struct AutoBudgetArgs {
    /// Free GPU memory in MiB before the model is loaded, for --budget-mib auto, one value per lane [default: from nvidia-smi]
    #[arg(long, value_name = "MIB[,…]", value_delimiter = ',', value_parser = mib, help_heading = "Budget")]
    free_mib: Vec<f64>,
    /// GPU memory in MiB for everything except experts, with --budget-mib auto, one value per lane; 0 if the model and its context are
    /// already loaded
    /// [default: computed from --model: tensors, KV cache, state and buffers; 0 without --model]
    #[arg(long, value_name = "MIB[,…]", value_delimiter = ',', value_parser = mib, help_heading = "Budget")]
    kv_mib: Vec<f64>,
    /// GPU memory in MiB to leave free with --budget-mib auto, one value per lane [default: 1024 for the first lane, 512 for others]
    #[arg(long, value_name = "MIB[,…]", value_delimiter = ',', value_parser = mib, help_heading = "Budget")]
    reserve_mib: Vec<f64>,
}

fn mib(text: &str) -> Result<f64, ValueError> {
    number(text, "a number of MiB from 0 to 1e12", |value| {
        (0.0..=1e12).contains(value)
    })
}

/// Returns the free MiB of the GPU of each lane with an automatic budget; `None` for other lanes.
///
/// # Errors
/// An option has no effect or too many values, or the free memory of a GPU is unknown.
pub fn free_mib(
    mib: &[Budget],
    bytes: &[u64],
    room: &AutoBudgetArgs,
) -> anyhow::Result<Vec<Option<f64>>> {
    if !mib.contains(&Budget::Auto) {
        for (list, name) in room.lists() {
            if !list.is_empty() {
                bail!("{name} has no effect without --budget-mib auto; add it, or omit {name}");
            }
        }
    }
    let n_lanes = mib.len().max(bytes.len());
    for (list, name) in room.lists() {
        if list.len() > n_lanes {
            bail!(
                "{name} has {} for {}; pass one budget for each lane, or fewer values",
                counted(list.len(), "value"),
                counted(n_lanes, "lane")
            );
        }
    }
    let lanes = (0..n_lanes).map(|lane| match mib.get(lane) {
        Some(Budget::Auto) => room.free(lane).map(Some),
        Some(Budget::Mib(_)) | None => Ok(None),
    });
    lanes.collect()
}

/// Returns the share of the layers on the GPU of each lane: in proportion to the free memory if it is known for all lanes, else
/// equal.
pub fn layer_split(free: &[Option<f64>]) -> Vec<f32> {
    let known: Option<Vec<f32>> = free.iter().map(|free| Some((*free)? as f32)).collect();
    known.unwrap_or_else(|| vec![1.0; free.len()])
}

/// Returns the budget of each lane in bytes.
///
/// # Errors
/// The memory of the model is not known.
pub fn lanes(
    mib: &[Budget],
    bytes: &[u64],
    free: &[Option<f64>],
    room: &AutoBudgetArgs,
    memory: Option<&Memory>,
    ctx: &Context,
) -> anyhow::Result<Vec<u64>> {
    let mib = mib.iter().zip(free).enumerate();
    let mib = mib.map(|(lane, (budget, free))| match (budget, free) {
        (Budget::Mib(mib), _) => Ok(mib_to_bytes(*mib)),
        (Budget::Auto, free) => room.budget(lane, free.unwrap_or(0.0), memory, ctx),
    });
    let mut lanes = mib.collect::<anyhow::Result<Vec<u64>>>()?;
    lanes.extend(bytes);
    Ok(lanes)
}

impl AutoBudgetArgs {
    fn lists(&self) -> [(&[f64], &str); 3] {
        [
            (&self.free_mib, "--free-mib"),
            (&self.kv_mib, "--kv-mib"),
            (&self.reserve_mib, "--reserve-mib"),
        ]
    }

    fn free(&self, lane: usize) -> anyhow::Result<f64> {
        match self.free_mib.get(lane) {
            Some(&free) => Ok(free),
            None => free_mib_of_gpu(lane).map_err(|error| {
                anyhow!(
                    "the free memory of GPU {lane} is unknown: {error:#}; pass --free-mib, or a number to --budget-mib"
                )
            }),
        }
    }

    fn budget(
        &self,
        lane: usize,
        free: f64,
        memory: Option<&Memory>,
        ctx: &Context,
    ) -> anyhow::Result<u64> {
        let bytes = |mib: f64| (mib * MIB as f64) as u64;
        let (needed, what) = match (self.kv_mib.get(lane), memory) {
            (Some(&kv), _) => (bytes(kv), "KV cache"),
            (None, None) => (0, "KV cache"),
            (None, Some(memory)) => {
                if let Some(fault) = memory.fault() {
                    bail!("{fault}; pass --kv-mib, or a number to --budget-mib");
                }
                let gpu = memory.gpus.get(lane).copied().unwrap_or_default();
                if lane == 0 && gpu.own.compute.is_none() {
                    ctx.note("warning: the size of the compute buffers is not known for this model; the reserve must be sufficient for them");
                }
                (gpu.needed(), "model and context")
            }
        };
        let default = RESERVE_MIB[lane.min(1)];
        let reserve = self.reserve_mib.get(lane).copied().unwrap_or(default);
        let budget = auto_budget_bytes(bytes(free), needed, bytes(reserve));
        // With two decimals.
        let needed = (needed as f64 / MIB as f64 * 100.0).round() / 100.0;
        ctx.note(format_args!(
            "lane {lane}: budget {} MiB ({free} MiB free - {needed} MiB {what} - {reserve} MiB reserve)",
            budget / MIB
        ));
        Ok(budget)
    }
}

/// Returns the free memory of a GPU in MiB. Uses nvidia-smi, so that a build without CUDA works.
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

/// Parses the output of nvidia-smi: one line per GPU, in MiB.
fn free_mib_of(answer: &str, gpu: usize) -> anyhow::Result<f64> {
    let line = answer
        .lines()
        .nth(gpu)
        .with_context(|| format!("nvidia-smi does not list GPU {gpu}"))?;
    let free = line.trim().parse();
    free.with_context(|| format!("nvidia-smi printed {line:?} instead of a number of MiB"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_integer_mib_or_auto() {
        assert_eq!("auto".parse(), Ok(Budget::Auto));
        assert_eq!("-1".parse(), Ok(Budget::Auto));
        assert_eq!("2048".parse(), Ok(Budget::Mib(2048)));
        assert!("1.5".parse::<Budget>().is_err());
        assert!("-2".parse::<Budget>().is_err());
    }

    #[test]
    fn parses_the_output_of_nvidia_smi() {
        assert_eq!(free_mib_of("23028\n80994\n", 1).unwrap(), 80994.0);
        assert!(free_mib_of("23028\n", 1).is_err());
        assert!(free_mib_of("[N/A]\n", 0).is_err());
    }
}
