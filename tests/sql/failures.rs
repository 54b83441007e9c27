//! Invalid queries exit with code 2 and one line that lists what is available.

use super::*;
use crate::support::fail;

#[test]
fn errors_list_available_tables_and_columns() {
    let (dir, run) = fixture();
    let message = |query: &str| fail!["--quiet", "sql", query, run];
    let tables = "ops, accesses, routing, map, hotness";
    let columns = "routing (token_id, sequence_id, phase, layer_id, slot, expert_id, weight, lane, timestamp_ns)";
    for (query, parts) in [
        ("SELECT * FROM operations", ["operations", tables]),
        ("SELECT layer FROM routing", ["\"layer\"", columns]),
        ("SELECT layer_id FROM routing WHERE", ["sql parser error", tables]),
        ("SELEC 1", ["starts with SELEC;", "must start with SELECT"]),
        ("SELECT no_function(slot) FROM routing", ["no_function", columns]),
        ("SELECT layer_id + phase FROM routing", ["type", columns]),
    ] {
        let message = message(query);
        for part in parts {
            assert!(message.contains(part), "{query}: {message}");
        }
    }
    let route = repository("fixtures/foreign/jsonl/with-weights.jsonl");
    let missing = fail!["--quiet", "sql", "SELECT * FROM ops", route];
    assert!(missing.contains("with-weights.jsonl: routing, hotness"), "{missing}");
    let bare = fail!["--quiet", "sql", "SELECT * FROM map", run.join("trace.bin")];
    assert!(bare.contains("trace.bin: ops, accesses, routing, hotness"), "{bare}");
    let text = dir.path().join("notes.txt");
    std::fs::write(&text, "notes").unwrap();
    assert!(fail!["--quiet", "sql", "SELECT 1", text].contains("has an unknown format"));
    let other = dir.path().join("other.parquet");
    run!["--quiet", "parquet", run, "--out", dir.path().join("tables")];
    std::fs::copy(dir.path().join("tables/ops.parquet"), &other).unwrap();
    assert_eq!(rows("SELECT COUNT(*) AS n FROM ops", &[&other]), ["168"]);
}

/// As docs/sql.md states.
#[test]
fn lowest_integer_is_an_expression() {
    let (_dir, run) = fixture();
    let query = |number: &str| format!("SELECT {number} AS a FROM routing LIMIT 1");
    let lowest = query("-9223372036854775807 - 1");
    assert_eq!(rows(&lowest, &[&run]), ["-9223372036854775808"]);
    let message = fail!["--quiet", "sql", query("-9223372036854775808"), run];
    assert!(message.contains("cannot parse literal"), "{message}");
}

#[test]
fn queries_cannot_access_files() {
    let (dir, run) = fixture();
    run!["--quiet", "parquet", run, "--out", dir.path().join("tables")];
    let table = dir.path().join("tables/ops.parquet");
    let table = table.to_str().unwrap();
    let csv = dir.path().join("a.csv");
    let csv = csv.to_str().unwrap();
    for query in [
        format!("SELECT * FROM read_parquet('{table}')"),
        format!("SELECT * FROM read_csv('{csv}')"),
        format!("SELECT * FROM '{table}'"),
        format!("SELECT * FROM \"{table}\""),
        format!("COPY ops TO '{csv}'"),
        "CREATE TABLE ops AS SELECT 1".into(),
        "DROP TABLE ops".into(),
        "DELETE FROM ops".into(),
        "INSERT INTO ops VALUES (1)".into(),
        "SELECT 1; DROP TABLE ops".into(),
    ] {
        let message = fail!["--quiet", "sql", query, run];
        assert!(
            ["not supported", "not valid", "tables are read-only"]
                .iter()
                .any(|part| message.contains(part)),
            "{query}: {message}"
        );
    }
    assert!(!dir.path().join("a.csv").exists());
}

#[test]
fn checks_outputs_before_reading() {
    let (dir, run) = fixture();
    let out = |name: &str| dir.path().join(name);
    let message = fail!["--quiet", "sql", "SELECT 1", run, "--out", out("a.xlsx")];
    assert!(message.contains(".csv, .json, .jsonl or .md"), "{message}");
    std::fs::write(out("a.csv"), "mine").unwrap();
    assert!(fail!["--quiet", "sql", "SELECT 1", run, "--out", out("a.csv")].contains("--force"));
    assert!(
        fail!["--quiet", "sql", "SELECT 1", run, "--out", run.join("a.csv")]
            .contains("inside the input")
    );
    assert_eq!(std::fs::read_to_string(out("a.csv")).unwrap(), "mine");
    assert!(fail!["--quiet", "sql", "SELECT 1", run, "--top-k", "4"].contains("--top-k"));
}
