//! Rows of a trace, put into passes.
//!
//! Where a trace has times, what has the same layer and time is computed together. Where it has none, a prompt is cut into
//! batches of positions, in whatever order its rows come, and any other token is on its own.

use moe_trace::{CountRow, LayerId, Phase, RoutingRow, Sink, SinkError, TokenId};

use super::routes::Routes;
use crate::error::Error;

/// Takes rows of routing and refuses counts.
#[derive(Debug)]
pub struct Collector {
    routes: Routes,
    /// Positions of a batch, for prompts without times.
    n_batch: u32,
    /// Tokens after whose pass no more is taken.
    max_tokens: u64,
    /// Tokens of the passes that are over, and of the pass that is not.
    n_tokens: [u64; 2],
    is_full: bool,
    /// The token whose experts come.
    token: Option<Token>,
    open: Option<Group>,
    /// Tokens of the open group, layer by layer.
    layers: Vec<(LayerId, Vec<Token>)>,
}

#[derive(Debug)]
struct Token {
    group: Group,
    layer: LayerId,
    position: u32,
    last_slot: u16,
    ids: Vec<i32>,
    weights: Vec<f32>,
}

/// What rows have in common that are computed together, and the request and the phase that a record tells.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Group {
    sequence_id: Option<u32>,
    phase: Phase,
    rows: Rows,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Rows {
    Operation(LayerId, u64),
    Token(LayerId, TokenId),
    /// A prompt without times.
    Prompt,
}

impl Group {
    /// Whether rows of `other` are computed together with these. One operation may serve several requests.
    fn goes_on(&self, other: &Group) -> bool {
        match self.rows {
            Rows::Operation(..) => self.rows == other.rows,
            Rows::Token(..) | Rows::Prompt => self == other,
        }
    }
}

impl Collector {
    /// Takes the passes of the first `max_tokens` tokens, up to the end of the pass that the last one is in. Where a prompt tells
    /// no batches they have `n_batch` positions.
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
        }
    }

    /// All that was collected.
    ///
    /// # Errors
    /// [`Error::UnevenToken`] for the last token.
    pub fn finish(mut self) -> Result<Routes, Error> {
        // The token that came last when all was taken is not whole.
        if !self.is_full {
            self.end_token()?;
            self.close();
        }
        Ok(self.routes)
    }

    /// Puts the token into its group.
    fn end_token(&mut self) -> Result<(), Error> {
        let Some(mut token) = self.token.take() else {
            return Ok(());
        };
        let found = token.ids.len();
        // Layers may differ, the tokens of a layer may not.
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
            self.routes.has_even_weights = true;
        }
        let goes_on = self.open.is_some_and(|open| open.goes_on(&token.group));
        if !goes_on {
            self.close();
            self.open = Some(token.group);
        }
        // Rows of a layer come together, or layers ascend: it is the last one or near it.
        let mut layers = self.layers.iter_mut().rev();
        match layers.find(|(layer, _)| *layer == token.layer) {
            Some((_, tokens)) => tokens.push(token),
            None => self.layers.push((token.layer, vec![token])),
        }
        Ok(())
    }

    /// Ends the open group.
    fn close(&mut self) {
        let Some(group) = self.open.take() else {
            return;
        };
        let mut layers = std::mem::take(&mut self.layers);
        if group.rows != Rows::Prompt {
            for (layer, tokens) in &layers {
                self.push(group, *layer, tokens);
            }
            return;
        }
        // The rows of a batch: positions from the first of the prompt on.
        layers.sort_by_key(|(layer, _)| *layer);
        let positions = || {
            layers
                .iter()
                .flat_map(|(_, t)| t.iter().map(|t| t.position))
        };
        let first = positions().min().unwrap_or(0);
        let n_batch = self.n_batch;
        let batch = |token: &Token| (token.position - first) / n_batch;
        let mut batches: Vec<u32> = positions().map(|at| (at - first) / n_batch).collect();
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

    fn push(&mut self, group: Group, layer: LayerId, tokens: &[Token]) {
        let pass = (group.sequence_id, group.phase);
        if self.routes.begins_pass(pass, layer) {
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
        let rows = match (row.timestamp_ns, row.phase) {
            (Some(time), _) => Rows::Operation(row.layer_id, time),
            (None, Some(Phase::Prompt)) => Rows::Prompt,
            (None, _) => Rows::Token(row.layer_id, row.token_id),
        };
        let group = Group {
            sequence_id: row.sequence_id,
            phase: row.phase.unwrap_or(Phase::Generate),
            rows,
        };
        let goes_on = self.token.as_ref().is_some_and(|token| {
            token.group == group
                && (token.layer, token.position) == (row.layer_id, row.token_id.0)
                && token.last_slot < row.slot
        });
        if !goes_on {
            self.end_token()
                .map_err(|error| SinkError::Refused(error.into()))?;
            self.token = Some(Token {
                group,
                layer: row.layer_id,
                position: row.token_id.0,
                last_slot: row.slot,
                ids: Vec::new(),
                weights: Vec::new(),
            });
        }
        let Some(token) = &mut self.token else {
            return Ok(());
        };
        token.last_slot = row.slot;
        let id = row.expert_id.0 as i32;
        if token.ids.contains(&id) {
            let reason = format!("expert {id} comes twice for one token");
            return Err(SinkError::Refused(reason.into()));
        }
        token.ids.push(id);
        token.weights.extend(row.weight);
        Ok(())
    }

    fn count(&mut self, _row: &CountRow) -> Result<(), SinkError> {
        Err(SinkError::NeedsOrder)
    }
}
