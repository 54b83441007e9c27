//! Parquet tables have the columns, types and nulls of `schemas/parquet.md`.

use std::path::Path;

use moe_trace::tables::TableMetadata;

use super::rows::columns;
use super::{recorded, text};
use crate::support::run;

/// The Arrow type of a name in `schemas/parquet.md`.
fn arrow_type(name: &str) -> &'static str {
    match name {
        "bool" => "Boolean",
        "uint8" => "UInt8",
        "uint16" => "UInt16",
        "uint32" => "UInt32",
        "uint64" => "UInt64",
        "float" => "Float32",
        "double" => "Float64",
        "name" => "Dictionary(Int32, Utf8)",
        _ => panic!("unknown type {name}"),
    }
}

fn check(section: &str, path: &Path) {
    let metadata = TableMetadata::read(path).unwrap();
    let fields = metadata.schema().fields();
    let declared = columns(&text("parquet.md"), section);
    let names: Vec<&str> = fields.iter().map(|field| field.name().as_str()).collect();
    let expected: Vec<&str> = declared.iter().map(|column| column.name.as_str()).collect();
    assert_eq!(names, expected, "{section}");
    for (field, column) in fields.iter().zip(&declared) {
        let at = format!("{section}.{}", column.name);
        assert_eq!(field.data_type().to_string(), arrow_type(&column.types[0]), "{at}");
        assert!(column.is_nullable() || !field.is_nullable(), "{at} is nullable");
    }
}

#[test]
fn tables_of_a_run() {
    let dir = tempfile::tempdir().unwrap();
    let run = recorded(dir.path());
    let tables = dir.path().join("tables");
    run!["--quiet", "parquet", run, "--out", tables];
    for table in ["ops", "accesses", "routing"] {
        check(table, &tables.join(table).with_extension("parquet"));
    }
    check("gguf-map", &run.join("gguf-map.parquet"));
    let matrix = dir.path().join("matrix.parquet");
    run!["--quiet", "hotness", run, "--matrix", matrix];
    check("hotness", &matrix);
    let trace = crate::support::repository("fixtures/simulate/mixed.route.csv");
    let foreign = dir.path().join("foreign");
    run!["--quiet", "parquet", trace, "--out", foreign];
    check("routing", &foreign.join("routing.parquet"));
}
