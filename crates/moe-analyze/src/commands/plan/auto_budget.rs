//! Options of `--budget-mib auto`, and the free memory of the GPUs that automatic budgets are computed from.

use std::process::Command;

use anyhow::{Context as _, anyhow, bail};
use moe_files::text::counted;

use crate::context::Context;
use crate::lane_budget::{AutoBudget, LaneBudget, bytes_of_mib, mib};
use crate::model_memory::Memory;
use crate::output;

/// Options of automatic budgets, a value per lane.
#[derive(Debug, clap::Args)]
pub struct AutoBudgetArgs {
    /// Free GPU memory in MiB before the model is loaded, for --budget-mib auto, one value per lane, each 0 or more [default: from
    /// nvidia-smi]
    #[arg(long, value_name = "MIB[,…]", value_delimiter = ',', value_parser = mib, help_heading = "Budget")]
    free_mib: Vec<f64>,
    /// GPU memory in MiB for everything except experts, with --budget-mib auto, one value per lane, each 0 or more; 0 if the model and its
    /// context are already loaded
    /// [default: computed from --model: tensors, KV cache, state and buffers; 0 without --model]
    #[arg(long, value_name = "MIB[,…]", value_delimiter = ',', value_parser = mib, help_heading = "Budget")]
    kv_mib: Vec<f64>,
    /// GPU memory in MiB to leave free with --budget-mib auto, one value per lane, each 0 or more [default: 1024 for the first lane, 512
    /// for others]
    #[arg(long, value_name = "MIB[,…]", value_delimiter = ',', value_parser = mib, help_heading = "Budget")]
    reserve_mib: Vec<f64>,
}

/// Returns the free MiB of the GPU of each lane with an automatic budget; `None` for other lanes.
///
/// # Errors
/// An option has no effect or too many values, or the free memory of a GPU is unknown.
pub fn free_mib(
    mib: &[LaneBudget],
    bytes: &[u64],
    room: &AutoBudgetArgs,
) -> anyhow::Result<Vec<Option<f64>>> {
    if !mib.contains(&LaneBudget::Auto) {
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
        Some(LaneBudget::Auto) => room.free(lane).map(Some),
        Some(LaneBudget::Mib(_)) | None => Ok(None),
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
    mib: &[LaneBudget],
    bytes: &[u64],
    free: &[Option<f64>],
    room: &AutoBudgetArgs,
    memory: Option<&Memory>,
    ctx: &Context,
) -> anyhow::Result<Vec<u64>> {
    let mib = mib.iter().zip(free).enumerate();
    let mib = mib.map(|(lane, (budget, free))| match budget.fixed_bytes() {
        Some(bytes) => Ok(bytes),
        None => room.budget(lane, free.unwrap_or(0.0), memory, ctx),
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
                let error = output::one_line(&error);
                anyhow!(
                    "the free memory of GPU {lane} is unknown: {error}; pass --free-mib, or a number to --budget-mib"
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
        let needed = match (self.kv_mib.get(lane), memory) {
            (Some(&kv), _) => bytes_of_mib(kv),
            (None, None) => 0,
            (None, Some(memory)) => {
                if let Some(fault) = memory.fault() {
                    bail!("{fault}; pass --kv-mib, or a number to --budget-mib");
                }
                let gpu = memory.gpus.get(lane).copied().unwrap_or_default();
                if lane == 0 && gpu.own.compute.is_none() {
                    ctx.note("warning: the size of the compute buffers is not known for this model; the reserve must be sufficient for them");
                }
                gpu.needed()
            }
        };
        let reserve = self.reserve_mib.get(lane).copied();
        let budget = AutoBudget::new(lane, bytes_of_mib(free), needed, reserve);
        ctx.note(budget);
        Ok(budget.bytes())
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
    fn parses_the_output_of_nvidia_smi() {
        assert_eq!(free_mib_of("23028\n80994\n", 1).unwrap(), 80994.0);
        assert!(free_mib_of("23028\n", 1).is_err());
        assert!(free_mib_of("[N/A]\n", 0).is_err());
    }
}
