//! The crate documentation.

use moe_foreign::{EXPORTERS, FILES_EXPORTERS, IMPORTERS};

#[test]
fn crate_documentation_lists_all_formats() {
    let importers = IMPORTERS.iter().map(|importer| importer.name());
    let exporters = EXPORTERS.iter().map(|exporter| exporter.name());
    let files_exporters = FILES_EXPORTERS.iter().map(|exporter| exporter.name());
    for name in importers.chain(exporters).chain(files_exporters) {
        let row = format!("//! | `{name}` |");
        assert!(include_str!("../../src/lib.rs").contains(&row), "{name}");
    }
}
