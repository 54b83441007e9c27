//! Token positions for traces that record only the order of layers: within a forward pass layer numbers increase, so the next
//! pass starts where the layer number does not increase.

use moe_trace::{LayerId, TokenId};

/// Counts the tokens of the passes of a trace, layer by layer.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Passes {
    /// Position of the first token of the pass.
    start: u32,
    /// Number of tokens of the pass: the most of any of its layers so far.
    n_tokens: u32,
    last_layer: Option<LayerId>,
}

impl Passes {
    /// Adds a layer with `n_tokens` consecutive tokens; returns the position of the first of them.
    ///
    /// A layer with fewer tokens than an earlier layer of the pass routes the last tokens of the pass: in the last layer
    /// llama.cpp computes only the requested outputs.
    pub(crate) fn layer(&mut self, layer_id: LayerId, n_tokens: u32) -> TokenId {
        self.start_layer(layer_id);
        self.n_tokens = self.n_tokens.max(n_tokens);
        let end = self.start.saturating_add(self.n_tokens);
        TokenId(end.saturating_sub(n_tokens))
    }

    /// Adds token `index` of the batch in a layer; returns its position. For traces that number the tokens of a batch.
    ///
    /// `is_same_layer`: the previous token belongs to the same layer and batch.
    pub(crate) fn token(&mut self, layer_id: LayerId, index: u32, is_same_layer: bool) -> TokenId {
        if !is_same_layer {
            self.start_layer(layer_id);
        }
        self.n_tokens = self.n_tokens.max(index.saturating_add(1));
        TokenId(self.start.saturating_add(index))
    }

    fn start_layer(&mut self, layer_id: LayerId) {
        if self.last_layer.is_some_and(|last| layer_id <= last) {
            self.start = self.start.saturating_add(self.n_tokens);
            self.n_tokens = 0;
        }
        self.last_layer = Some(layer_id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn starts_a_pass_where_the_layer_number_does_not_increase() {
        let mut passes = Passes::default();
        // A prompt of five tokens, of which the last layer routes only the last; then two passes of one token.
        assert_eq!(passes.layer(LayerId(1), 5), TokenId(0));
        assert_eq!(passes.layer(LayerId(3), 5), TokenId(0));
        assert_eq!(passes.layer(LayerId(7), 1), TokenId(4));
        assert_eq!(passes.layer(LayerId(1), 1), TokenId(5));
        assert_eq!(passes.layer(LayerId(3), 1), TokenId(5));
        assert_eq!(passes.layer(LayerId(7), 1), TokenId(5));
        assert_eq!(passes.layer(LayerId(1), 1), TokenId(6));
    }

    #[test]
    fn a_repeated_layer_starts_a_pass() {
        let mut passes = Passes::default();
        let starts = [3, 1, 1].map(|n| passes.layer(LayerId(4), n));
        assert_eq!(starts, [0, 3, 4].map(TokenId));
    }

    #[test]
    fn numbers_tokens_of_a_batch() {
        let mut passes = Passes::default();
        assert_eq!(passes.token(LayerId(0), 0, false), TokenId(0));
        assert_eq!(passes.token(LayerId(0), 1, true), TokenId(1));
        assert_eq!(passes.token(LayerId(5), 0, false), TokenId(0));
        assert_eq!(passes.token(LayerId(5), 1, true), TokenId(1));
        assert_eq!(passes.token(LayerId(0), 0, false), TokenId(2));
    }
}
