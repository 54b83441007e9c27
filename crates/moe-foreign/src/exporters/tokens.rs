//! Rows of routing, a token and layer at a time.

use moe_trace::{CountRow, RoutingRow, Sink, SinkError, TokenStarts};

use crate::{Export, ExportError, ForeignError};

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
        starts: TokenStarts::default(),
        take,
    };
    export.rows(format, &mut tokens)?;
    tokens.finish().map_err(|error| match error {
        SinkError::Refused(source) => ExportError::Unfit { format, source },
        SinkError::NeedsOrder => ExportError::NoOrder {
            format,
            from: export.summary.format,
        },
        SinkError::Failed(error) => ForeignError::Sink(error).into(),
    })
}

struct Tokens<F> {
    /// Of the last token.
    rows: Vec<RoutingRow>,
    starts: TokenStarts,
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
        if self.starts.is_start(row.token(), row.slot.into()) {
            self.finish()?;
        }
        self.rows.push(*row);
        Ok(())
    }

    fn count(&mut self, _: &CountRow) -> Result<(), SinkError> {
        Ok(())
    }
}
