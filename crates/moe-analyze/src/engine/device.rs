//! Options of GPUs: which tensors and operations are on a GPU.

use anyhow::{Context as _, anyhow, bail};
use moe_executor::cuda::post_fetch::Settings;
use moe_executor::cuda::{self, Gpu, GpuSpec, Policy};
use moe_executor::placement::{Override, Rules};
use moe_executor::{Devices, Model};
use moe_files::text::counted;

use super::device_list::DeviceList;
use super::dynamic::{DynamicArgs, HOT_CACHE_OPTIONS};
use super::hot_cache::HotCacheArgs;
use super::post_fetch::PostFetchArgs;
use super::scratchpad;
use crate::context::Context;
use crate::env_option::{EnvOption, EnvOptionParser, InvalidVariable};
use crate::option_values::{ValueError, first_given, number};

/// Values of `--policy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum PolicyArg {
    /// The CPU computes them
    Cpu,
    /// The GPU computes them; their weights are copied when a token selects them
    Gpu,
    /// The CPU computes gate and up while the down matrix is copied to the GPU, which computes the down product
    PostFetch,
    /// The GPU computes the experts that a hot cache contains, while the CPU computes the others; see --hot-cache
    HotCache,
    /// Like hot-cache, but missing experts are copied to the cache when a token selects them; see --cache-policy
    Dynamic,
}

/// Name of the policy of a hot cache in manifests.
const HOT_CACHE: &str = "hot-cache";
/// Name of the policy of a dynamic cache in manifests.
const DYNAMIC: &str = "dynamic";

/// Returns the name of a policy in the results of a run. Without a GPU it is `cpu`, except for a cache, which is then in CPU memory.
pub fn policy_of_run(policy: &str, has_gpu: bool) -> &str {
    if has_gpu || [HOT_CACHE, DYNAMIC].contains(&policy) {
        policy
    } else {
        "cpu"
    }
}

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
    /// Devices to run on: cpu, auto, or up to 16 GPUs such as cuda, cuda:1 or cuda:0,cuda:1
    ///
    /// cuda is the first NVIDIA GPU. auto is the first GPU if it works, else the CPU. The CPU is always used as well. The GPUs of a list
    /// are named CUDA0, CUDA1, ... in this order, and share the layers (--tensor-split). A GPU that is listed twice counts as two.
    #[arg(long, value_name = "LIST", default_value_t)]
    pub device: DeviceList,
    /// Number of layers on the GPU, 0 or more, counted from the end of the model and including the output layer; -1 is all layers;
    /// short name: -ngl [default: -1]
    #[arg(long, visible_alias = "ngl", value_name = "N", value_parser = layers)]
    pub n_gpu_layers: Option<usize>,
    /// Device that computes selected experts whose weights are in CPU memory [default: cpu without a GPU, or with --cpu-moe, --n-cpu-moe
    /// or --override-tensor; else gpu]
    ///
    /// cpu, post-fetch, hot-cache and dynamic keep the weights of all experts in CPU memory, unless --n-cpu-moe or --override-tensor
    /// places some of them on a GPU. Without a GPU, the experts of a cache are copied within CPU memory.
    #[arg(long, value_enum)]
    pub policy: Option<PolicyArg>,
    /// Keep the weights of all experts in CPU memory; short name: -cmoe
    #[arg(long)]
    pub cpu_moe: bool,
    /// Keep the weights of experts of the first N layers in CPU memory, 0 or more; short name: -ncmoe
    #[arg(long, value_name = "N", conflicts_with = "cpu_moe")]
    pub n_cpu_moe: Option<usize>,
    /// Place tensors whose name matches REGEX on DEVICE: CPU, CUDA0, CUDA1, ...; the first match applies; REGEX must not contain a comma;
    /// short name: -ot
    #[arg(long, value_name = "REGEX=DEVICE[,…]", value_delimiter = ',')]
    pub override_tensor: Vec<String>,
    /// Proportion of the layers on each GPU, such as 3,1; each 0 or more; short name: -ts [default: in proportion to free memory]
    #[arg(long, visible_alias = "ts", value_name = "N[,…]", value_delimiter = ',', value_parser = proportion)]
    pub tensor_split: Vec<f32>,
    /// Limit the memory of each GPU to N MiB, 0 or more; a list contains one limit per GPU [default: no limit]
    #[arg(long, value_name = "N[,…]", value_delimiter = ',')]
    pub vram_mib: Vec<u64>,
    /// Minimum batch size in tokens, 0 or more, for which weights in CPU memory are copied to the GPU and multiplied there; 0 disables
    /// these copies
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
    pub dynamic: DynamicArgs,
    #[command(flatten)]
    pub post_fetch: PostFetchArgs,
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
        let has_cache = self.has_hot_cache() || self.has_dynamic_cache();
        let copies = self.policy() != Policy::Cpu || has_cache;
        if copies && self.keeps_experts_on_cpu() {
            let registered = devices.register(model.gguf());
            if !registered {
                ctx.note(
                    "warning: the driver cannot copy directly from the mapped model, so copies use pinned buffers",
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
        self.check_cache()?;
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

    /// Rejects options of a cache that is not used, and settings that do not fit together.
    fn check_cache(&self) -> anyhow::Result<()> {
        if let Some(option) = self.dynamic.given().filter(|_| !self.has_dynamic_cache()) {
            bail!("{option} has no effect without --policy dynamic; add it, or omit {option}");
        }
        match self.policy {
            Some(PolicyArg::HotCache) => self.hot_cache.check(),
            Some(PolicyArg::Dynamic) => self.dynamic.check(&self.hot_cache),
            _ => match self.hot_cache.given_except(&[]) {
                Some(option) => {
                    let policies = if HOT_CACHE_OPTIONS.contains(&option) {
                        "hot-cache or dynamic"
                    } else {
                        "hot-cache"
                    };
                    bail!(
                        "{option} has no effect without --policy {policies}; add it, or omit {option}"
                    )
                }
                None => Ok(()),
            },
        }
    }

    /// Returns whether a dynamic cache is used.
    pub fn has_dynamic_cache(&self) -> bool {
        self.policy == Some(PolicyArg::Dynamic)
    }

    /// Returns the learn file or plan of a hot cache.
    #[cfg(feature = "serve")]
    pub fn hot_cache_file(&self) -> Option<&std::path::Path> {
        self.hot_cache.file().filter(|_| self.has_hot_cache())
    }

    /// Returns whether a hot cache is used.
    pub fn has_hot_cache(&self) -> bool {
        self.policy == Some(PolicyArg::HotCache)
    }

    /// Returns the first option on the command line that describes a hot or dynamic cache.
    pub fn cache_option(&self) -> Option<&'static str> {
        let policy = match self.policy {
            Some(PolicyArg::HotCache) => Some("--policy hot-cache"),
            Some(PolicyArg::Dynamic) => Some("--policy dynamic"),
            _ => None,
        };
        let hot_cache = self.hot_cache.given_except(&[]);
        policy.or(hot_cache).or(self.dynamic.given())
    }

    /// Returns the first option on the command line that needs a GPU. `--policy cpu`, `hot-cache` and `dynamic` do not.
    pub fn gpu_option(&self) -> Option<&'static str> {
        let option = first_given([
            ("--policy gpu", self.policy == Some(PolicyArg::Gpu)),
            (
                "--policy post-fetch",
                self.policy == Some(PolicyArg::PostFetch),
            ),
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
            _ if self.has_dynamic_cache() => DYNAMIC,
            (DeviceList::Cpu, _) | (_, Policy::Cpu) => "cpu",
            (_, Policy::Gpu) => "gpu",
            (_, Policy::PostFetch) => "post-fetch",
        }
    }

    fn policy(&self) -> Policy {
        match self.policy {
            Some(PolicyArg::Cpu | PolicyArg::HotCache | PolicyArg::Dynamic) => Policy::Cpu,
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
            "; reduce --n-gpu-layers, add --cpu-moe, or run on the CPU with --device cpu"
        } else if error.contains_advice() {
            ", or run on the CPU with --device cpu"
        } else {
            "; run on the CPU with --device cpu"
        };
        format!("--device {}: {error}{options}", self.device)
    }
}
