//! Damaged tables, and tables that claim too much memory.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use arrow::array::{
    ArrayRef, DictionaryArray, Float32Array, Int32Array, ListArray, RecordBatch, StringArray,
    UInt16Array, UInt32Array, UInt64Array,
};
use arrow::datatypes::{Field, Schema, UInt64Type};
use moe_trace::tables::{TableMetadata, read_routing};
use moe_trace::{Error, TableFault, map_table};
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, Encoding, ZstdLevel};
use parquet::file::properties::WriterProperties;
use parquet::schema::types::ColumnPath;

fn write(path: &Path, columns: Vec<(&str, ArrayRef)>, properties: WriterProperties) {
    let fields = columns
        .iter()
        .map(|(name, array)| Field::new(*name, array.data_type().clone(), true));
    let schema = Arc::new(Schema::new(fields.collect::<Vec<_>>()));
    let arrays = columns.into_iter().map(|(_, array)| array).collect();
    let batch = RecordBatch::try_new(schema.clone(), arrays).unwrap();
    let file = File::create(path).unwrap();
    let mut writer = ArrowWriter::try_new(file, schema, Some(properties)).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
}

fn compressed() -> WriterProperties {
    WriterProperties::builder()
        .set_compression(Compression::ZSTD(ZstdLevel::default()))
        .build()
}

/// A `routing` table of `n` rows with the phase `phase`.
fn routing(n: usize, phase: &str) -> Vec<(&'static str, ArrayRef)> {
    let u32s = || Arc::new(UInt32Array::from(vec![0; n])) as ArrayRef;
    let u16s = || Arc::new(UInt16Array::from(vec![0; n])) as ArrayRef;
    vec![
        ("token_id", u32s()),
        ("sequence_id", u32s()),
        ("phase", Arc::new(StringArray::from(vec![phase; n]))),
        ("layer_id", u16s()),
        ("slot", u16s()),
        ("expert_id", u32s()),
        ("weight", Arc::new(Float32Array::from(vec![1.0; n]))),
        ("lane", Arc::new(StringArray::from(vec!["cpu"; n]))),
        ("timestamp_ns", Arc::new(UInt64Array::from(vec![1; n]))),
    ]
}

#[track_caller]
fn fault(path: &Path) -> TableFault {
    let first = read_routing(path).unwrap().find_map(Result::err);
    match first.expect("the table is refused") {
        Error::Table { path: found, fault } => {
            assert_eq!(found, path);
            fault
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn refuses_encodings_without_a_memory_bound() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("routing.parquet");
    for encoding in [
        Encoding::DELTA_BYTE_ARRAY,
        Encoding::DELTA_LENGTH_BYTE_ARRAY,
    ] {
        let phase = ColumnPath::from("phase");
        let properties = WriterProperties::builder()
            .set_column_dictionary_enabled(phase.clone(), false)
            .set_column_encoding(phase, encoding)
            .build();
        write(&path, routing(100, "PROMPT"), properties);
        let TableFault::Encoding {
            column,
            encoding: found,
        } = fault(&path)
        else {
            panic!()
        };
        assert_eq!((&*column, found), ("phase", &*encoding.to_string()));
    }
    write(&path, routing(100, "PROMPT"), compressed());
    assert_eq!(
        read_routing(&path)
            .unwrap()
            .map(|batch| batch.unwrap().len())
            .sum::<usize>(),
        100
    );
}

#[test]
fn refuses_lists_before_decoding() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("routing.parquet");
    let mut columns = routing(2, "PROMPT");
    let lists = ListArray::from_iter_primitive::<UInt64Type, _, _>([Some(vec![Some(1)]), None]);
    columns[8].1 = Arc::new(lists);
    write(&path, columns, compressed());
    assert!(
        matches!(fault(&path), TableFault::Nested { column } if column.starts_with("timestamp_ns"))
    );
    let metadata = TableMetadata::read(&path).unwrap();
    assert_eq!(metadata.n_rows(), 2);
    assert!(metadata.decode_rows().is_err());
}

/// An offset map with `n` rows of one tensor.
fn map(n: usize, tensor: &str) -> Vec<(&'static str, ArrayRef)> {
    let u16s = || Arc::new(UInt16Array::from(vec![0; n])) as ArrayRef;
    let u32s = || Arc::new(UInt32Array::from(vec![0; n])) as ArrayRef;
    let u64s = || Arc::new(UInt64Array::from(vec![1; n])) as ArrayRef;
    let names = |name: &str| {
        let values = Arc::new(StringArray::from(vec![name]));
        Arc::new(DictionaryArray::new(Int32Array::from(vec![0; n]), values)) as ArrayRef
    };
    vec![
        ("file", u16s()),
        ("tensor", names(tensor)),
        ("tensor_idx", u32s()),
        ("expert_id", u32s()),
        ("layer_id", u16s()),
        ("projection", names("gate")),
        ("category", names("expert")),
        ("type", names("F32")),
        ("ne0", u64s()),
        ("ne1", u64s()),
        ("ne2", u64s()),
        ("ne3", u64s()),
        ("file_offset", u64s()),
        ("size_bytes", u64s()),
    ]
}

#[test]
fn limits_rows_and_names_of_maps() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("gguf-map.parquet");
    let fault = || match map_table::read(&path) {
        Err(Error::Table { fault, .. }) => fault,
        other => panic!("{other:?}"),
    };
    write(&path, map((1 << 20) + 1, "a"), compressed());
    assert!(fs::metadata(&path).unwrap().len() < 100_000);
    assert!(matches!(fault(), TableFault::Rows { limit: 1_048_576 }));
    write(&path, map(3, &"a".repeat(256)), compressed());
    assert!(matches!(
        fault(),
        TableFault::LongName {
            bytes: 256,
            limit: 255,
            ..
        }
    ));
}

#[test]
fn ignores_unknown_columns() {
    /// Columns of other types, one of them nested, before, between and after the known ones.
    fn with_more(mut columns: Vec<(&'static str, ArrayRef)>) -> Vec<(&'static str, ArrayRef)> {
        let n = columns[0].1.len();
        let lists = (0..n).map(|_| Some(vec![Some(1), None]));
        let lists = ListArray::from_iter_primitive::<UInt64Type, _, _>(lists);
        columns.insert(0, ("later", Arc::new(StringArray::from(vec!["x"; n]))));
        columns.insert(4, ("later_list", Arc::new(lists)));
        columns.push(("later_id", Arc::new(UInt64Array::from(vec![u64::MAX; n]))));
        columns
    }
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("gguf-map.parquet");
    write(&path, map(3, "a"), compressed());
    let expected = map_table::read(&path).unwrap();
    write(&path, with_more(map(3, "a")), compressed());
    assert_eq!(map_table::read(&path).unwrap(), expected);

    let path = tmp.path().join("routing.parquet");
    write(&path, with_more(routing(3, "PROMPT")), compressed());
    let batches: Vec<_> = read_routing(&path)
        .unwrap()
        .map(|batch| batch.unwrap().expert_id().to_vec())
        .collect();
    assert_eq!(batches, [[0; 3]]);
}

#[test]
fn limits_the_size_of_pages() {
    let bomb = moe_testkit::fixture("reliability/parquet-string-bomb-gguf-map.parquet.zst");
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("gguf-map.parquet");
    std::fs::write(&path, moe_testkit::reference::decompressed(&bomb)).unwrap();
    match map_table::read(&path) {
        Err(Error::Table {
            fault: TableFault::Pages { column, bytes, .. },
            ..
        }) => assert!(bytes > 1 << 30, "{column}: {bytes}"),
        other => panic!("{other:?}"),
    }
}

/// A page header of this file claims a list of 10^9 elements at the end of the file. The Parquet library would skip each of them.
#[test]
fn refuses_lists_in_a_page_header() {
    let path = moe_testkit::fixture("reliability/page-header-list-routing.parquet");
    let metadata = TableMetadata::read(&path).unwrap();
    let Err(Error::Table { fault, .. }) = metadata.decode_rows() else {
        panic!("the table is refused");
    };
    assert!(matches!(fault, TableFault::PageHeader { .. }), "{fault:?}");
}

/// The Parquet library panics on this file, which has a page of an unexpected type.
#[test]
fn converts_a_decoder_panic_to_an_error() {
    let path = moe_testkit::fixture("reliability/decoder-panic-routing.parquet");
    assert!(matches!(fault(&path), TableFault::DecoderPanicked));
    let metadata = TableMetadata::read(&path).unwrap();
    assert!(matches!(
        metadata.decode_rows(),
        Err(Error::Table {
            fault: TableFault::DecoderPanicked,
            ..
        })
    ));
}

/// The panic hook hides panics of the decoder only. Other panics are printed and unwind.
#[test]
fn does_not_catch_panics_of_other_code() {
    let output = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "table_limits::panic_after_the_decoder",
            "--ignored",
        ])
        .arg("--nocapture")
        .output()
        .unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success(), "{stderr}");
    assert_eq!(stderr.matches("panicked at").count(), 1, "{stderr}");
    assert!(
        stderr.contains("a panic of the reader's caller"),
        "{stderr}"
    );
}

#[test]
#[ignore = "part of does_not_catch_panics_of_other_code"]
fn panic_after_the_decoder() {
    converts_a_decoder_panic_to_an_error();
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("routing.parquet");
    write(&path, routing(3, "PROMPT"), compressed());
    for batch in read_routing(&path).unwrap() {
        assert!(batch.is_err(), "a panic of the reader's caller");
    }
}

/// A table with one byte of the pages or the footer changed is read or refused.
#[test]
fn never_panics_on_damaged_tables() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("routing.parquet");
    write(&path, routing(3, "PROMPT"), compressed());
    let good = fs::read(&path).unwrap();
    for (at, flip) in (4..good.len()).zip([0x01, 0x10, 0xff].into_iter().cycle()) {
        let mut bad = good.clone();
        bad[at] ^= flip;
        fs::write(&path, &bad).unwrap();
        match read_routing(&path).map(|mut batches| batches.find_map(Result::err)) {
            Ok(None) | Ok(Some(Error::Table { .. })) | Err(Error::Table { .. }) => {}
            other => panic!("byte {at}: {other:?}"),
        }
    }
}
