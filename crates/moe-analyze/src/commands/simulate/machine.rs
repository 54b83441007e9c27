//! Bandwidths and compute times of a machine, for bounds of tokens/s.

use moe_analysis::simulate::{ExpertTime, Machine};
use moe_placement::plan::MIB;

use crate::option_values::{at_least, not_negative, positive};

/// Options of the speed model.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Speed model (needs --pcie-gb-s; use measured values)")]
pub struct MachineArgs {
    /// PCIe bandwidth for missed experts in 10^9 bytes/s, above 0: adds bounds on tokens/s
    #[arg(long, alias = "link-gb-s", value_name = "GB/S", value_parser = positive)]
    pcie_gb_s: Option<f64>,
    /// Latency of each copy of a missed expert in µs, 0 or more
    #[arg(long, alias = "link-us", value_name = "µS", requires = "pcie_gb_s", default_value_t = 0.0, value_parser = not_negative)]
    pcie_us: f64,
    /// Bandwidth of the SSD that contains missed experts in 10^9 bytes/s, above 0 [default: they are in CPU memory]
    #[arg(long, value_name = "GB/S", requires = "pcie_gb_s", value_parser = positive)]
    ssd_gb_s: Option<f64>,
    /// Bandwidth of the memory that contains the cache in 10^9 bytes/s, above 0: adds its read time, and columns for the memory bandwidth
    /// used
    #[arg(long, value_name = "GB/S", requires = "pcie_gb_s", value_parser = positive)]
    memory_gb_s: Option<f64>,
    /// Size in MiB of everything else that a token reads from the memory of --memory-gb-s, 0 or more: other weights and the
    /// KV cache
    #[arg(
        long,
        value_name = "MIB",
        requires = "memory_gb_s",
        default_value_t = 0,
        value_parser = at_least(0u32)
    )]
    dense_mib: u32,
    /// Additional time per token in ms, 0 or more, for example for attention
    #[arg(long, value_name = "MS", requires = "pcie_gb_s", default_value_t = 0.0, value_parser = not_negative)]
    other_ms: f64,
    /// CPU time of an expert for the first token of a batch in µs, above 0, reads included: adds the speedup over no cache and the batch
    /// size from which copying experts to the GPU is faster
    #[arg(long, value_name = "µS", requires = "pcie_gb_s", value_parser = positive)]
    cpu_expert_us: Option<f64>,
    /// CPU time of an expert for each further token of a batch in µs, 0 or more [default: --cpu-expert-us]
    #[arg(long, value_name = "µS", requires = "cpu_expert_us", value_parser = not_negative)]
    cpu_next_us: Option<f64>,
    /// GPU time of an expert for the first token of a batch in µs, above 0, reads included [default: its bytes at --memory-gb-s]
    #[arg(long, value_name = "µS", requires = "pcie_gb_s", value_parser = positive)]
    gpu_expert_us: Option<f64>,
    /// GPU time of an expert for each further token of a batch in µs, 0 or more [default: --gpu-expert-us]
    #[arg(long, value_name = "µS", requires = "gpu_expert_us", value_parser = not_negative)]
    gpu_next_us: Option<f64>,
}

impl MachineArgs {
    /// Returns the machine, if `--pcie-gb-s` is given.
    pub fn machine(&self) -> Option<Machine> {
        Some(Machine {
            link_bytes_per_s: self.pcie_gb_s? * 1e9,
            link_latency_s: self.pcie_us * 1e-6,
            ssd_bytes_per_s: self.ssd_gb_s.map(|gb_s| gb_s * 1e9),
            memory_bytes_per_s: self.memory_gb_s.map(|gb_s| gb_s * 1e9),
            device: expert_time(self.gpu_expert_us, self.gpu_next_us),
            cpu: expert_time(self.cpu_expert_us, self.cpu_next_us),
            dense_bytes: u64::from(self.dense_mib) * MIB,
            other_s: self.other_ms * 1e-3,
        })
    }
}

fn expert_time(first_us: Option<f64>, next_us: Option<f64>) -> Option<ExpertTime> {
    first_us.map(|first_us| ExpertTime {
        first_s: first_us * 1e-6,
        next_s: next_us.unwrap_or(first_us) * 1e-6,
    })
}
