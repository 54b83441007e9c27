//! What the endpoints need: the tokenizer and the chat template of the model, and the scheduler.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use moe_engine::chat::RenderOptions;
use moe_placement::learn::LearnFile;
use moe_placement::perf::PerfMode;
use moe_server::generation::GenerationRequest;
use moe_server::http::{
    Backend, Chat, EventReceiver, HotCacheError, HotCacheUpdate, ModelInfo, SavedFile, Selections,
    Snapshot,
};
use moe_server::scheduler::{Handle, SubmitError};

use crate::chat::ModelChat;
use crate::engine::native::Native;
use crate::files;
use crate::output;

/// A model and its scheduler.
pub struct ServedModel {
    pub info: ModelInfo,
    pub engine: &'static Native<'static>,
    /// The chat template, or why the server has no template.
    pub chat: Result<ModelChat, String>,
    pub handle: Handle,
    /// The file of `--hot-cache`, which `save_to_disk` replaces.
    pub learn_file: Option<PathBuf>,
    /// The memory of the hot lanes: `gpu` or `ram`.
    pub hot_tier: &'static str,
}

impl Backend for ServedModel {
    fn model(&self) -> &ModelInfo {
        &self.info
    }

    fn tokenize(
        &self,
        text: &str,
        add_special: bool,
        parse_special: bool,
    ) -> Result<Vec<u32>, String> {
        let tokens = self
            .engine
            .tokenizer()
            .encode(text, add_special, parse_special);
        tokens.map_err(|error| error.to_string())
    }

    fn piece(&self, token: u32) -> Vec<u8> {
        self.engine.tokenizer().piece(token).to_vec()
    }

    fn chat_prompt(&self, chat: &Chat) -> Result<Vec<u32>, String> {
        let template = self.chat.as_ref().map_err(Clone::clone)?;
        let options = RenderOptions {
            tools: (!chat.tools.is_empty()).then(|| chat.tools.clone()),
            ..RenderOptions::default()
        };
        let text = template
            .render(&chat.messages, &options)
            .map_err(|error| output::one_line(&error.into()))?;
        let tokens = template.encode(&text, self.engine);
        tokens.map_err(|error| error.to_string())
    }

    fn submit(&self, request: GenerationRequest) -> Result<EventReceiver, SubmitError> {
        self.handle.submit(request)
    }

    fn perf_report(&self) -> String {
        let counters = self.handle.counters();
        counters.map_or_else(String::new, |counters| {
            counters.lock().to_learn_file().to_json()
        })
    }

    fn set_perf_mode(&self, mode: PerfMode) {
        // An error means that the server shuts down.
        let _ = self
            .handle
            .with_session(move |session| session.set_perf_mode(mode));
    }

    fn apply_hot_cache(
        &self,
        learn: &LearnFile,
        save_to_disk: bool,
    ) -> Result<HotCacheUpdate, HotCacheError> {
        let file = learn.clone();
        let updated = self
            .handle
            .with_session(move |session| session.update_cache(&file))
            .map_err(|stopped| HotCacheError::Invalid(stopped.to_string()))?;
        let update = updated
            .ok_or_else(|| {
                HotCacheError::Invalid(
                    "there is no hot cache; start the server with --policy hot-cache".to_owned(),
                )
            })?
            .map_err(|error| HotCacheError::Invalid(error.to_string()))?;
        let saved = match (&self.learn_file, save_to_disk) {
            (_, false) => None,
            (Some(path), true) => Some(
                save(path, learn)
                    .map_err(|error| HotCacheError::NotSaved(output::one_line(&error)))?,
            ),
            (None, true) => {
                return Err(HotCacheError::NotSaved(
                    "the server has no learn file".to_owned(),
                ));
            }
        };
        Ok(HotCacheUpdate {
            update_rate: update.update_rate,
            exchanged: update.exchanged,
            candidates: update.candidates,
            max_exchange: update.max_exchange,
            hot_experts: update.hot_experts,
            layers_changed: update.layers_changed,
            saved,
        })
    }

    fn metrics(&self) -> Snapshot {
        let counts = self.handle.metrics();
        let selections = self.handle.counters().map(|counters| {
            let counters = counters.lock();
            [
                ("hot", self.hot_tier, counters.hot_slots()),
                ("cold", "ram", counters.cold_slots()),
            ]
        });
        Snapshot {
            n_slots: counts.n_slots,
            n_running: counts.n_running,
            n_queued: counts.n_queued,
            queue_capacity: counts.queue_capacity,
            prompt_tokens: counts.prompt_tokens,
            prompt_time: counts.prompt_time,
            generated_tokens: counts.generated_tokens,
            generation_time: counts.generation_time,
            selections: selections
                .into_iter()
                .flatten()
                .map(|(lane, tier, count)| Selections {
                    lane: lane.to_owned(),
                    tier: tier.to_owned(),
                    count,
                })
                .collect(),
        }
    }
}

/// Writes a learn file. An existing file gets the name `STEM.N.EXTENSION`, N from 1, as in the fork.
fn save(path: &Path, learn: &LearnFile) -> anyhow::Result<SavedFile> {
    let backup = if path.exists() {
        let backup = free_backup(path);
        // A hard link fails if the name was taken meanwhile, so that no file is replaced.
        std::fs::hard_link(path, &backup)
            .with_context(|| format!("cannot keep the old file as {}", backup.display()))?;
        Some(backup)
    } else {
        None
    };
    files::write(path, true, |out| {
        Ok(out.write_all(learn.to_json().as_bytes())?)
    })?;
    Ok(SavedFile {
        path: path.display().to_string(),
        backup_path: backup.map_or_else(String::new, |backup| backup.display().to_string()),
    })
}

fn free_backup(path: &Path) -> PathBuf {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let extension = path
        .extension()
        .map(|ext| format!(".{}", ext.to_string_lossy()));
    let extension = extension.unwrap_or_default();
    let name = |n: u32| path.with_file_name(format!("{stem}.{n}{extension}"));
    (1..)
        .map(name)
        .find(|backup| !backup.exists())
        .unwrap_or_else(|| name(0))
}
