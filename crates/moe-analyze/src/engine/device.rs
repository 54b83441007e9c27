//! Options of the GPU: what runs there, and how.

use anyhow::{Context as _, anyhow, bail};
use moe_executor::Model;
use moe_executor::cuda::post_fetch::Settings;
use moe_executor::cuda::{self, Device, Gpu, Policy};
use moe_executor::placement::{Override, Placement, Rules};

use super::scratchpad;
use crate::context::Context;
use crate::env_option::{EnvOption, EnvOptionParser, InvalidVariable};
use crate::option_values::{ValueError, first_given, whole};

/// Values of `--device`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Kind {
    /// The processor alone
    #[default]
    Cpu,
    /// The first NVIDIA GPU, with the processor
    Cuda,
    /// A GPU if there is one that works
    Auto,
}

/// Values of `--policy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum PolicyArg {
    /// The processor computes them
    Cpu,
    /// The GPU does; weights that do not live there are copied when a token chooses them
    Gpu,
    /// The processor computes gate and up while down travels to the GPU
    PostFetch,
}

/// A number of layers; -1 is all of them, as in llama.cpp.
fn layers(text: &str) -> Result<usize, std::num::ParseIntError> {
    match text {
        "-1" => Ok(usize::MAX),
        _ => text.parse(),
    }
}

/// Options of the GPU.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "GPU")]
pub struct DeviceArgs {
    /// What computes
    #[arg(long, value_enum, default_value_t)]
    pub device: Kind,
    /// Layers on the GPU, the last ones; the output counts as one more, the very last; -1 = all, the default
    #[arg(long, visible_alias = "ngl", value_name = "N", value_parser = layers)]
    pub n_gpu_layers: Option<usize>,
    /// Who computes the chosen experts [default: gpu; cpu with --cpu-moe, --n-cpu-moe or --override-tensor]
    ///
    /// cpu and post-fetch keep all experts with the processor unless --n-cpu-moe or --override-tensor say which.
    #[arg(long, value_enum)]
    pub policy: Option<PolicyArg>,
    /// Keep the weights of all experts with the processor
    #[arg(long)]
    pub cpu_moe: bool,
    /// Keep the weights of the experts of the first N layers with the processor
    #[arg(long, value_name = "N", conflicts_with = "cpu_moe")]
    pub n_cpu_moe: Option<usize>,
    /// Where tensors live whose name matches a regular expression: CPU or CUDA0; the first that matches decides
    #[arg(long, value_name = "REGEX=CPU|CUDA0", value_delimiter = ',')]
    pub override_tensor: Vec<String>,
    /// Use at most so much of the GPU's memory
    #[arg(long, value_name = "N")]
    pub vram_mib: Option<u64>,
    /// Rows of a batch from which weights of the processor are copied to the GPU for a product; 0 = never
    #[arg(
        long,
        env = "GGML_OP_OFFLOAD_MIN_BATCH",
        value_name = "N",
        default_value = "32",
        value_parser = EnvOptionParser(str::parse::<usize>)
    )]
    pub offload_min_batch: EnvOption<usize>,
    #[command(flatten)]
    pub post_fetch: PostFetchArgs,
}

/// Options of `--policy post-fetch`. Each has the environment variable of the design it comes from; the option wins.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Post-Fetch (an empty variable counts as unset)")]
pub struct PostFetchArgs {
    /// 0 = the processor computes all
    #[arg(
        long,
        env = "LLAMA_POSTFETCH_ENABLE",
        value_name = "0|1",
        default_value = "1",
        value_parser = EnvOptionParser(switch)
    )]
    pub postfetch_enable: EnvOption<bool>,
    /// 1 = the processor computes all, for comparison
    #[arg(
        long,
        env = "LLAMA_POSTFETCH_FORCE_CPU",
        value_name = "0|1",
        default_value = "0",
        value_parser = EnvOptionParser(switch)
    )]
    pub postfetch_force_cpu: EnvOption<bool>,
    /// 1 = wait for a late transfer, 0 = the processor takes over
    #[arg(
        long,
        env = "LLAMA_POSTFETCH_BLOCK_ON_MISS",
        value_name = "0|1",
        default_value = "1",
        value_parser = EnvOptionParser(switch)
    )]
    pub postfetch_block_on_miss: EnvOption<bool>,
    /// Transfers of a layer at most
    #[arg(
        long,
        env = "LLAMA_POSTFETCH_MAX_TRANSFERS",
        value_name = "N",
        default_value = "8",
        value_parser = EnvOptionParser(whole(1..=1usize << 14))
    )]
    pub postfetch_max_transfers: EnvOption<usize>,
    /// Memory for the transfers of a layer; 0 = what they need
    #[arg(
        long,
        env = "LLAMA_POSTFETCH_SCRATCHPAD_MB",
        value_name = "MB",
        default_value = "0",
        value_parser = EnvOptionParser(whole(0..=1usize << 20))
    )]
    pub postfetch_scratchpad_mb: EnvOption<usize>,
    /// 1 = a stream for transfers alone
    #[arg(
        long,
        env = "LLAMA_POSTFETCH_USE_DEDICATED_STREAMS",
        value_name = "0|1",
        default_value = "1",
        value_parser = EnvOptionParser(switch)
    )]
    pub postfetch_use_dedicated_streams: EnvOption<bool>,
    /// Experts of a token whose gate and up the processor computes, the GPU does the others; 0 = all of them
    #[arg(
        long,
        env = "LLAMA_POSTFETCH_CPU_LIMIT",
        value_name = "N",
        default_value = "0",
        value_parser = EnvOptionParser(whole(0..=1usize << 14))
    )]
    pub postfetch_cpu_limit: EnvOption<usize>,
    /// 1 = tell of each transfer on stderr, unless --quiet
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
    /// An option that is on the command line.
    fn given(&self) -> Option<&'static str> {
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

    /// The settings of the options and variables.
    fn settings(&self) -> Result<Settings, InvalidVariable> {
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

/// Parses 0 or 1.
fn switch(text: &str) -> Result<bool, ValueError> {
    match text {
        "0" => Ok(false),
        "1" => Ok(true),
        _ => Err(ValueError::Expected("0 or 1")),
    }
}

impl DeviceArgs {
    /// The GPU as it is asked for; none for the processor alone, also where `auto` finds no GPU that works.
    ///
    /// # Errors
    /// The GPU that was asked for does not work, or a setting that cannot be.
    pub fn open<'g>(&self, model: &Model<'g>, ctx: &Context) -> anyhow::Result<Option<Device<'g>>> {
        if self.device == Kind::Cpu {
            return Ok(None);
        }
        let rules = self.rules(model.hparams().n_layer)?;
        let names = model.gguf().tensors().iter().map(|t| t.name.as_str());
        let placement = rules.resolve(names).context("--override-tensor")?;
        let settings = self.post_fetch.settings()?;
        let debug = self.post_fetch.postfetch_debug.get()?;
        let mut device = match self.ready(placement, settings, self.min_batch()?) {
            Ok(device) => device,
            Err(error) if self.device == Kind::Auto => {
                ctx.remark(format_args!("{error}; the processor computes"));
                return Ok(None);
            }
            Err(error) => bail!(with_advice(&error)),
        };
        if let Some(small) =
            scratchpad::too_small(model, &settings).filter(|_| device.policy() == Policy::PostFetch)
        {
            ctx.remark(small);
        }
        let info = device.gpu().info();
        ctx.remark(format_args!(
            "{}, {:.1} GiB, policy {}",
            info.name,
            info.memory_bytes as f64 / (1u64 << 30) as f64,
            self.policy_name()
        ));
        if self.policy() != Policy::Cpu && self.keeps_experts_with_host() {
            let registered = device.register(model.gguf());
            if !registered {
                ctx.remark(
                    "the driver does not read the mapped model by itself: copies go through other memory",
                );
            }
        }
        if debug {
            let ctx = *ctx;
            device.observe_transfers(Box::new(move |transfer| {
                ctx.remark(format_args!("post-fetch: {transfer}"));
            }));
        }
        Ok(Some(device))
    }

    /// The GPU with all that a session needs of it, or what does not work.
    fn ready<'g>(
        &self,
        placement: Placement,
        settings: Settings,
        min_batch: Option<usize>,
    ) -> cuda::Result<Device<'g>> {
        let gpu = Gpu::open(self.vram_mib.map(|mib| mib.saturating_mul(1 << 20)))?;
        let policy = self.policy();
        let device = Device::new(gpu, placement, policy, min_batch);
        match policy {
            Policy::PostFetch => device.with_post_fetch(settings),
            Policy::Cpu | Policy::Gpu => Ok(device),
        }
    }

    /// Refuses settings that cannot be, before a model is loaded.
    ///
    /// # Errors
    /// Which, and what it must be.
    pub fn check(&self) -> anyhow::Result<()> {
        if self.device == Kind::Cpu {
            return match self.for_a_gpu().or(self.post_fetch.given()) {
                Some(option) => bail!(
                    "{option} is for a GPU; add --device cuda or --device auto, or leave it out"
                ),
                None => Ok(()),
            };
        }
        if let Some(option) = self.post_fetch.given()
            && self.policy() != Policy::PostFetch
        {
            bail!("{option} is for --policy post-fetch; add that, or leave it out");
        }
        self.rules(0)?;
        self.post_fetch.settings()?;
        self.post_fetch.postfetch_debug.get()?;
        self.min_batch()?;
        match (self.device, Gpu::look()) {
            (Kind::Cuda, Err(missing)) => Err(anyhow!(with_advice(&missing))),
            _ => Ok(()),
        }
    }

    /// An option that was given and is for a GPU alone. The processor has the policy `cpu` in any case.
    fn for_a_gpu(&self) -> Option<&'static str> {
        let policy = self.policy.is_some_and(|policy| policy != PolicyArg::Cpu);
        first_given([
            ("--policy", policy),
            ("--n-gpu-layers", self.n_gpu_layers.is_some()),
            ("--cpu-moe", self.cpu_moe),
            ("--n-cpu-moe", self.n_cpu_moe.is_some()),
            ("--override-tensor", !self.override_tensor.is_empty()),
            ("--vram-mib", self.vram_mib.is_some()),
            ("--offload-min-batch", self.offload_min_batch.is_given()),
        ])
    }

    /// Name of the policy, as a manifest says it.
    pub fn policy_name(&self) -> &'static str {
        match (self.device, self.policy()) {
            (Kind::Cpu, _) | (_, Policy::Cpu) => "cpu",
            (_, Policy::Gpu) => "gpu",
            (_, Policy::PostFetch) => "post-fetch",
        }
    }

    fn policy(&self) -> Policy {
        match self.policy {
            Some(PolicyArg::Cpu) => Policy::Cpu,
            Some(PolicyArg::Gpu) => Policy::Gpu,
            Some(PolicyArg::PostFetch) => Policy::PostFetch,
            None if self.says_where_experts_live() => Policy::Cpu,
            None => Policy::Gpu,
        }
    }

    /// Whether options say so.
    pub fn says_where_experts_live(&self) -> bool {
        self.cpu_moe || self.n_cpu_moe.is_some() || !self.override_tensor.is_empty()
    }

    fn keeps_experts_with_host(&self) -> bool {
        self.says_where_experts_live() || self.policy() != Policy::Gpu
    }

    fn min_batch(&self) -> Result<Option<usize>, InvalidVariable> {
        let rows = self.offload_min_batch.get()?;
        Ok((rows > 0).then_some(rows))
    }

    fn rules(&self, n_layer: usize) -> anyhow::Result<Rules> {
        let overrides = self.override_tensor.iter();
        let overrides = overrides.map(|rule| rule.parse::<Override>().context("--override-tensor"));
        let overrides = overrides.collect::<anyhow::Result<Vec<Override>>>()?;
        let n_gpu_layers = self.n_gpu_layers.unwrap_or(usize::MAX);
        let rules = Rules::new(n_layer, n_gpu_layers, overrides);
        Ok(match self.n_cpu_moe {
            Some(n) => rules.experts_on_host(Some(n.min(n_layer))),
            None if self.cpu_moe => rules.experts_on_host(None),
            None if self.policy() != Policy::Gpu && self.override_tensor.is_empty() => {
                rules.experts_on_host(None)
            }
            None => rules,
        })
    }
}

/// An error of the GPU that was asked for, and the options that avoid it.
fn with_advice(error: &cuda::Error) -> String {
    let options = if error.is_out_of_memory() {
        "lower --n-gpu-layers, add --cpu-moe, or run with --device cpu"
    } else {
        "or run with --device cpu"
    };
    format!("--device cuda: {error}; {options}")
}

#[cfg(test)]
mod tests {
    use clap::{Args as _, FromArgMatches as _};

    use super::*;

    fn parse(args: &[&str]) -> PostFetchArgs {
        let command = PostFetchArgs::augment_args(clap::Command::new("test"));
        // Variables of whoever runs the test count for nothing.
        let command = command.mut_args(|arg| arg.env(clap::builder::Resettable::Reset));
        let matches = command.try_get_matches_from([&["test"], args].concat());
        PostFetchArgs::from_arg_matches(&matches.unwrap()).unwrap()
    }

    #[test]
    fn defaults_are_those_of_the_executor() {
        let args = parse(&[]);
        assert_eq!(args.given(), None);
        let (settings, defaults) = (args.settings().unwrap(), Settings::default());
        assert_eq!(format!("{settings:?}"), format!("{defaults:?}"));
    }

    #[test]
    fn options_on_the_command_line_are_given() {
        let args = parse(&["--postfetch-cpu-limit", "2"]);
        assert_eq!(args.given(), Some("--postfetch-cpu-limit"));
        assert_eq!(args.settings().unwrap().cpu_limit, Some(2));
    }
}
