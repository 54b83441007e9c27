//! Rows of routing, a token and layer at a time.

use crate::foreign::{CountRow, Export, ExportError, ForeignError, RoutingRow, Sink, SinkError};

/// Hands the rows of a token in a layer over together, best expert first, to the writer of `format`.
///
/// The rows are never none.
pub(super) fn for_each_token(
    export: &Export<'_>,
    format: &'static str,
    take: impl FnMut(&[RoutingRow]) -> Result<(), SinkError>,
) -> Result<(), ExportError> {
    let mut tokens = Tokens {
        rows: Vec::new(),
        take,
    };
    export.rows(format, &mut tokens)?;
    tokens.finish().map_err(|error| match error {
        SinkError::Refused(reason) => ExportError::Unfit { format, reason },
        SinkError::NeedsOrder => ExportError::NoOrder {
            format,
            from: export.summary.format,
        },
        SinkError::Failed(error) => ForeignError::Sink(error).into(),
    })
}

struct Tokens<F> {
    rows: Vec<RoutingRow>,
    take: F,
}

impl<F: FnMut(&[RoutingRow]) -> Result<(), SinkError>> Tokens<F> {
    /// Hands over the token whose rows have come.
    fn finish(&mut self) -> Result<(), SinkError> {
        if !self.rows.is_empty() {
            (self.take)(&self.rows)?;
            self.rows.clear();
        }
        Ok(())
    }
}

impl<F: FnMut(&[RoutingRow]) -> Result<(), SinkError>> Sink for Tokens<F> {
    fn routing(&mut self, row: &RoutingRow) -> Result<(), SinkError> {
        if self.rows.last().is_some_and(|last| !follows(row, last)) {
            self.finish()?;
        }
        self.rows.push(*row);
        Ok(())
    }

    fn count(&mut self, _: &CountRow) -> Result<(), SinkError> {
        Ok(())
    }
}

/// Whether `row` is the next expert of the token that `last` is of.
fn follows(row: &RoutingRow, last: &RoutingRow) -> bool {
    row.slot > last.slot
        && row.layer_id == last.layer_id
        && row.token_id == last.token_id
        && row.sequence_id == last.sequence_id
        && row.phase == last.phase
        && row.timestamp_ns == last.timestamp_ns
}
