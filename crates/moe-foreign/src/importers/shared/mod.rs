//! Helpers that importers of several formats share.

pub(crate) mod json_lines;
pub(crate) mod text;
