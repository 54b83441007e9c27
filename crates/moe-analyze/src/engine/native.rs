//! The executor of this program as an engine.

use moe_executor::cpu::threads::Threads;
use moe_executor::recorder::{Mode, Recorder};
use moe_executor::{Model, Session};
use moe_gguf::Gguf;
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
        let hp = model.hparams();
        let about = About {
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
        };
        Ok(Native {
            model,
            threads: Threads::new(n_threads)?,
            device,
            ctx,
            about,
        })
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
        let recorder = Recorder::new(setup.writer).with_mode(setup.mode);
        let device = self.device.open(&self.model, &self.ctx)?;
        let (model, threads, n_ctx) = (&self.model, &self.threads, setup.n_ctx);
        let mut session = Session::with_device(model, threads, device, recorder, n_ctx);
        if let Some(observer) = setup.observer {
            session.observe(observer);
        }
        Ok(Box::new(session))
    }
}

impl super::Session for Session<'_, '_> {
    fn gpu(&self) -> Option<manifest::Gpu> {
        let device = self.device()?;
        let about = device.gpu().about();
        let (_, peak, limit) = device.gpu().memory();
        let scratchpad = device.scratchpad_bytes() as u64;
        Some(manifest::Gpu {
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
        })
    }

    fn gpu_bandwidth(&self) -> Option<f64> {
        const BYTES: usize = 1 << 30;
        self.device()?.gpu().bandwidth(BYTES).ok()
    }

    fn fallbacks(&self) -> Option<String> {
        let fallbacks = &self.device()?.fallbacks;
        let first = fallbacks.first.as_ref()?;
        let tensors = fallbacks.tensors.len();
        Some(format!(
            "the processor did {} operations in the GPU's place, and {tensors} tensors found no room there; the first \
             reason: {first}",
            fallbacks.ops
        ))
    }

    fn into_writer(self: Box<Self>) -> Option<RunWriter> {
        self.into_recorder().into_writer()
    }
}
