//! What a trace of another tool's records has in addition: the positions of its passes.

use moe_ids::TokenId;

/// One pass through the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TablePass {
    /// Its first record.
    pub first_record: u64,
    /// Position of its first token.
    pub token_id: TokenId,
    /// Whether it is the graph that llama.cpp warms up with, which routes to all experts.
    pub is_warm_up: bool,
}

/// The passes of a trace whose records do not contain the positions of their tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PassTable {
    passes: Vec<TablePass>,
}

impl PassTable {
    /// A table of passes in order, first records ascending.
    pub fn new(passes: Vec<TablePass>) -> Self {
        Self { passes }
    }

    /// The pass that a record is of; `None` if nothing is known of passes.
    pub fn at(&self, record: u64) -> Option<&TablePass> {
        let next = self
            .passes
            .partition_point(|pass| pass.first_record <= record);
        self.passes.get(next.checked_sub(1)?)
    }
}
