//! The executor of this program as an engine.

use moe_executor::cpu::threads::Threads;
use moe_executor::cuda::Device;
use moe_executor::cuda::post_fetch::Settings;
use moe_executor::recorder::{Mode, Recorder};
use moe_executor::{Model, Session};
use moe_gguf::Gguf;
use moe_gguf::text::counted;
use moe_trace::{RunWriter, manifest};

use super::device::DeviceArgs;
use super::{About, Engine, Setup};
use crate::cli::Context;

/// A model, and the threads that compute it.
pub struct Native<'g> {
    model: Model<'g>,
    threads: Threads,
    device: DeviceArgs,
    ctx: Context,
    about: About,
}

impl<'g> Native<'g> {
    /// Loads the model of a file whose data is whole.
    pub fn load(
        gguf: &'g Gguf,
        n_threads: usize,
        device: DeviceArgs,
        ctx: Context,
    ) -> anyhow::Result<Native<'g>> {
        device.check()?;
        let model = Model::load(gguf)?;
        print_warnings(&model, &ctx);
        let about = about(&model);
        Ok(Native {
            model,
            threads: Threads::new(n_threads)?,
            device,
            ctx,
            about,
        })
    }
}

/// Prints what a user should know about the model's file although it can be run.
pub fn print_warnings(model: &Model, ctx: &Context) {
    for warning in model.warnings() {
        let file = model.gguf().files()[0].path.display();
        ctx.remark(format_args!("warning: {file}: {warning}"));
    }
}

/// What the executor says of itself and of a model.
pub fn about(model: &Model) -> About {
    let hp = model.hparams();
    About {
        name: "moe-analyze".to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        arch: hp.arch.clone(),
        n_layer: hp.n_layer,
        n_expert: hp.n_expert,
        n_expert_used: hp.n_expert_used,
        n_vocab: hp.n_vocab,
        n_ctx_train: hp.n_ctx_train,
        mmap: vec!["MAP_SHARED".to_owned()],
        ..About::default()
    }
}

impl Engine for Native<'_> {
    fn about(&self) -> &About {
        &self.about
    }

    fn encode(&self, text: &str) -> anyhow::Result<Vec<u32>> {
        Ok(self.model.tokenizer().encode(text, true, true)?)
    }

    fn piece(&self, token: u32) -> Vec<u8> {
        self.model.tokenizer().piece(token).to_vec()
    }

    fn records_per_pass(&self, n_tokens: usize, mode: Mode) -> u64 {
        self.model.records_per_pass(n_tokens, mode)
    }

    fn session<'s>(&'s self, setup: Setup<'s>) -> anyhow::Result<Box<dyn super::Session + 's>> {
        let device = self.device.open(&self.model, &self.ctx)?;
        let writer = setup
            .begin
            .map(|begin| begin(device.as_ref().map(gpu_at_start)));
        let recorder = Recorder::new(writer.transpose()?).with_mode(setup.mode);
        let (model, threads, n_ctx) = (&self.model, &self.threads, setup.n_ctx);
        let mut session = Session::with_device(model, threads, device, recorder, n_ctx);
        if let Some(observer) = setup.observer {
            session.observe(observer);
        }
        Ok(Box::new(session))
    }
}

impl super::Session for Session<'_, '_> {
    fn stop_observing(&mut self) {
        Session::stop_observing(self);
    }

    fn gpu(&self) -> Option<manifest::Gpu> {
        self.device().map(gpu)
    }

    fn gpu_bandwidth(&self, ctx: &Context) -> Option<f64> {
        gpu_bandwidth(self.device()?, ctx)
    }

    fn fallbacks(&self) -> Option<String> {
        self.device().and_then(fallbacks)
    }

    fn into_writer(self: Box<Self>) -> (Option<RunWriter>, moe_executor::Result<()>) {
        let (recorder, ended) = self.into_recorder();
        (recorder.into_writer(), ended)
    }
}

/// The GPU as in the manifest while the run goes on: what is counted is known at its end.
pub fn gpu_at_start(device: &Device) -> manifest::Gpu {
    manifest::Gpu {
        peak_bytes: None,
        fallbacks: None,
        ..gpu(device)
    }
}

/// The GPU as in a manifest.
pub fn gpu(device: &Device) -> manifest::Gpu {
    let about = device.gpu().about();
    let (_, peak, limit) = device.gpu().memory();
    let scratchpad = device.scratchpad_bytes() as u64;
    manifest::Gpu {
        name: about.name.clone(),
        memory_bytes: about.memory_bytes,
        driver: Some(format!(
            "CUDA {}.{}",
            about.driver / 1000,
            about.driver % 1000 / 10
        )),
        limit_bytes: Some(limit),
        peak_bytes: Some(peak),
        scratchpad_bytes: (scratchpad > 0).then_some(scratchpad),
        fallbacks: Some(manifest::Fallbacks {
            operations: device.fallbacks.ops,
            tensors: device.fallbacks.tensors.len() as u64,
            first_error: device.fallbacks.first.clone(),
        }),
        offload_min_batch: Some(device.min_batch().unwrap_or(0) as u64),
        post_fetch: device.post_fetch_settings().map(settings),
    }
}

/// The settings of Post-Fetch as in a manifest.
fn settings(settings: &Settings) -> manifest::PostFetch {
    manifest::PostFetch {
        enable: settings.enable,
        force_cpu: settings.force_cpu,
        block_on_miss: settings.block_on_miss,
        max_transfers: settings.max_transfers as u64,
        scratchpad_mb: settings.scratchpad_bytes.map_or(0, |bytes| bytes >> 20) as u64,
        use_dedicated_streams: settings.dedicated_streams,
        cpu_limit: settings.cpu_limit.unwrap_or(0) as u64,
    }
}

/// Bytes that the GPU reads from its memory in a second. A failure is printed: the GPU may have no room for the copy.
pub fn gpu_bandwidth(device: &Device, ctx: &Context) -> Option<f64> {
    const BYTES: usize = 1 << 30;
    match device.gpu().bandwidth(BYTES) {
        Ok(bandwidth) => Some(bandwidth),
        Err(error) => {
            ctx.remark(format_args!(
                "warning: the memory bandwidth of the GPU cannot be measured: {error}"
            ));
            None
        }
    }
}

/// What the GPU could not do and the processor did; none if there was nothing.
pub fn fallbacks(device: &Device) -> Option<String> {
    let fallbacks = &device.fallbacks;
    let first = fallbacks.first.as_ref()?;
    let advice = match fallbacks.tensors.is_empty() {
        true => "",
        false => {
            "; --n-gpu-layers, --n-cpu-moe and --override-tensor say what stays with the processor"
        }
    };
    Some(format!(
        "the processor did {} in the GPU's place, and {} found no room there; the first reason: {first}{advice}",
        counted(fallbacks.ops, "operation"),
        counted(fallbacks.tensors.len(), "tensor")
    ))
}
