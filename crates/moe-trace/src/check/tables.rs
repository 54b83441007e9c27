//! Checks that the Parquet files of a run belong to it.

use crate::error::Error;
use crate::manifest::ModelFile;
use crate::map_table;
use crate::run::Run;
use crate::table_fault::TableFault;
use crate::tables::{RUN_ID_KEY, TABLES, TableMetadata};

/// Returns [`TableFault::OtherModel`] if the offset map of the run belongs to another model, and `None` if it belongs to the run or
/// its model is unknown, or if the map is not in the run directory.
///
/// # Errors
/// The metadata of the map cannot be read.
pub fn mismatched_map(run: &Run) -> Result<Option<Error>, Error> {
    let (Some(manifest), Some(_)) = (&run.manifest, &run.map) else {
        return Ok(None);
    };
    let path = run.path.join(map_table::FILE_NAME);
    if !path.exists() {
        return Ok(None);
    }
    let identity = map_table::identity(&path)?;
    let header = identity.model.as_ref().map(|model| &model.header_xxh3);
    let own_header = &manifest.model.header_xxh3;
    let sizes =
        |files: &[ModelFile]| -> Vec<u64> { files.iter().map(|file| file.size_bytes).collect() };
    let own_files = &manifest.model.files;
    let is_foreign = match header {
        Some(header) if !header.is_empty() && !own_header.is_empty() => header != own_header,
        _ => {
            !identity.files.is_empty()
                && !own_files.is_empty()
                && sizes(&identity.files) != sizes(own_files)
        }
    };
    Ok(is_foreign.then(|| Error::table(&path)(TableFault::OtherModel)))
}

/// Tables in the run directory that belong to another run, for example to a replaced one ([`TableFault::OtherRun`]), or that
/// cannot be read. Each is an error about the file of the table; the run itself can be used.
pub fn stale_tables(run: &Run) -> Vec<Error> {
    let id = run.id();
    let directories = [run.path.clone(), run.path.join("tables")];
    let files = directories
        .iter()
        .flat_map(|dir| TABLES.map(|table| dir.join(format!("{table}.parquet"))));
    files
        .filter(|file| file.is_file())
        .filter_map(|file| match TableMetadata::read(&file) {
            Ok(metadata) => {
                let other = metadata.value(RUN_ID_KEY).filter(|&other| other != id)?;
                let run_id = other.to_owned();
                Some(Error::table(&file)(TableFault::OtherRun { run_id }))
            }
            Err(error) => Some(error),
        })
        .collect()
}
