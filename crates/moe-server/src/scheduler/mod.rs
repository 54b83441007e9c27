//! Continuous batching: one thread evaluates all running requests together, pass by pass.
//!
//! ```text
//! Handle::submit ──► Queue ──► slots of the session ──► a pass: generated tokens of all slots, then chunks of prompts
//!     ▲                                                   │
//!     └─────────── Event::Token, Finished, Failed ────────┘
//! ```
//!
//! - A request gets a free slot in the order of the queue. Its sequence starts with an empty slot.
//! - A pass has one token of each sequence that generates. The remaining tokens of the pass are those of prompts, in the order in which
//!   their requests started. While other sequences generate, a pass has at most [`SchedulerParams::n_prompt_chunk`] prompt tokens.
//! - Before each pass, requests whose receiver was dropped or whose deadline has passed lose their slots.
//! - If a pass fails, the requests with tokens in it fail. The others continue.
//! - After a pass in which requests ended, [`BatchSession::between_requests`] updates the expert cache.
//! - If nothing runs, the thread sleeps.
//!
//! A session borrows its model and is not [`Send`]. Therefore [`Scheduler::run`] uses the calling thread, on which the session was
//! created, and the endpoints run on other threads.

mod handle;
mod logprobs;
mod queue;
mod running;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Instant;

use moe_engine::{BatchEntry, BatchSession, RouterOutput};
use moe_trace::Phase;

use crate::generation::{Event, FinishReason, Usage};
use crate::metrics::{LaneSlots, Metrics, Outcome};
use crate::recent::RecentRequests;
use crate::recording::Recording;
use handle::Shared;
use queue::{Queue, Queued};
use running::{Running, Sampled};

pub use handle::{Handle, Stopped, SubmitError};

/// Limits of a scheduler.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SchedulerParams {
    /// Maximum number of tokens of a pass. At least one token of each slot fits, even if this number is lower.
    pub n_batch: usize,
    /// Maximum number of prompt tokens of a pass that also evaluates generated tokens, at least 1. It limits the time between two
    /// generated tokens.
    pub n_prompt_chunk: usize,
    /// Maximum number of requests that wait while all slots are busy.
    pub n_queue: usize,
}

impl Default for SchedulerParams {
    fn default() -> SchedulerParams {
        SchedulerParams {
            n_batch: 512,
            n_prompt_chunk: 128,
            n_queue: 64,
        }
    }
}

/// Evaluates the requests of its handles with a session. Dropping it fails the remaining requests.
pub struct Scheduler {
    shared: Arc<Shared>,
    params: SchedulerParams,
    recording: Option<Recording>,
    recent: Option<RecentRequests>,
    slots: Vec<Option<Running>>,
    /// Occupied slots in the order in which their requests started.
    order: Vec<usize>,
    /// The tokens of the current pass.
    entries: Vec<BatchEntry>,
    next_sequence: u32,
}

impl Scheduler {
    /// A scheduler for `session`. With `recording`, the routing of each request is recorded.
    pub fn new(
        session: &dyn BatchSession,
        params: SchedulerParams,
        recording: Option<Recording>,
    ) -> Scheduler {
        let n_slots = session.n_slots();
        let traces = recording.as_ref().map(Recording::counts);
        Scheduler {
            shared: Arc::new(Shared {
                queue: Queue::new(n_slots, params.n_queue),
                metrics: Metrics::default(),
                traces: traces.unwrap_or_default(),
                counters: session.counters(),
                n_ctx: session.n_ctx(),
                n_vocab: session.n_vocab(),
            }),
            params: SchedulerParams {
                n_batch: params.n_batch.max(n_slots),
                n_prompt_chunk: params.n_prompt_chunk.max(1),
                ..params
            },
            recording,
            recent: None,
            slots: (0..n_slots).map(|_| None).collect(),
            order: Vec::new(),
            entries: Vec::new(),
            next_sequence: 0,
        }
    }

    /// Adds each request and its selected experts to `recent`.
    #[must_use]
    pub fn watch(mut self, recent: RecentRequests) -> Scheduler {
        self.recent = Some(recent);
        self
    }

    /// A handle for other threads.
    pub fn handle(&self) -> Handle {
        Handle(Arc::clone(&self.shared))
    }

    /// Evaluates requests until [`Handle::shutdown`] was called and all requests have ended. `session` is the one of
    /// [`Scheduler::new`]. Recorded traces are complete when the function returns.
    pub fn run(mut self, session: &mut dyn BatchSession) {
        if self.recording.is_some() || self.recent.is_some() {
            let mut record = self.recording.as_ref().map(Recording::observer);
            let recent = self.recent.clone();
            session.set_observer(Some(Box::new(move |routed: &RouterOutput| {
                if let Some(record) = &mut record {
                    record(routed);
                }
                if let Some(recent) = &recent {
                    recent.layer(routed);
                }
            })));
        }
        while let Some(work) = self.shared.queue.take() {
            for command in work.commands {
                command(session);
            }
            for queued in work.over {
                self.end_queued(queued);
            }
            for queued in work.started {
                self.start(session, queued);
            }
            let mut n_ended = self.end_abandoned(session);
            self.fill_batch();
            if !self.entries.is_empty() {
                n_ended += self.pass(session);
            }
            if n_ended > 0 {
                let exchanged = session.between_requests();
                self.shared.metrics.updated_cache(exchanged);
            }
        }
        session.set_observer(None);
        if let Some(recording) = self.recording.take() {
            recording.finish();
        }
    }

    /// Ends a request that lost its client or exceeded its deadline in the queue.
    fn end_queued(&self, queued: Queued) {
        let reason = if queued.events.is_closed() {
            FinishReason::Cancelled
        } else {
            FinishReason::TimeLimit
        };
        let queue_time = queued.submitted.elapsed();
        self.shared
            .metrics
            .ended(Outcome::Finished(reason), queue_time);
        let usage = Usage {
            n_prompt: queued.request.prompt.len(),
            queue_time,
            ..Usage::default()
        };
        let _ = queued.events.send(Event::Finished { reason, usage });
    }

    /// Starts a request in a free slot.
    fn start(&mut self, session: &mut dyn BatchSession, queued: Queued) {
        let sequence_id = self.next_sequence;
        self.next_sequence = sequence_id.wrapping_add(1);
        self.shared.metrics.started(queued.submitted.elapsed());
        let running = Running::new(queued, sequence_id);
        // The queue starts no more requests than there are slots.
        let free = self.slots.iter().position(Option::is_none);
        let began = match free {
            Some(slot) => session.begin_slot(slot, sequence_id).map(|()| slot),
            None => Err(moe_engine::Error::engine("no slot is free")),
        };
        match began {
            Ok(slot) => {
                if let Some(recording) = &mut self.recording {
                    recording.begin(sequence_id);
                }
                if let Some(recent) = &self.recent {
                    running.watch(recent);
                }
                self.slots[slot] = Some(running);
                self.order.push(slot);
            }
            Err(error) => self.failed(running, &error.to_string()),
        }
    }

    /// Ends the requests whose client no longer waits, and those whose deadline has passed. Returns their number.
    fn end_abandoned(&mut self, session: &mut dyn BatchSession) -> usize {
        let now = Instant::now();
        let reason = |slot: &usize| Some((*slot, self.slots[*slot].as_ref()?.reason_to_end(now)?));
        let ended: Vec<(usize, FinishReason)> = self.order.iter().filter_map(reason).collect();
        for &(slot, reason) in &ended {
            self.finish(session, slot, reason);
        }
        ended.len()
    }

    /// Selects the tokens of the next pass.
    fn fill_batch(&mut self) {
        self.entries.clear();
        let running = |&slot: &usize| Some((slot, self.slots[slot].as_ref()?));
        let running = || self.order.iter().filter_map(running);
        let steps = running().filter_map(|(slot, request)| request.decode_step(slot));
        self.entries.extend(steps);
        let mut room = self.params.n_batch - self.entries.len().min(self.params.n_batch);
        if !self.entries.is_empty() {
            room = room.min(self.params.n_prompt_chunk);
        }
        for (slot, request) in running() {
            let n = request.n_prompt_left().min(room);
            if n > 0 {
                self.entries.extend(request.prompt_chunk(slot, n));
                room -= n;
            }
        }
    }

    /// Evaluates the selected tokens, and reports what was sampled. Returns the number of requests that ended.
    fn pass(&mut self, session: &mut dyn BatchSession) -> usize {
        if let Some(recording) = &self.recording {
            recording.begin_pass();
        }
        if let Some(recent) = &self.recent {
            recent.begin_pass();
        }
        let (n_ctx, n_vocab) = (self.shared.n_ctx, self.shared.n_vocab);
        let slots_before = self.lane_slots();
        let start = Instant::now();
        let wanted = self.entries.iter().filter(|entry| entry.logits);
        let n_logits = wanted.clone().count() * n_vocab;
        let result = session.decode_batch(&self.entries);
        self.shared
            .metrics
            .selected(slots_before, self.lane_slots());
        let sampled: Vec<Sampled> = match result {
            Ok(logits) if logits.len() != n_logits => {
                let message = format!(
                    "the session returned {} logits instead of {n_logits}",
                    logits.len()
                );
                return self.fail_pass(session, &message);
            }
            Ok(logits) => {
                let rows = wanted.zip(logits.chunks_exact(n_vocab.max(1)));
                let sample = |(entry, row): (&BatchEntry, &[f32])| {
                    Some(self.slots[entry.slot].as_mut()?.sample(entry.slot, row))
                };
                rows.filter_map(sample).collect()
            }
            Err(error) => return self.fail_pass(session, &error.to_string()),
        };
        let now = Instant::now();
        let steps = self
            .entries
            .iter()
            .filter(|entry| entry.phase == Phase::Generate);
        let n_generated = steps.count();
        let counts = [self.entries.len() - n_generated, n_generated];
        self.shared.metrics.passed(counts, now - start);
        if let Some(recording) = &mut self.recording {
            recording.end_pass();
        }
        if let Some(recent) = &self.recent {
            recent.end_pass();
        }
        let mut ended: Vec<(usize, FinishReason)> = Vec::new();
        for entries in self.entries.chunk_by(|a, b| a.slot == b.slot) {
            let slot = entries[0].slot;
            let running = self.slots[slot].as_mut();
            let reason = running.and_then(|running| running.evaluated(entries.len(), now));
            ended.extend(reason.map(|reason| (slot, reason)));
        }
        for sampled in sampled {
            let (slot, token) = (sampled.slot, sampled.token);
            let is_eog = session.is_eog(token);
            let Some(running) = self.slots[slot].as_mut() else {
                continue;
            };
            let (time, reason) = running.report(sampled, is_eog, n_ctx, now);
            if let Some(time) = time {
                self.shared.metrics.generated(time);
                if let Some(recent) = &self.recent {
                    recent.generated(running.sequence_id, token);
                }
            }
            ended.extend(reason.map(|reason| (slot, reason)));
        }
        for &(slot, reason) in &ended {
            self.finish(session, slot, reason);
        }
        ended.len()
    }

    /// The counters of the expert cache.
    fn lane_slots(&self) -> LaneSlots {
        let counters = self.shared.counters.as_ref();
        counters.map_or_else(LaneSlots::default, |counters| counters.lock().lane_slots())
    }

    /// Fails the requests of the pass. Returns their number.
    fn fail_pass(&mut self, session: &mut dyn BatchSession, message: &str) -> usize {
        self.shared.metrics.lock().failed_passes += 1;
        let mut slots: Vec<usize> = self.entries.iter().map(|entry| entry.slot).collect();
        slots.dedup();
        for &slot in &slots {
            if let Some(running) = self.free(session, slot) {
                self.failed(running, message);
            }
        }
        slots.len()
    }

    /// Ends the request of a slot.
    fn finish(&mut self, session: &mut dyn BatchSession, slot: usize, reason: FinishReason) {
        let Some(running) = self.free(session, slot) else {
            return;
        };
        if let Some(recording) = &mut self.recording {
            recording.end(running.sequence_id);
        }
        self.ended(&running, Outcome::Finished(reason));
        self.shared.queue.release();
        running.finish(reason);
    }

    /// Fails a request that has no slot any more.
    fn failed(&mut self, running: Running, message: &str) {
        if let Some(recording) = &mut self.recording {
            recording.discard(running.sequence_id);
        }
        self.ended(&running, Outcome::Failed);
        self.shared.queue.release();
        running.fail(message);
    }

    /// Counts the end of a request.
    fn ended(&self, running: &Running, outcome: Outcome) {
        let time = running.time();
        self.shared.metrics.ended(outcome, time);
        if let Some(recent) = &self.recent {
            recent.end(running.sequence_id, outcome.name(), time);
        }
    }

    /// Frees a slot.
    fn free(&mut self, session: &mut dyn BatchSession, slot: usize) -> Option<Running> {
        self.order.retain(|&occupied| occupied != slot);
        // The slot exists. If it could not be truncated, the next `begin_slot` fails.
        let _ = session.truncate_slot(slot, 0);
        self.slots[slot].take()
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        const MESSAGE: &str = "the scheduler ended before the request was complete";
        for queued in self.shared.queue.end() {
            self.shared
                .metrics
                .ended(Outcome::Failed, queued.submitted.elapsed());
            let _ = queued.events.send(Event::Failed(MESSAGE.to_owned()));
        }
        for slot in 0..self.slots.len() {
            if let Some(running) = self.slots[slot].take() {
                self.failed(running, MESSAGE);
            }
        }
    }
}
