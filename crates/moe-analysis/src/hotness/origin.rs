//! Where counts come from: which run, of which model.

use std::ffi::OsStr;
use std::path::Path;

use moe_trace::manifest::Model;
use moe_trace::tables::{MODEL_KEY, RUN_ID_KEY, SCHEMA_KEY, TableMetadata};
use moe_trace::{Contradiction, Facts, Run};

use super::Error;

/// What a table of routing says there, whatever its version.
const ROUTING_SCHEMA: &str = "moe-analyze.routing.";

/// One run that was counted.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Origin {
    run_id: Option<String>,
    /// The recorded model; a bare trace does not tell.
    model: Option<Model>,
}

impl Origin {
    /// A trace of another tool: its path stands for the run that it is of.
    pub fn of_foreign(path: &Path, facts: &Facts) -> Origin {
        let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        Origin {
            run_id: Some(path.display().to_string()),
            model: Some(Model {
                path: facts.model.clone().unwrap_or_default(),
                arch: facts.arch.clone().unwrap_or_default(),
                ..Model::default()
            }),
        }
    }

    pub fn of_run(run: &Run) -> Origin {
        Origin {
            run_id: Some(run.id()),
            model: run.manifest.as_ref().map(|manifest| manifest.model.clone()),
        }
    }

    /// What a table's metadata tells; the run also by its directory in a dataset, `run=ID`.
    ///
    /// # Errors
    /// [`Error::NotRouting`] for another table, [`Error::Trace`] for a file that is no table, or whose model is not JSON.
    pub fn of_table(file: &Path) -> Result<Origin, Error> {
        let metadata = TableMetadata::read(file)?;
        if let Some(schema) = metadata.value(SCHEMA_KEY)
            && !schema.starts_with(ROUTING_SCHEMA)
        {
            return Err(Error::NotRouting {
                path: file.to_owned(),
                schema: schema.to_owned(),
            });
        }
        Ok(Origin {
            run_id: metadata
                .value(RUN_ID_KEY)
                .map(str::to_owned)
                .or_else(|| partition(file)),
            model: metadata.json(MODEL_KEY)?,
        })
    }

    /// Why the run cannot be of this model.
    pub fn contradiction(&self, model: &Facts) -> Option<Contradiction> {
        model.contradiction(&Facts::of_manifest(self.model.as_ref()?))
    }

    pub fn model(&self) -> Option<&Model> {
        self.model.as_ref()
    }

    /// Whether it is told of which model the run is.
    pub fn is_known(&self) -> bool {
        self.model()
            .is_some_and(|model| !model.header_xxh3.is_empty())
    }

    /// Refuses to count `other` beside this one: another model, or the same run.
    pub fn check(&self, other: &Origin) -> Result<(), Error> {
        if let (Some(left), Some(right)) = (&self.model, &other.model)
            && self.is_known()
            && other.is_known()
            && left.header_xxh3 != right.header_xxh3
        {
            return Err(Error::OtherModel {
                left: name(left),
                right: name(right),
            });
        }
        match &self.run_id {
            Some(id) if other.run_id.as_ref() == Some(id) => Err(Error::SameRun { id: id.clone() }),
            _ => Ok(()),
        }
    }
}

/// A model as a person knows it, and what tells it from others of that name.
fn name(model: &Model) -> String {
    format!("{:?} (header hash {})", model.path, model.header_xxh3)
}

fn partition(file: &Path) -> Option<String> {
    let directory = file.parent().and_then(Path::file_name);
    let id = directory.and_then(OsStr::to_str)?.strip_prefix("run=")?;
    Some(id.to_owned())
}
