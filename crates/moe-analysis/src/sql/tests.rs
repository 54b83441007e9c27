mod merging;
mod refused;

use std::fs::File;
use std::sync::atomic::Ordering;

use arrow::array::{
    ArrayRef, BooleanArray, DictionaryArray, Float32Array, RecordBatch, StringArray, UInt16Array,
    UInt32Array, UInt64Array,
};
use arrow::datatypes::Int32Type;
use parquet::arrow::ArrowWriter;

use super::*;

const N_ROWS: u64 = 100;
/// Ten row groups of ten rows.
const GROUP_ROWS: u64 = 10;

/// The rows `start..end` of the table `t`.
fn rows(start: u64, end: u64) -> RecordBatch {
    let ids = || start..end;
    let phases = ids().map(|id| (id % 4 != 3).then_some(["PROMPT", "GENERATE"][id as usize % 2]));
    let columns: [(&str, ArrayRef); 7] = [
        ("id", Arc::new(UInt64Array::from_iter_values(ids()))),
        (
            "layer_id",
            Arc::new(UInt16Array::from_iter_values(
                ids().map(|id| (id % 3) as u16),
            )),
        ),
        (
            "expert_id",
            Arc::new(UInt32Array::from_iter_values(
                ids().map(|id| (id * 7 % 8) as u32),
            )),
        ),
        (
            "weight",
            Arc::new(Float32Array::from_iter(
                ids().map(|id| (id % 5 != 0).then_some((id % 4) as f32 / 4.0)),
            )),
        ),
        (
            "phase",
            Arc::new(DictionaryArray::<Int32Type>::from_iter(phases)),
        ),
        (
            "is_late",
            Arc::new(BooleanArray::from_iter(ids().map(|id| Some(id % 10 == 9)))),
        ),
        (
            "buffer_id",
            Arc::new(UInt64Array::from_iter_values(ids().map(|id| u64::MAX - id))),
        ),
    ];
    let columns = columns.map(|(name, column)| (name, column, true));
    RecordBatch::try_from_iter_with_nullable(columns).unwrap()
}

fn write(path: &Path, groups: &[RecordBatch]) {
    let mut writer =
        ArrowWriter::try_new(File::create(path).unwrap(), groups[0].schema(), None).unwrap();
    for group in groups {
        writer.write(group).unwrap();
        writer.flush().unwrap();
    }
    writer.close().unwrap();
}

/// The tables `t` and `labels`.
fn database(dir: &Path) -> Database {
    let starts = (0..N_ROWS).step_by(GROUP_ROWS as usize);
    let groups: Vec<RecordBatch> = starts
        .map(|start| rows(start, start + GROUP_ROWS))
        .collect();
    write(&dir.join("t.parquet"), &groups);
    let labels: [(&str, ArrayRef); 2] = [
        ("expert_id", Arc::new(UInt32Array::from(vec![0, 1, 2, 3]))),
        (
            "label",
            Arc::new(StringArray::from(vec!["even", "odd", "even", "odd"])),
        ),
    ];
    write(
        &dir.join("labels.parquet"),
        &[RecordBatch::try_from_iter(labels).unwrap()],
    );
    let mut database = Database::default();
    database.add("t", &dir.join("t.parquet"), None).unwrap();
    database
        .add("labels", &dir.join("labels.parquet"), None)
        .unwrap();
    database
}

fn in_steps_of(step_rows: u64) -> QueryOptions {
    QueryOptions {
        step_rows,
        ..QueryOptions::default()
    }
}

fn result(database: &Database, sql: &str, options: &QueryOptions) -> Vec<Vec<Value>> {
    let rows = database
        .query(sql, options)
        .unwrap_or_else(|error| panic!("{sql}: {error}"));
    let rows: Result<_, _> = rows.collect();
    rows.unwrap_or_else(|error| panic!("{sql}: {error}"))
}

use Value::{Bool, Float, Int, Null, UInt};

fn text(text: &str) -> Value {
    Value::Text(text.into())
}

#[test]
fn columns_keep_their_names_and_have_64_bit_values() {
    let dir = tempfile::tempdir().unwrap();
    let database = database(dir.path());
    let rows = database
        .query(
            "SELECT * FROM t WHERE id IN (3, 5)",
            &QueryOptions::default(),
        )
        .unwrap();
    let columns = [
        "id",
        "layer_id",
        "expert_id",
        "weight",
        "phase",
        "is_late",
        "buffer_id",
    ];
    assert_eq!(rows.columns(), columns);
    let rows: Vec<_> = rows.map(Result::unwrap).collect();
    assert_eq!(
        rows,
        [
            [
                Int(3),
                Int(0),
                Int(5),
                Float(0.75),
                Null,
                Bool(false),
                UInt(u64::MAX - 3)
            ],
            [
                Int(5),
                Int(2),
                Int(3),
                Null,
                text("GENERATE"),
                Bool(false),
                UInt(u64::MAX - 5)
            ],
        ]
    );
}

#[test]
fn returns_values_of_every_type() {
    let dir = tempfile::tempdir().unwrap();
    let database = database(dir.path());
    let types = [
        ("1 - 2", Int(-1)),
        ("COUNT(*) - 101", Int(-1)),
        ("MIN(layer_id) - 1", Int(-1)),
        ("SUM(id)", Int(4950)),
        ("AVG(id)", Float(49.5)),
        ("MIN(buffer_id)", UInt(u64::MAX - 99)),
        ("CAST(0.1 AS REAL)", Float(0.1)),
        ("MAX(weight) > 0.5", Bool(true)),
        ("NULL", Null),
        ("MAX(phase)", text("PROMPT")),
        ("DATE '2026-11-29'", text("2026-11-29")),
        ("SUM(weight) / 0", Float(f64::INFINITY)),
    ];
    for (expr, value) in types {
        let sql = format!("SELECT {expr} AS x FROM t");
        for step_rows in [u64::MAX, GROUP_ROWS] {
            let rows = result(&database, &sql, &in_steps_of(step_rows));
            assert_eq!(rows[0], std::slice::from_ref(&value), "{expr}");
        }
    }
    let lists = "SELECT layer_id, ARRAY_AGG(expert_id) FROM t WHERE id < 6 GROUP BY layer_id ORDER BY layer_id";
    let list = |a, b| Value::List(vec![Int(a), Int(b)]);
    assert_eq!(
        result(&database, lists, &QueryOptions::default()),
        [
            [Int(0), list(0, 5)],
            [Int(1), list(7, 4)],
            [Int(2), list(6, 3)],
        ]
    );
}

#[test]
fn computes_rows_on_demand() {
    let dir = tempfile::tempdir().unwrap();
    let database = database(dir.path());
    let options = in_steps_of(GROUP_ROWS);
    let n_read = &options.n_read;
    let mut rows = database
        .query("SELECT id + 1 AS next FROM t WHERE layer_id = 1", &options)
        .unwrap();
    assert_eq!(rows.next().unwrap().unwrap(), [Int(2)]);
    assert_eq!(n_read.swap(0, Ordering::Relaxed), GROUP_ROWS);
    let ids: Vec<_> = rows.map(Result::unwrap).collect();
    assert_eq!((ids.len(), &ids[31]), (32, &vec![Int(98)]));
    assert_eq!(n_read.swap(0, Ordering::Relaxed), N_ROWS - GROUP_ROWS);

    let rows = result(
        &database,
        "SELECT id FROM t WHERE id >= 0 LIMIT 3 OFFSET 18",
        &options,
    );
    assert_eq!(rows, [[Int(18)], [Int(19)], [Int(20)]]);
    assert_eq!(n_read.swap(0, Ordering::Relaxed), 3 * GROUP_ROWS);
}

#[test]
fn runs_queries_that_need_all_rows_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let database = database(dir.path());
    let queries = [
        (
            "SELECT COUNT(DISTINCT expert_id) FROM t",
            vec![vec![Int(8)]],
        ),
        ("SELECT MEDIAN(id) FROM t", vec![vec![Float(49.5)]]),
        (
            "SELECT COUNT(*) FROM t WHERE expert_id IN (SELECT expert_id FROM labels WHERE label = 'odd')",
            vec![vec![Int(24)]],
        ),
        (
            "SELECT id, RANK() OVER (PARTITION BY layer_id ORDER BY id) AS r FROM t ORDER BY id DESC LIMIT 1",
            vec![vec![Int(99), Int(34)]],
        ),
        (
            "SELECT COUNT(*) FROM (SELECT id FROM t UNION ALL SELECT id FROM t) AS u",
            vec![vec![Int(200)]],
        ),
        (
            "SELECT a.id FROM t AS a JOIN t AS b ON a.id = b.expert_id WHERE b.id = 1",
            vec![vec![Int(7)]],
        ),
    ];
    for (sql, expected) in queries {
        for step_rows in [u64::MAX, GROUP_ROWS] {
            let rows = result(&database, sql, &in_steps_of(step_rows));
            let rows: Vec<Vec<Value>> = rows
                .into_iter()
                .map(|row| row.into_iter().map(signed).collect())
                .collect();
            assert_eq!(rows, expected, "{sql} in steps of {step_rows} rows");
        }
    }
}

/// Converts ranks, which are unsigned.
fn signed(value: Value) -> Value {
    match value {
        UInt(value) => Int(value as i64),
        value => value,
    }
}

#[test]
fn tables_of_several_runs_have_run_column() {
    let dir = tempfile::tempdir().unwrap();
    let mut database = Database::default();
    for (run, start) in [("a", 0), ("b", 10)] {
        let path = dir.path().join(run);
        write(&path, &[rows(start, start + 10)]);
        database.add("t", &path, Some(run)).unwrap();
    }
    let sql = "SELECT run, MIN(id) AS first FROM t GROUP BY run ORDER BY run";
    for step_rows in [u64::MAX, GROUP_ROWS] {
        let rows = result(&database, sql, &in_steps_of(step_rows));
        assert_eq!(rows, [[text("a"), Int(0)], [text("b"), Int(10)]]);
    }
    let filtered = result(
        &database,
        "SELECT run FROM t WHERE run = 'b' LIMIT 1",
        &QueryOptions::default(),
    );
    assert_eq!(filtered, [[text("b")]]);
    assert_eq!(
        result(&database, "SELECT run FROM t", &QueryOptions::default()).len(),
        20
    );
    let other = dir.path().join("other");
    let labels: [(&str, ArrayRef); 1] = [("id", Arc::new(UInt32Array::from(vec![0])))];
    write(&other, &[RecordBatch::try_from_iter(labels).unwrap()]);
    let error = database.add("t", &other, Some("c")).unwrap_err();
    assert!(
        matches!(&error, Error::Columns { column, .. } if column == "layer_id"),
        "{error}"
    );
}

#[test]
fn show_tables_lists_names_in_the_order_in_which_they_were_added() {
    let dir = tempfile::tempdir().unwrap();
    let mut database = database(dir.path());
    database.add_name("without_file");
    database.add_name("t");
    for sql in ["SHOW TABLES", "-- all\nshow tables;"] {
        let tables = result(&database, sql, &QueryOptions::default());
        assert_eq!(
            tables,
            [[text("t")], [text("labels")], [text("without_file")]]
        );
    }
    let empty = Database::default();
    assert!(result(&empty, "SHOW TABLES", &QueryOptions::default()).is_empty());
}

#[test]
fn keeps_kind_of_reader_errors() {
    let dir = tempfile::tempdir().unwrap();
    let database = database(dir.path());
    let path = dir.path().join("t.parquet");
    let mut bytes = std::fs::read(&path).unwrap();
    // Damages the first pages.
    bytes[4..200].fill(0xff);
    std::fs::write(&path, bytes).unwrap();
    for step_rows in [u64::MAX, GROUP_ROWS] {
        let rows = database.query("SELECT id FROM t WHERE id >= 0", &in_steps_of(step_rows));
        let error = rows
            .and_then(|rows| rows.collect::<Result<Vec<_>, _>>())
            .unwrap_err();
        assert!(
            matches!(error, Error::Trace(moe_trace::Error::Table { .. })),
            "{error}"
        );
    }
}

#[test]
fn sorts_by_one_column_with_a_limit() {
    let dir = tempfile::tempdir().unwrap();
    let database = database(dir.path());
    for (sql, expected) in [
        (
            "SELECT id FROM t ORDER BY id DESC LIMIT 2",
            vec![vec![Int(99)], vec![Int(98)]],
        ),
        (
            "SELECT layer_id, COUNT(*) AS n FROM t GROUP BY layer_id ORDER BY layer_id DESC LIMIT 1",
            vec![vec![Int(2), Int(33)]],
        ),
    ] {
        for step_rows in [u64::MAX, GROUP_ROWS] {
            let rows = result(&database, sql, &in_steps_of(step_rows));
            assert_eq!(rows, expected, "{sql} in steps of {step_rows} rows");
        }
    }
}

/// polars needs tens of KiB of stack for each operator.
#[test]
fn runs_long_chains_of_operators() {
    let dir = tempfile::tempdir().unwrap();
    let database = database(dir.path());
    let options = QueryOptions::default();
    let sum = format!("SELECT id{} AS x FROM t WHERE id = 1", "+1".repeat(100));
    assert_eq!(result(&database, &sum, &options), [[Int(101)]]);
    let ids: Vec<String> = (0..64).map(|id| format!("id = {}", id % 10)).collect();
    let filter = format!("SELECT COUNT(*) AS n FROM t WHERE {}", ids.join(" OR "));
    assert_eq!(result(&database, &filter, &options), [[Int(10)]]);
    let sum = format!("SELECT 1{} AS x", "+1".repeat(5000));
    let error = database.query(&sum, &options).map(|_| ()).unwrap_err();
    assert!(matches!(error, Error::TooComplex { .. }), "{error}");
}
