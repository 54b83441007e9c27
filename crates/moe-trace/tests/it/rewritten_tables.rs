//! Tables that other programs rewrote, and invalid tables.

use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, Float64Array, Int64Array, RecordBatch, StringArray};
use moe_trace::tables::{read_routing, routing_files};
use moe_trace::{Error, Phase, TableFault, map_table};
use parquet::arrow::ArrowWriter;

fn write(path: &Path, columns: Vec<(&str, ArrayRef)>) {
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let mut writer =
        ArrowWriter::try_new(File::create(path).unwrap(), batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
}

fn ints(values: &[i64]) -> ArrayRef {
    Arc::new(Int64Array::from(values.to_vec()))
}

/// A `routing` table with plain strings, 64-bit integers, another order of columns and an additional column.
fn rewritten() -> Vec<(&'static str, ArrayRef)> {
    vec![
        ("expert_id", ints(&[31, 7])),
        ("run", Arc::new(StringArray::from(vec!["a", "a"]))),
        ("token_id", ints(&[5, 5])),
        ("sequence_id", ints(&[0, 0])),
        (
            "phase",
            Arc::new(StringArray::from(vec!["GENERATE", "PROMPT"])),
        ),
        ("layer_id", ints(&[2, 2])),
        ("slot", ints(&[0, 1])),
        (
            "weight",
            Arc::new(Float64Array::from(vec![Some(0.75), None])),
        ),
        (
            "lane",
            Arc::new(StringArray::from(vec![Some("hot_cache"), None])),
        ),
        ("timestamp_ns", ints(&[1, 1])),
    ]
}

#[test]
fn reads_a_rewritten_routing_table() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("any-name.parquet");
    write(&path, rewritten());
    let batches: Vec<_> = read_routing(&path).unwrap().map(Result::unwrap).collect();
    assert_eq!(batches.len(), 1);
    let batch = &batches[0];
    assert_eq!(
        (
            batch.expert_id(),
            batch.token_id(),
            batch.layer_id(),
            batch.slot()
        ),
        (&[31, 7][..], &[5, 5][..], &[2, 2][..], &[0, 1][..])
    );
    assert_eq!(
        (batch.phase(), batch.lane()),
        (
            &[Some(Phase::Generate), Some(Phase::Prompt)][..],
            &[3, 0][..]
        )
    );
    assert_eq!(
        batch.weight().iter().collect::<Vec<_>>(),
        [Some(0.75), None]
    );
}

/// Traces of other tools may contain neither phases nor times.
#[test]
fn accepts_null_phases_and_times() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("routing.parquet");
    let mut columns = rewritten();
    for (name, column) in &mut columns {
        match *name {
            "phase" => *column = Arc::new(StringArray::from(vec![Some("PROMPT"), None])),
            "timestamp_ns" => *column = Arc::new(Int64Array::from(vec![None, Some(9)])),
            _ => {}
        }
    }
    write(&path, columns);
    let batch = read_routing(&path).unwrap().next().unwrap().unwrap();
    assert_eq!(batch.phase(), [Some(Phase::Prompt), None]);
    assert_eq!(batch.timestamp_ns(), [0, 9]);
}

#[test]
fn treats_missing_columns_as_null() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("routing.parquet");
    let mut columns = rewritten();
    let unknown = ["sequence_id", "phase", "weight", "lane", "timestamp_ns"];
    columns.retain(|(name, _)| !unknown.contains(name));
    write(&path, columns);
    let batch = read_routing(&path).unwrap().next().unwrap().unwrap();
    assert_eq!(batch.expert_id(), [31, 7]);
    assert_eq!(batch.phase(), [None, None]);
    assert_eq!(
        (batch.timestamp_ns(), batch.lane()),
        (&[0, 0][..], &[0, 0][..])
    );
    assert_eq!(batch.sequence_id().null_count(), 2);
    assert_eq!(batch.weight().null_count(), 2);
    let files = routing_files(&path).unwrap();
    let batches = files[0].read_part(0).unwrap();
    let batches: Vec<_> = batches.map(Result::unwrap).collect();
    assert_eq!(batches[0].sequence_id().null_count(), 2);
}

#[test]
fn reports_unsupported_compression() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("routing.parquet");
    let batch = RecordBatch::try_from_iter(rewritten()).unwrap();
    let mut writer = ArrowWriter::try_new(Vec::new(), batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    // The footer, in the Thrift compact protocol: `ColumnMetaData` has the codec (field 4) after the path (field 3).
    let mut bytes = writer.into_inner().unwrap();
    let path_of = b"\x19\x18\x08layer_id\x15\x00";
    let at = bytes
        .windows(path_of.len())
        .position(|bytes| bytes == path_of);
    let gzip = 2;
    bytes[at.unwrap() + path_of.len() - 1] = 2 * gzip;
    fs::write(&path, bytes).unwrap();
    let error = read_routing(&path).unwrap().next().unwrap().unwrap_err();
    let message = error.to_string();
    assert!(
        message.ends_with("column layer_id: the compression gzip is not supported; write the table with zstd, snappy or no compression"),
        "{message}"
    );
}

#[test]
fn reports_the_column_of_an_invalid_table() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("routing.parquet");
    type IsExpected = fn(&TableFault) -> bool;
    let wrong: [(&str, Option<ArrayRef>, IsExpected); 9] = [
        (
            "layer_id",
            None,
            |fault| matches!(fault, TableFault::NoColumn { column } if column == "layer_id"),
        ),
        (
            "layer_id",
            Some(ints(&[2, 70_000])),
            |fault| matches!(fault, TableFault::Range { column, .. } if column == "layer_id"),
        ),
        (
            "expert_id",
            Some(ints(&[-1, 0])),
            |fault| matches!(fault, TableFault::Range { column, .. } if column == "expert_id"),
        ),
        (
            "expert_id",
            Some(Arc::new(Float64Array::from(vec![0.9, 1.0]))),
            |fault| matches!(fault, TableFault::Range { column, .. } if column == "expert_id"),
        ),
        (
            "weight",
            Some(Arc::new(Float64Array::from(vec![0.5, -0.5]))),
            |fault| {
                matches!(
                    fault,
                    TableFault::Weight {
                        row: 1,
                        weight: -0.5
                    }
                )
            },
        ),
        (
            "weight",
            Some(Arc::new(Float64Array::from(vec![f64::INFINITY, 0.5]))),
            |fault| matches!(fault, TableFault::Weight { row: 0, .. }),
        ),
        (
            "weight",
            Some(Arc::new(Float64Array::from(vec![0.5, f64::NAN]))),
            |fault| matches!(fault, TableFault::Weight { row: 1, .. }),
        ),
        (
            "phase",
            Some(Arc::new(StringArray::from(vec!["PROMPT", "dream"]))),
            |fault| matches!(fault, TableFault::Name { name, .. } if name == "dream"),
        ),
        (
            "slot",
            Some(Arc::new(Int64Array::from(vec![Some(0), None]))),
            |fault| matches!(fault, TableFault::Null { column } if column == "slot"),
        ),
    ];
    for (name, column, is_expected) in wrong {
        let mut columns = rewritten();
        let i = columns.iter().position(|(n, _)| *n == name).unwrap();
        match column {
            Some(column) => columns[i].1 = column,
            None => drop(columns.remove(i)),
        }
        write(&path, columns);
        let error = read_routing(tmp.path())
            .unwrap()
            .find_map(Result::err)
            .unwrap();
        assert!(
            matches!(&error, Error::Table { path: at, fault } if *at == path && is_expected(fault)),
            "{error:?}"
        );
    }
    let mut twice = rewritten();
    twice.push(("slot", ints(&[1, 2])));
    write(&path, twice);
    let error = read_routing(&path).unwrap().next().unwrap().unwrap_err();
    assert!(
        error.to_string().contains("column slot appears twice"),
        "{error}"
    );
    fs::write(&path, "PAR1 but no table").unwrap();
    assert!(read_routing(&path).unwrap().next().unwrap().is_err());
    assert!(map_table::read(&path).is_err());
    let error = read_routing(Path::new(env!("CARGO_MANIFEST_DIR")))
        .err()
        .unwrap();
    assert!(
        matches!(
            error,
            Error::Table {
                fault: TableFault::NoRouting,
                ..
            }
        ),
        "{error:?}"
    );
}
