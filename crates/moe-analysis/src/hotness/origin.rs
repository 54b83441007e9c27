//! Origin of counts: run and model.

use std::ffi::OsStr;
use std::path::Path;

use moe_trace::manifest::Model;
use moe_trace::tables::{MODEL_KEY, RUN_ID_KEY, SCHEMA_KEY, TableMetadata};
use moe_trace::{ModelInfo, ModelMismatch, Run};

use super::Error;

/// Prefix of the schema names of routing tables.
const ROUTING_SCHEMA: &str = "moe-analyze.routing.";

/// A counted run.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Origin {
    run_id: Option<String>,
    /// The recorded model; `None` for a bare trace.
    model: Option<Model>,
}

impl Origin {
    /// Origin of a trace of another tool. Its path serves as the run id.
    pub fn of_foreign(path: &Path, model_info: &ModelInfo) -> Origin {
        let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        Origin {
            run_id: Some(path.display().to_string()),
            model: Some(Model {
                path: model_info.model.clone().unwrap_or_default(),
                arch: model_info.arch.clone().unwrap_or_default(),
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

    /// Origin in the metadata of a table. If it lacks the run id, the directory name `run=ID` of a dataset is used.
    ///
    /// # Errors
    /// [`Error::NotRouting`] for another table, [`Error::Trace`] for a file that is not a table, or whose model is not JSON.
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

    /// The reason why the run cannot be of this model, if there is one.
    pub fn mismatch(&self, model: &ModelInfo) -> Option<ModelMismatch> {
        model.mismatch(&ModelInfo::from_manifest(self.model.as_ref()?))
    }

    pub fn model(&self) -> Option<&Model> {
        self.model.as_ref()
    }

    /// Whether the model is identified by its header hash.
    pub fn is_known(&self) -> bool {
        self.model()
            .is_some_and(|model| !model.header_xxh3.is_empty())
    }

    /// Checks that `other` may be counted together with this run: the same model, and another run.
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

/// Name and header hash of a model.
fn name(model: &Model) -> String {
    format!("{:?} (header hash {})", model.path, model.header_xxh3)
}

fn partition(file: &Path) -> Option<String> {
    let directory = file.parent().and_then(Path::file_name);
    let id = directory.and_then(OsStr::to_str)?.strip_prefix("run=")?;
    Some(id.to_owned())
}
