//! Hotness of the records of a trace, and of tables of routing.

use std::path::{Path, PathBuf};

use arrow::array::Array;
use moe_trace::tables::{CountingBatch, read_routing, routing_files};
use moe_trace::{Error as TraceError, ExpertId, LayerId, Phase, Run, TokenId};
use rayon::prelude::*;

use super::counting::{Counter, LayerPass, Selection};
use super::origin::Origin;
use super::{Error, Hotness};
use crate::survey::{SelectedExpert, Survey};

impl Hotness {
    /// Counts the records of a run, or of a bare trace. `survey` receives the same selections.
    ///
    /// # Errors
    /// [`Error::Empty`] if no token was routed, [`Error::Id`] if a record contains an expert that the model does not have.
    pub fn from_run(run: &Run, mut survey: Option<&mut Survey>) -> Result<Hotness, Error> {
        if let Some(survey) = &mut survey {
            survey.begin_run();
        }
        let mut counter = Counter::new(Origin::of_run(run), &run.path)?;
        for operation in run.routing() {
            let head = operation.head();
            let Some(layer) = head.layer() else { continue };
            let location = || {
                let record = operation.first_record();
                let path = run.trace.path().display();
                format!("{path}, operation at record {record}")
            };
            for token in operation.tokens() {
                let head_of_token = token.head();
                let phase = head_of_token.phase().ok_or_else(|| Error::Id {
                    what: "phase",
                    id: head_of_token.phase.into(),
                    limit: Phase::ALL.len() as u32,
                    location: location(),
                })?;
                for expert in token.experts() {
                    let selected = SelectedExpert {
                        layer,
                        phase: Some(phase),
                        timestamp_ns: head.timestamp_ns.get(),
                        token_id: token.token_id(),
                        sequence_id: token.sequence_id(),
                        slot: expert.slot.into(),
                        expert: expert.expert_id,
                        weight: expert.weight.map(f64::from),
                    };
                    counter.add(&selected, location)?;
                    if let Some(survey) = &mut survey {
                        survey.add_selection(&selected);
                    }
                }
            }
        }
        counter.finish().ok_or_else(|| Error::Empty {
            location: run.path.display().to_string(),
        })
    }

    /// Counts a `routing` table: a Parquet file, a directory that contains `routing.parquet`, or a dataset of several runs.
    /// `survey` receives the same selections. Without a survey, the parts of a file are counted in parallel, and only the
    /// necessary columns are read.
    ///
    /// # Errors
    /// [`Error::Trace`] if the table cannot be read, [`Error::NotRouting`] for another table; like [`Hotness::merge`] for
    /// several runs, and like [`Hotness::from_run`].
    pub fn from_routing_table(path: &Path, survey: Option<&mut Survey>) -> Result<Hotness, Error> {
        let total = match survey {
            Some(survey) => surveyed(path, survey)?,
            None => counted(&[path])?,
        };
        total.ok_or_else(|| Error::Empty {
            location: path.display().to_string(),
        })
    }

    /// Counts files of `routing` tables. Files in one directory are parts of one run; other files are different runs.
    ///
    /// # Errors
    /// Like [`Hotness::from_routing_table`].
    pub fn from_routing_files(paths: &[&Path]) -> Result<Hotness, Error> {
        counted(paths)?.ok_or_else(|| Error::Empty {
            location: paths
                .first()
                .map_or(String::new(), |path| path.display().to_string()),
        })
    }
}

/// Counts a table in order, for a survey.
fn surveyed(path: &Path, survey: &mut Survey) -> Result<Option<Hotness>, Error> {
    let (mut total, mut last_parent) = (None, None);
    let mut file = None;
    for batch in read_routing(path)? {
        let batch = batch.map_err(not_routing)?;
        let (_, counter) = match &mut file {
            Some((current, counter)) if *current == batch.file() => (current, counter),
            other => {
                add_file(&mut total, &mut last_parent, other.take())?;
                let counter = Counter::new(Origin::of_table(batch.file())?, batch.file())?;
                survey.begin_run();
                let (current, counter) = other.insert((batch.file().to_owned(), counter));
                (current, counter)
            }
        };
        add_batch(counter, &batch)?;
        let passes = Passes::of(&batch);
        let (slot, expert, weight) = (batch.slot(), batch.expert_id(), batch.weight());
        let (token_id, sequence_id) = (batch.token_id(), batch.sequence_id());
        for row in 0..batch.len() {
            let pass = passes.at(row);
            survey.add_selection(&SelectedExpert {
                layer: pass.layer,
                phase: pass.phase,
                timestamp_ns: pass.timestamp_ns,
                token_id: TokenId(token_id[row]),
                sequence_id: sequence_id.is_valid(row).then(|| sequence_id.value(row)),
                slot: slot[row].into(),
                expert: ExpertId(expert[row]),
                weight: weight.is_valid(row).then(|| weight.value(row).into()),
            });
        }
    }
    add_file(&mut total, &mut last_parent, file)?;
    Ok(total)
}

/// Counts the parts of each file in parallel.
fn counted(paths: &[&Path]) -> Result<Option<Hotness>, Error> {
    let (mut total, mut last_parent) = (None, None);
    let mut files = Vec::new();
    for path in paths {
        files.extend(routing_files(path).map_err(not_routing)?);
    }
    for file in files {
        let origin = Origin::of_table(file.path())?;
        let parts = (0..file.n_parts()).into_par_iter().map(|part| {
            let mut counter = Counter::new(origin.clone(), file.path())?;
            for batch in file.read_part(part).map_err(not_routing)? {
                add_batch(&mut counter, &batch.map_err(not_routing)?)?;
            }
            Ok(counter)
        });
        let parts: Vec<Result<Counter, Error>> = parts.collect();
        let mut counter = Counter::new(origin, file.path())?;
        for part in parts {
            counter.append(part?);
        }
        let file = (file.path().to_owned(), counter);
        add_file(&mut total, &mut last_parent, Some(file))?;
    }
    Ok(total)
}

/// Adds the counts of a complete file. Files in one directory of a dataset are parts of one run.
fn add_file(
    total: &mut Option<Hotness>,
    last_parent: &mut Option<PathBuf>,
    file: Option<(PathBuf, Counter)>,
) -> Result<(), Error> {
    let Some((path, counter)) = file else {
        return Ok(());
    };
    let Some(hotness) = counter.finish() else {
        return Ok(());
    };
    let parent = path.parent().map(Path::to_owned);
    let is_same_run = parent == *last_parent;
    *last_parent = parent;
    match total {
        Some(total) if is_same_run => total.add_counts(&hotness),
        Some(total) => total.merge(&hotness),
        None => {
            *total = Some(hotness);
            Ok(())
        }
    }
}

/// Replaces an error about a missing column by [`Error::NotRouting`] if the file is another table.
fn not_routing(error: TraceError) -> Error {
    if let TraceError::Table { path, .. } = &error
        && let Err(other @ Error::NotRouting { .. }) = Origin::of_table(path)
    {
        return other;
    }
    error.into()
}

/// Counts the rows of a batch, one pass at a time.
fn add_batch(counter: &mut Counter, batch: &CountingBatch) -> Result<(), Error> {
    let (slot, expert, weight) = (batch.slot(), batch.expert_id(), batch.weight());
    let (token_id, sequence_id) = (batch.token_id(), batch.sequence_id());
    let location = || batch.file().display().to_string();
    let passes = Passes::of(batch);
    let mut start = 0;
    while start < batch.len() {
        let pass = passes.at(start);
        let more = (start + 1..batch.len()).take_while(|&row| passes.at(row) == pass);
        let rows = start..start + 1 + more.count();
        start = rows.end;
        let selections = rows.map(|row| Selection {
            sequence_id: sequence_id.is_valid(row).then(|| sequence_id.value(row)),
            token_id: TokenId(token_id[row]),
            slot: slot[row].into(),
            expert: ExpertId(expert[row]),
            weight: weight.is_valid(row).then(|| weight.value(row).into()),
        });
        counter.add_all(pass, selections, location)?;
    }
    Ok(())
}

/// The passes of the rows of a batch.
struct Passes<'a> {
    layer: &'a [u16],
    phase: &'a [Option<Phase>],
    timestamp_ns: &'a [u64],
}

impl Passes<'_> {
    fn of(batch: &CountingBatch) -> Passes<'_> {
        Passes {
            layer: batch.layer_id(),
            phase: batch.phase(),
            timestamp_ns: batch.timestamp_ns(),
        }
    }

    #[inline]
    fn at(&self, row: usize) -> LayerPass {
        LayerPass {
            layer: LayerId(self.layer[row]),
            phase: self.phase[row],
            timestamp_ns: self.timestamp_ns[row],
        }
    }
}
