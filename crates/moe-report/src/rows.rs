//! Collects the routing rows of a trace without operations.

use std::collections::HashSet;

use moe_trace::{CountRow, RoutingRow, Sink, SinkError, TokenStarts};

use crate::routing::{Routing, Selected};
use crate::tokens::TokenList;

/// The first rows of a trace, as tokens and as the table `routing`.
#[derive(Debug)]
pub(crate) struct RowCollector {
    pub routing: Routing,
    pub tokens: TokenList,
    /// Whether the trace has more rows than were kept.
    pub is_truncated: bool,
    /// Whether every row has a timestamp.
    pub has_times: bool,
    /// Number of tokens in layers, which would be rows of `routing`.
    pub n_rows: u64,
    max_rows: usize,
    starts: TokenStarts,
    /// Tokens that have a row in a layer.
    routed: HashSet<(i32, u16)>,
    is_open: bool,
}

impl RowCollector {
    /// Keeps at most `max_rows` rows of `routing`.
    pub fn new(max_rows: usize) -> RowCollector {
        RowCollector {
            routing: Routing::default(),
            tokens: TokenList::default(),
            is_truncated: false,
            has_times: true,
            n_rows: 0,
            max_rows,
            starts: TokenStarts::default(),
            routed: HashSet::new(),
            is_open: false,
        }
    }

    /// The token of a row that starts a row of `routing`. A layer that the token already has is a layer of another token.
    fn token(&mut self, row: &RoutingRow, start: i64) -> i32 {
        let place = (row.sequence_id.unwrap_or(0), row.token_id.0);
        let layer = row.layer_id.0;
        let known = self.tokens.newest(place);
        let token = match known.filter(|&token| !self.routed.contains(&(token, layer))) {
            Some(token) => token,
            None => self.tokens.add(place, row.phase, start),
        };
        self.routed.insert((token, layer));
        token
    }
}

impl Sink for RowCollector {
    fn routing(&mut self, row: &RoutingRow) -> Result<(), SinkError> {
        if self.starts.is_start(row.token(), row.slot.into()) {
            self.n_rows += 1;
            self.is_open = self.routing.len() < self.max_rows;
            if !self.is_open {
                self.is_truncated = true;
                return Ok(());
            }
            self.has_times &= row.timestamp_ns.is_some();
            let start = row.timestamp_ns.unwrap_or(0);
            let start = i64::try_from(start).unwrap_or(i64::MAX);
            let token = self.token(row, start);
            self.routing.begin_row(token, row.layer_id.0, start);
        }
        if self.is_open {
            let selected = Selected::new(row.expert_id.0, row.weight, row.lane);
            self.routing.push(selected);
        }
        Ok(())
    }

    fn count(&mut self, _row: &CountRow) -> Result<(), SinkError> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use moe_trace::{ExpertId, LayerId, TokenId};

    use super::*;

    fn rows(of: &[(u32, u16, u32)], max_rows: usize) -> RowCollector {
        let mut rows = RowCollector::new(max_rows);
        for &(token, layer, expert) in of {
            for slot in 0..2u16 {
                let row = RoutingRow {
                    token_id: TokenId(token),
                    slot,
                    expert_id: ExpertId(expert + u32::from(slot)),
                    ..RoutingRow::at_layer(LayerId(layer))
                };
                rows.routing(&row).unwrap();
            }
        }
        rows
    }

    /// Two tokens, all layers of the first one before those of the second one, and in the other order.
    #[test]
    fn finds_tokens_in_both_orders() {
        for order in [
            [(0, 0, 1), (0, 1, 2), (1, 0, 3), (1, 1, 4)],
            [(0, 0, 1), (1, 0, 3), (0, 1, 2), (1, 1, 4)],
        ] {
            let rows = rows(&order, 9);
            assert_eq!(rows.tokens.len(), 2);
            assert_eq!(rows.routing.len(), 4);
            assert!(!rows.has_times && !rows.is_truncated);
        }
        let again = rows(&[(0, 0, 1), (0, 1, 2), (0, 0, 5), (0, 1, 6)], 9);
        assert_eq!(again.routing.tokens(), [0, 0, 1, 1]);
    }

    #[test]
    fn counts_rows_above_the_limit() {
        let rows = rows(&[(0, 0, 1), (0, 1, 2), (1, 0, 3)], 2);
        assert_eq!((rows.routing.len(), rows.n_rows), (2, 3));
        assert_eq!(rows.routing.row(1).len(), 2);
        assert!(rows.is_truncated);
    }
}
