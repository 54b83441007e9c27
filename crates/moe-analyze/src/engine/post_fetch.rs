//! Options of Post-Fetch.

use moe_executor::cuda::post_fetch::Settings;

use crate::env_option::{EnvOption, EnvOptionParser, InvalidVariable};
use crate::option_values::{first_given, integer_in, switch};

/// Options of `--policy post-fetch`. The environment variables are those of Post-Fetch (ernestuz-b/llama-prefetch.cpp). The option
/// overrides the variable.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Post-Fetch (with --policy post-fetch)")]
pub struct PostFetchArgs {
    /// With 1, copy down matrices to the GPU; with 0, the CPU computes all experts
    #[arg(
        long,
        env = "LLAMA_POSTFETCH_ENABLE",
        value_name = "0|1",
        default_value = "1",
        value_parser = EnvOptionParser(switch)
    )]
    pub postfetch_enable: EnvOption<bool>,
    /// With 1, the CPU computes all experts, for comparison
    #[arg(
        long,
        env = "LLAMA_POSTFETCH_FORCE_CPU",
        value_name = "0|1",
        default_value = "0",
        value_parser = EnvOptionParser(switch)
    )]
    pub postfetch_force_cpu: EnvOption<bool>,
    /// With 1, wait for copies that are not ready in time; with 0, the CPU computes these down products
    #[arg(
        long,
        env = "LLAMA_POSTFETCH_BLOCK_ON_MISS",
        value_name = "0|1",
        default_value = "1",
        value_parser = EnvOptionParser(switch)
    )]
    pub postfetch_block_on_miss: EnvOption<bool>,
    /// Maximum number of down matrices to copy per layer, 1 to 16384
    #[arg(
        long,
        env = "LLAMA_POSTFETCH_MAX_TRANSFERS",
        value_name = "N",
        default_value = "8",
        value_parser = EnvOptionParser(integer_in(1..=1usize << 14))
    )]
    pub postfetch_max_transfers: EnvOption<usize>,
    /// Size in MiB of the GPU scratchpad for the down matrices of a layer, 0 to 1048576; 0 selects the size that they need
    #[arg(
        long,
        env = "LLAMA_POSTFETCH_SCRATCHPAD_MB",
        value_name = "MB",
        default_value = "0",
        value_parser = EnvOptionParser(integer_in(0..=1usize << 20))
    )]
    pub postfetch_scratchpad_mb: EnvOption<usize>,
    /// With 1, use a separate CUDA stream for copies
    #[arg(
        long,
        env = "LLAMA_POSTFETCH_USE_DEDICATED_STREAMS",
        value_name = "0|1",
        default_value = "1",
        value_parser = EnvOptionParser(switch)
    )]
    pub postfetch_use_dedicated_streams: EnvOption<bool>,
    /// Number of experts per token whose gate and up products the CPU computes, 0 to 16384; the GPU computes the others; 0 is all experts
    #[arg(
        long,
        env = "LLAMA_POSTFETCH_CPU_LIMIT",
        value_name = "N",
        default_value = "0",
        value_parser = EnvOptionParser(integer_in(0..=1usize << 14))
    )]
    pub postfetch_cpu_limit: EnvOption<usize>,
    /// With 1, print each copy on stderr, unless --quiet is given
    #[arg(
        long,
        env = "LLAMA_POSTFETCH_DEBUG",
        value_name = "0|1",
        default_value = "0",
        value_parser = EnvOptionParser(switch)
    )]
    pub postfetch_debug: EnvOption<bool>,
}

impl PostFetchArgs {
    /// Returns the first option on the command line.
    pub fn given(&self) -> Option<&'static str> {
        first_given([
            ("--postfetch-enable", self.postfetch_enable.is_given()),
            ("--postfetch-force-cpu", self.postfetch_force_cpu.is_given()),
            (
                "--postfetch-block-on-miss",
                self.postfetch_block_on_miss.is_given(),
            ),
            (
                "--postfetch-max-transfers",
                self.postfetch_max_transfers.is_given(),
            ),
            (
                "--postfetch-scratchpad-mb",
                self.postfetch_scratchpad_mb.is_given(),
            ),
            (
                "--postfetch-use-dedicated-streams",
                self.postfetch_use_dedicated_streams.is_given(),
            ),
            ("--postfetch-cpu-limit", self.postfetch_cpu_limit.is_given()),
            ("--postfetch-debug", self.postfetch_debug.is_given()),
        ])
    }

    /// Returns the settings of the options and variables.
    pub fn settings(&self) -> Result<Settings, InvalidVariable> {
        let scratchpad_mb = self.postfetch_scratchpad_mb.get()?;
        let cpu_limit = self.postfetch_cpu_limit.get()?;
        Ok(Settings {
            enable: self.postfetch_enable.get()?,
            force_cpu: self.postfetch_force_cpu.get()?,
            block_on_miss: self.postfetch_block_on_miss.get()?,
            max_transfers: self.postfetch_max_transfers.get()?,
            scratchpad_bytes: (scratchpad_mb > 0).then_some(scratchpad_mb << 20),
            dedicated_streams: self.postfetch_use_dedicated_streams.get()?,
            cpu_limit: (cpu_limit > 0).then_some(cpu_limit),
            ..Settings::default()
        })
    }
}

#[cfg(test)]
mod tests {
    use clap::{Args as _, FromArgMatches as _};

    use super::*;

    fn parse(args: &[&str]) -> PostFetchArgs {
        let command = PostFetchArgs::augment_args(clap::Command::new("test"));
        // Ignore variables in the environment of the test.
        let command = command.mut_args(|arg| arg.env(clap::builder::Resettable::Reset));
        let matches = command.try_get_matches_from([&["test"], args].concat());
        PostFetchArgs::from_arg_matches(&matches.unwrap()).unwrap()
    }

    #[test]
    fn defaults_equal_those_of_the_executor() {
        let args = parse(&[]);
        assert_eq!(args.given(), None);
        let (settings, defaults) = (args.settings().unwrap(), Settings::default());
        assert_eq!(format!("{settings:?}"), format!("{defaults:?}"));
    }

    #[test]
    fn detects_options_on_the_command_line() {
        let args = parse(&["--postfetch-cpu-limit", "2"]);
        assert_eq!(args.given(), Some("--postfetch-cpu-limit"));
        assert_eq!(args.settings().unwrap().cpu_limit, Some(2));
    }
}
