//! Errors at a location in the current file of an [`Output`].

use std::error::Error as StdError;

use super::Output;
use crate::error::{ForeignError, Location, Missing};
use crate::importers::responses::ResponseError;
use crate::layers::LayerError;

impl Output<'_> {
    /// An error about the layers of an array in the current file.
    pub fn layers(&self, at: Location, source: LayerError) -> ForeignError {
        ForeignError::Layers {
            path: self.file.clone(),
            at,
            source,
        }
    }

    /// An error about the routing in a response in the current file.
    pub(crate) fn response(&self, at: Location, source: ResponseError) -> ForeignError {
        ForeignError::Response {
            path: self.file.clone(),
            at,
            source,
        }
    }

    /// An error about a missing value, without which the current file cannot be read.
    pub fn not_recorded(&self, at: Location, missing: Missing) -> ForeignError {
        ForeignError::Missing {
            path: self.file.clone(),
            at,
            missing,
        }
    }

    /// An error about a layer, expert or slot number of `limit` or more.
    pub(super) fn out_of_range(
        &self,
        at: Location,
        name: &'static str,
        id: u64,
        limit: u32,
    ) -> ForeignError {
        ForeignError::OutOfRange {
            path: self.file.clone(),
            at,
            name,
            id,
            limit,
        }
    }

    /// An error about a format version that this importer does not read.
    pub(crate) fn version(
        &self,
        at: Location,
        found: impl ToString,
        supported: &'static str,
    ) -> ForeignError {
        ForeignError::Version {
            path: self.file.clone(),
            at,
            found: found.to_string(),
            supported,
        }
    }

    /// An error at a location in the current file.
    pub fn invalid(
        &self,
        at: Location,
        source: impl Into<Box<dyn StdError + Send + Sync>>,
    ) -> ForeignError {
        ForeignError::invalid(&self.file, at, source)
    }

    /// An error about a top-k that the file contradicts.
    pub(crate) fn wrong_top_k(&self, at: Location, reason: String) -> ForeignError {
        ForeignError::TopK {
            path: self.file.clone(),
            at,
            reason,
        }
    }
}
