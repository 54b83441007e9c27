//! The executor of this program as an engine.

use std::fmt::Display;

use moe_engine::{Engine, EngineInfo, Error, Mode, Setup};
use moe_executor::cpu::threads::Threads;
use moe_executor::recorder::Recorder;
use moe_executor::{Devices, Model, Session};
use moe_gguf::Gguf;
use moe_gguf::text::counted;
use moe_trace::manifest;

use super::boxed;
use super::device::DeviceArgs;
use crate::context::Context;

/// Bytes over which the bandwidth of the memory is measured: beyond the caches of today's processors.
pub const BANDWIDTH_BYTES: usize = 512 << 20;

/// A model, and the threads that compute it.
pub struct Native<'g> {
    model: Model<'g>,
    threads: Threads,
    device: DeviceArgs,
    ctx: Context,
    info: EngineInfo,
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
        let info = info(&model);
        Ok(Native {
            model,
            threads: Threads::new(n_threads)?,
            device,
            ctx,
            info,
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
pub fn info(model: &Model) -> EngineInfo {
    let hp = model.hparams();
    EngineInfo {
        name: "moe-analyze".to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        arch: hp.arch.clone(),
        n_layer: hp.n_layer,
        n_expert: hp.n_expert,
        n_expert_used: hp.n_expert_used,
        n_vocab: hp.n_vocab,
        n_ctx_train: hp.n_ctx_train,
        mmap: vec!["MAP_SHARED".to_owned()],
        ..EngineInfo::default()
    }
}

impl Engine for Native<'_> {
    fn info(&self) -> &EngineInfo {
        &self.info
    }

    fn encode(&self, text: &str) -> moe_engine::Result<Vec<u32>> {
        let tokens = self.model.tokenizer().encode(text, true, true);
        tokens.map_err(Error::engine)
    }

    fn piece(&self, token: u32) -> Vec<u8> {
        self.model.tokenizer().piece(token).to_vec()
    }

    fn records_per_pass(&self, n_tokens: usize, mode: Mode) -> u64 {
        self.model.records_per_pass(n_tokens, mode)
    }

    fn session<'s>(
        &'s self,
        setup: Setup<'s>,
    ) -> moe_engine::Result<Box<dyn moe_engine::Session + 's>> {
        let devices = self.device.open(&self.model, &self.ctx).map_err(boxed)?;
        let writer = setup.begin.map(|begin| begin(gpus_at_start(&devices)));
        let writer = writer.transpose().map_err(Error::Engine)?;
        let recorder = Recorder::new(writer).with_mode(setup.mode);
        let (model, threads, n_ctx) = (&self.model, &self.threads, setup.n_ctx);
        let mut session = Session::with_devices(model, threads, devices, recorder, n_ctx);
        if let Some(observer) = setup.observer {
            session.observe(observer);
        }
        Ok(Box::new(session))
    }
}

/// The GPUs as the manifest describes them while the run goes on: what is counted is known at its end.
pub fn gpus_at_start(devices: &Devices) -> Vec<manifest::Gpu> {
    let mut gpus = devices.describe();
    for gpu in &mut gpus {
        (gpu.peak_bytes, gpu.fallbacks) = (None, None);
    }
    gpus
}

/// A bandwidth that was measured. A failure is printed: the GPU may have no room for the copy.
pub fn gpu_bandwidth<E: Display>(measured: Result<f64, E>, ctx: &Context) -> Option<f64> {
    let failed = |error: &E| {
        ctx.remark(format_args!(
            "warning: the memory bandwidth of the GPU cannot be measured: {error}"
        ));
    };
    measured.inspect_err(failed).ok()
}

/// What each GPU could not do and the CPU did; empty if there was nothing.
pub fn fallbacks(gpus: &[manifest::Gpu]) -> Vec<String> {
    let all = gpus.iter().filter_map(|gpu| {
        let fallbacks = gpu.fallbacks.as_ref()?;
        let first = fallbacks.first_error.as_ref()?;
        let advice = match fallbacks.tensors {
            0 => "",
            _ => {
                "; --n-gpu-layers, --n-cpu-moe and --override-tensor say what stays with the processor"
            }
        };
        let place = match (&gpu.device, gpus.len()) {
            (Some(device), 2..) => format!("the place of {device}"),
            _ => "the GPU's place".to_owned(),
        };
        Some(format!(
            "the processor did {} in {place}, and {} found no room there; the first reason: {first}{advice}",
            counted(fallbacks.operations, "operation"),
            counted(fallbacks.tensors, "tensor")
        ))
    });
    all.collect()
}
