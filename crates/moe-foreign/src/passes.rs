//! Token positions where a trace gives only the order of layers: a pass goes through the layers upwards, and where the layer
//! number does not rise the next pass begins.

use moe_trace::{LayerId, TokenId};

/// Follows the layers of a trace.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Passes {
    /// Position of the first token of the pass.
    start: u32,
    /// Tokens of the pass, as its first layers routed them.
    n_tokens: u32,
    last_layer: Option<LayerId>,
}

impl Passes {
    /// A layer that routed `n_tokens` tokens in a row; returns the position of the first of them.
    ///
    /// A layer with fewer tokens than those before it in the pass routed the last ones: llama.cpp computes only the wanted
    /// outputs in the last layer.
    pub(crate) fn layer(&mut self, layer_id: LayerId, n_tokens: u32) -> TokenId {
        self.begin(layer_id);
        self.n_tokens = self.n_tokens.max(n_tokens);
        let end = self.start.saturating_add(self.n_tokens);
        TokenId(end.saturating_sub(n_tokens))
    }

    /// One token of a layer, the `row`-th of its batch; returns its position. For traces that number the tokens of a batch.
    ///
    /// `is_same_layer`: the token before it was of the same layer and batch.
    pub(crate) fn row(&mut self, layer_id: LayerId, row: u32, is_same_layer: bool) -> TokenId {
        if !is_same_layer {
            self.begin(layer_id);
        }
        self.n_tokens = self.n_tokens.max(row.saturating_add(1));
        TokenId(self.start.saturating_add(row))
    }

    fn begin(&mut self, layer_id: LayerId) {
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
    fn a_pass_ends_where_layers_begin_anew() {
        let mut passes = Passes::default();
        // A prompt of five tokens, whose last layer routes the last one alone; then two single tokens.
        assert_eq!(passes.layer(LayerId(1), 5), TokenId(0));
        assert_eq!(passes.layer(LayerId(3), 5), TokenId(0));
        assert_eq!(passes.layer(LayerId(7), 1), TokenId(4));
        assert_eq!(passes.layer(LayerId(1), 1), TokenId(5));
        assert_eq!(passes.layer(LayerId(3), 1), TokenId(5));
        assert_eq!(passes.layer(LayerId(7), 1), TokenId(5));
        assert_eq!(passes.layer(LayerId(1), 1), TokenId(6));
    }

    #[test]
    fn a_single_layer_is_a_pass_every_time() {
        let mut passes = Passes::default();
        let starts = [3, 1, 1].map(|n| passes.layer(LayerId(4), n));
        assert_eq!(starts, [0, 3, 4].map(TokenId));
    }

    #[test]
    fn numbered_rows() {
        let mut passes = Passes::default();
        assert_eq!(passes.row(LayerId(0), 0, false), TokenId(0));
        assert_eq!(passes.row(LayerId(0), 1, true), TokenId(1));
        assert_eq!(passes.row(LayerId(5), 0, false), TokenId(0));
        assert_eq!(passes.row(LayerId(5), 1, true), TokenId(1));
        assert_eq!(passes.row(LayerId(0), 0, false), TokenId(2));
    }
}
