//! Options of the GPU: what runs there, and how.

use std::ops::RangeInclusive;

use anyhow::{Context as _, anyhow, bail};
use moe_executor::Model;
use moe_executor::cuda::post_fetch::Settings;
use moe_executor::cuda::{self, Device, Gpu, Policy};
use moe_executor::placement::{Override, Placement, Rules};

use super::scratchpad;
use crate::context::Context;
use crate::values::first_given;

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
#[derive(Clone, Debug, Default, clap::Args)]
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
    /// [default: GGML_OP_OFFLOAD_MIN_BATCH, or 32 as in llama.cpp]
    #[arg(long, value_name = "N")]
    pub offload_min_batch: Option<usize>,
    #[command(flatten)]
    pub post_fetch: PostFetchArgs,
}

/// Options of `--policy post-fetch`. Each has the environment variable of the design it comes from; the option wins.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Post-Fetch (an empty variable counts as unset)")]
pub struct PostFetchArgs {
    /// 0 = the processor computes all [env: LLAMA_POSTFETCH_ENABLE=] [default: 1]
    #[arg(long, value_name = "0|1")]
    pub postfetch_enable: Option<String>,
    /// 1 = the processor computes all, for comparison [env: LLAMA_POSTFETCH_FORCE_CPU=] [default: 0]
    #[arg(long, value_name = "0|1")]
    pub postfetch_force_cpu: Option<String>,
    /// 1 = wait for a late transfer, 0 = the processor takes over [env: LLAMA_POSTFETCH_BLOCK_ON_MISS=] [default: 1]
    #[arg(long, value_name = "0|1")]
    pub postfetch_block_on_miss: Option<String>,
    /// Transfers of a layer at most [env: LLAMA_POSTFETCH_MAX_TRANSFERS=] [default: 8]
    #[arg(long, value_name = "N")]
    pub postfetch_max_transfers: Option<String>,
    /// Memory for the transfers of a layer; 0 = what they need [env: LLAMA_POSTFETCH_SCRATCHPAD_MB=] [default: 0]
    #[arg(long, value_name = "MB")]
    pub postfetch_scratchpad_mb: Option<String>,
    /// 1 = a stream for transfers alone [env: LLAMA_POSTFETCH_USE_DEDICATED_STREAMS=] [default: 1]
    #[arg(long, value_name = "0|1")]
    pub postfetch_use_dedicated_streams: Option<String>,
    /// Experts of a token whose gate and up the processor computes, the GPU does the others; 0 = all of them
    /// [env: LLAMA_POSTFETCH_CPU_LIMIT=] [default: 0]
    #[arg(long, value_name = "N")]
    pub postfetch_cpu_limit: Option<String>,
    /// 1 = tell of each transfer on stderr, unless --quiet [env: LLAMA_POSTFETCH_DEBUG=] [default: 0]
    #[arg(long, value_name = "0|1")]
    pub postfetch_debug: Option<String>,
}

impl PostFetchArgs {
    /// An option that was given; variables may be set for all runs.
    fn given(&self) -> Option<&'static str> {
        first_given([
            ("--postfetch-enable", self.postfetch_enable.is_some()),
            ("--postfetch-force-cpu", self.postfetch_force_cpu.is_some()),
            (
                "--postfetch-block-on-miss",
                self.postfetch_block_on_miss.is_some(),
            ),
            (
                "--postfetch-max-transfers",
                self.postfetch_max_transfers.is_some(),
            ),
            (
                "--postfetch-scratchpad-mb",
                self.postfetch_scratchpad_mb.is_some(),
            ),
            (
                "--postfetch-use-dedicated-streams",
                self.postfetch_use_dedicated_streams.is_some(),
            ),
            ("--postfetch-cpu-limit", self.postfetch_cpu_limit.is_some()),
            ("--postfetch-debug", self.postfetch_debug.is_some()),
        ])
    }

    /// Whether each transfer is to be told, as options and environment say.
    fn debug(&self) -> anyhow::Result<bool> {
        switch(&self.postfetch_debug, "DEBUG", false)
    }

    /// The settings that options and environment say.
    fn settings(&self) -> anyhow::Result<Settings> {
        let given = Settings::default();
        let pad: usize = number(
            &self.postfetch_scratchpad_mb,
            "SCRATCHPAD_MB",
            0,
            0..=1 << 20,
        )?;
        let limit: usize = number(&self.postfetch_cpu_limit, "CPU_LIMIT", 0, 0..=1 << 14)?;
        Ok(Settings {
            enable: switch(&self.postfetch_enable, "ENABLE", given.enable)?,
            force_cpu: switch(&self.postfetch_force_cpu, "FORCE_CPU", given.force_cpu)?,
            block_on_miss: switch(
                &self.postfetch_block_on_miss,
                "BLOCK_ON_MISS",
                given.block_on_miss,
            )?,
            max_transfers: number(
                &self.postfetch_max_transfers,
                "MAX_TRANSFERS",
                given.max_transfers,
                1..=1 << 14,
            )?,
            scratchpad_bytes: (pad > 0).then_some(pad << 20),
            dedicated_streams: switch(
                &self.postfetch_use_dedicated_streams,
                "USE_DEDICATED_STREAMS",
                given.dedicated_streams,
            )?,
            cpu_limit: (limit > 0).then_some(limit),
            ..given
        })
    }
}

/// The value of a variable; one that is set but empty is as none.
fn variable(name: &str) -> anyhow::Result<Option<String>> {
    match std::env::var(name) {
        Ok(text) => Ok(Some(text).filter(|text| !text.is_empty())),
        Err(std::env::VarError::NotPresent) => Ok(None),
        Err(error) => Err(anyhow!("{name}: {error}")),
    }
}

/// The value of an option or of its variable, and what it is called.
fn value(option: &Option<String>, name: &str) -> anyhow::Result<Option<(String, String)>> {
    let flag = name.to_lowercase().replace('_', "-");
    if let Some(text) = option {
        return Ok(Some((text.clone(), format!("--postfetch-{flag}"))));
    }
    let name = format!("LLAMA_POSTFETCH_{name}");
    Ok(variable(&name)?.map(|text| (text, name)))
}

fn switch(option: &Option<String>, name: &str, default: bool) -> anyhow::Result<bool> {
    match value(option, name)? {
        None => Ok(default),
        Some((text, from)) => match text.as_str() {
            "0" => Ok(false),
            "1" => Ok(true),
            _ => bail!("{from} is `{text}`; it must be 0 or 1"),
        },
    }
}

fn number(
    option: &Option<String>,
    name: &str,
    default: usize,
    range: RangeInclusive<usize>,
) -> anyhow::Result<usize> {
    let Some((text, from)) = value(option, name)? else {
        return Ok(default);
    };
    let parsed = text.parse().ok().filter(|n| range.contains(n));
    let (least, most) = range.into_inner();
    parsed.ok_or_else(|| anyhow!("{from} is `{text}`; it must be a number from {least} to {most}"))
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
        let debug = self.post_fetch.debug()?;
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
        let about = device.gpu().about();
        ctx.remark(format_args!(
            "{}, {:.1} GiB, policy {}",
            about.name,
            about.memory_bytes as f64 / (1u64 << 30) as f64,
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
        self.post_fetch.debug()?;
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
            ("--offload-min-batch", self.offload_min_batch.is_some()),
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

    fn min_batch(&self) -> anyhow::Result<Option<usize>> {
        const VARIABLE: &str = "GGML_OP_OFFLOAD_MIN_BATCH";
        let rows = match (self.offload_min_batch, variable(VARIABLE)?) {
            (Some(rows), _) => rows,
            (None, Some(text)) => text.parse().map_err(|_| {
                anyhow!("{VARIABLE} is `{text}`; it must be a number of rows, 0 = never")
            })?,
            (None, None) => 32,
        };
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
    let options = match error.is_out_of_memory() {
        true => "lower --n-gpu-layers, add --cpu-moe, or run with --device cpu",
        false => "or run with --device cpu",
    };
    format!("--device cuda: {error}; {options}")
}
