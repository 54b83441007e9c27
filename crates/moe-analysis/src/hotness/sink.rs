//! Hotness of a stream of rows: routing of any trace, or counts.

use std::path::{Path, PathBuf};

use moe_trace::{CountRow, LayerRow, ModelInfo, RoutingRow, Sink, SinkError};

use super::counting::Counter;
use super::origin::Origin;
use super::{Error, Hotness};
use crate::survey::{SelectedExpert, Survey};
use crate::tally::ExpertTally;

/// Counts the rows of one trace, with tokens or with counts only.
pub struct RowCounter<'a> {
    path: PathBuf,
    counter: Counter,
    survey: Option<&'a mut Survey>,
}

impl<'a> RowCounter<'a> {
    /// A counter for the trace at `path`. `survey` receives the same selections.
    pub fn new(path: &Path, mut survey: Option<&'a mut Survey>) -> Self {
        if let Some(survey) = &mut survey {
            survey.begin_run();
        }
        let origin = Origin::of_foreign(path, &ModelInfo::default());
        Self {
            path: path.to_owned(),
            counter: Counter::without_shape(origin),
            survey,
        }
    }

    /// The sums. `model_info` are the parameters of the model that the trace or its reader contains.
    ///
    /// # Errors
    /// [`Error::Empty`] if nothing was counted.
    pub fn finish(self, model_info: &ModelInfo) -> Result<Hotness, Error> {
        let origin = Origin::of_foreign(&self.path, model_info);
        let hotness = self.counter.finish_foreign(origin, model_info);
        hotness.ok_or_else(|| Error::Empty {
            location: self.path.display().to_string(),
        })
    }
}

impl Sink for RowCounter<'_> {
    fn routing(&mut self, row: &RoutingRow) -> Result<(), SinkError> {
        let selected = SelectedExpert {
            layer: row.layer_id,
            phase: row.phase,
            timestamp_ns: row.timestamp_ns.unwrap_or(0),
            token_id: row.token_id,
            sequence_id: row.sequence_id,
            slot: row.slot.into(),
            expert: row.expert_id,
            weight: row.weight.map(f64::from),
        };
        let location = || format!("token {}", row.token_id);
        self.counter.add(&selected, location)?;
        if let Some(survey) = &mut self.survey {
            survey.add_selection(&selected);
        }
        Ok(())
    }

    fn count(&mut self, row: &CountRow) -> Result<(), SinkError> {
        let tally = ExpertTally {
            count: row.count,
            mass: row.mass.unwrap_or(0.0),
        };
        let (layer, phase) = (row.layer_id, row.phase);
        self.counter.has_mass &= row.mass.is_some();
        let counted = self.counter.add_counts(layer, phase, row.expert_id, tally);
        counted.ok_or_else(|| {
            SinkError::Refused("the sum of all counts exceeds 64 bits; the file is damaged".into())
        })?;
        if let Some(survey) = &mut self.survey {
            survey.count(layer, phase, row.expert_id, tally);
        }
        Ok(())
    }

    fn layer(&mut self, row: &LayerRow) -> Result<(), SinkError> {
        let (calls, tokens) = (row.calls.unwrap_or(0), row.n_tokens.unwrap_or(0));
        self.counter
            .add_totals(row.layer_id, row.phase, calls, tokens);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use moe_trace::{ExpertId, LayerId};

    use super::*;
    use crate::phases::Phases;

    /// Two passes of layer 0 in reverse order, and then a pass of layer 1.
    #[test]
    fn counts_passes_before_the_preceding_pass() {
        let mut counter = RowCounter::new(Path::new("trace"), None);
        for (timestamp_ns, layer) in [(8, 0), (5, 0), (6, 1)] {
            let row = RoutingRow {
                timestamp_ns: Some(timestamp_ns),
                ..RoutingRow::at_layer(LayerId(layer))
            };
            counter.routing(&row).unwrap();
        }
        let hotness = counter.finish(&ModelInfo::default()).unwrap();
        assert_eq!(hotness.n_backward(), 1);
    }

    /// One position, with slot 0 in sequence 0 and slot 1 without a sequence.
    #[test]
    fn token_without_sequence_is_not_in_sequence_0() {
        let mut counter = RowCounter::new(Path::new("trace"), None);
        for (sequence_id, slot) in [(Some(0), 0), (None, 1)] {
            let row = RoutingRow {
                sequence_id,
                slot,
                expert_id: ExpertId(slot.into()),
                ..RoutingRow::at_layer(LayerId(0))
            };
            counter.routing(&row).unwrap();
        }
        let hotness = counter.finish(&ModelInfo::default()).unwrap();
        assert_eq!(hotness.routed_tokens(LayerId(0), Phases::All), 2);
    }
}
