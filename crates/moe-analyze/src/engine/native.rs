//! The executor of this program as an engine.

use std::fmt::Display;

use moe_engine::{Decode as _, Engine, EngineInfo, Error, Logits, Mode, SessionInfo, Setup};
use moe_executor::cpu::threads::Threads;
use moe_executor::recorder::Recorder;
#[cfg(feature = "serve")]
use moe_executor::tokenizer::Tokenizer;
use moe_executor::{CacheParams, Devices, Model, Session};
use moe_files::text::counted;
use moe_gguf::Gguf;
use moe_placement::perf::{Counters, PerfMode};
use moe_trace::{Phase, manifest};

use super::boxed;
use super::cache_run::PreparedCacheRun;
use super::device::DeviceArgs;
use super::hot_cache::Machine;
use super::kv_cache::{self, CacheArgs};
use super::lora::{self, LoraFile};
use super::native_session::NativeSession;
use crate::context::Context;

/// Size of the buffer for the measurement of memory bandwidth: larger than CPU caches.
pub const BANDWIDTH_BYTES: usize = 512 << 20;

/// A model, and the threads that run it.
pub struct Native<'g> {
    model: Model<'g>,
    threads: Threads,
    device: DeviceArgs,
    cache: CacheArgs,
    ctx: Context,
    info: EngineInfo,
}

impl<'g> Native<'g> {
    /// Loads a model with LoRA adapters. The files are complete.
    pub fn load(
        gguf: &'g Gguf,
        adapters: &'g [LoraFile],
        n_threads: usize,
        device: DeviceArgs,
        cache: CacheArgs,
        ctx: Context,
    ) -> anyhow::Result<Native<'g>> {
        device.check()?;
        let model = Model::load_with_adapters(gguf, &lora::adapters(adapters))?;
        print_warnings(&model, &ctx);
        let info = info(&model);
        Ok(Native {
            model,
            threads: Threads::new(n_threads)?,
            device,
            cache,
            ctx,
            info,
        })
    }
}

/// Prints warnings about the model's file.
pub fn print_warnings(model: &Model, ctx: &Context) {
    for warning in model.warnings() {
        let file = model.gguf().files()[0].path.display();
        ctx.note(format_args!("warning: {file}: {warning}"));
    }
}

/// Describes the executor and a model.
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
        Ok(Box::new(self.native_session(setup)?))
    }
}

impl Native<'_> {
    /// The tokenizer of the model.
    #[cfg(feature = "serve")]
    pub fn tokenizer(&self) -> &Tokenizer {
        self.model.tokenizer()
    }

    /// Starts a session, and builds its cache.
    ///
    /// # Errors
    /// The device cannot be used, the cache cannot have its settings, or the run directory cannot be created.
    pub fn native_session<'s>(
        &'s self,
        setup: Setup<'s>,
    ) -> moe_engine::Result<NativeSession<'s, 's>> {
        let kv_params = self.kv_params(&setup);
        let devices = self.device.open(&self.model, &self.ctx).map_err(boxed)?;
        let (prepared, devices) = self
            .prepare_cache(devices, &setup, kv_params)
            .map_err(boxed)?;
        let (model, threads) = (&self.model, &self.threads);
        kv_params.check(model.gguf(), model.hparams())?;
        let kv_cache = kv_cache::describe(&kv_params, model.hparams());
        self.ctx.note(kv_cache::note(&kv_cache));
        let info = SessionInfo {
            gpus: gpus_at_start(&devices),
            kv_cache: Some(kv_cache),
        };
        let recorder = Recorder::new(None).with_mode(setup.mode);
        let mut session = Session::with_devices(model, threads, devices, recorder, kv_params)?;
        if let Some(observer) = setup.observer {
            session.observe(observer);
        }
        let enable = |prepared: PreparedCacheRun| {
            prepared.enable(&mut session.expert_cache()).map_err(boxed)
        };
        let cache = prepared.map(enable).transpose()?;
        // After everything else that can fail: the run directory may replace an earlier run.
        if let Some(create_run) = setup.create_run {
            let writer = create_run(info).map_err(Error::Engine)?;
            session.record(Recorder::new(Some(writer)).with_mode(setup.mode));
        }
        Ok(NativeSession::new(session, cache))
    }

    fn kv_params(&self, setup: &Setup) -> CacheParams {
        let params = self.cache.params(setup.n_ctx, setup.n_positions);
        params.with_sequences(setup.n_sequences)
    }

    /// Plans the cache of a session on `devices`, and runs the warm-up prompt there. Returns the devices, with the weights that the
    /// warm-up prompt has copied to them.
    fn prepare_cache<'s>(
        &'s self,
        mut devices: Devices<'s>,
        setup: &Setup,
        kv_cache: CacheParams,
    ) -> anyhow::Result<(Option<PreparedCacheRun>, Devices<'s>)> {
        let mut warm_up = None;
        let args = &self.device.hot_cache;
        if let Some(text) = args.warmup_text()? {
            if !args.uses_warmup() {
                self.ctx.note(
                    "warning: --warmup-prompt does not change the cache with an update rate of 0; pass --update-rate R above 0",
                );
            }
            let (counters, used) = self.warm_up(devices, &text, setup)?;
            (warm_up, devices) = (Some(counters), used);
        }
        let machine = self.machine(&devices, setup, kv_cache);
        let (device, threads) = (&self.device, &self.threads);
        let prepared = PreparedCacheRun::new(device, &machine, warm_up, threads, self.ctx)?;
        Ok((prepared, devices))
    }

    fn machine<'m>(
        &'m self,
        devices: &'m Devices<'m>,
        setup: &Setup,
        kv_cache: CacheParams,
    ) -> Machine<'m, 'm> {
        Machine {
            model: &self.model,
            devices,
            kv_cache,
            n_batch: setup.n_batch,
        }
    }

    /// Runs a prompt without recording it. Returns the counters of its experts, and the devices.
    fn warm_up<'s>(
        &'s self,
        devices: Devices<'s>,
        text: &str,
        setup: &Setup,
    ) -> anyhow::Result<(Counters, Devices<'s>)> {
        let recorder = Recorder::new(None);
        let mut tokens = self.encode(text)?;
        tokens.truncate(setup.n_ctx);
        let cache = self.cache.params(setup.n_ctx, tokens.len());
        let kv_cache = kv_cache::describe(&cache, self.model.hparams());
        self.ctx.note(format_args!(
            "warm-up prompt, {}",
            kv_cache::note(&kv_cache)
        ));
        let mut session =
            Session::with_devices(&self.model, &self.threads, devices, recorder, cache)?;
        let mut cache = session.expert_cache();
        cache.enable_hot_cache(&[], PerfMode::Update)?;
        for batch in tokens.chunks(setup.n_batch.max(1)) {
            session.decode(batch, Phase::Prompt, Logits::None)?;
        }
        let counters = session.counters().map_or_else(
            || Counters::new(PerfMode::Update, 0, 0),
            |counters| counters.lock().clone(),
        );
        Ok((counters, session.into_devices()))
    }
}

/// Returns the manifest's description of the GPUs at the start of a run. Counters are known only at the end.
pub fn gpus_at_start(devices: &Devices) -> Vec<manifest::Gpu> {
    let mut gpus = devices.describe();
    for gpu in &mut gpus {
        (gpu.peak_bytes, gpu.fallbacks) = (None, None);
    }
    gpus
}

/// Returns a measured bandwidth. Prints a failure, for example if GPU memory is exhausted.
pub fn gpu_bandwidth<E: Display>(measured: Result<f64, E>, ctx: &Context) -> Option<f64> {
    let failed = |error: &E| {
        ctx.note(format_args!(
            "warning: the memory bandwidth of the GPU cannot be measured: {error}"
        ));
    };
    measured.inspect_err(failed).ok()
}

/// Describes the operations of each GPU that the CPU ran instead. Returns an empty list without such operations.
pub fn fallbacks(gpus: &[manifest::Gpu]) -> Vec<String> {
    let all = gpus.iter().filter_map(|gpu| {
        let fallbacks = gpu.fallbacks.as_ref()?;
        let first = fallbacks.first_error.as_ref()?;
        let advice = match fallbacks.tensors {
            0 => "",
            _ => {
                "; use --n-gpu-layers, --n-cpu-moe or --override-tensor to keep tensors in CPU memory"
            }
        };
        let device = match (&gpu.device, gpus.len()) {
            (Some(device), 2..) => device.as_str(),
            _ => "the GPU",
        };
        Some(format!(
            "warning: the CPU ran {} instead of {device}, and {} did not fit into GPU memory; first error: {first}{advice}",
            counted(fallbacks.operations, "operation"),
            counted(fallbacks.tensors, "tensor")
        ))
    });
    all.collect()
}
