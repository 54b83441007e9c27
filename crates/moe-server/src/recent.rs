//! The recent requests and their selected experts, for the page of the server.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use moe_engine::RouterOutput;

/// A request that runs or has ended.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RecentRequest {
    /// Number of the request since the start of the scheduler.
    pub id: u32,
    /// How it ended, as in [`OUTCOMES`](crate::metrics::OUTCOMES); `None` while it runs.
    pub outcome: Option<&'static str>,
    /// Number of tokens of its prompt.
    pub n_prompt: usize,
    /// Number of generated tokens.
    pub n_generated: usize,
    /// Time in the queue.
    pub queue_time: Duration,
    /// Time since its submission, or until its end.
    pub time: Duration,
    /// Tokens of the prompt and generated tokens; empty unless they are kept.
    pub tokens: Vec<u32>,
    /// Number of selections of each expert, by layer.
    pub selections: BTreeMap<u16, Vec<u64>>,
}

/// The last requests of a scheduler. Clones refer to the same requests.
#[derive(Clone)]
pub struct RecentRequests {
    max: usize,
    keeps_tokens: bool,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    requests: VecDeque<(Instant, RecentRequest)>,
    /// Layers of the current pass.
    pass: Vec<PassLayer>,
}

/// The selected experts of a layer in a pass.
struct PassLayer {
    layer: u16,
    n_expert_used: usize,
    /// Id of the request of each token.
    sequences: Vec<u32>,
    /// `(token, n_expert_used)`
    ids: Vec<i32>,
}

impl State {
    fn get(&mut self, id: u32) -> Option<&mut (Instant, RecentRequest)> {
        let mut newest_first = self.requests.iter_mut().rev();
        newest_first.find(|(_, request)| request.id == id)
    }
}

impl RecentRequests {
    /// Keeps the last `max` requests, and all that run. Their tokens are kept only if `keeps_tokens` is set.
    pub fn new(max: usize, keeps_tokens: bool) -> RecentRequests {
        RecentRequests {
            max,
            keeps_tokens,
            state: Arc::default(),
        }
    }

    /// The requests, newest first. Only the request with the id `detailed` has tokens and selections.
    pub fn list(&self, detailed: Option<u32>) -> Vec<RecentRequest> {
        let state = self.lock();
        let newest_first = state.requests.iter().rev();
        let requests = newest_first.map(|(submitted, request)| {
            let is_detailed = detailed == Some(request.id);
            RecentRequest {
                id: request.id,
                outcome: request.outcome,
                n_prompt: request.n_prompt,
                n_generated: request.n_generated,
                queue_time: request.queue_time,
                time: match request.outcome {
                    Some(_) => request.time,
                    None => submitted.elapsed(),
                },
                tokens: if is_detailed {
                    request.tokens.clone()
                } else {
                    Vec::new()
                },
                selections: if is_detailed {
                    request.selections.clone()
                } else {
                    BTreeMap::new()
                },
            }
        });
        requests.collect()
    }

    /// Adds a request that leaves the queue.
    pub(crate) fn begin(&self, id: u32, submitted: Instant, prompt: &[u32]) {
        let mut state = self.lock();
        let request = RecentRequest {
            id,
            n_prompt: prompt.len(),
            queue_time: submitted.elapsed(),
            tokens: if self.keeps_tokens {
                prompt.to_vec()
            } else {
                Vec::new()
            },
            ..RecentRequest::default()
        };
        state.requests.push_back((submitted, request));
        while state.requests.len() > self.max {
            let has_ended = |(_, request): &(Instant, RecentRequest)| request.outcome.is_some();
            let Some(oldest) = state.requests.iter().position(has_ended) else {
                break;
            };
            state.requests.remove(oldest);
        }
    }

    /// Starts a pass. The selections of a failed pass are removed.
    pub(crate) fn begin_pass(&self) {
        self.lock().pass.clear();
    }

    /// Adds a layer to the pass. A layer that is not above the previous one starts the repetition of the pass.
    pub(crate) fn layer(&self, routed: &RouterOutput) {
        let layer = routed.layer.0;
        let mut state = self.lock();
        if state.pass.last().is_some_and(|last| layer <= last.layer) {
            state.pass.clear();
        }
        state.pass.push(PassLayer {
            layer,
            n_expert_used: routed.n_expert_used,
            sequences: routed
                .sequences
                .iter()
                .map(|sequence| sequence.id)
                .collect(),
            ids: routed.ids.to_vec(),
        });
    }

    /// Adds the selections of the pass to its requests.
    pub(crate) fn end_pass(&self) {
        let mut state = self.lock();
        for layer in std::mem::take(&mut state.pass) {
            let experts = layer.ids.chunks_exact(layer.n_expert_used.max(1));
            for (&id, experts) in layer.sequences.iter().zip(experts) {
                let Some((_, request)) = state.get(id) else {
                    continue;
                };
                let counts = request.selections.entry(layer.layer).or_default();
                // Negative ids are empty slots.
                for expert in experts.iter().filter_map(|&id| usize::try_from(id).ok()) {
                    if counts.len() <= expert {
                        counts.resize(expert + 1, 0);
                    }
                    counts[expert] += 1;
                }
            }
        }
    }

    /// Adds a generated token.
    pub(crate) fn generated(&self, id: u32, token: u32) {
        let keeps_tokens = self.keeps_tokens;
        if let Some((_, request)) = self.lock().get(id) {
            request.n_generated += 1;
            if keeps_tokens {
                request.tokens.push(token);
            }
        }
    }

    /// Ends a request.
    pub(crate) fn end(&self, id: u32, outcome: &'static str, time: Duration) {
        if let Some((_, request)) = self.lock().get(id) {
            request.outcome = Some(outcome);
            request.time = time;
        }
    }

    /// A thread that panicked leaves valid requests.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use moe_engine::TokenSequence;
    use moe_trace::{LayerId, Phase};

    use super::*;

    /// Adds the experts of a token of each of two requests.
    fn add(recent: &RecentRequests, layer: u16, ids: &[i32; 4]) {
        let sequences = [4, 5].map(|id| TokenSequence {
            id,
            phase: Phase::Generate,
        });
        recent.layer(&RouterOutput {
            layer: LayerId(layer),
            positions: &[0, 0],
            sequences: &sequences,
            logits: &[],
            ids,
            weights: &[0.5; 4],
            n_expert_used: 2,
        });
    }

    #[test]
    fn counts_the_selections_of_successful_passes() {
        let recent = RecentRequests::new(4, false);
        for id in [4, 5] {
            recent.begin(id, Instant::now(), &[1, 2]);
        }
        recent.begin_pass();
        add(&recent, 0, &[1, 2, 3, 3]);
        // The session repeats the pass.
        add(&recent, 0, &[0, 2, 3, 1]);
        add(&recent, 3, &[0, 1, -1, 1]);
        recent.end_pass();
        // This pass fails.
        recent.begin_pass();
        add(&recent, 0, &[0, 1, 2, 3]);
        recent.begin_pass();
        recent.end_pass();
        let selections = |id: u32| {
            let list = recent.list(Some(id));
            let request = list.into_iter().find(|request| request.id == id);
            request.unwrap().selections
        };
        assert_eq!(selections(4), [(0, vec![1, 0, 1]), (3, vec![1, 1])].into());
        assert_eq!(
            selections(5),
            [(0, vec![0, 1, 0, 1]), (3, vec![0, 1])].into()
        );
        assert!(recent.list(None)[0].selections.is_empty());
    }

    #[test]
    fn keeps_the_last_requests_and_those_that_run() {
        let recent = RecentRequests::new(2, false);
        for id in 0..4 {
            recent.begin(id, Instant::now(), &[7]);
            if id != 1 {
                recent.end(id, "length", Duration::from_secs(2));
            }
        }
        let kept = recent.list(None);
        let kept: Vec<_> = kept
            .iter()
            .map(|request| (request.id, request.outcome))
            .collect();
        assert_eq!(kept, [(3, Some("length")), (1, None)]);
        assert_eq!(recent.list(None)[0].time, Duration::from_secs(2));
    }

    #[test]
    fn tokens_are_kept_on_request_only() {
        for (keeps_tokens, expected) in [(false, vec![]), (true, vec![7, 8, 9])] {
            let recent = RecentRequests::new(2, keeps_tokens);
            recent.begin(0, Instant::now(), &[7, 8]);
            recent.generated(0, 9);
            let request = recent.list(Some(0)).remove(0);
            assert_eq!((request.n_prompt, request.n_generated), (2, 1));
            assert_eq!(request.tokens, expected);
        }
    }
}
