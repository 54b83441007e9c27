//! Hotness from traces of other tools.

use moe_trace::foreign::{
    self, CountRow, Detected, LayerRow, Options, Phase, RoutingRow, Sink, SinkError, Summary,
};

use super::counting::{Choice, Counter};
use super::origin::Origin;
use super::{Error, Hotness, Tally, UNTOLD};

impl Hotness {
    /// Counts a trace of another tool, whether it tells tokens or counts alone; the summary has what the format lost.
    ///
    /// # Errors
    /// [`Error::Foreign`] if it cannot be read or holds nothing.
    pub fn from_foreign(trace: &Detected, options: &Options) -> Result<(Hotness, Summary), Error> {
        let path = trace.source.path();
        let mut sink = Counting(Counter::new(Origin::of_foreign(path, &Default::default())));
        let summary = foreign::import(trace.importer, &trace.source, options, &mut sink)?;
        let facts = &summary.facts;
        let n_expert_used = options.top_k.or(facts.n_expert_used);
        let hotness = sink.0.finish_foreign(
            Origin::of_foreign(path, facts),
            facts.n_expert,
            n_expert_used,
        );
        match hotness {
            Some(hotness) => Ok((hotness, summary)),
            None => Err(Error::Empty {
                place: path.display().to_string(),
            }),
        }
    }
}

struct Counting(Counter);

fn index(phase: Option<Phase>) -> usize {
    phase.map_or(UNTOLD, |phase| phase.number().into())
}

impl Sink for Counting {
    fn routing(&mut self, row: &RoutingRow) -> Result<(), SinkError> {
        let choice = Choice {
            layer: row.layer_id.into(),
            phase: index(row.phase),
            timestamp_ns: row.timestamp_ns.unwrap_or(0),
            slot: row.slot.into(),
            expert: row.expert_id,
            weight: row.weight.unwrap_or(0.0).into(),
        };
        let place = || format!("token {}", row.token_id);
        Ok(self.0.add(choice, place)?)
    }

    fn count(&mut self, row: &CountRow) -> Result<(), SinkError> {
        let tally = Tally {
            count: row.count,
            mass: row.mass.unwrap_or(0.0),
        };
        let layer = row.layer_id.into();
        self.0
            .add_counts(layer, index(row.phase), row.expert_id, tally);
        Ok(())
    }

    fn layer(&mut self, row: &LayerRow) -> Result<(), SinkError> {
        let (calls, rows) = (row.calls.unwrap_or(0), row.rows.unwrap_or(0));
        self.0
            .add_totals(row.layer_id.into(), index(row.phase), calls, rows);
        Ok(())
    }
}
