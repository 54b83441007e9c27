//! [`Collected`]: a sink that keeps a small trace in memory.

use moe_trace::{CountRow, LayerRow, RoutingRow, Sink, SinkError};

/// Keeps all rows in memory, which grows with the trace.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Collected {
    /// Routing rows, in order.
    pub routing: Vec<RoutingRow>,
    /// Counts, in order.
    pub counts: Vec<CountRow>,
    /// Totals of layers, in order.
    pub layers: Vec<LayerRow>,
}

impl Sink for Collected {
    fn routing(&mut self, row: &RoutingRow) -> Result<(), SinkError> {
        self.routing.push(*row);
        Ok(())
    }

    fn count(&mut self, row: &CountRow) -> Result<(), SinkError> {
        self.counts.push(*row);
        Ok(())
    }

    fn layer(&mut self, row: &LayerRow) -> Result<(), SinkError> {
        self.layers.push(*row);
        Ok(())
    }
}
