//! The interface of the endpoints to the model and its scheduler.

use moe_engine::CacheUpdate;
use moe_placement::learn::LearnFile;
use moe_placement::perf::{LaneIndex, PerfMode};
use serde_json::Value;
use tokio::sync::mpsc::UnboundedReceiver;

use crate::generation::{Event, GenerationRequest};
use crate::metrics::MetricsSnapshot;
use crate::recent::RecentRequest;
use crate::scheduler::{Stopped, SubmitError};

/// The events of one request. Dropping the receiver cancels the request. The queue needs no limit of its own: a request has
/// at most one event for each position of its context.
pub type EventReceiver = UnboundedReceiver<Event>;

/// A model and the scheduler that evaluates requests. All functions may block, except [`submit`](Backend::submit),
/// [`model`](Backend::model), [`piece`](Backend::piece), [`metrics`](Backend::metrics), [`tier`](Backend::tier) and [`recent_requests`](Backend::recent_requests).
pub trait Backend: Send + Sync + 'static {
    /// Properties of the model.
    fn model(&self) -> &ModelInfo;

    /// The tokens of a text.
    ///
    /// - `add_special`: adds the tokens that the vocabulary puts around a text, for example BOS.
    /// - `parse_special`: reads the text of a special token, for example `<|im_end|>`, as this token.
    ///
    /// # Errors
    /// A message if the text cannot be tokenized.
    fn tokenize(
        &self,
        text: &str,
        add_special: bool,
        parse_special: bool,
    ) -> Result<Vec<u32>, String>;

    /// The bytes of a token; empty for an id outside the vocabulary. A character may be split over several tokens.
    fn piece(&self, token: u32) -> Vec<u8>;

    /// The tokens of a conversation, formatted with the chat template of the model.
    ///
    /// # Errors
    /// A message if the model has no template or the template rejects the conversation.
    fn chat_prompt(&self, chat: &Chat) -> Result<Vec<u32>, String>;

    /// Puts a request into the queue.
    ///
    /// # Errors
    /// The request cannot be queued.
    fn submit(&self, request: GenerationRequest) -> Result<EventReceiver, SubmitError>;

    /// The counters of the expert cache as compact JSON: the body of `GET /moe-layer-perf`.
    fn perf_report(&self) -> String;

    /// Sets what the counters count, and resets them.
    fn set_perf_mode(&self, mode: PerfMode);

    /// Exchanges experts of the hot cache for those that `learn` ranks highest, and saves the file if requested. Waits for the
    /// end of the current pass.
    ///
    /// # Errors
    /// See [`HotCacheError`].
    fn apply_hot_cache(
        &self,
        learn: &LearnFile,
        save_to_disk: bool,
    ) -> Result<HotCacheUpdate, HotCacheError>;

    /// State and counts of the scheduler.
    fn metrics(&self) -> MetricsSnapshot;

    /// The memory that contains the weights of a lane, for example `gpu` or `ram`; `None` if the expert cache does not have the lane.
    fn tier(&self, lane: LaneIndex) -> Option<&str>;

    /// The recent requests, newest first. Only the request with the id `detailed` has tokens and selections. Empty by default.
    fn recent_requests(&self, detailed: Option<u32>) -> Vec<RecentRequest> {
        let _ = detailed;
        Vec::new()
    }
}

/// Properties of the model that a server serves.
#[derive(Clone, Debug, Default)]
pub struct ModelInfo {
    /// Name in requests and responses.
    pub name: String,
    /// When the model was loaded, in seconds since 1970.
    pub created: u64,
    /// Context length of a request, in tokens.
    pub n_ctx: usize,
    /// Number of tokens in the vocabulary.
    pub n_vocab: usize,
}

/// A conversation.
#[derive(Clone, Debug)]
pub struct Chat {
    /// Messages: objects with `role` and `content`, and other keys as in the request. `content` is a string or null.
    pub messages: Vec<Value>,
    /// Definitions of tools; empty if there are none.
    pub tools: Vec<Value>,
}

/// An update of the hot cache: the answer of `/moe-hot-cache`.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct HotCacheUpdate {
    /// The exchanges.
    pub update: CacheUpdate,
    /// Where the file was saved, if requested.
    pub saved: Option<SavedFile>,
}

/// A learn file that was saved.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct SavedFile {
    /// Path of the file.
    pub path: String,
    /// Path to which the old file was moved; empty if the file did not exist.
    pub backup_path: String,
}

/// The hot cache was not updated, or the file was not saved.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum HotCacheError {
    /// The server has no hot cache, or no path for the file.
    #[error("{0}")]
    Unavailable(String),
    /// The file does not fit to the model.
    #[error("{0}")]
    Invalid(String),
    /// The cache was updated, but the file was not saved.
    #[error("the hot cache was updated, but the file was not saved: {0}")]
    NotSaved(String),
    /// The scheduler has ended.
    #[error("{0}")]
    Stopped(#[from] Stopped),
}
