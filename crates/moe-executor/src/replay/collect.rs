//! Groups the routing rows of a trace into forward passes.
//!
//! In a trace with timestamps, rows with the same layer and timestamp are computed together. Without timestamps, a prompt is
//! divided into batches of consecutive positions, whatever the order of its rows, and each decoded token is a batch of its
//! own.

use moe_trace::{CountRow, ExpertId, LayerId, Phase, RoutingRow, Sink, SinkError, TokenId};

use super::routes::Routes;
use crate::error::Error;

/// A [`Sink`] that groups routing rows into forward passes. It rejects counts.
#[derive(Debug)]
pub struct Collector {
    routes: Routes,
    /// Positions per batch, for prompts without timestamps.
    n_batch: u32,
    /// Number of tokens after which no further pass is started.
    max_tokens: u64,
    /// Tokens of the completed passes, and of the current pass.
    n_tokens: [u64; 2],
    is_full: bool,
    /// The token and layer of the last row.
    token: Option<Token>,
    /// The group of the last completed token.
    open: Option<Group>,
    /// Tokens of the open group by layer.
    layers: Vec<(LayerId, Vec<Token>)>,
    /// Sequences and phases of the tokens in the first layer of the last pass.
    members: Vec<(Option<u32>, Phase)>,
}

/// The experts of a token in one layer.
#[derive(Debug)]
struct Token {
    group: Group,
    layer: LayerId,
    position: TokenId,
    /// Ranks of `ids` in the top-k.
    slots: Vec<u16>,
    ids: Vec<ExpertId>,
    weights: Vec<f32>,
}

/// The key of rows that are computed together, with the sequence and phase of their records.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Group {
    sequence_id: Option<u32>,
    phase: Phase,
    unit: Unit,
}

/// A unit of computation.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Unit {
    /// An operation of a layer, by its timestamp.
    Operation(LayerId, u64),
    /// A token in a layer.
    Token(LayerId, TokenId),
    /// A prompt without timestamps.
    Prompt,
}

impl Token {
    /// Orders the experts by slot. There is a weight for each expert.
    fn sort(&mut self) {
        if self.slots.is_sorted() {
            return;
        }
        let mut order: Vec<usize> = (0..self.slots.len()).collect();
        order.sort_by_key(|&i| self.slots[i]);
        self.slots.sort_unstable();
        self.ids = order.iter().map(|&i| self.ids[i]).collect();
        self.weights = order.iter().map(|&i| self.weights[i]).collect();
    }
}

impl Group {
    fn member(&self) -> (Option<u32>, Phase) {
        (self.sequence_id, self.phase)
    }

    /// Whether rows of `other` are computed together with rows of this group. One operation may serve several sequences.
    fn includes(&self, other: &Group) -> bool {
        match self.unit {
            Unit::Operation(..) => self.unit == other.unit,
            Unit::Token(..) | Unit::Prompt => self == other,
        }
    }
}

impl Collector {
    /// A collector that stops at the end of the pass with the `max_tokens`-th token. Prompts without timestamps are divided
    /// into batches of `n_batch` positions.
    pub fn new(max_tokens: u64, n_batch: u32) -> Collector {
        Collector {
            routes: Routes::default(),
            n_batch: n_batch.max(1),
            max_tokens,
            n_tokens: [0; 2],
            is_full: false,
            token: None,
            open: None,
            layers: Vec::new(),
            members: Vec::new(),
        }
    }

    /// The collected passes.
    ///
    /// # Errors
    /// [`Error::UnevenToken`] for the last token.
    pub fn finish(mut self) -> Result<Routes, Error> {
        // If the collector stopped, the last token may be incomplete.
        if !self.is_full {
            self.end_token()?;
            self.close();
        }
        Ok(self.routes)
    }

    /// Completes the current token and adds it to its group.
    fn end_token(&mut self) -> Result<(), Error> {
        let Some(mut token) = self.token.take() else {
            return Ok(());
        };
        let found = token.ids.len();
        // The number of experts may differ between layers, but not between the tokens of a layer.
        let expected = *self.routes.k.entry(token.layer).or_insert(found);
        if found != expected {
            return Err(Error::UnevenToken {
                layer: token.layer,
                position: token.position,
                found,
                expected,
            });
        }
        if token.weights.len() < found {
            token.weights = vec![1.0 / found as f32; found];
            self.routes.has_uniform_weights = true;
        }
        token.sort();
        let is_in_group = self.open.is_some_and(|open| open.includes(&token.group));
        if !is_in_group {
            self.close();
            self.open = Some(token.group);
        }
        // Search from the end: traces are ordered by layer or by token, so the layer is the last one or near it.
        let mut layers = self.layers.iter_mut().rev();
        match layers.find(|(layer, _)| *layer == token.layer) {
            Some((_, tokens)) => tokens.push(token),
            None => self.layers.push((token.layer, vec![token])),
        }
        Ok(())
    }

    /// Closes the open group: adds its batches to the passes.
    fn close(&mut self) {
        let Some(group) = self.open.take() else {
            return;
        };
        let mut layers = std::mem::take(&mut self.layers);
        if group.unit != Unit::Prompt {
            for (layer, tokens) in &layers {
                self.push(group, *layer, tokens);
            }
            return;
        }
        // Batches count positions from the first position of the prompt.
        layers.sort_by_key(|(layer, _)| *layer);
        let positions = || {
            layers
                .iter()
                .flat_map(|(_, t)| t.iter().map(|t| t.position))
        };
        let first = positions().min().unwrap_or_default();
        let n_batch = self.n_batch;
        let batch_of = |position: TokenId| (position.0 - first.0) / n_batch;
        let batch = |token: &Token| batch_of(token.position);
        let mut batches: Vec<u32> = positions().map(batch_of).collect();
        batches.sort_unstable();
        batches.dedup();
        for (_, tokens) in &mut layers {
            tokens.sort_by_key(batch);
        }
        for number in batches {
            for (layer, tokens) in &layers {
                let from = tokens.partition_point(|token| batch(token) < number);
                let to = tokens.partition_point(|token| batch(token) <= number);
                if from < to {
                    self.push(group, *layer, &tokens[from..to]);
                }
            }
        }
    }

    /// Adds tokens that a layer computes together.
    fn push(&mut self, group: Group, layer: LayerId, tokens: &[Token]) {
        let mut pass = group.member();
        // The first token of a later layer may be of another sequence than that of the pass, because the last layer of a model omits
        // tokens whose logits are not wanted.
        if let Some(last) = self.routes.last_pass()
            && !self.routes.starts_pass(last, layer)
            && tokens
                .iter()
                .all(|token| self.members.contains(&token.group.member()))
        {
            pass = last;
        }
        if self.routes.starts_pass(pass, layer) {
            self.members.clear();
            for token in tokens {
                let member = token.group.member();
                if !self.members.contains(&member) {
                    self.members.push(member);
                }
            }
            let [past, open] = self.n_tokens;
            self.n_tokens = [past + open, 0];
            self.is_full |= past + open >= self.max_tokens;
        }
        if self.is_full {
            return;
        }
        self.n_tokens[1] = self.n_tokens[1].max(tokens.len() as u64);
        let rows = tokens.iter();
        let rows = rows.map(|t| (t.position, t.ids.as_slice(), t.weights.as_slice()));
        self.routes.push(pass, layer, rows);
    }
}

impl Sink for Collector {
    fn routing(&mut self, row: &RoutingRow) -> Result<(), SinkError> {
        if self.is_full {
            return Ok(());
        }
        let unit = match (row.timestamp_ns, row.phase) {
            (Some(time), _) => Unit::Operation(row.layer_id, time),
            (None, Some(Phase::Prompt)) => Unit::Prompt,
            (None, _) => Unit::Token(row.layer_id, row.token_id),
        };
        let group = Group {
            sequence_id: row.sequence_id,
            phase: row.phase.unwrap_or(Phase::Generate),
            unit,
        };
        let is_same_token = self.token.as_ref().is_some_and(|token| {
            token.group == group
                && (token.layer, token.position) == (row.layer_id, row.token_id)
                && !token.slots.contains(&row.slot)
        });
        if !is_same_token {
            self.end_token()
                .map_err(|error| SinkError::Refused(error.into()))?;
            self.token = Some(Token {
                group,
                layer: row.layer_id,
                position: row.token_id,
                slots: Vec::new(),
                ids: Vec::new(),
                weights: Vec::new(),
            });
        }
        let Some(token) = &mut self.token else {
            return Ok(());
        };
        let id = row.expert_id;
        if token.ids.contains(&id) {
            let reason = format!(
                "expert {id} occurs twice for the token at position {} in layer {}",
                row.token_id, row.layer_id
            );
            return Err(SinkError::Refused(reason.into()));
        }
        token.slots.push(row.slot);
        token.ids.push(id);
        token.weights.extend(row.weight);
        Ok(())
    }

    fn count(&mut self, _row: &CountRow) -> Result<(), SinkError> {
        Err(SinkError::NeedsOrder)
    }
}
