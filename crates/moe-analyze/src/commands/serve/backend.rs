//! What the endpoints need: the tokenizer and the chat template of the model, and the scheduler.

use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use moe_engine::chat::RenderOptions;
use moe_engine::{Engine as _, EngineInfo};
use moe_placement::learn::{LearnFile, is_usable};
use moe_placement::perf::{Counters, LaneIndex, PerfMode};
use moe_server::generation::GenerationRequest;
use moe_server::http::{
    Backend, Chat, EventReceiver, HotCacheError, HotCacheUpdate, ModelInfo, SavedFile,
};
use moe_server::metrics::MetricsSnapshot;
use moe_server::recent::{RecentRequest, RecentRequests};
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
    /// The requests that the page of `--ui` shows.
    pub recent: Option<RecentRequests>,
    /// The file of `--hot-cache`, which `save_to_disk` replaces.
    pub learn_file: Option<PathBuf>,
    /// The memory of each hot lane: `gpu` or `ram`.
    pub hot_tiers: Vec<&'static str>,
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
        let report = match self.handle.counters() {
            Some(counters) => counters.lock().to_learn_file(),
            None => Counters::new(PerfMode::Off, 0, 0).to_learn_file(),
        };
        report.to_json()
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
        let unavailable = |message: &str| HotCacheError::Unavailable(message.to_owned());
        let path = match (&self.learn_file, save_to_disk) {
            (_, false) => None,
            (Some(path), true) => Some(path),
            (None, true) => {
                let message = "the server has no learn file; start it with --hot-cache FILE";
                return Err(unavailable(message));
            }
        };
        check_learn_file(learn, self.engine.info()).map_err(HotCacheError::Invalid)?;
        // The next start would refuse it.
        if path.is_some() && learn.observations().is_ok_and(|layers| !is_usable(&layers)) {
            let message = "the learn file contains no activations, so it is not saved";
            return Err(HotCacheError::Invalid(message.to_owned()));
        }
        let no_cache = "there is no hot cache; start the server with --policy hot-cache";
        let update = self
            .handle
            .update_cache(learn.clone())?
            .ok_or_else(|| unavailable(no_cache))?
            .map_err(|error| HotCacheError::Invalid(error.to_string()))?;
        let saved = path.map(|path| save(path, learn));
        let saved = saved
            .transpose()
            .map_err(|error| HotCacheError::NotSaved(output::one_line(&error)))?;
        Ok(HotCacheUpdate { update, saved })
    }

    fn metrics(&self) -> MetricsSnapshot {
        self.handle.metrics()
    }

    fn tier(&self, lane: LaneIndex) -> Option<&str> {
        match lane.hot_index() {
            Some(index) => self.hot_tiers.get(index).copied(),
            // The weights of the mapped file.
            None => Some("ram"),
        }
    }

    fn recent_requests(&self, detailed: Option<u32>) -> Vec<RecentRequest> {
        let recent = self.recent.as_ref();
        recent.map_or_else(Vec::new, |recent| recent.list(detailed))
    }
}

/// Rejects a learn file of another model, before it changes the cache or replaces the file of `--hot-cache`.
fn check_learn_file(learn: &LearnFile, model: &EngineInfo) -> Result<(), String> {
    let observations = learn.observations().map_err(|error| error.to_string())?;
    let out_of_range = |what: String, n: usize| {
        let last = n.saturating_sub(1);
        Err(format!(
            "the learn file is invalid: {what} is out of range (0..={last}); send a learn file of this model"
        ))
    };
    let n_expert = learn.n_expert().filter(|&n| n != model.n_expert as u64);
    if let Some(n) = n_expert {
        return Err(format!(
            "the learn file has {n} experts in a layer, but the model has {}; send a learn file of this model",
            model.n_expert
        ));
    }
    let mut previous = None;
    for observation in &observations {
        let layer = observation.layer;
        if usize::from(layer.0) >= model.n_layer {
            return out_of_range(format!("layer {}", layer.0), model.n_layer);
        }
        // Observations are sorted by layer.
        if previous.replace(layer) == Some(layer) {
            return Err(format!(
                "the learn file is invalid: it contains layer {} twice; add its counts in one element of `layers`",
                layer.0
            ));
        }
        let is_unknown = |expert: &u32| *expert as usize >= model.n_expert;
        let mut experts = observation.experts.iter().map(|expert| expert.expert.0);
        if let Some(expert) = experts.find(is_unknown) {
            let what = format!("expert {expert} of layer {}", layer.0);
            return out_of_range(what, model.n_expert);
        }
    }
    Ok(())
}

/// Writes a learn file. An existing file gets the name `STEM.N.EXTENSION`, N from 1, as in the fork. It is the file of `--hot-cache`,
/// which no output may replace; under its new name, it stays as it is.
fn save(path: &Path, learn: &LearnFile) -> anyhow::Result<SavedFile> {
    save_by(path, || {
        files::write(path, false, |out| {
            Ok(out.write_all(learn.to_json().as_bytes())?)
        })
    })
}

/// Renames the file at `path`, if any, and calls `write`, which must not replace a file. If `write` fails, the file gets its name
/// back, unless another program has created a file with that name.
fn save_by(path: &Path, write: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<SavedFile> {
    let backup = path.exists().then(|| free_backup(path));
    if let Some(backup) = &backup {
        rename_without_replacing(path, backup)
            .with_context(|| format!("cannot keep the old file as {}", backup.display()))?;
    }
    if let Err(error) = write() {
        if let Some(backup) = &backup
            && rename_without_replacing(backup, path).is_err()
        {
            bail!("{error:#}; the old file is now {}", backup.display());
        }
        return Err(error);
    }
    Ok(SavedFile {
        path: path.display().to_string(),
        backup_path: backup.map_or_else(String::new, |backup| backup.display().to_string()),
    })
}

/// Renames a file. A hard link fails if the new name is taken, unlike a rename, which replaces the file with that name.
fn rename_without_replacing(from: &Path, to: &Path) -> io::Result<()> {
    fs::hard_link(from, to)?;
    fs::remove_file(from)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn learn_file_of_another_model_is_rejected() {
        let model = EngineInfo {
            n_layer: 4,
            n_expert: 16,
            ..EngineInfo::default()
        };
        let check = |layers: &str| {
            let text =
                format!(r#"{{"schema": "llama.cpp.moe_layer_opt_perf.v1", "layers": [{layers}]}}"#);
            check_learn_file(&LearnFile::parse(&text).unwrap(), &model)
        };
        let sound = r#"{"layer": 3, "experts": [[15, 2], [0, 1]]}"#;
        assert_eq!(check(sound), Ok(()));
        let twice = format!("{sound}, {sound}");
        for (layers, expected) in [
            (
                r#"{"layer": 4, "experts": [[1, 2]]}"#,
                "layer 4 is out of range (0..=3)",
            ),
            (
                r#"{"layer": 2, "experts": [[16, 2]]}"#,
                "expert 16 of layer 2 is out of range (0..=15)",
            ),
            (twice.as_str(), "it contains layer 3 twice"),
        ] {
            let error = check(layers).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn learn_file_with_another_number_of_experts_is_rejected() {
        let model = EngineInfo {
            n_layer: 4,
            n_expert: 16,
            ..EngineInfo::default()
        };
        let check = |n: u32| {
            let schema = "llama.cpp.moe_layer_opt_perf.v1";
            let text = format!(r#"{{"schema": "{schema}", "n_expert": {n}, "layers": []}}"#);
            check_learn_file(&LearnFile::parse(&text).unwrap(), &model)
        };
        assert_eq!(check(16), Ok(()));
        assert!(check(64).unwrap_err().contains("has 64 experts"));
    }

    #[test]
    fn failed_save_restores_the_old_file() {
        let dir = tempfile::tempdir().unwrap();
        let (path, backup) = (
            dir.path().join("learn.json"),
            dir.path().join("learn.1.json"),
        );
        fs::write(&path, "old").unwrap();
        let error = save_by(&path, || bail!("the disk is full")).unwrap_err();
        assert_eq!(error.to_string(), "the disk is full");
        assert_eq!(fs::read_to_string(&path).unwrap(), "old");
        assert!(!backup.exists());
    }

    #[test]
    fn failed_save_keeps_a_file_that_another_program_created() {
        let dir = tempfile::tempdir().unwrap();
        let (path, backup) = (
            dir.path().join("learn.json"),
            dir.path().join("learn.1.json"),
        );
        fs::write(&path, "old").unwrap();
        let saved = save_by(&path, || {
            fs::write(&path, "foreign")?;
            files::write(&path, false, |out| Ok(out.write_all(b"new")?))
        });
        let expected = format!(
            "{} exists; the old file is now {}",
            path.display(),
            backup.display()
        );
        assert_eq!(saved.unwrap_err().to_string(), expected);
        assert_eq!(fs::read_to_string(&path).unwrap(), "foreign");
        assert_eq!(fs::read_to_string(&backup).unwrap(), "old");
    }
}
