//! The routing of any trace as a stream of rows: which experts the tokens selected, in order, or how often each was selected.

use moe_ids::{ExpertId, LayerId, TokenId};

use crate::facts::Facts;
use crate::phase::Phase;
use crate::token::TokenKey;

/// Takes the routing of a trace, whatever recorded it. Layer and expert ids are below [`MAX_ID`](crate::MAX_ID), and of the
/// model if it is known.
pub trait Sink {
    /// What is known about the model before the first row; not called where a format tells nothing there.
    fn facts(&mut self, facts: &Facts) -> Result<(), SinkError> {
        let _ = facts;
        Ok(())
    }

    /// One row of routing.
    fn routing(&mut self, row: &RoutingRow) -> Result<(), SinkError>;

    /// One count.
    fn count(&mut self, row: &CountRow) -> Result<(), SinkError>;

    /// Totals of a layer, where counts are told.
    fn layer(&mut self, row: &LayerRow) -> Result<(), SinkError> {
        let _ = row;
        Ok(())
    }
}

/// Why a sink takes no more.
#[derive(Debug)]
pub enum SinkError {
    /// The row makes no sense; the place where it was read is added.
    Refused(Box<dyn std::error::Error + Send + Sync>),
    /// Counts have no order, and the sink needs one.
    NeedsOrder,
    /// Something else failed.
    Failed(Box<dyn std::error::Error + Send + Sync>),
}

impl<E: std::error::Error + Send + Sync + 'static> From<E> for SinkError {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

/// One expert of one token in one layer; rows come in the order of the trace, those of a token in the order of their slots.
///
/// The columns of the table `routing`. What the format does not tell is `None`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RoutingRow {
    /// Position of the token in its sequence.
    pub token_id: TokenId,
    /// Sequence (request, turn) of the token.
    pub sequence_id: Option<u32>,
    /// Prompt or generated.
    pub phase: Option<Phase>,
    /// Layer.
    pub layer_id: LayerId,
    /// Rank of the expert in the token's top-k, best 0.
    pub slot: u16,
    /// Expert in the layer.
    pub expert_id: ExpertId,
    /// Router weight as applied.
    pub weight: Option<f32>,
    /// Where it was computed, a number of [`lane`](crate::record::lane).
    pub lane: Option<u8>,
    /// Start of the operation; equal for all tokens of a batch in a layer, never 0.
    pub timestamp_ns: Option<u64>,
}

impl RoutingRow {
    /// Token 0, slot 0, expert 0 of a layer, nothing else told: to be filled in with what a format tells.
    pub fn at_layer(layer_id: LayerId) -> Self {
        Self {
            token_id: TokenId(0),
            sequence_id: None,
            phase: None,
            layer_id,
            slot: 0,
            expert_id: ExpertId(0),
            weight: None,
            lane: None,
            timestamp_ns: None,
        }
    }

    /// The token in its layer.
    pub fn token(&self) -> TokenKey {
        TokenKey {
            layer_id: self.layer_id,
            sequence_id: self.sequence_id,
            token_id: self.token_id,
            phase: self.phase,
            timestamp_ns: self.timestamp_ns.unwrap_or(0),
        }
    }
}

/// How often an expert was chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CountRow {
    /// Layer.
    pub layer_id: LayerId,
    /// Expert in the layer.
    pub expert_id: ExpertId,
    /// The tokens that were counted; `None` = both phases, or not told.
    pub phase: Option<Phase>,
    /// Times it was chosen.
    pub count: u64,
    /// Sum of the router weights with which it was chosen.
    pub mass: Option<f64>,
}

/// What a format of counts says of a whole layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerRow {
    /// Layer.
    pub layer_id: LayerId,
    /// The tokens that were counted; `None` = both phases, or not told.
    pub phase: Option<Phase>,
    /// Passes in which the layer routed something.
    pub calls: Option<u64>,
    /// Tokens that it routed.
    pub rows: Option<u64>,
}
