//! Reads an input: its metadata, its tables and its charts.

use std::path::Path;

use moe_analysis::overlap::bounds;
use moe_foreign::{ImportOptions, Input, Records as ForeignRecords, Summary};
use moe_gguf::map::OffsetMap;
use moe_trace::bounded::is_present;
use moe_trace::buffers::{self as buffer_events, BufferEvent};
use moe_trace::graph::{self, Graph};
use moe_trace::manifest::ModelFile;
use moe_trace::transfers::{self, Span, Transfer};
use moe_trace::{ExpertId, LayerId, ModelInfo, Phase, Run};

use crate::analysis::{Analysis, analyze};
use crate::document::{self, Chart, File, InputInfo, TimeUnit};
use crate::error::Error;
use crate::model::{ModelTable, layers};
use crate::records::{self, Records};
use crate::routing::{Routing, lane_names};
use crate::rows::RowCollector;
use crate::spans::{self, Spans};
use crate::tokens::TokenList;
use crate::{buffers, lanes};

/// Text of the token at a sequence and a position; `None` if it is unknown.
pub type TokenText<'a> = dyn Fn(u32, u32) -> Option<String> + 'a;

/// An input of a report.
pub struct Source<'a> {
    /// Name in the report. The names of two inputs must differ.
    pub name: String,
    /// Path of the trace.
    pub path: &'a Path,
    /// The trace.
    pub input: &'a Input,
    /// Options for a trace of another tool.
    pub options: &'a ImportOptions,
    /// Offset map of the model, for a trace that contains none.
    pub map: Option<&'a OffsetMap>,
    /// Files of the model of `map`.
    pub files: Vec<ModelFile>,
    /// Texts of the tokens.
    pub texts: Option<&'a TokenText<'a>>,
    /// Properties: name and value.
    pub properties: Vec<(String, String)>,
    /// Notes and warnings about the trace.
    pub notes: Vec<String>,
    /// Maximum number of records in the report.
    pub max_records: usize,
}

/// An input that was read.
#[derive(Debug)]
pub struct InputReport {
    pub(crate) info: InputInfo,
    pub(crate) records: Records,
    pub(crate) routing: Routing,
    pub(crate) spans: Spans,
    pub(crate) charts: Vec<Chart>,
    summary: Option<Summary>,
    /// Number of notes that the caller knows.
    n_known_notes: usize,
}

/// The tables of an input with relative times, and their tokens.
struct Tables {
    records: Records,
    routing: Routing,
    tokens: TokenList,
    unit: TimeUnit,
    /// Absolute time of the first record.
    first: i64,
    duration: i64,
    notes: Vec<String>,
}

impl InputReport {
    /// Reads an input. `index` is 0 for the first input of the report, and 1 for the second.
    ///
    /// # Errors
    /// The trace or a file of the run cannot be read, or the trace is of another model than the options state.
    pub fn read(source: Source<'_>, index: usize) -> Result<InputReport, Error> {
        let foreign = match source.input {
            Input::Foreign(trace) => trace.importer.records(&trace.source, source.options)?,
            Input::Run(_) | Input::Tables(_) => None,
        };
        let run = run_of(source.input, foreign.as_ref());
        let own_map = run.and_then(|run| run.map.as_ref());
        let map = own_map.or(source.map);
        let analysis = analyze(&source, run.is_some(), map)?;
        let info = model_info(&source, run, analysis.summary.as_ref());
        let is_named = own_map.is_none() && source.map.is_some();
        let files = files(&source.files, run, is_named);
        let model = ModelTable::new(map, files);
        let (mut tables, mut rest) = match run {
            Some(run) => (
                Tables::of_run(run, map, &model, source.max_records),
                analysis,
            ),
            None => Tables::of_rows(analysis),
        };
        let transfers = run.map_or_else(|| Ok(Vec::new()), transfers_of)?;
        if tables.records.len() == 0 {
            match bounds(&transfers) {
                Some(span) => tables.set_span(span),
                None if rest.summary.is_none() => {
                    let path = source.path.to_owned();
                    return Err(Error::Empty { path });
                }
                None => {}
            }
        }
        let events = run.map_or_else(|| Ok(Vec::new()), buffer_events_of)?;
        let graphs = run.map_or_else(|| Ok(Vec::new()), |run| graphs_of(run, &model))?;
        let buffers = buffers::buffers(&events, tables.first);
        let spans = Spans::new(&transfers, &tables.tokens, tables.first, tables.duration);

        let mut charts = rest.charts(index);
        charts.extend(lanes::shares(index, &tables.routing, tables.duration));
        let manifest = run.and_then(|run| run.manifest.as_ref());
        let hot_cache = manifest.and_then(|manifest| manifest.hot_cache.as_ref());
        charts.extend(hot_cache.and_then(|cache| lanes::requests(index, cache)));
        charts.extend(lanes::overlap(index, &transfers));
        charts.extend(buffers::chart(index, &buffers, tables.duration));
        let (unit, duration) = (tables.unit, tables.duration);
        charts.extend(lanes::speed(index, &tables.tokens, unit, duration));

        let mut used = tables.routing.layer_use();
        for &layer in &tables.records.layer {
            if let Ok(layer) = u16::try_from(layer) {
                used.entry(layer).or_default();
            }
        }
        // Counts have no rows of routing.
        if used.is_empty() {
            let (routed, n_expert) = rest.routed_layers();
            for layer in routed {
                used.entry(layer.0).or_default().n_expert = n_expert;
            }
        }
        let mut layers = layers(&info, &model.tensors, &used);
        for layer in &mut layers {
            layer.selections = rest.counted(LayerId(layer.index));
        }
        let mut properties_of_source = source.properties;
        let mut notes = source.notes;
        if let (Input::Foreign(_), Some(summary)) = (source.input, &rest.summary) {
            properties_of_source.extend(properties(summary));
            notes.extend(summary.notes.iter().cloned());
            let missing = summary.missing.iter();
            notes.extend(missing.map(|missing| format!("Not recorded: {missing}.")));
        }
        let n_known_notes = notes.len();
        notes.extend(tables.notes);
        notes.extend(rest.notes);
        let no_text = |_: u32, _: u32| -> Option<String> { None };
        let texts: &TokenText<'_> = source.texts.unwrap_or(&no_text);
        let mut records = tables.records;
        let (ops, names) = (
            std::mem::take(&mut records.ops),
            std::mem::take(&mut records.names),
        );
        let has_spans = spans.len() > 0;
        let has_lanes = tables.routing.has_lanes();
        Ok(InputReport {
            info: InputInfo {
                name: source.name,
                kind: kind(source.input).to_owned(),
                model: info.model,
                properties: properties_of_source,
                notes,
                time_unit: tables.unit,
                duration: tables.duration,
                layers,
                top_k: tables.routing.top_k(),
                files: model.files,
                tensors: model.tensors,
                ops,
                names,
                lanes: if has_lanes { lane_names() } else { Vec::new() },
                tracks: if has_spans {
                    spans::tracks()
                } else {
                    Vec::new()
                },
                tokens: tables.tokens.finish(texts),
                graphs,
                buffers,
            },
            records,
            routing: tables.routing,
            spans,
            charts,
            summary: rest.summary,
            n_known_notes,
        })
    }

    /// Number of rows of the table `records`.
    pub fn n_records(&self) -> usize {
        self.records.len()
    }

    /// Summary of the routing; `None` for a trace of a dense model.
    pub fn summary(&self) -> Option<&Summary> {
        self.summary.as_ref()
    }

    /// Notes about the report of this input, without those of [`Source::notes`] and of the summary.
    pub fn notes(&self) -> &[String] {
        &self.info.notes[self.n_known_notes..]
    }
}

impl Tables {
    /// Sets the time of a run that has transfers, but no records.
    fn set_span(&mut self, span: Span) {
        self.first = i64::try_from(span.start_ns).unwrap_or(i64::MAX);
        self.duration = i64::try_from(span.ns()).unwrap_or(i64::MAX);
    }

    /// The tables of a trace of every operation.
    fn of_run(
        run: &Run,
        map: Option<&OffsetMap>,
        model: &ModelTable,
        max_records: usize,
    ) -> Tables {
        let recorded = records::read(run, map, model, max_records);
        let (mut records, mut routing) = (recorded.records, recorded.routing);
        let mut tokens = recorded.tokens;
        let first = records.start.iter().copied().min().unwrap_or(0);
        records.rebase(first);
        routing.rebase(first);
        tokens.rebase(first);
        if let Some(places) = tokens.sort() {
            records.renumber_tokens(&places);
            routing.renumber_tokens(&places);
        }
        if let Some(places) = routing.sort() {
            records.renumber_routes(&places);
        }
        let mut notes = Vec::new();
        if recorded.is_truncated {
            let (n, all) = (records.len(), run.trace.records().len());
            notes.push(truncation(n, all as u64));
        }
        if records.sort() {
            notes.push(
                "The records are not in the order of time: the report contains them sorted by start.".to_owned(),
            );
        }
        let ends = records.start.iter().zip(&records.duration);
        let ends = ends.map(|(&start, &ns)| start.saturating_add(ns.max(0).into()));
        let duration = ends.max().unwrap_or(0);
        Tables {
            records,
            routing,
            tokens,
            unit: TimeUnit::Ns,
            first,
            duration,
            notes,
        }
    }

    /// The tables of a trace of routing, whose rows the analysis has collected.
    fn of_rows(mut analysis: Analysis) -> (Tables, Analysis) {
        let RowCollector {
            mut routing,
            mut tokens,
            is_truncated,
            has_times,
            n_rows,
            ..
        } = std::mem::replace(&mut analysis.rows, RowCollector::new(0));
        let has_times = has_times && routing.len() > 0;
        let first = routing.starts().iter().copied().min().unwrap_or(0);
        let (unit, duration) = if has_times {
            routing.rebase(first);
            tokens.rebase(first);
            if let Some(places) = tokens.sort() {
                routing.renumber_tokens(&places);
            }
            let last = routing.starts().iter().copied().max();
            (TimeUnit::Ns, last.unwrap_or(0))
        } else {
            routing.count_steps();
            tokens.count_steps();
            let n_steps = i64::try_from(tokens.len()).unwrap_or(i64::MAX);
            (TimeUnit::Step, n_steps)
        };
        routing.sort();
        let sizes = &analysis.sizes;
        let records = Records::of_routing(&routing, |layer, expert| {
            let layer = LayerId::try_from(layer).ok()?;
            let expert = ExpertId::try_from(expert).ok()?;
            Some(sizes.as_ref()?.get(layer, expert)? as f64)
        });
        let mut notes = Vec::new();
        if is_truncated {
            notes.push(truncation(routing.len(), n_rows));
        }
        if !has_times && routing.len() > 0 {
            notes
                .push("The trace has no timestamps: the time of a token is its number.".to_owned());
        }
        let tables = Tables {
            records,
            routing,
            tokens,
            unit,
            first,
            duration,
            notes,
        };
        (tables, analysis)
    }
}

fn truncation(n: usize, all: u64) -> String {
    format!(
        "The report contains the first {n} of {all} records. The charts are computed from all of them, except lanes over time and time per token."
    )
}

/// The run of an input with operations.
fn run_of<'a>(input: &'a Input, foreign: Option<&'a ForeignRecords>) -> Option<&'a Run> {
    match input {
        Input::Run(run) => Some(run),
        Input::Tables(_) | Input::Foreign(_) => foreign.map(|records| &records.run),
    }
}

fn kind(input: &Input) -> &'static str {
    match input {
        Input::Run(run) if run.path.is_dir() => "run",
        Input::Run(_) => "trace",
        Input::Tables(_) => "tables",
        Input::Foreign(trace) => trace.importer.name(),
    }
}

/// Parameters of the model from the trace, completed from the options.
fn model_info(source: &Source<'_>, run: Option<&Run>, summary: Option<&Summary>) -> ModelInfo {
    let mut info = summary.map_or_else(ModelInfo::default, |summary| summary.model_info.clone());
    if let Some(manifest) = run.and_then(|run| run.manifest.as_ref()) {
        info.fill_from(&ModelInfo::from_manifest(&manifest.model));
    }
    if let Some(model) = &source.options.model {
        info.fill_from(model);
    }
    info
}

/// Files of the model: `named` if the map is that of the user's model, else those of the manifest.
fn files(named: &[ModelFile], run: Option<&Run>, is_named: bool) -> Vec<File> {
    let manifest = run.and_then(|run| run.manifest.as_ref());
    let of_manifest = manifest.map_or(&[][..], |manifest| &manifest.model.files[..]);
    let files = if is_named { named } else { of_manifest };
    let file = |file: &ModelFile| File {
        name: file.name.clone(),
        size: file.size_bytes,
    };
    files.iter().map(file).collect()
}

/// Properties of a trace of another tool.
fn properties(summary: &Summary) -> Vec<(String, String)> {
    let info = &summary.model_info;
    let (what, n) = if summary.is_ordered() {
        ("rows", summary.rows)
    } else {
        ("counts", summary.counts)
    };
    let number = |number: Option<u32>| number.map(|number| number.to_string());
    let properties = [
        ("model", info.model.clone()),
        ("architecture", info.arch.clone()),
        ("layers", number(info.n_layer)),
        ("experts per layer", number(info.n_expert)),
        ("experts per token", number(info.max_expert_used())),
        (what, Some(n.to_string())),
    ];
    let known = properties.into_iter();
    known
        .filter_map(|(name, value)| Some((name.to_owned(), value?)))
        .collect()
}

/// The transfers of a run directory; empty for other policies than Post-Fetch.
fn transfers_of(run: &Run) -> Result<Vec<Transfer>, Error> {
    let path = run.path.join(transfers::FILE_NAME);
    if run.path.is_dir() && is_present(&path) {
        return Ok(transfers::read(&path)?);
    }
    Ok(Vec::new())
}

/// The buffer events of a run directory.
fn buffer_events_of(run: &Run) -> Result<Vec<BufferEvent>, Error> {
    let path = run.path.join(buffer_events::FILE_NAME);
    if run.path.is_dir() && is_present(&path) {
        return Ok(buffer_events::read(&path)?);
    }
    Ok(Vec::new())
}

/// The graphs of a run directory, or for other traces, graphs from the records.
fn graphs_of(run: &Run, model: &ModelTable) -> Result<Vec<document::Graph>, Error> {
    let mut graphs = Vec::new();
    for phase in Phase::ALL {
        let path = graph::path(&run.path, phase);
        let found = if run.path.is_dir() && is_present(&path) {
            Some(Graph::read(&path)?)
        } else {
            graph::reconstruct(run, phase)
        };
        graphs.extend(found.map(|found| crate::graph::layout(&found, phase, model)));
    }
    Ok(graphs)
}
