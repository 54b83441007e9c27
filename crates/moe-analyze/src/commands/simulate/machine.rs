//! The machine whose speed is bounded, on the command line.

use moe_analysis::simulate::{ExpertTime, Machine};
use moe_placement::plan::MIB;

use crate::option_values::{at_least, not_negative, positive};

/// Numbers for tokens per second; measured ones make honest bounds.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "What hits are worth")]
pub struct MachineArgs {
    /// Bandwidth of the link over which missed experts come, in 10^9 bytes per second: adds bounds of tokens per second
    #[arg(long, value_name = "GB/S", value_parser = positive)]
    link_gb_s: Option<f64>,
    /// Latency of each missed expert
    #[arg(long, value_name = "µS", requires = "link_gb_s", default_value_t = 0.0, value_parser = not_negative)]
    link_us: f64,
    /// Bandwidth of an SSD that missed experts come from before they pass the link
    #[arg(long, value_name = "GB/S", requires = "link_gb_s", value_parser = positive)]
    ssd_gb_s: Option<f64>,
    /// Bandwidth of the memory that holds the cache, in 10^9 bytes per second: reading takes its time, and S-MBU is told
    #[arg(long, value_name = "GB/S", requires = "link_gb_s", value_parser = positive)]
    memory_gb_s: Option<f64>,
    /// What a token reads there beside its experts: other weights, keys and values
    #[arg(
        long,
        value_name = "MIB",
        requires = "memory_gb_s",
        default_value_t = 0,
        value_parser = at_least(0u32)
    )]
    dense_mib: u32,
    /// What else a token takes
    #[arg(long, value_name = "MS", requires = "link_gb_s", default_value_t = 0.0, value_parser = not_negative)]
    other_ms: f64,
    /// Time of an expert for a token on the CPU, its reading included: tells speeds without a cache, from which batch on
    /// experts should be copied, and policies that leave missed experts in place compute them there
    #[arg(long, value_name = "µS", requires = "link_gb_s", value_parser = positive)]
    cpu_expert_us: Option<f64>,
    /// The same for each further token of a batch [default: as for the first]
    #[arg(long, value_name = "µS", requires = "cpu_expert_us", value_parser = not_negative)]
    cpu_next_us: Option<f64>,
    /// Time of an expert for a token on the GPU, its reading included [default: its bytes at --memory-gb-s]
    #[arg(long, value_name = "µS", requires = "link_gb_s", value_parser = positive)]
    gpu_expert_us: Option<f64>,
    /// The same for each further token of a batch [default: as for the first]
    #[arg(long, value_name = "µS", requires = "gpu_expert_us", value_parser = not_negative)]
    gpu_next_us: Option<f64>,
}

impl MachineArgs {
    /// The machine, if a link is named.
    pub fn machine(&self) -> Option<Machine> {
        Some(Machine {
            link_bytes_per_s: self.link_gb_s? * 1e9,
            link_latency_s: self.link_us * 1e-6,
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
