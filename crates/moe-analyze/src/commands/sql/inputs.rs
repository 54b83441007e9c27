//! The Parquet files that a query reads: files of the inputs, or temporary files.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use anyhow::bail;
use moe_analysis::Phases;
use moe_analysis::hotness::{ExpertBytes, Hotness, Matrix};
use moe_foreign::{Detected, ForeignError, ImportOptions, Input, Records, import};
use moe_gguf::Gguf;
use moe_gguf::map::OffsetMap;
use moe_trace::record::RECORD_SIZE;
use moe_trace::tables::{RoutingTable, TABLES, TableOptions, prepare_tables};
use moe_trace::{CountRow, RoutingRow, Run, Sink, SinkError, map_table};

use crate::commands::parquet;
use crate::context::Context;
use crate::counting;
use crate::inputs::Kind;
use crate::layout::prepare_map_table;
use crate::traces::{self, TraceArgs};

use super::parquet_files::{self, TableFile};
use super::temporary::Temporary;

/// Names of the tables.
pub const QUERY_TABLES: [&str; 5] = ["ops", "accesses", "routing", "map", "hotness"];

/// The tables of a trace of records are smaller than the trace divided by this number.
const TABLES_OF_TRACE: u64 = 8;

/// An input of a query.
pub struct QueryInput {
    path: PathBuf,
    /// Value of the column `run`.
    run: String,
    source: Source,
    trace_options: Rc<TraceOptions>,
}

enum Source {
    /// A run, or a trace of another tool with operations.
    Run(Box<Run>),
    /// A trace of another tool with routing or counts.
    Foreign(Detected),
    Parquet(Vec<TableFile>),
    Model(Gguf),
}

/// Options that describe traces.
struct TraceOptions {
    options: ImportOptions,
    model: Option<Gguf>,
}

/// Opens all inputs.
///
/// # Errors
/// An input has an unknown format, a run is passed twice, or an option applies to no input.
pub fn open(
    paths: &[PathBuf],
    trace: &TraceArgs,
    ctx: &Context,
) -> anyhow::Result<Vec<QueryInput>> {
    let mut traces = Vec::new();
    for path in paths {
        if !is_model(path)? {
            traces.push(path.as_path());
        }
    }
    trace.check(&traces)?;
    let trace_options = Rc::new(TraceOptions {
        options: trace.options()?,
        model: trace.gguf()?.map(|(_, gguf)| gguf),
    });
    let mut inputs: Vec<QueryInput> = Vec::new();
    for path in paths {
        let input = QueryInput::open(path, &trace_options, ctx)?;
        if let Some(same) = inputs.iter().find(|other| other.run == input.run) {
            bail!(
                "{} and {} are the same run, {}; pass each run once",
                same.path.display(),
                path.display(),
                input.run
            );
        }
        inputs.push(input);
    }
    if trace_options.model.is_some() && inputs.iter().all(QueryInput::has_map) {
        bail!(
            "--model: {} already contains the map of its model; omit the option",
            inputs[0].path.display()
        );
    }
    Ok(inputs)
}

/// Returns whether the path is a model, and not another file in GGUF format, such as an importance matrix.
fn is_model(path: &Path) -> anyhow::Result<bool> {
    Ok(matches!(Kind::of(path), Ok(Kind::Gguf)) && traces::detect(path)?.is_none())
}

impl QueryInput {
    fn open(path: &Path, trace_options: &Rc<TraceOptions>, ctx: &Context) -> anyhow::Result<Self> {
        let options = &trace_options.options;
        let (run, source) = if is_model(path)? {
            (path.display().to_string(), Source::Model(Gguf::open(path)?))
        } else {
            match traces::open(path, options)? {
                Input::Run(run) => {
                    traces::print_warnings(&run, ctx)?;
                    (run.id(), Source::Run(run))
                }
                Input::Tables(path) => {
                    let files = parquet_files::find(&path)?;
                    let run = match &files[..] {
                        [file, ..] if !file.is_partition => file.run.clone(),
                        _ => path.display().to_string(),
                    };
                    (run, Source::Parquet(files))
                }
                Input::Foreign(trace) => match trace.importer.records(&trace.source, options)? {
                    Some(Records { run, notes }) => {
                        ctx.note(format_args!(
                            "{}: {}",
                            path.display(),
                            trace.importer.name()
                        ));
                        for note in notes {
                            ctx.note(format_args!("  {note}"));
                        }
                        (run.id(), Source::Run(Box::new(run)))
                    }
                    None => (trace.run_id()?, Source::Foreign(trace)),
                },
            }
        };
        let mut input = Self {
            path: path.to_owned(),
            run,
            source,
            trace_options: trace_options.clone(),
        };
        if let (Source::Run(run), Some(model)) = (&mut input.source, &trace_options.model)
            && run.map.is_none()
        {
            if let Some(model_info) = &options.model {
                traces::check_model(path, run.manifest.as_ref(), model_info)?;
            }
            run.map = Some(OffsetMap::new(model));
        }
        Ok(input)
    }

    /// The path on the command line.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the tables that the input can have. A trace of another tool may contain only counts and thus no routing; see
    /// [`present_tables`].
    pub fn tables(&self) -> Vec<&'static str> {
        let own = |table: &str| match &self.source {
            Source::Run(_) => table != "map",
            Source::Foreign(_) => ["routing", "hotness"].contains(&table),
            Source::Parquet(files) => {
                let has = |table: &str| files.iter().any(|file| file.table == table);
                has(table) || table == "hotness" && has("routing")
            }
            Source::Model(_) => false,
        };
        let has_map = self.has_map() || self.trace_options.model.is_some();
        let tables = QUERY_TABLES.into_iter();
        tables
            .filter(|&table| own(table) || table == "map" && has_map)
            .collect()
    }

    /// Returns whether the input is a trace of another tool that contains only counts.
    fn has_only_counts(&self) -> bool {
        let Source::Foreign(trace) = &self.source else {
            return false;
        };
        let options = &self.trace_options.options;
        let imported = import(trace.importer, &trace.source, options, &mut FirstRow);
        // Other errors are those of the query.
        matches!(imported, Err(ForeignError::NoOrder { .. }))
    }

    /// Returns whether the input contains the map of its model, so that `--model` is not needed.
    fn has_map(&self) -> bool {
        match &self.source {
            Source::Run(run) => run.path.join(map_table::FILE_NAME).is_file(),
            Source::Foreign(_) => false,
            Source::Parquet(files) => files.iter().any(|file| file.table == "map"),
            Source::Model(_) => true,
        }
    }

    /// Returns the Parquet files of the `wanted` tables. Tables of other formats are written to temporary files.
    pub fn files(
        &self,
        wanted: &BTreeSet<String>,
        temporary: &mut Temporary,
        ctx: &Context,
    ) -> anyhow::Result<Vec<TableFile>> {
        let is_wanted = |table: &str| wanted.contains(table) && self.tables().contains(&table);
        let mut files = Vec::new();
        match &self.source {
            Source::Run(run) if TABLES.into_iter().any(is_wanted) => {
                let dir = write_run(run, temporary, ctx)?;
                let tables = TABLES.into_iter().filter(|table| is_wanted(table));
                files.extend(
                    tables.map(|table| self.file(table, dir.join(format!("{table}.parquet")))),
                );
            }
            Source::Foreign(trace) if is_wanted("routing") => {
                files.push(self.file("routing", self.write_routing(trace, temporary, ctx)?));
            }
            Source::Parquet(found) => {
                files.extend(found.iter().filter(|file| is_wanted(file.table)).cloned());
            }
            _ => {}
        }
        let has = |table: &str| files.iter().any(|file| file.table == table);
        let (has_map, has_hotness) = (has("map"), has("hotness"));
        if is_wanted("map") && !has_map {
            files.push(self.file("map", self.map_file(temporary)?));
        }
        if is_wanted("hotness") && !has_hotness {
            files.extend(self.hotness_files(temporary, ctx)?);
        }
        Ok(files)
    }

    fn file(&self, table: &'static str, path: PathBuf) -> TableFile {
        TableFile {
            table,
            path,
            run: self.run.clone(),
            is_partition: false,
        }
    }

    /// Writes the routing of a trace of another tool.
    fn write_routing(
        &self,
        trace: &Detected,
        temporary: &mut Temporary,
        ctx: &Context,
    ) -> anyhow::Result<PathBuf> {
        let sizes = trace
            .source
            .files()
            .iter()
            .filter_map(|file| file.metadata().ok());
        let path = temporary.path("routing.parquet", sizes.map(|file| file.len()).sum())?;
        let mut table = RoutingTable::create(&path, &self.run, false)?;
        let summary = import(
            trace.importer,
            &trace.source,
            &self.trace_options.options,
            &mut table,
        )?;
        let (table, _) = table.complete(summary.format, &summary.model_info)?;
        table.commit()?;
        traces::report_import(ctx, &self.path, &summary);
        Ok(path)
    }

    fn map_file(&self, temporary: &mut Temporary) -> anyhow::Result<PathBuf> {
        let gguf = match (&self.source, &self.trace_options.model) {
            (Source::Run(run), _) if self.has_map() => {
                return Ok(run.path.join(map_table::FILE_NAME));
            }
            (Source::Model(gguf), _) | (_, Some(gguf)) => gguf,
            _ => bail!("{} has no map", self.path.display()),
        };
        let path = temporary.path("map.parquet", 0)?;
        prepare_map_table(gguf, &OffsetMap::new(gguf), &path, false)?.commit()?;
        Ok(path)
    }

    /// Writes the counts of experts, one file per run.
    fn hotness_files(
        &self,
        temporary: &mut Temporary,
        ctx: &Context,
    ) -> anyhow::Result<Vec<TableFile>> {
        let mut bytes = match &self.trace_options.model {
            Some(gguf) => ExpertBytes::from_map(&OffsetMap::new(gguf)),
            None => ExpertBytes::default(),
        };
        let mut files = Vec::new();
        match &self.source {
            Source::Run(run) => {
                if let Some(map) = &run.map {
                    bytes = ExpertBytes::from_map(map);
                }
                let hotness = Hotness::from_run(run, None)?;
                files.push(self.file("hotness", write_hotness(&hotness, &bytes, temporary)?));
            }
            Source::Foreign(_) => {
                let options = &self.trace_options.options;
                let hotness = counting::read_with(&self.path, options, None, &mut bytes, ctx)?;
                files.push(self.file("hotness", write_hotness(&hotness, &bytes, temporary)?));
            }
            Source::Parquet(found) => {
                if let Some(map) = found.iter().find(|file| file.table == "map") {
                    bytes = ExpertBytes::from_map(&map_table::read(&map.path)?);
                }
                let routing = found.iter().filter(|file| file.table == "routing");
                let routing: Vec<&TableFile> = routing.collect();
                for parts in routing.chunk_by(|a, b| a.run == b.run) {
                    let paths: Vec<&Path> = parts.iter().map(|file| file.path.as_path()).collect();
                    let hotness = Hotness::from_routing_files(&paths)?;
                    files.push(TableFile {
                        table: "hotness",
                        path: write_hotness(&hotness, &bytes, temporary)?,
                        ..parts[0].clone()
                    });
                }
            }
            Source::Model(_) => {}
        }
        Ok(files)
    }
}

/// Stops at the first row. The error shows whether the row is routing or a count.
struct FirstRow;

impl Sink for FirstRow {
    fn routing(&mut self, _: &RoutingRow) -> Result<(), SinkError> {
        Err(SinkError::Failed("stopped at the first row".into()))
    }

    fn count(&mut self, _: &CountRow) -> Result<(), SinkError> {
        Err(SinkError::NeedsOrder)
    }
}

/// Returns the tables of all inputs, in the order of [`QUERY_TABLES`].
pub fn present_tables(inputs: &[QueryInput]) -> Vec<&'static str> {
    let mut present = BTreeSet::new();
    for input in inputs {
        let only_counts = input.has_only_counts();
        let tables = input.tables().into_iter();
        present.extend(tables.filter(|&table| table != "routing" || !only_counts));
    }
    let tables = QUERY_TABLES.into_iter();
    tables.filter(|table| present.contains(table)).collect()
}

/// Writes `ops`, `accesses` and `routing`; returns their directory.
fn write_run(run: &Run, temporary: &mut Temporary, ctx: &Context) -> anyhow::Result<PathBuf> {
    if let Some(warning) = run.unresolved_warning() {
        ctx.note(warning);
    }
    let size = run.trace.size_bytes();
    let dir = temporary.path("tables", size / TABLES_OF_TRACE)?;
    let (tables, _) = parquet::with_progress(
        ctx,
        size / RECORD_SIZE as u64,
        TableOptions::default(),
        |options| prepare_tables(run, &dir, options),
    )?;
    tables.commit()?;
    Ok(dir)
}

fn write_hotness(
    hotness: &Hotness,
    bytes: &ExpertBytes,
    temporary: &mut Temporary,
) -> anyhow::Result<PathBuf> {
    let path = temporary.path("hotness.parquet", 0)?;
    let mut file = BufWriter::new(File::create_new(&path)?);
    Matrix::ungrouped(hotness, Phases::All, bytes).write_parquet(&mut file)?;
    file.into_inner()?;
    Ok(path)
}

/// Lists the inputs for a message.
pub fn names(inputs: &[QueryInput]) -> String {
    let names = inputs.iter().map(|input| input.path.display().to_string());
    names.collect::<Vec<_>>().join(", ")
}
