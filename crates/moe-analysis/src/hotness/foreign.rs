//! Hotness from traces of other tools.

use moe_trace::foreign::{
    self, CountRow, Detected, LayerRow, Options, Phase, RoutingRow, Sink, SinkError, Summary,
};

use super::counting::Counter;
use super::origin::Origin;
use super::{Error, Hotness, Tally, UNTOLD};
use crate::survey::{Choice, Survey};

impl Hotness {
    /// Counts a trace of another tool, whether it tells tokens or counts alone; the summary has what the format lost. A survey
    /// takes the same choices.
    ///
    /// # Errors
    /// [`Error::Foreign`] if it cannot be read or holds nothing.
    pub fn from_foreign(
        trace: &Detected,
        options: &Options,
        mut survey: Option<&mut Survey>,
    ) -> Result<(Hotness, Summary), Error> {
        let path = trace.source.path();
        if let Some(survey) = &mut survey {
            survey.begin_run();
        }
        let mut sink = Counting {
            counter: Counter::new(Origin::of_foreign(path, &Default::default()), path)?,
            survey,
        };
        let summary = foreign::import(trace.importer, &trace.source, options, &mut sink)?;
        let facts = &summary.facts;
        let hotness = sink.counter.finish_foreign(
            Origin::of_foreign(path, facts),
            facts.n_expert,
            facts.n_expert_used,
        );
        match hotness {
            Some(hotness) => Ok((hotness, summary)),
            None => Err(Error::Empty {
                place: path.display().to_string(),
            }),
        }
    }
}

struct Counting<'a> {
    counter: Counter,
    survey: Option<&'a mut Survey>,
}

fn index(phase: Option<Phase>) -> usize {
    phase.map_or(UNTOLD, |phase| phase.number().into())
}

impl Sink for Counting<'_> {
    fn routing(&mut self, row: &RoutingRow) -> Result<(), SinkError> {
        let choice = Choice {
            layer: row.layer_id.into(),
            phase: index(row.phase),
            timestamp_ns: row.timestamp_ns.unwrap_or(0),
            token_id: row.token_id,
            sequence_id: row.sequence_id.unwrap_or(0),
            slot: row.slot.into(),
            expert: row.expert_id,
            weight: row.weight.map(f64::from),
        };
        let place = || format!("token {}", row.token_id);
        self.counter.add(&choice, place)?;
        if let Some(survey) = &mut self.survey {
            survey.choice(&choice);
        }
        Ok(())
    }

    fn count(&mut self, row: &CountRow) -> Result<(), SinkError> {
        let tally = Tally {
            count: row.count,
            mass: row.mass.unwrap_or(0.0),
        };
        let (layer, phase) = (row.layer_id.into(), index(row.phase));
        self.counter.has_mass &= row.mass.is_some();
        let counted = self.counter.add_counts(layer, phase, row.expert_id, tally);
        counted.ok_or_else(|| {
            SinkError::Refused(
                "all counts together are more than 64 bits hold; the file is damaged".into(),
            )
        })?;
        if let Some(survey) = &mut self.survey {
            survey.count(layer, phase, row.expert_id, tally);
        }
        Ok(())
    }

    fn layer(&mut self, row: &LayerRow) -> Result<(), SinkError> {
        let (calls, rows) = (row.calls.unwrap_or(0), row.rows.unwrap_or(0));
        self.counter
            .add_totals(row.layer_id.into(), index(row.phase), calls, rows);
        Ok(())
    }
}
