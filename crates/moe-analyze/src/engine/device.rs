//! Options of GPUs: which tensors and operations are on a GPU.

use anyhow::{Context as _, anyhow, bail};
use moe_executor::cuda::post_fetch::Settings;
use moe_executor::cuda::{self, Gpu, GpuSpec, Policy};
use moe_executor::placement::{Override, Rules};
use moe_executor::{Devices, Model};
use moe_gguf::text::counted;

use super::device_list::DeviceList;
use super::hot_cache::HotCacheArgs;
use super::scratchpad;
use crate::context::Context;
use crate::env_option::{EnvOption, EnvOptionParser, InvalidVariable};
use crate::option_values::{ValueError, first_given, integer_in, number};

/// Values of `--policy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum PolicyArg {
    /// The CPU computes them
    Cpu,
    /// The GPU computes them; their weights are copied when a token selects them
    Gpu,
    /// The CPU computes gate and up while the down matrix is copied to the GPU, which computes the down product
    PostFetch,
    /// The GPU computes the experts that a hot cache contains, and the CPU the others at the same time; see --hot-cache
    HotCache,
}

/// Name of the policy of a hot cache in manifests.
pub const HOT_CACHE: &str = "hot-cache";

/// Parses a number of layers. -1 means all layers, as in llama.cpp.
fn layers(text: &str) -> Result<usize, ValueError> {
    match text {
        "-1" => Ok(usize::MAX),
        _ => number(text, "-1 or an integer of at least 0", |_| true),
    }
}

/// Parses a GPU's proportion of the layers.
fn proportion(text: &str) -> Result<f32, ValueError> {
    number(text, "a number of at least 0", |share: &f32| {
        *share >= 0.0 && share.is_finite()
    })
}

/// Options of GPUs.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "GPU")]
pub struct DeviceArgs {
    /// Devices to run on: cpu, auto, or GPUs such as cuda, cuda:1 or cuda:0,cuda:1
    ///
    /// cuda is the first NVIDIA GPU. auto is the first GPU if it works, else the CPU. The CPU is always used as well. The GPUs of a list
    /// are named CUDA0, CUDA1, ... in this order, and share the layers (--tensor-split). A GPU that is listed twice counts as two.
    #[arg(long, value_name = "LIST", default_value_t)]
    pub device: DeviceList,
    /// Number of layers on the GPU, counted from the end of the model and including the output layer; -1 is all layers [default: -1]
    #[arg(long, visible_alias = "ngl", value_name = "N", value_parser = layers)]
    pub n_gpu_layers: Option<usize>,
    /// Device that computes selected experts whose weights are in CPU memory [default: gpu; cpu with --cpu-moe, --n-cpu-moe or
    /// --override-tensor]
    ///
    /// cpu, post-fetch and hot-cache keep the weights of all experts in CPU memory, unless --n-cpu-moe or --override-tensor places
    /// them. Without a GPU, the experts of a hot cache are copied to CPU memory.
    #[arg(long, value_enum)]
    pub policy: Option<PolicyArg>,
    /// Keep the weights of all experts in CPU memory
    #[arg(long)]
    pub cpu_moe: bool,
    /// Keep the weights of experts of the first N layers in CPU memory
    #[arg(long, value_name = "N", conflicts_with = "cpu_moe")]
    pub n_cpu_moe: Option<usize>,
    /// Place tensors whose name matches REGEX on DEVICE: CPU, CUDA0, CUDA1, ...; the first match applies
    #[arg(long, value_name = "REGEX=DEVICE[,…]", value_delimiter = ',')]
    pub override_tensor: Vec<String>,
    /// Proportion of the layers on each GPU, such as 3,1 [default: in proportion to free memory]
    #[arg(long, visible_alias = "ts", value_name = "N[,…]", value_delimiter = ',', value_parser = proportion)]
    pub tensor_split: Vec<f32>,
    /// Limit GPU memory to N MiB; a list contains one limit per GPU [default: no limit]
    #[arg(long, value_name = "N[,…]", value_delimiter = ',')]
    pub vram_mib: Vec<u64>,
    /// Minimum batch size in tokens for which weights in CPU memory are copied to the GPU and multiplied there; 0 disables these copies
    #[arg(
        long,
        env = "GGML_OP_OFFLOAD_MIN_BATCH",
        value_name = "N",
        default_value = "32",
        value_parser = EnvOptionParser(str::parse::<usize>)
    )]
    pub offload_min_batch: EnvOption<usize>,
    #[command(flatten)]
    pub hot_cache: HotCacheArgs,
    #[command(flatten)]
    pub post_fetch: PostFetchArgs,
}

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

    /// Returns the settings of the options and variables.
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
pub fn switch(text: &str) -> Result<bool, ValueError> {
    match text {
        "0" => Ok(false),
        "1" => Ok(true),
        _ => Err(ValueError::Expected("0 or 1")),
    }
}

impl DeviceArgs {
    /// Opens the devices of `--device`. Returns only the CPU if `auto` finds no working GPU.
    ///
    /// # Errors
    /// A GPU of the list does not work, or a setting is invalid.
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
                    ctx.note(format_args!("warning: {error}; running on the CPU"));
                    return Ok(Devices::cpu());
                }
                Some(error) => bail!(self.with_advice(error)),
                None => return Err(error),
            },
        };
        if let Some(small) = scratchpad::too_small(model, &settings)
            .filter(|_| devices.policy() == Policy::PostFetch)
        {
            ctx.note(small);
        }
        self.print_gpus(&devices, ctx);
        let copies = self.policy() != Policy::Cpu || self.has_hot_cache();
        if copies && self.keeps_experts_on_cpu() {
            let registered = devices.register(model.gguf());
            if !registered {
                ctx.note(
                    "warning: the driver cannot copy directly from the mapped model, so copies use staging buffers",
                );
            }
        }
        if debug {
            for gpu in devices.gpus_mut() {
                let ctx = *ctx;
                gpu.observe_transfers(Box::new(move |transfer| {
                    ctx.note(format_args!("post-fetch: {transfer}"));
                }));
            }
        }
        Ok(devices)
    }

    /// Opens the GPUs and places the tensors.
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

    /// Prints the GPUs.
    fn print_gpus(&self, devices: &Devices, ctx: &Context) {
        let gpus = devices.gpus();
        for gpu in gpus {
            let info = gpu.gpu().info();
            let name = match gpus.len() {
                1 => String::new(),
                _ => format!("{}, cuda:{}: ", gpu.id(), info.ordinal),
            };
            ctx.note(format_args!(
                "{name}{}, {:.1} GiB, policy {}",
                info.name,
                info.memory_bytes as f64 / (1u64 << 30) as f64,
                self.policy_name()
            ));
        }
    }

    /// Returns the GPUs to open with their memory limits.
    fn specs(&self) -> anyhow::Result<Vec<GpuSpec>> {
        let gpus = self.device.gpus();
        let limits = match self.vram_mib.as_slice() {
            [] => vec![None; gpus.len()],
            [all] => vec![Some(*all); gpus.len()],
            each if each.len() == gpus.len() => each.iter().copied().map(Some).collect(),
            each => bail!(
                "--vram-mib has {} for {}; pass one value for all GPUs, or one for each",
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

    /// Returns the proportion of layers of each GPU: `--tensor-split`, with 0 for missing values, else the free memory of the GPU within
    /// its limit, as in llama.cpp.
    fn split(&self, gpus: &[Gpu]) -> Vec<f32> {
        if self.tensor_split.is_empty() {
            return gpus.iter().map(|gpu| gpu.memory().2 as f32).collect();
        }
        let mut split = self.tensor_split.clone();
        split.resize(gpus.len(), 0.0);
        split
    }

    /// Rejects a `--tensor-split` that does not match the list of GPUs.
    fn check_split(&self) -> anyhow::Result<()> {
        let (n, n_gpus) = (self.tensor_split.len(), self.device.gpus().len());
        if n > n_gpus {
            bail!(
                "--tensor-split has {} for {}; pass at most one value for each GPU",
                counted(n, "value"),
                counted(n_gpus, "GPU")
            );
        }
        if n > 0 && self.tensor_split.iter().all(|&share| share == 0.0) {
            bail!(
                "--tensor-split assigns no layer to any GPU; pass a value above 0, or --n-gpu-layers 0"
            );
        }
        Ok(())
    }

    /// Rejects invalid settings before a model is loaded.
    ///
    /// # Errors
    /// A setting is invalid, or has no effect with the other settings.
    pub fn check(&self) -> anyhow::Result<()> {
        match (self.has_hot_cache(), self.hot_cache.given()) {
            (true, _) => self.hot_cache.check()?,
            (false, Some(option)) => {
                bail!("{option} has no effect without --policy hot-cache; add it, or omit {option}")
            }
            (false, None) => {}
        }
        if self.device == DeviceList::Cpu {
            return match self.gpu_option() {
                Some(option) => bail!(
                    "{option} has no effect without a GPU; add --device cuda or --device auto, or omit {option}"
                ),
                None => Ok(()),
            };
        }
        if let Some(option) = self.post_fetch.given()
            && self.policy() != Policy::PostFetch
        {
            bail!("{option} has no effect without --policy post-fetch; add it, or omit {option}");
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

    /// Returns whether a hot cache is used.
    pub fn has_hot_cache(&self) -> bool {
        self.policy == Some(PolicyArg::HotCache)
    }

    /// Returns the first option on the command line that describes a hot cache.
    pub fn hot_cache_option(&self) -> Option<&'static str> {
        let policy = self.has_hot_cache().then_some("--policy hot-cache");
        policy.or(self.hot_cache.given())
    }

    /// Returns the first option on the command line that needs a GPU. `--policy cpu` and `--policy hot-cache` do not.
    pub fn gpu_option(&self) -> Option<&'static str> {
        let needs_gpu = [PolicyArg::Gpu, PolicyArg::PostFetch];
        let policy = self
            .policy
            .is_some_and(|policy| needs_gpu.contains(&policy));
        let option = first_given([
            ("--policy", policy),
            ("--n-gpu-layers", self.n_gpu_layers.is_some()),
            ("--cpu-moe", self.cpu_moe),
            ("--n-cpu-moe", self.n_cpu_moe.is_some()),
            ("--override-tensor", !self.override_tensor.is_empty()),
            ("--tensor-split", !self.tensor_split.is_empty()),
            ("--vram-mib", !self.vram_mib.is_empty()),
            ("--offload-min-batch", self.offload_min_batch.is_given()),
        ]);
        option.or(self.post_fetch.given())
    }

    /// Returns the policy's name in a manifest.
    pub fn policy_name(&self) -> &'static str {
        match (&self.device, self.policy()) {
            _ if self.has_hot_cache() => HOT_CACHE,
            (DeviceList::Cpu, _) | (_, Policy::Cpu) => "cpu",
            (_, Policy::Gpu) => "gpu",
            (_, Policy::PostFetch) => "post-fetch",
        }
    }

    fn policy(&self) -> Policy {
        match self.policy {
            Some(PolicyArg::Cpu | PolicyArg::HotCache) => Policy::Cpu,
            Some(PolicyArg::Gpu) => Policy::Gpu,
            Some(PolicyArg::PostFetch) => Policy::PostFetch,
            None if self.places_experts() => Policy::Cpu,
            None => Policy::Gpu,
        }
    }

    /// Returns whether options place the weights of experts.
    pub fn places_experts(&self) -> bool {
        self.cpu_moe || self.n_cpu_moe.is_some() || !self.override_tensor.is_empty()
    }

    fn keeps_experts_on_cpu(&self) -> bool {
        self.places_experts() || self.policy() != Policy::Gpu
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

    /// Returns the error of a GPU with advice.
    fn with_advice(&self, error: &cuda::Error) -> String {
        let options = if error.is_out_of_memory() {
            "reduce --n-gpu-layers, add --cpu-moe, or run on the CPU with --device cpu"
        } else {
            "run on the CPU with --device cpu"
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
