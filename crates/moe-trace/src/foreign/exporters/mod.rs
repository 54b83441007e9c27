//! The formats that are written, one file each.

use super::Exporter;

/// All formats that this crate writes.
pub const EXPORTERS: &[&dyn Exporter] = &[];
