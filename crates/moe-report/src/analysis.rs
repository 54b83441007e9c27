//! Analysis of the routing of an input, in one pass over its rows.

use moe_analysis::Phases;
use moe_analysis::hotness::{Hotness, RowCounter};
use moe_analysis::simulate::{Collector, Error as SimulateError};
use moe_analysis::survey::{Survey, SurveyOptions};
use moe_foreign::{ForeignError, Summary};
use moe_gguf::experts::expert_bytes;
use moe_gguf::map::OffsetMap;
use moe_placement::plan::ExpertSizes;
use moe_trace::{CountRow, ExpertId, LayerId, LayerRow, ModelInfo, RoutingRow, Sink, SinkError};

use crate::charts;
use crate::document::Chart;
use crate::error::Error;
use crate::input::Source;
use crate::rows::RowCollector;

/// Results for the charts of an input.
pub(crate) struct Analysis {
    /// Summary of the routing; `None` for a trace of operations without routing.
    pub summary: Option<Summary>,
    /// Routing of a trace without operations; otherwise empty.
    pub rows: RowCollector,
    /// Sizes of the experts in bytes, if they are known.
    pub sizes: Option<ExpertSizes>,
    pub notes: Vec<String>,
    hotness: Option<Hotness>,
    survey: Survey,
    caches: Option<Collector>,
}

/// Sends each row to several sinks.
struct Tee<'a> {
    hotness: RowCounter<'a>,
    caches: Collector,
    rows: RowCollector,
}

impl Sink for Tee<'_> {
    fn model_info(&mut self, model_info: &ModelInfo) -> Result<(), SinkError> {
        self.caches.model_info(model_info)
    }

    fn routing(&mut self, row: &RoutingRow) -> Result<(), SinkError> {
        self.hotness.routing(row)?;
        self.caches.routing(row)?;
        self.rows.routing(row)
    }

    fn count(&mut self, row: &CountRow) -> Result<(), SinkError> {
        self.hotness.count(row)
    }

    fn layer(&mut self, row: &LayerRow) -> Result<(), SinkError> {
        self.hotness.layer(row)
    }
}

/// Reads the routing of an input. `has_operations`: whether the trace contains operations, so that its rows are not collected.
pub(crate) fn analyze(
    source: &Source<'_>,
    has_operations: bool,
    map: Option<&OffsetMap>,
) -> Result<Analysis, Error> {
    let mut survey = Survey::new(SurveyOptions::default());
    survey.begin_input();
    let max_rows = if has_operations {
        0
    } else {
        source.max_records
    };
    let mut tee = Tee {
        hotness: RowCounter::new(source.path, Some(&mut survey)),
        caches: Collector::new(),
        rows: RowCollector::new(max_rows),
    };
    let summary = match source.input.read(source.options, &mut tee) {
        Ok(summary) => Some(summary),
        // A dense model.
        Err(ForeignError::NoRouting { .. }) if has_operations => None,
        Err(error) => return Err(error.into()),
    };
    let Tee {
        hotness,
        caches,
        rows,
    } = tee;
    let counted = |summary: &Summary| hotness.finish(&summary.model_info);
    let hotness = summary.as_ref().map(counted).transpose()?;
    survey.finish()?;
    let model = source.options.model.as_ref();
    let mismatch = hotness.as_ref().zip(model);
    if let Some(mismatch) = mismatch.and_then(|(hotness, model)| hotness.mismatch(model)) {
        return Err(Error::Foreign(ForeignError::OtherModel {
            path: source.path.to_owned(),
            mismatch,
        }));
    }
    let is_ordered = summary.as_ref().is_some_and(Summary::is_ordered);
    let mut notes = Vec::new();
    if summary.is_some() && !is_ordered {
        notes.push(
            "The trace contains only counts of selected experts, without tokens and their order."
                .to_owned(),
        );
    }
    let sizes = summary
        .as_ref()
        .and_then(|summary| known_sizes(map, &caches, &summary.model_info));
    Ok(Analysis {
        summary,
        rows,
        sizes,
        notes,
        hotness,
        survey,
        caches: is_ordered.then_some(caches),
    })
}

/// Sizes of the experts from the map, else from the trace. The MTP head has no experts in a cache.
fn known_sizes(
    map: Option<&OffsetMap>,
    caches: &Collector,
    info: &ModelInfo,
) -> Option<ExpertSizes> {
    let n_layer = info.n_hidden_layer();
    let of_map = map.map(|map| {
        let sizes = expert_bytes(map).into_iter();
        sizes
            .map(|((layer, expert), bytes)| (layer, expert, bytes))
            .filter(|&(layer, ..)| n_layer.is_none_or(|n_layer| u32::from(layer.0) < n_layer))
            .collect::<ExpertSizes>()
    });
    of_map
        .filter(|sizes| !sizes.is_empty())
        .or_else(|| Some(caches.recorded_sizes()).filter(|sizes| !sizes.is_empty()))
}

/// A size of 1 for each expert.
fn unit_sizes(hotness: &Hotness) -> ExpertSizes {
    let layers = hotness.layers(Phases::All).into_iter();
    let n_expert = hotness.n_expert();
    layers
        .flat_map(|layer| (0..n_expert).map(move |expert| (layer, ExpertId(expert), 1)))
        .collect()
}

impl Analysis {
    /// Number of selections of each expert of a layer, for a trace that contains only counts.
    pub fn counted(&self, layer: LayerId) -> Option<Vec<u64>> {
        let has_order = self.summary.as_ref().is_none_or(Summary::is_ordered);
        let hotness = self.hotness.as_ref().filter(|_| !has_order)?;
        let is_counted = hotness.layers(Phases::All).contains(&layer);
        is_counted.then(|| hotness.counts(layer, Phases::All))
    }

    /// Layers with selected experts, and the number of experts in a layer.
    pub fn routed_layers(&self) -> (Vec<LayerId>, u32) {
        let hotness = self.hotness.as_ref();
        hotness.map_or((Vec::new(), 0), |hotness| {
            (hotness.layers(Phases::All), hotness.n_expert())
        })
    }

    /// The charts of the routing. Notes about missing charts are added to the notes.
    pub fn charts(&mut self, input: usize) -> Vec<Chart> {
        let Some(hotness) = &self.hotness else {
            return Vec::new();
        };
        let mut charts = vec![charts::coverage(input, hotness)];
        charts.extend(charts::stability(input, hotness, &self.survey));
        charts.push(charts::balance(input, hotness));
        if let Some(caches) = self.caches.take() {
            let has_sizes = self.sizes.is_some();
            let unit = || unit_sizes(hotness);
            let sizes = self.sizes.clone().unwrap_or_else(unit);
            let batches = caches.finish(&sizes);
            match batches.and_then(|batches| charts::caches(input, &batches, has_sizes)) {
                Ok(chart) => charts.extend(chart),
                Err(error) => self.notes.push(missing(&error)),
            }
        }
        charts
    }
}

fn missing(error: &SimulateError) -> String {
    format!("The cache simulation is missing: {error}.")
}
