//! llama.cpp as an engine.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use anyhow::{Context as _, bail};
use moe_engine::{Engine, EngineInfo, Error, Mode, SessionInfo, Setup};
use moe_gguf::Gguf;
use moe_gguf::kv_cache::{Cells, KvShape, LayerBytes};
use moe_llama_cpp::{Model, OpNumbers, Params, Recording, Session, positions_to_allocate};
use moe_trace::manifest;

use super::kv_cache::{self, CacheArgs};
use super::lora::LoraFile;
use crate::context::Context;
use crate::output::message;

/// The path of the model, for [`exit_on_abort`].
static MODEL: OnceLock<PathBuf> = OnceLock::new();

/// Exits with an error where llama.cpp would abort the process.
fn exit_on_abort(condition: &str) -> ! {
    let model = MODEL.get().map_or(Path::new("the model"), PathBuf::as_path);
    let message = message::line(&format!(
        "moe-analyze: {}: llama.cpp cannot run this model, because its check failed: {condition}; check the keys of the model's header, \
         or run it without --engine llama.cpp",
        model.display()
    ));
    moe_files::signals::fail(&message)
}

/// A model that llama.cpp has loaded.
pub struct LlamaCpp<'g> {
    gguf: &'g Gguf,
    adapters: &'g [LoraFile],
    model: Model,
    n_threads: u32,
    cache: CacheArgs,
    ctx: Context,
    info: EngineInfo,
}

impl<'g> LlamaCpp<'g> {
    /// Loads the files of the model and its LoRA adapters into llama.cpp.
    pub fn load(
        gguf: &'g Gguf,
        adapters: &'g [LoraFile],
        n_threads: usize,
        cache: CacheArgs,
        ctx: Context,
    ) -> anyhow::Result<LlamaCpp<'g>> {
        let path = &gguf.files()[0].path;
        if !path.is_file() {
            bail!("llama.cpp cannot run the embedded model; pass a model with --model FILE.gguf");
        }
        let _ = MODEL.set(path.clone());
        moe_llama_cpp::on_abort(exit_on_abort);
        let scaled: Vec<(&Gguf, f32)> = adapters
            .iter()
            .map(|file| (&file.gguf, file.scale))
            .collect();
        let model = Model::load_with_adapters(gguf, &scaled)?;
        let metadata = gguf.metadata();
        let arch = metadata
            .str("general.architecture")?
            .with_context(|| format!("{}: general.architecture is missing", path.display()))?;
        // The maximum over layers, if the value differs between layers.
        let number = |key: &str| -> anyhow::Result<usize> {
            let values = metadata.per_layer(&format!("{arch}.{key}"))?;
            let number = values.and_then(|values| values.max());
            Ok(usize::try_from(number.unwrap_or(0))?)
        };
        // llama.cpp maps with read-ahead.
        let flags = if cfg!(target_os = "linux") {
            &["MAP_SHARED", "MAP_POPULATE"][..]
        } else {
            &["MAP_SHARED"]
        };
        let info = EngineInfo {
            name: "llama.cpp".to_owned(),
            version: moe_llama_cpp::version(),
            arch: arch.to_owned(),
            n_layer: number("block_count")?.saturating_sub(number("nextn_predict_layers")?),
            n_expert: number("expert_count")?,
            n_expert_used: number("expert_used_count")?,
            n_vocab: model.n_vocab(),
            n_ctx_train: model.n_ctx_train(),
            ops: OpNumbers::new().table().clone(),
            mmap: flags.iter().map(|&flag| flag.to_owned()).collect(),
        };
        Ok(LlamaCpp {
            gguf,
            adapters,
            model,
            n_threads: n_threads as u32,
            cache,
            ctx,
            info,
        })
    }
}

impl Engine for LlamaCpp<'_> {
    fn info(&self) -> &EngineInfo {
        &self.info
    }

    fn encode(&self, text: &str) -> moe_engine::Result<Vec<u32>> {
        let tokens = self.model.tokenize(text, true, true);
        tokens.map_err(Error::engine)
    }

    fn piece(&self, token: u32) -> Vec<u8> {
        self.model.piece(token)
    }

    fn records_per_pass(&self, n_tokens: usize, mode: Mode) -> u64 {
        Session::records_per_pass(&self.model, self.gguf, n_tokens, mode)
    }

    fn session<'s>(
        &'s self,
        setup: Setup<'s>,
    ) -> moe_engine::Result<Box<dyn moe_engine::Session + 's>> {
        let n_positions = setup.n_positions.min(setup.n_ctx);
        let n_positions = positions_to_allocate(self.gguf, n_positions, setup.n_ctx);
        let params = Params {
            n_ctx: n_positions as u32,
            n_seq: 1,
            n_batch: setup.n_batch as u32,
            n_threads: self.n_threads,
            flash_attention: None,
            kv_types: self.cache.types(),
        };
        let (n_positions, n_batch) = (n_positions as u64, setup.n_batch as u64);
        let kv_cache = describe(self.cache, self.gguf, n_positions, n_batch);
        self.ctx.note(kv_cache::note(&kv_cache));
        let session = SessionInfo {
            kv_cache: Some(kv_cache),
            ..SessionInfo::default()
        };
        let adapters: Vec<&Gguf> = self.adapters.iter().map(|file| &file.gguf).collect();
        let recording = Recording::new(self.gguf, None, setup.mode, setup.observer);
        let recording = recording.with_adapters(self.gguf, &adapters);
        let started = Session::new(&self.model, self.gguf, params, setup.n_ctx, recording);
        let mut started = started.map_err(Error::engine)?;
        // After llama.cpp has created its context and evaluated a token: the run directory may replace an earlier run.
        if let Some(create_run) = setup.create_run {
            started.warm_up().map_err(Error::engine)?;
            started.record(create_run(session).map_err(Error::Engine)?);
        }
        Ok(Box::new(started))
    }
}

/// The description of llama.cpp's cache for the manifest: of one sequence with `n_positions` positions, and passes of `n_batch`
/// tokens.
fn describe(cache: CacheArgs, gguf: &Gguf, n_positions: u64, n_batch: u64) -> manifest::KvCache {
    let layers = KvShape::of(gguf).and_then(|shape| {
        let cells = Cells::of_llama_cpp(n_positions, 1, n_batch, shape.window());
        shape.bytes(cache.types(), cells)
    });
    let layers = layers.ok();
    let sum = |bytes: fn(&LayerBytes) -> u64| {
        let bytes = layers.as_ref()?.iter().map(bytes);
        Some(bytes.fold(0, u64::saturating_add))
    };
    manifest::KvCache {
        type_k: cache.cache_type_k.name().to_owned(),
        type_v: cache.cache_type_v.name().to_owned(),
        n_seq: Some(1),
        n_positions: Some(n_positions),
        size_bytes: sum(LayerBytes::kv),
        state_bytes: sum(|layer| layer.state).filter(|&bytes| bytes > 0),
    }
}
