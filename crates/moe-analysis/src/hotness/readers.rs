//! Hotness from the records of a trace and from tables of routing.

use std::fs::File;
use std::path::Path;

use moe_trace::manifest::Model;
use moe_trace::tables::{MODEL_KEY, RoutingBatch, read_routing};
use moe_trace::{Error as TraceError, Run};
use parquet::file::reader::{FileReader, SerializedFileReader};

use super::counting::{Choice, Counter, Shape};
use super::{Error, Hotness};

impl Hotness {
    /// Counts the records of a run, or of a bare trace.
    ///
    /// # Errors
    /// [`Error::Empty`] if nothing was routed, [`Error::Id`] if a record names an expert that the model does not have.
    pub fn from_run(run: &Run) -> Result<Hotness, Error> {
        let shape = run
            .manifest
            .as_ref()
            .and_then(|manifest| Shape::of(&manifest.model));
        let mut counter = Counter::new(shape);
        for operation in run.routing() {
            let head = operation.head();
            let Some(layer) = head.layer() else { continue };
            for token in operation.tokens() {
                for expert in token.experts() {
                    let choice = Choice {
                        layer: layer.into(),
                        phase: token.head().phase.into(),
                        timestamp_ns: head.timestamp_ns.get(),
                        slot: expert.slot.into(),
                        expert: expert.expert_id,
                        weight: expert.weight.unwrap_or(0.0).into(),
                    };
                    counter.add(choice, || {
                        let record = operation.first_record();
                        format!(
                            "{}, the operation at record {record}",
                            run.trace.path().display()
                        )
                    })?;
                }
            }
        }
        counter.finish().ok_or_else(|| Error::Empty {
            place: run.path.display().to_string(),
        })
    }

    /// Counts a `routing` table: a Parquet file, a directory that holds `routing.parquet`, or a dataset of several runs.
    ///
    /// # Errors
    /// [`Error::Trace`] if it cannot be read, [`Error::Mixed`] if its runs are of different models, else as
    /// [`Hotness::from_run`].
    pub fn from_routing_table(path: &Path) -> Result<Hotness, Error> {
        let mut total = None;
        let mut file = None;
        for batch in read_routing(path)? {
            let batch = batch?;
            let (current, counter) = match &mut file {
                Some((current, counter)) if *current == batch.file() => (current, counter),
                other => {
                    add_file(&mut total, other.take())?;
                    let counter = Counter::new(shape_of(batch.file())?);
                    let (current, counter) = other.insert((batch.file().to_owned(), counter));
                    (current, counter)
                }
            };
            add_batch(counter, &batch, current)?;
        }
        add_file(&mut total, file)?;
        total.ok_or_else(|| Error::Empty {
            place: path.display().to_string(),
        })
    }
}

/// Adds a file that is read to its end.
fn add_file<P>(total: &mut Option<Hotness>, file: Option<(P, Counter)>) -> Result<(), Error> {
    let hotness = file.and_then(|(_, counter)| counter.finish());
    match (total.as_mut(), hotness) {
        (_, None) => Ok(()),
        (Some(total), Some(hotness)) => total.merge(&hotness),
        (None, hotness) => {
            *total = hotness;
            Ok(())
        }
    }
}

fn add_batch(counter: &mut Counter, batch: &RoutingBatch, file: &Path) -> Result<(), Error> {
    let (layer, slot, expert) = (batch.layer_id(), batch.slot(), batch.expert_id());
    let (phase, timestamp_ns) = (batch.phase(), batch.timestamp_ns());
    for (row, weight) in batch.weight().iter().enumerate() {
        let choice = Choice {
            layer: layer[row].into(),
            phase: phase[row].into(),
            timestamp_ns: timestamp_ns[row],
            slot: slot[row].into(),
            expert: expert[row],
            weight: weight.unwrap_or(0.0).into(),
        };
        counter.add(choice, || file.display().to_string())?;
    }
    Ok(())
}

/// What a table's metadata tells of the model.
fn shape_of(file: &Path) -> Result<Option<Shape>, Error> {
    let unreadable = |reason: String| TraceError::Parquet {
        path: file.to_owned(),
        reason,
    };
    let reader = File::open(file).map_err(|error| unreadable(error.to_string()))?;
    let reader =
        SerializedFileReader::new(reader).map_err(|error| unreadable(error.to_string()))?;
    let entries = reader.metadata().file_metadata().key_value_metadata();
    let model = entries
        .into_iter()
        .flatten()
        .find(|entry| entry.key == MODEL_KEY);
    let model = model.and_then(|entry| entry.value.as_deref());
    let model: Option<Model> = model.and_then(|json| serde_json::from_str(json).ok());
    Ok(model.as_ref().and_then(Shape::of))
}
