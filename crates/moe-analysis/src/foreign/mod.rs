//! All foreign formats: those of `moe-trace`, and learn files, whose rules `moe-placement` knows.

mod learn;
mod learn_export;

use std::sync::LazyLock;

use moe_trace::foreign::{
    EXPORTERS, Exporter, FILES_EXPORTERS, FilesExporter, IMPORTERS, Importer,
};

static ALL_IMPORTERS: LazyLock<Vec<&'static dyn Importer>> = LazyLock::new(|| {
    let mut importers: Vec<&'static dyn Importer> = vec![&learn::Learn];
    importers.extend(IMPORTERS);
    importers
});

static ALL_EXPORTERS: LazyLock<Vec<&'static dyn Exporter>> = LazyLock::new(|| {
    let mut exporters: Vec<&'static dyn Exporter> = EXPORTERS.to_vec();
    exporters.push(&learn_export::LearnExport);
    exporters
});

/// All formats that can be read; the first one that recognises a file reads it.
pub fn importers() -> &'static [&'static dyn Importer] {
    &ALL_IMPORTERS
}

/// All formats of one file that can be written.
pub fn exporters() -> &'static [&'static dyn Exporter] {
    &ALL_EXPORTERS
}

/// All formats of several files that can be written.
pub fn files_exporters() -> &'static [&'static dyn FilesExporter] {
    FILES_EXPORTERS
}
