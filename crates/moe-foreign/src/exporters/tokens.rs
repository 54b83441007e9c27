//! Groups routing rows by token and layer.

use moe_trace::{CountRow, RoutingRow, Sink, SinkError, TokenStarts};

use crate::{Export, ExportError, ForeignError};

/// Calls `write` with the rows of each token in each layer, best expert first, for the exporter named `format`. There is at least
/// one row in each call.
pub(super) fn for_each_token(
    export: &Export<'_>,
    format: &'static str,
    write: impl FnMut(&[RoutingRow]) -> Result<(), SinkError>,
) -> Result<(), ExportError> {
    let mut tokens = Tokens {
        rows: Vec::new(),
        starts: TokenStarts::default(),
        write,
    };
    export.rows(format, &mut tokens)?;
    tokens.finish().map_err(|error| match error {
        SinkError::Refused(source) => ExportError::Unsupported { format, source },
        SinkError::NeedsOrder => ExportError::NoOrder {
            format,
            from: export.summary.format,
        },
        SinkError::Failed(error) => ForeignError::Sink(error).into(),
    })
}

struct Tokens<F> {
    /// Rows of the current token.
    rows: Vec<RoutingRow>,
    starts: TokenStarts,
    write: F,
}

impl<F: FnMut(&[RoutingRow]) -> Result<(), SinkError>> Tokens<F> {
    /// Writes the current token.
    fn finish(&mut self) -> Result<(), SinkError> {
        if !self.rows.is_empty() {
            self.rows.sort_by_key(|row| row.slot);
            (self.write)(&self.rows)?;
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
