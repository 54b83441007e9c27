//! Token positions of passes, for traces of other tools whose records do not contain them.

use moe_ids::TokenId;

/// A forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TablePass {
    /// Index of its first record.
    pub first_record: u64,
    /// Position of its first token.
    pub token_id: TokenId,
    /// Whether it is the warm-up pass of llama.cpp, which uses all experts.
    pub is_warm_up: bool,
}

/// The passes of a trace whose records do not contain the positions of their tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PassTable {
    passes: Vec<TablePass>,
}

impl PassTable {
    /// A table of `passes`, which must be sorted by `first_record`.
    pub fn new(passes: Vec<TablePass>) -> Self {
        Self { passes }
    }

    /// The pass that contains a record; `None` if passes are unknown.
    pub fn at(&self, record: u64) -> Option<&TablePass> {
        let next = self
            .passes
            .partition_point(|pass| pass.first_record <= record);
        self.passes.get(next.checked_sub(1)?)
    }
}
