//! Options of the GPUs: what runs there, and how.

use anyhow::{Context as _, anyhow, bail};
use moe_executor::cuda::post_fetch::Settings;
use moe_executor::cuda::{self, Gpu, GpuSpec, Policy};
use moe_executor::placement::{Override, Rules};
use moe_executor::{Devices, Model};
use moe_gguf::text::counted;

use super::device_list::DeviceList;
use super::scratchpad;
use crate::context::Context;
use crate::env_option::{EnvOption, EnvOptionParser, InvalidVariable};
use crate::option_values::{ValueError, first_given, number, whole};

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

/// A GPU's part of the layers.
fn share(text: &str) -> Result<f32, ValueError> {
    number(text, "a number of at least 0", |share: &f32| {
        *share >= 0.0 && share.is_finite()
    })
}

/// Options of the GPUs.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "GPU")]
pub struct DeviceArgs {
    /// Devices to run on: cpu, auto, or GPUs such as cuda, cuda:1 or cuda:0,cuda:1
    ///
    /// cuda is the first NVIDIA GPU; auto is the same if it works, else the CPU. The CPU always takes part. The GPUs of a list are named
    /// CUDA0, CUDA1, ... in its order, and share the layers (--tensor-split). A GPU that is listed twice counts as two.
    #[arg(long, value_name = "LIST", default_value_t)]
    pub device: DeviceList,
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
    /// Where tensors live whose name matches a regular expression: CPU, CUDA0, CUDA1, ...; the first that matches decides
    #[arg(long, value_name = "REGEX=DEVICE", value_delimiter = ',')]
    pub override_tensor: Vec<String>,
    /// Split the layers on GPUs among them in these proportions, such as 3,1 [default: by free memory]
    #[arg(long, visible_alias = "ts", value_name = "N,...", value_delimiter = ',', value_parser = share)]
    pub tensor_split: Vec<f32>,
    /// Limit the memory of each GPU to N MiB; a list has a limit for each
    #[arg(long, value_name = "N,...", value_delimiter = ',')]
    pub vram_mib: Vec<u64>,
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
    /// The devices as they are asked for; the CPU alone also where `auto` finds no GPU that works.
    ///
    /// # Errors
    /// A GPU that was asked for does not work, or a setting that cannot be.
    pub fn open<'g>(&self, model: &Model<'g>, ctx: &Context) -> anyhow::Result<Devices<'g>> {
        if self.device == DeviceList::Cpu {
            return Ok(Devices::cpu());
        }
        let settings = self.post_fetch.settings()?;
        let debug = self.post_fetch.postfetch_debug.get()?;
        let mut devices = match self.ready(model, settings) {
            Ok(devices) => devices,
            Err(error) => match error.downcast_ref::<cuda::Error>() {
                Some(error) if self.device == DeviceList::Auto => {
                    ctx.remark(format_args!("{error}; the processor computes"));
                    return Ok(Devices::cpu());
                }
                Some(error) => bail!(self.with_advice(error)),
                None => return Err(error),
            },
        };
        if let Some(small) = scratchpad::too_small(model, &settings)
            .filter(|_| devices.policy() == Policy::PostFetch)
        {
            ctx.remark(small);
        }
        self.print_gpus(&devices, ctx);
        if self.policy() != Policy::Cpu && self.keeps_experts_with_host() {
            let registered = devices.register(model.gguf());
            if !registered {
                ctx.remark(
                    "the driver does not read the mapped model by itself: copies go through other memory",
                );
            }
        }
        if debug {
            for gpu in devices.gpus_mut() {
                let ctx = *ctx;
                gpu.observe_transfers(Box::new(move |transfer| {
                    ctx.remark(format_args!("post-fetch: {transfer}"));
                }));
            }
        }
        Ok(devices)
    }

    /// The devices with all that a session needs of them, or what does not work.
    fn ready<'g>(&self, model: &Model<'g>, settings: Settings) -> anyhow::Result<Devices<'g>> {
        let rules = self.rules(model.hparams().n_layer)?;
        let min_batch = self.min_batch()?;
        let gpus = Gpu::open_all(&self.specs()?)?;
        let names = model.gguf().tensors().iter().map(|t| t.name.as_str());
        let rules = rules.split_layers(self.split(&gpus));
        let placement = rules.resolve(names).context("--override-tensor")?;
        let policy = self.policy();
        let devices = Devices::new(gpus, placement, policy, min_batch);
        Ok(match policy {
            Policy::PostFetch => devices.with_post_fetch(settings)?,
            Policy::Cpu | Policy::Gpu => devices,
        })
    }

    /// Prints which GPUs are used.
    fn print_gpus(&self, devices: &Devices, ctx: &Context) {
        let gpus = devices.gpus();
        for gpu in gpus {
            let info = gpu.gpu().info();
            let name = match gpus.len() {
                1 => String::new(),
                _ => format!("{}, cuda:{}: ", gpu.id(), info.ordinal),
            };
            ctx.remark(format_args!(
                "{name}{}, {:.1} GiB, policy {}",
                info.name,
                info.memory_bytes as f64 / (1u64 << 30) as f64,
                self.policy_name()
            ));
        }
    }

    /// The GPUs to open, each with its limit.
    fn specs(&self) -> anyhow::Result<Vec<GpuSpec>> {
        let gpus = self.device.gpus();
        let limits = match self.vram_mib.as_slice() {
            [] => vec![None; gpus.len()],
            [all] => vec![Some(*all); gpus.len()],
            each if each.len() == gpus.len() => each.iter().copied().map(Some).collect(),
            each => bail!(
                "--vram-mib has {} for {}; give one for all, or one for each",
                counted(each.len(), "value"),
                counted(gpus.len(), "GPU")
            ),
        };
        let spec = |(&ordinal, mib): (&usize, Option<u64>)| GpuSpec {
            ordinal,
            limit: mib.map(|mib| mib.saturating_mul(1 << 20)),
        };
        Ok(gpus.iter().zip(limits).map(spec).collect())
    }

    /// Part of the layers of each GPU: as given, where GPUs without a value get none, else by the memory that it may use, as in
    /// llama.cpp.
    fn split(&self, gpus: &[Gpu]) -> Vec<f32> {
        if self.tensor_split.is_empty() {
            return gpus.iter().map(|gpu| gpu.memory().2 as f32).collect();
        }
        let mut split = self.tensor_split.clone();
        split.resize(gpus.len(), 0.0);
        split
    }

    /// Refuses a split that does not fit the list of GPUs.
    fn check_split(&self) -> anyhow::Result<()> {
        let (n, n_gpus) = (self.tensor_split.len(), self.device.gpus().len());
        if n > n_gpus {
            bail!(
                "--tensor-split has {} for {}; give at most one for each",
                counted(n, "value"),
                counted(n_gpus, "GPU")
            );
        }
        if n > 0 && self.tensor_split.iter().all(|&share| share == 0.0) {
            bail!(
                "--tensor-split leaves no GPU any layer; give a value above 0, or --n-gpu-layers 0"
            );
        }
        Ok(())
    }

    /// Refuses settings that cannot be, before a model is loaded.
    ///
    /// # Errors
    /// Which, and what it must be.
    pub fn check(&self) -> anyhow::Result<()> {
        if self.device == DeviceList::Cpu {
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
        self.check_split()?;
        self.specs()?;
        let rules = self
            .rules(0)?
            .split_layers(vec![1.0; self.device.gpus().len()]);
        rules.resolve([]).context("--override-tensor")?;
        self.post_fetch.settings()?;
        self.post_fetch.postfetch_debug.get()?;
        self.min_batch()?;
        match (&self.device, Gpu::detect()) {
            (DeviceList::Cuda(_), Err(missing)) => Err(anyhow!(self.with_advice(&missing))),
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
            ("--tensor-split", !self.tensor_split.is_empty()),
            ("--vram-mib", !self.vram_mib.is_empty()),
            ("--offload-min-batch", self.offload_min_batch.is_given()),
        ])
    }

    /// Name of the policy, as a manifest says it.
    pub fn policy_name(&self) -> &'static str {
        match (&self.device, self.policy()) {
            (DeviceList::Cpu, _) | (_, Policy::Cpu) => "cpu",
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
            Some(n) => rules.experts_on_cpu(Some(n.min(n_layer))),
            None if self.cpu_moe => rules.experts_on_cpu(None),
            None if self.policy() != Policy::Gpu && self.override_tensor.is_empty() => {
                rules.experts_on_cpu(None)
            }
            None => rules,
        })
    }

    /// An error of a GPU that was asked for, and the options that avoid it.
    fn with_advice(&self, error: &cuda::Error) -> String {
        let options = if error.is_out_of_memory() {
            "lower --n-gpu-layers, add --cpu-moe, or run with --device cpu"
        } else {
            "or run with --device cpu"
        };
        format!("--device {}: {error}; {options}", self.device)
    }
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
