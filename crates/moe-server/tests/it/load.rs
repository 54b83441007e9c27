//! The endpoints, the scheduler and the executor under load: clients that disconnect, malformed bodies, a full queue, failing passes, and
//! a shutdown while requests run. No request is lost without an error.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use moe_engine::{BatchEntry, BatchSession, Error, Observer, Result};
use moe_executor::cpu::threads::Threads;
use moe_executor::recorder::Recorder;
use moe_executor::{CacheParams, CacheType, Model, Session};
use moe_gguf::Gguf;
use moe_placement::learn::LearnFile;
use moe_placement::perf::{LaneIndex, PerfMode};
use moe_server::generation::GenerationRequest;
use moe_server::http::{
    Backend, Chat, EventReceiver, HotCacheError, HotCacheUpdate, ModelInfo, serve,
};
use moe_server::metrics::MetricsSnapshot;
use moe_server::scheduler::{Handle, Scheduler, SchedulerParams, SubmitError};
use moe_testkit::fixture;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::client::options;
use crate::openapi::events;

const N_CLIENTS: usize = 10;
/// The shutdown starts after this number of requests of each client.
const N_BEFORE: usize = 12;
const N_AFTER: usize = 3;
/// Generated tokens of a request.
const N_PREDICT: usize = 6;
/// Each pass with a multiple of this number fails.
const FAILURES: usize = 11;
const FAILURE: &str = "the device failed";

/// A session some of whose passes fail.
struct Failing<'a, 'g> {
    session: Session<'a, 'g>,
    n_passes: usize,
}

impl BatchSession for Failing<'_, '_> {
    fn n_slots(&self) -> usize {
        BatchSession::n_slots(&self.session)
    }

    fn n_ctx(&self) -> usize {
        BatchSession::n_ctx(&self.session)
    }

    fn n_vocab(&self) -> usize {
        BatchSession::n_vocab(&self.session)
    }

    fn is_eog(&self, _: u32) -> bool {
        false
    }

    fn slot_len(&self, slot: usize) -> Result<usize> {
        BatchSession::slot_len(&self.session, slot)
    }

    fn begin_slot(&mut self, slot: usize, sequence_id: u32) -> Result<()> {
        BatchSession::begin_slot(&mut self.session, slot, sequence_id)
    }

    fn truncate_slot(&mut self, slot: usize, n_past: usize) -> Result<()> {
        BatchSession::truncate_slot(&mut self.session, slot, n_past)
    }

    fn decode_batch(&mut self, entries: &[BatchEntry]) -> Result<&[f32]> {
        self.n_passes += 1;
        if self.n_passes.is_multiple_of(FAILURES) {
            return Err(Error::engine(FAILURE));
        }
        BatchSession::decode_batch(&mut self.session, entries)
    }

    fn set_observer(&mut self, observer: Option<Observer<'static>>) {
        BatchSession::set_observer(&mut self.session, observer);
    }
}

/// A backend whose tokens are the bytes of a text.
struct Bytes {
    model: ModelInfo,
    handle: Handle,
}

impl Backend for Bytes {
    fn model(&self) -> &ModelInfo {
        &self.model
    }

    fn tokenize(&self, text: &str, _: bool, _: bool) -> Result<Vec<u32>, String> {
        Ok(text.bytes().map(u32::from).collect())
    }

    fn piece(&self, token: u32) -> Vec<u8> {
        vec![b'a' + (token % 26) as u8]
    }

    fn chat_prompt(&self, _: &Chat) -> Result<Vec<u32>, String> {
        Err("no chat".into())
    }

    fn submit(&self, request: GenerationRequest) -> Result<EventReceiver, SubmitError> {
        self.handle.submit(request)
    }

    fn perf_report(&self) -> String {
        unimplemented!("not requested")
    }

    fn set_perf_mode(&self, _: PerfMode) {
        unimplemented!("not requested")
    }

    fn apply_hot_cache(&self, _: &LearnFile, _: bool) -> Result<HotCacheUpdate, HotCacheError> {
        unimplemented!("not requested")
    }

    fn metrics(&self) -> MetricsSnapshot {
        self.handle.metrics()
    }

    fn tier(&self, _: LaneIndex) -> Option<&str> {
        None
    }
}

/// How a request ended for its client.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum End {
    Complete,
    Failed,
    Malformed,
    QueueFull,
    ShuttingDown,
    Disconnected,
    /// The connection was refused, or closed before the request, since the server has ended.
    NoConnection,
}

/// Sends a request on a connection of its own, and checks that the response is complete.
async fn request(address: &str, number: usize) -> End {
    let is_stream = number.is_multiple_of(2);
    let kind = number % 5;
    let prompt = "x".repeat(1 + number % 23);
    let body = match kind {
        0 => "{\"prompt\": ".to_owned(),
        1 => format!("[\"{prompt}\", \"y\"]"),
        _ => format!("\"{prompt}\""),
    };
    let body = match kind {
        0 => body,
        _ => {
            format!("{{\"prompt\": {body}, \"max_tokens\": {N_PREDICT}, \"stream\": {is_stream}}}")
        }
    };
    let Ok(mut stream) = TcpStream::connect(address).await else {
        return End::NoConnection;
    };
    let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close";
    let text = format!("{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    let mut response = Vec::new();
    if stream.write_all(text.as_bytes()).await.is_err() {
        return End::NoConnection;
    }
    if kind == 4 {
        // In the queue, in the prompt, or while it generates.
        let mut part = [0; 64];
        let wait = Duration::from_millis(number as u64 % 7);
        let _ = tokio::time::timeout(wait, stream.read(&mut part)).await;
        return End::Disconnected;
    }
    let _ = stream.read_to_end(&mut response).await;
    let response = String::from_utf8(response).unwrap();
    let Some((head, body)) = response.split_once("\r\n\r\n") else {
        assert_eq!(response, "");
        return End::NoConnection;
    };
    end_of(head, body, if kind == 1 { 2 } else { 1 })
}

/// How a response ends. The response to `n_prompts` must be complete, or an error.
fn end_of(head: &str, body: &str, n_prompts: usize) -> End {
    let status = head.split(' ').nth(1).unwrap();
    let error = |error: &Value| {
        let message = error["error"]["message"].as_str().unwrap();
        match message {
            FAILURE => End::Failed,
            "the server is shutting down" => End::ShuttingDown,
            _ => panic!("{head} {body}"),
        }
    };
    let is_stream = head.contains("text/event-stream");
    match status {
        "200" if is_stream => {
            let events = events(body);
            let last = events.last().unwrap();
            if last.get("error").is_some() {
                return error(last);
            }
            assert!(body.contains("data: [DONE]\n\n"), "{body}");
            let choices = events.iter().map(|event| &event["choices"][0]);
            let texts = choices.map(|choice| choice["text"].as_str().unwrap().len());
            assert_eq!(texts.sum::<usize>(), n_prompts * N_PREDICT);
            End::Complete
        }
        "200" => {
            let body: Value = serde_json::from_str(body).unwrap();
            let n = body["usage"]["completion_tokens"].as_u64();
            assert_eq!(n, Some((n_prompts * N_PREDICT) as u64));
            End::Complete
        }
        "400" => End::Malformed,
        "429" => End::QueueFull,
        "500" | "503" => error(&serde_json::from_str(body).unwrap()),
        _ => panic!("{head} {body}"),
    }
}

/// Serves clients, and starts the shutdown while they send requests. Returns the numbers of ends.
async fn load(handle: Handle) -> BTreeMap<End, usize> {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let model = ModelInfo::default();
    let backend = Arc::new(Bytes { model, handle });
    let (shutdown, mut started) = watch::channel(false);
    let mut waits = started.clone();
    let server = tokio::spawn(serve(listener, backend, options(), async move {
        let _ = waits.wait_for(|is_shutdown| *is_shutdown).await;
    }));
    let mut clients = JoinSet::new();
    let shutdown = Arc::new(shutdown);
    for client in 0..N_CLIENTS {
        let (address, shutdown) = (address.clone(), shutdown.clone());
        clients.spawn(async move {
            let mut ends = Vec::new();
            for number in 0..N_BEFORE + N_AFTER {
                if number == N_BEFORE {
                    shutdown.send_replace(true);
                }
                ends.push(request(&address, client * 7 + number).await);
            }
            ends
        });
    }
    let mut counts = BTreeMap::new();
    while let Some(ends) = clients.join_next().await {
        for end in ends.unwrap() {
            *counts.entry(end).or_default() += 1;
        }
    }
    assert!(*started.borrow_and_update());
    server.await.unwrap().unwrap();
    counts
}

#[test]
fn no_request_is_lost_without_an_error() {
    let gguf = Gguf::open(fixture("random-qwen3moe-F16.gguf")).unwrap();
    let model = Model::load(&gguf).unwrap();
    let threads = Threads::new(1).unwrap();
    let cache = CacheParams::of_type(CacheType::F32, 64).with_sequences(3);
    let mut session = Failing {
        session: Session::new(&model, &threads, Recorder::new(None), cache).unwrap(),
        n_passes: 0,
    };
    let params = SchedulerParams {
        n_batch: 8,
        n_prompt_chunk: 4,
        n_queue: 2,
    };
    let scheduler = Scheduler::new(&session, params, None);
    let handle = scheduler.handle();
    let counts = thread::scope(|scope| {
        let endpoints = scope.spawn(|| {
            let runtime = tokio::runtime::Runtime::new().unwrap();
            let counts = catch_unwind(AssertUnwindSafe(|| runtime.block_on(load(handle.clone()))));
            handle.shutdown();
            counts
        });
        scheduler.run(&mut session);
        endpoints.join().unwrap().unwrap()
    });
    let count = |end| counts.get(&end).copied().unwrap_or(0);
    assert_eq!(
        counts.values().sum::<usize>(),
        N_CLIENTS * (N_BEFORE + N_AFTER)
    );
    for end in [
        End::Complete,
        End::Failed,
        End::Malformed,
        End::Disconnected,
    ] {
        assert!(count(end) > 0, "{end:?} in {counts:?}");
    }
    let metrics = handle.metrics();
    assert_eq!((metrics.n_running, metrics.n_queued), (0, 0));
    let requests = |outcome| metrics.requests.get(outcome).copied().unwrap_or(0) as usize;
    assert!(requests("length") >= count(End::Complete), "{metrics:?}");
    assert!(requests("failed") >= count(End::Failed), "{metrics:?}");
    assert!(requests("rejected") >= count(End::QueueFull), "{metrics:?}");
    assert_eq!(metrics.failed_passes, (session.n_passes / FAILURES) as u64);
    let ended: u64 = metrics.requests.values().sum();
    assert_eq!(
        metrics.request_time.count(),
        ended - requests("rejected") as u64
    );
    for slot in 0..3 {
        assert_eq!(session.slot_len(slot).unwrap(), 0);
    }
}
