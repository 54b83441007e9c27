//! The table `spans`: the timeline of Post-Fetch's copies and computation.

use moe_trace::transfers::{Span, Transfer};

use crate::document::Track;
use crate::table::Column;
use crate::tokens::TokenList;

/// Rows of the timeline: what a track shows, and the kind of it.
const TRACKS: [(&str, &str); 3] = [
    ("gate and up (CPU)", "compute"),
    ("H2D copies", "transfer"),
    ("down (GPU)", "compute"),
];

/// The spans of a run, sorted by start.
#[derive(Debug, Default)]
pub(crate) struct Spans {
    rows: Vec<Row>,
}

#[derive(Clone, Copy, Debug)]
struct Row {
    track: i32,
    token: i32,
    layer: i32,
    start: i64,
    duration: i32,
    bytes: f64,
}

/// The tracks of a run with transfers.
pub(crate) fn tracks() -> Vec<Track> {
    let tracks = TRACKS.into_iter();
    tracks.map(|(name, kind)| Track { name, kind }).collect()
}

impl Spans {
    /// The spans of transfers that start at most at `end`. `first` is the time of the first record, `end` is relative to it.
    pub fn new(transfers: &[Transfer], tokens: &TokenList, first: i64, end: i64) -> Spans {
        let mut rows = Vec::new();
        for transfer in transfers {
            let place = (transfer.sequence_id, transfer.token_id.0);
            let token = tokens.newest(place).unwrap_or(-1);
            let spans = [
                (0, Some(transfer.window), -1.0),
                (1, transfer.transfer, transfer.bytes as f64),
                (2, transfer.product, -1.0),
            ];
            for (track, span, bytes) in spans {
                let Some(span) = span else { continue };
                let start = start_of(span).saturating_sub(first).max(0);
                if start > end {
                    continue;
                }
                rows.push(Row {
                    track,
                    token,
                    layer: transfer.layer_id.0.into(),
                    start,
                    duration: i32::try_from(span.ns()).unwrap_or(i32::MAX),
                    bytes,
                });
            }
        }
        rows.sort_by_key(|row| row.start);
        Spans { rows }
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// The token of each row; -1 for none.
    pub fn tokens(&self) -> impl Iterator<Item = i32> {
        self.rows.iter().map(|row| row.token)
    }

    /// Number of rows that start at most at `end`.
    pub fn n_until(&self, end: i64) -> usize {
        self.rows.partition_point(|row| row.start <= end)
    }

    /// The columns of the first `n_rows` rows.
    pub fn columns(&self, n_rows: usize) -> Vec<Column> {
        let rows = &self.rows[..n_rows.min(self.len())];
        let integers = |of: fn(&Row) -> i32| -> Vec<i32> { rows.iter().map(of).collect() };
        vec![
            Column::dictionary("track", integers(|row| row.track)),
            Column::dictionary("token", integers(|row| row.token)),
            Column::dictionary("layer", integers(|row| row.layer)),
            Column::times("start", rows.iter().map(|row| row.start).collect()),
            Column::delta("duration", integers(|row| row.duration)),
            Column::numbers("bytes", rows.iter().map(|row| row.bytes).collect()),
        ]
    }
}

fn start_of(span: Span) -> i64 {
    i64::try_from(span.start_ns).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use moe_trace::{LayerId, Phase, TokenId};

    use super::*;

    fn span(start_ns: u64, end_ns: u64) -> Span {
        Span { start_ns, end_ns }
    }

    #[test]
    fn spans_are_sorted_and_relative() {
        let mut tokens = TokenList::default();
        tokens.add((2, 7), Some(Phase::Generate), 1000);
        let transfer = |start: u64, transfer| Transfer {
            sequence_id: 2,
            token_id: TokenId(7),
            phase: Phase::Generate,
            layer_id: LayerId(3),
            n_tokens: 1,
            n_experts: 2,
            n_fetched: 2,
            bytes: 64,
            transfer,
            window: span(start, start + 50),
            product: None,
        };
        let transfers = [
            transfer(1100, Some(span(1090, 1120))),
            transfer(1060, None),
            transfer(9000, None),
        ];
        let spans = Spans::new(&transfers, &tokens, 1000, 5000);
        let rows = spans
            .rows
            .iter()
            .map(|row| (row.track, row.start, row.duration));
        assert_eq!(
            rows.collect::<Vec<_>>(),
            [(0, 60, 50), (1, 90, 30), (0, 100, 50)]
        );
        assert_eq!((spans.rows[1].token, spans.rows[1].layer), (0, 3));
        assert_eq!(spans.rows[1].bytes, 64.0);
        assert_eq!(spans.n_until(90), 2);
        assert_eq!(spans.columns(2).len(), 6);
    }
}
