//! The formats, one file each.

mod bigmoeonedge;

use super::Importer;

/// All formats that this crate reads; the first one that recognises a file reads it, so the choosy ones come first.
pub const IMPORTERS: &[&dyn Importer] = &[&bigmoeonedge::BigMoeOnEdge];
