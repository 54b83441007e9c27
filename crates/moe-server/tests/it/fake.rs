//! A backend without a model, for tests of the endpoints and for the example `fake_server`. It generates a fixed script.

use std::sync::{Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use moe_engine::CacheUpdate;
use moe_placement::LayerId;
use moe_placement::learn::LearnFile;
use moe_placement::perf::{Counters, LaneIndex, LayerCall, PerfMode};
use moe_server::generation::{Event, FinishReason, GenerationRequest, TokenProbability, Usage};
use moe_server::http::{
    Backend, Chat, EventReceiver, HotCacheError, HotCacheUpdate, ModelInfo, SavedFile,
};
use moe_server::metrics::{BUCKETS, Histogram, MetricsSnapshot};
use moe_server::recent::RecentRequest;
use moe_server::recording::TraceCounts;
use moe_server::scheduler::SubmitError;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

/// `<s>`, which starts a prompt.
pub const BOS: u32 = 256;
/// The first token of the script. Tokens below 256 are bytes; 257 is `</s>`.
pub const FIRST: u32 = 258;

/// What the backend was asked for, and the state of its queue.
#[derive(Default)]
pub struct State {
    /// Accepted requests.
    pub requests: Vec<GenerationRequest>,
    /// Conversations.
    pub chats: Vec<Chat>,
    /// Updates of the hot cache, and whether they were saved.
    pub updates: Vec<(LearnFile, bool)>,
    /// Number of requests whose receiver was dropped.
    pub n_cancelled: usize,
    /// Number of requests that generate now.
    pub n_running: usize,
    /// Number of tokens that may still be generated; `None`: no limit.
    pub allowed: Option<usize>,
    n_open: usize,
    n_generated: u64,
}

/// A backend that generates a script.
pub struct Fake {
    /// Properties of the model.
    pub model: ModelInfo,
    script: Vec<Vec<u8>>,
    n_slots: usize,
    queue_capacity: usize,
    state: &'static (Mutex<State>, Condvar),
    counters: Mutex<Counters>,
    /// Time between two tokens.
    pub pause: Duration,
    /// Message with which requests fail instead of finishing.
    pub failure: Option<&'static str>,
    /// Number of tokens after which requests end at the time limit.
    pub time_limit: Option<usize>,
    /// Whether there is a hot cache.
    pub has_hot_cache: bool,
    /// The recent requests.
    pub recent: Vec<RecentRequest>,
}

impl Fake {
    /// A backend that generates the pieces of `script`, with `n_slots` slots and as many places in the queue.
    pub fn new(script: &[&[u8]], n_slots: usize) -> Fake {
        Fake {
            model: ModelInfo {
                name: "fake/model".into(),
                created: 1_700_000_000,
                n_ctx: 4096,
                n_vocab: FIRST as usize + script.len(),
            },
            script: script.iter().map(|piece| piece.to_vec()).collect(),
            n_slots,
            queue_capacity: n_slots,
            // The threads of requests may outlive the backend.
            state: Box::leak(Box::default()),
            counters: Mutex::new(counters(PerfMode::Update)),
            pause: Duration::ZERO,
            failure: None,
            time_limit: None,
            has_hot_cache: true,
            recent: Vec::new(),
        }
    }

    /// The state of the backend.
    pub fn state(&self) -> MutexGuard<'static, State> {
        self.state.0.lock().unwrap()
    }

    /// Sets the number of tokens that may be generated.
    pub fn allow(&self, allowed: Option<usize>) {
        self.state().allowed = allowed;
        self.state.1.notify_all();
    }

    /// Waits until the state fulfils a condition.
    pub fn wait_until(&self, condition: impl Fn(&State) -> bool) {
        let (state, changed) = self.state;
        let state = state.lock().unwrap();
        let limit = Duration::from_secs(30);
        let result = changed.wait_timeout_while(state, limit, |state| !condition(state));
        assert!(
            !result.unwrap().1.timed_out(),
            "the condition is not fulfilled"
        );
    }
}

/// Counters after one call.
fn counters(mode: PerfMode) -> Counters {
    let mut counters = Counters::new(mode, 8, 2);
    counters.start_pass();
    counters.add_call(&LayerCall {
        layer: LayerId(0),
        ids: &[3, 5],
        lanes: &[LaneIndex::Hot0, LaneIndex::Cold],
        times: None,
    });
    counters
}

impl Backend for Fake {
    fn model(&self) -> &ModelInfo {
        &self.model
    }

    fn tokenize(
        &self,
        text: &str,
        add_special: bool,
        parse_special: bool,
    ) -> Result<Vec<u32>, String> {
        let mut tokens: Vec<u32> = add_special.then_some(BOS).into_iter().collect();
        let mut rest = text;
        while let Some(byte) = rest.bytes().next() {
            if parse_special && let Some(after) = rest.strip_prefix("<s>") {
                tokens.push(BOS);
                rest = after;
            } else {
                let n = rest.chars().next().map_or(1, char::len_utf8);
                tokens.push(byte.into());
                tokens.extend(rest.bytes().take(n).skip(1).map(u32::from));
                rest = &rest[n..];
            }
        }
        Ok(tokens)
    }

    fn piece(&self, token: u32) -> Vec<u8> {
        match token {
            0..=255 => vec![token as u8],
            256 => b"<s>".to_vec(),
            257 => b"</s>".to_vec(),
            _ => {
                let piece = self.script.get((token - FIRST) as usize);
                piece.cloned().unwrap_or_default()
            }
        }
    }

    fn chat_prompt(&self, chat: &Chat) -> Result<Vec<u32>, String> {
        self.state().chats.push(chat.clone());
        let mut text = String::new();
        for message in &chat.messages {
            let role = message["role"].as_str().unwrap_or_default();
            if role == "critic" {
                return Err("the template has no role critic".into());
            }
            text += &format!(
                "{role}: {}\n",
                message["content"].as_str().unwrap_or_default()
            );
        }
        self.tokenize(&text, true, true)
    }

    fn submit(&self, request: GenerationRequest) -> Result<EventReceiver, SubmitError> {
        let (n_prompt, n_ctx) = (request.prompt.len(), self.model.n_ctx);
        let n_vocab = self.model.n_vocab;
        if n_prompt == 0 {
            return Err(SubmitError::EmptyPrompt);
        }
        if n_prompt >= n_ctx {
            return Err(SubmitError::PromptTooLong { n_prompt, n_ctx });
        }
        let mut tokens = request.prompt.iter();
        if let Some(&token) = tokens.find(|token| **token as usize >= n_vocab) {
            return Err(SubmitError::TokenOutOfRange { token, n_vocab });
        }
        let mut state = self.state();
        if state.n_open >= self.n_slots + self.queue_capacity {
            return Err(SubmitError::QueueFull);
        }
        state.n_open += 1;
        state.requests.push(request.clone());
        self.state.1.notify_all();
        let (sender, receiver) = unbounded_channel();
        let run = Run {
            state: self.state,
            n_slots: self.n_slots,
            n_script: self.script.len(),
            n_left: n_ctx - n_prompt,
            pause: self.pause,
            failure: self.failure,
            time_limit: self.time_limit,
            sender,
            request,
        };
        thread::spawn(move || run.run());
        Ok(receiver)
    }

    fn perf_report(&self) -> String {
        self.counters.lock().unwrap().to_learn_file().to_json()
    }

    fn set_perf_mode(&self, mode: PerfMode) {
        *self.counters.lock().unwrap() = Counters::new(mode, 8, 2);
    }

    fn apply_hot_cache(
        &self,
        learn: &LearnFile,
        save_to_disk: bool,
    ) -> Result<HotCacheUpdate, HotCacheError> {
        if !self.has_hot_cache {
            return Err(HotCacheError::Unavailable("there is no hot cache".into()));
        }
        self.state().updates.push((learn.clone(), save_to_disk));
        let saved = save_to_disk.then(|| SavedFile {
            path: "learn.json".into(),
            backup_path: "learn.1.json".into(),
        });
        let update = CacheUpdate {
            update_rate: 1.0,
            exchanged: 1,
            candidates: 1,
            max_exchange: 1,
            hot_experts: 2,
            layers_changed: 1,
        };
        Ok(HotCacheUpdate { update, saved })
    }

    fn metrics(&self) -> MetricsSnapshot {
        let state = self.state();
        // One value in each of two buckets.
        let mut times = Histogram::default();
        times.counts[2] = 1;
        times.counts[BUCKETS.len()] = 1;
        times.sum = 700.01;
        MetricsSnapshot {
            n_slots: self.n_slots,
            n_running: state.n_running,
            n_queued: state.n_open - state.n_running,
            queue_capacity: self.queue_capacity,
            passes: 9,
            failed_passes: 2,
            prompt_tokens: state
                .requests
                .iter()
                .map(|request| request.prompt.len() as u64)
                .sum(),
            prompt_time: Duration::from_secs(2),
            generated_tokens: state.n_generated,
            generation_time: Duration::from_secs(4),
            requests: [("length", 5), ("failed", 1)].into(),
            queue_time: times,
            first_token_time: times,
            token_time: times,
            request_time: times,
            selections: [3, 0, 0, 1],
            cache_updates: 4,
            exchanged_experts: 7,
            traces: TraceCounts {
                written: 3,
                dropped: 1,
                ..TraceCounts::default()
            },
        }
    }

    fn tier(&self, lane: LaneIndex) -> Option<&str> {
        match lane {
            LaneIndex::Hot0 | LaneIndex::Hot1 => Some("gpu"),
            LaneIndex::Hot2 => None,
            LaneIndex::Cold => Some("ram"),
        }
    }

    fn recent_requests(&self, _detailed: Option<u32>) -> Vec<RecentRequest> {
        self.recent.clone()
    }
}

/// A request in the queue or in a slot.
struct Run {
    state: &'static (Mutex<State>, Condvar),
    n_slots: usize,
    n_script: usize,
    /// Number of free positions of the context.
    n_left: usize,
    pause: Duration,
    failure: Option<&'static str>,
    time_limit: Option<usize>,
    sender: UnboundedSender<Event>,
    request: GenerationRequest,
}

impl Run {
    fn run(self) {
        let is_running = self.wait(|state| {
            let has_slot = state.n_running < self.n_slots;
            state.n_running += usize::from(has_slot);
            has_slot
        });
        let (reason, n_generated) = match is_running {
            Ok(()) => self.generate(),
            Err(reason) => (reason, 0),
        };
        let usage = Usage {
            n_prompt: self.request.prompt.len(),
            n_generated,
            queue_time: Duration::from_millis(1),
            prompt_time: Duration::from_millis(20),
            generation_time: Duration::from_millis(40),
        };
        let event = match self.failure {
            Some(message) => Event::Failed(message.into()),
            None => Event::Finished { reason, usage },
        };
        let _ = self.sender.send(event);
        let mut state = self.state.0.lock().unwrap();
        state.n_open -= 1;
        state.n_running -= usize::from(is_running.is_ok());
        state.n_cancelled += usize::from(reason == FinishReason::Cancelled);
        drop(state);
        self.state.1.notify_all();
    }

    /// Waits until `ready`, or the reason to end the request.
    fn wait(&self, mut ready: impl FnMut(&mut State) -> bool) -> Result<(), FinishReason> {
        let (state, changed) = self.state;
        let mut state = state.lock().unwrap();
        loop {
            if self.sender.is_closed() {
                return Err(FinishReason::Cancelled);
            }
            let deadline = self.request.deadline;
            if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                return Err(FinishReason::TimeLimit);
            }
            if ready(&mut state) {
                changed.notify_all();
                return Ok(());
            }
            state = changed
                .wait_timeout(state, Duration::from_millis(5))
                .unwrap()
                .0;
        }
    }

    fn generate(&self) -> (FinishReason, usize) {
        let limit = self.request.n_predict.unwrap_or(usize::MAX);
        for n in 0.. {
            if n == limit {
                return (FinishReason::Length, n);
            }
            if Some(n) == self.time_limit {
                return (FinishReason::TimeLimit, n);
            }
            if n == self.n_left {
                return (FinishReason::ContextFull, n);
            }
            if n == self.n_script && !self.request.ignore_eos {
                return (FinishReason::EndOfGeneration, n);
            }
            let allowed = self.wait(|state| {
                let is_allowed = state.allowed != Some(0);
                state.allowed = state.allowed.map(|n| n.saturating_sub(1));
                state.n_generated += u64::from(is_allowed);
                is_allowed
            });
            if let Err(reason) = allowed {
                return (reason, n);
            }
            thread::sleep(self.pause);
            let _ = self.sender.send(self.token(n % self.n_script));
        }
        unreachable!("a limit is reached")
    }

    fn token(&self, index: usize) -> Event {
        let token = FIRST + index as u32;
        let n_probs = self.request.n_probs;
        // The second most probable token cannot be represented in JSON.
        let top = [
            (token, -0.25),
            (u32::from(b'b'), f32::NEG_INFINITY),
            (0xf0, -9.0),
        ];
        let top = top.map(|(token, logprob)| TokenProbability { token, logprob });
        Event::Token {
            token,
            logprob: n_probs.map(|_| -0.25),
            top: top.into_iter().cycle().take(n_probs.unwrap_or(0)).collect(),
        }
    }
}
