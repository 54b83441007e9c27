//! The routing of a trace of any format as a stream of rows: the selected experts of each token in order, or counts.

use moe_ids::{ExpertId, LayerId, TokenId};

use crate::model_info::ModelInfo;
use crate::phase::Phase;
use crate::token::TokenKey;

/// Receives the routing of a trace of any format. Layer and expert ids are below [`MAX_ID`](crate::MAX_ID), and below the
/// numbers of the model if these are known.
pub trait Sink {
    /// Receives the parameters of the model before the first row. Not called if the trace does not contain them.
    fn model_info(&mut self, model_info: &ModelInfo) -> Result<(), SinkError> {
        let _ = model_info;
        Ok(())
    }

    /// Receives a row of routing: one selected expert of one token in one layer.
    fn routing(&mut self, row: &RoutingRow) -> Result<(), SinkError>;

    /// Receives the count of one expert.
    fn count(&mut self, row: &CountRow) -> Result<(), SinkError>;

    /// Receives the totals of a layer, for formats with counts.
    fn layer(&mut self, row: &LayerRow) -> Result<(), SinkError> {
        let _ = row;
        Ok(())
    }
}

/// Why a sink stops.
#[derive(Debug)]
pub enum SinkError {
    /// The row is invalid. The caller adds the location of the row in the file.
    Refused(Box<dyn std::error::Error + Send + Sync>),
    /// The sink needs rows in order, but the format contains counts.
    NeedsOrder,
    /// Something else failed.
    Failed(Box<dyn std::error::Error + Send + Sync>),
}

impl<E: std::error::Error + Send + Sync + 'static> From<E> for SinkError {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

/// Whether a value can be the weight with which a router applies an expert: finite and not negative.
pub fn is_router_weight(weight: f32) -> bool {
    (0.0..=f32::MAX).contains(&weight)
}

/// An expert of a token in a layer. Rows have the order of the trace; those of a token follow each other.
///
/// The fields are the columns of the table `routing`. Values that the format does not contain are `None`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RoutingRow {
    /// Position of the token in its sequence.
    pub token_id: TokenId,
    /// Sequence (request, turn) of the token.
    pub sequence_id: Option<u32>,
    /// Phase of the token.
    pub phase: Option<Phase>,
    /// Layer.
    pub layer_id: LayerId,
    /// Rank of the expert in the token's top-k; 0 is the best.
    pub slot: u16,
    /// Id of the expert in its layer.
    pub expert_id: ExpertId,
    /// Router weight as applied.
    pub weight: Option<f32>,
    /// Where the expert was computed, a value of [`lane`](crate::record::lane).
    pub lane: Option<u8>,
    /// Start of the operation in nanoseconds; equal for all tokens of a batch in a layer, never 0.
    pub timestamp_ns: Option<u64>,
}

impl RoutingRow {
    /// A row with token 0, slot 0 and expert 0 of a layer, and `None` in all other fields, for importers to complete.
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

/// How often an expert was selected.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CountRow {
    /// Layer.
    pub layer_id: LayerId,
    /// Id of the expert in its layer.
    pub expert_id: ExpertId,
    /// Phase of the counted tokens; `None` for both phases, or if unknown.
    pub phase: Option<Phase>,
    /// Number of selections.
    pub count: u64,
    /// Sum of the router weights over these selections.
    pub mass: Option<f64>,
}

/// Totals of a layer in a format with counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerRow {
    /// Layer.
    pub layer_id: LayerId,
    /// Phase of the counted tokens; `None` for both phases, or if unknown.
    pub phase: Option<Phase>,
    /// Number of passes in which the layer routed tokens.
    pub calls: Option<u64>,
    /// Number of routed tokens.
    pub n_tokens: Option<u64>,
}
