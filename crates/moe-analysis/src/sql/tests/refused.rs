//! Statements that are not queries, and queries that are not valid.

use super::*;

#[test]
fn rejects_invalid_queries() {
    let dir = tempfile::tempdir().unwrap();
    let database = database(dir.path());
    let error = |sql: &str| {
        let rows = database.query(sql, &QueryOptions::default());
        rows.err().unwrap_or_else(|| panic!("{sql} has a result"))
    };
    for (sql, part) in [
        ("SELECT", "sql parser error"),
        ("SELECT * FROM t WHERE", "sql parser error"),
        ("SELECT nothing FROM t", "nothing"),
        ("SELECT * FROM missing", "missing"),
        ("SELECT 1; SELECT 2", "one (and only one) statement"),
        ("SELECT * FROM read_parquet('t.parquet')", "read_parquet"),
        ("SELECT * FROM read_csv('t.csv')", "read_csv"),
        ("SELECT * FROM 't.parquet'", "t.parquet"),
        ("SELECT unknown_function(id) FROM t", "unknown_function"),
        ("SELECT MIN(id), MAX(id) FROM t", "rename columns with AS"),
        ("SHOW COLUMNS FROM t", "not supported"),
    ] {
        let error = error(sql);
        assert!(matches!(error, Error::Query { .. }), "{sql}: {error}");
        let message = error.to_string();
        assert!(
            message.contains(part) && !message.contains('\n'),
            "{sql}: {message}"
        );
    }
    for sql in ["DROP TABLE t", "CREATE TABLE u AS SELECT * FROM t"] {
        assert!(matches!(error(sql), Error::NotAQuery { .. }), "{sql}");
    }
    assert_eq!(
        error("SELEC 1").to_string(),
        "the query starts with SELEC; tables are read-only, so a query must start with SELECT, WITH, FROM, VALUES, SHOW TABLES or EXPLAIN"
    );
    for sql in ["", "-- nothing"] {
        assert_eq!(
            error(sql).to_string(),
            "the query is empty; write a query that starts with SELECT"
        );
    }
}

#[test]
fn finds_first_word_of_statement() {
    let statements = [
        ("SELECT 1", "SELECT"),
        (" ((select*from a) union (select 1))", "select"),
        (
            "-- a comment\n/* another */ WITH a AS (SELECT 1) FROM a",
            "WITH",
        ),
        ("/* not closed SELECT", ""),
        ("-- only a comment", ""),
        ("", ""),
        (";", ""),
        ("* FROM a", "*"),
        ("'a'", "'"),
    ];
    for (sql, word) in statements {
        assert_eq!(first_word(sql), word, "{sql}");
    }
}

#[test]
fn rejects_statements_that_change_tables() {
    for sql in [
        "CREATE TABLE a AS SELECT 1",
        "drop table ops",
        "DELETE FROM ops",
        "TRUNCATE TABLE ops",
        "COPY ops TO 'a.csv'",
    ] {
        assert!(
            matches!(table_names(sql), Err(Error::NotAQuery { .. })),
            "{sql}"
        );
    }
    assert!(matches!(table_names(";"), Err(Error::Empty)));
}

#[test]
fn errors_contain_no_syntax_tree() {
    let dir = tempfile::tempdir().unwrap();
    let database = database(dir.path());
    for (sql, expected) in [
        (
            "SELECT * FROM t WHERE EXISTS (SELECT 1 FROM labels)",
            "expression Exists is not currently supported",
        ),
        (
            "EXPLAIN INSERT INTO t VALUES (1)",
            "statement type is not supported: Insert",
        ),
        (
            "SHOW TABLES LIKE 'x'",
            "SHOW TABLES with a condition is not supported; write SHOW TABLES",
        ),
        (
            "WITH a AS (SELECT 1), t AS (SELECT 2) SELECT * FROM t",
            "the common table expression t has the name of a table; use another name",
        ),
    ] {
        let options = QueryOptions::default();
        let error = database.query(sql, &options).map(|_| ()).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("the query is not valid: {expected}")
        );
    }
}
