//! Each table of the known run: one prompt pass over six layers, then six passes for generated tokens.

use std::collections::BTreeMap;

use super::*;
use crate::support::{ALL, N_EXPERT, N_LAYER, known_counts};

#[test]
fn ops_has_a_row_for_each_operation() {
    let (_dir, run) = fixture();
    let query = "SELECT op, phase, COUNT(*) AS n, SUM(duration_ns) AS ns FROM ops GROUP BY op, phase ORDER BY op, phase";
    // An attention product and three expert products in each layer of a pass, 500 ns each.
    assert_eq!(
        rows(query, &[&run]),
        [
            "MUL_MAT,GENERATE,36,18000",
            "MUL_MAT,PROMPT,6,3000",
            "MUL_MAT_ID,GENERATE,108,54000",
            "MUL_MAT_ID,PROMPT,18,9000",
        ]
    );
    let tokens = "SELECT layer_id, SUM(n_tokens) AS n FROM ops WHERE op = 'MUL_MAT' GROUP BY layer_id ORDER BY layer_id";
    assert_eq!(rows(tokens, &[&run]), ["0,16", "1,16", "2,16", "3,16", "4,16", "5,7"]);
}

#[test]
fn accesses_can_be_joined_with_ops_and_map() {
    let (_dir, run) = fixture();
    let query = "SELECT memory_source, COUNT(*) AS n, COUNT(expert_id) AS experts FROM accesses GROUP BY memory_source ORDER BY memory_source";
    // The prompt uses 7 experts of a layer, 4 of the last one, and a generated token 4. Every operation reads a buffer.
    let n_expert = 3 * (5 * 7 + 4 + 6 * 6 * 4);
    let n_op = 42 + 3 * 42;
    assert_eq!(
        rows(query, &[&run]),
        [format!("BUFFER,{n_op},0"), format!("DISK,{},{n_expert}", n_expert + 42)]
    );
    let query = "SELECT m.category, COUNT(*) AS n, SUM(a.size_bytes - m.size_bytes) AS difference \
                 FROM accesses AS a JOIN map AS m ON a.file_offset = m.file_offset AND a.file = m.file \
                 JOIN ops AS o ON o.op_index = a.op_index WHERE o.phase = 'GENERATE' GROUP BY m.category ORDER BY m.category";
    assert_eq!(rows(query, &[&run]), ["attention,36,0", "expert,432,0"]);
}

#[test]
fn routing_has_a_row_for_each_selected_expert() {
    let (_dir, run) = fixture();
    let query = "SELECT layer_id, expert_id, COUNT(*) AS n FROM routing GROUP BY layer_id, expert_id ORDER BY layer_id, expert_id";
    let expected = known_counts(&ALL).into_iter();
    let expected: Vec<String> = expected
        .map(|((layer, expert), n)| format!("{layer},{expert},{n}"))
        .collect();
    assert_eq!(rows(query, &[&run]), expected);
    // The weights of a token sum to 1.
    let query = "SELECT lane, slot, AVG(weight) AS weight, COUNT(DISTINCT token_id) AS n FROM routing GROUP BY lane, slot ORDER BY slot";
    assert_eq!(
        rows(query, &[&run]),
        ["cpu,0,0.5,16", "cpu,1,0.25,16", "cpu,2,0.125,16", "cpu,3,0.125,16"]
    );
}

#[test]
fn map_has_a_row_for_each_tensor_and_expert() {
    let (_dir, run) = fixture();
    let query = "SELECT projection, COUNT(*) AS n, MIN(ne2) AS ne2 FROM map WHERE category = 'expert' GROUP BY projection ORDER BY projection";
    let n = N_LAYER * N_EXPERT;
    let expected = ["down", "gate", "up"].map(|projection| format!("{projection},{n},1"));
    assert_eq!(rows(query, &[&run]), expected);
    assert_eq!(rows(query, &[&repository(MODEL)]), expected);
    let csv = run!["--quiet", "sql", "SELECT * FROM map", repository(MODEL), "-o", "csv"];
    assert_eq!(csv, run!["--quiet", "gguf-map", repository(MODEL), "-o", "csv"]);
}

#[test]
fn hotness_has_counts_mass_and_bytes_of_each_expert() {
    let (_dir, run) = fixture();
    let rows_of = |query: &str| rows(query, &[&run]);
    let query = "SELECT layer_id, expert_id, \"count\" FROM hotness WHERE \"count\" > 0 ORDER BY layer_id, expert_id";
    let counts: BTreeMap<(u32, u32), u64> = known_counts(&ALL);
    let expected: Vec<String> = counts
        .iter()
        .map(|((layer, expert), n)| format!("{layer},{expert},{n}"))
        .collect();
    assert_eq!(rows_of(query), expected);
    // Size of an expert × activations, from the map.
    let query = "SELECT COUNT(*) AS n, SUM(h.bytes - h.\"count\" * m.bytes) AS difference FROM hotness AS h \
                 JOIN (SELECT layer_id, expert_id, SUM(size_bytes) AS bytes FROM map WHERE category = 'expert' GROUP BY layer_id, expert_id) AS m \
                 ON h.layer_id = m.layer_id AND h.expert_id = m.expert_id";
    assert_eq!(rows_of(query), [format!("{},0", N_LAYER * N_EXPERT)]);
    let query = "SELECT SUM(mass) AS mass, SUM(\"count\") AS n FROM hotness WHERE layer_id = 0";
    assert_eq!(rows_of(query), ["16,64"]);
}

/// The columns of the tables are those in `schemas/parquet.md`.
#[test]
fn columns_match_the_parquet_schemas() {
    let (_dir, run) = fixture();
    let schemas = std::fs::read_to_string(repository("schemas/parquet.md")).unwrap();
    for (table, section) in [
        ("ops", "ops"),
        ("accesses", "accesses"),
        ("routing", "routing"),
        ("map", "gguf-map"),
        ("hotness", "hotness"),
    ] {
        let (_, section) = schemas.split_once(&format!("\n## {section}\n")).unwrap();
        let section = section.split("\n## ").next().unwrap();
        let columns = section.lines().filter_map(|line| line.strip_prefix("| `"));
        let columns = columns.flat_map(|line| {
            let name = line.split(" |").next().unwrap();
            match name {
                "ne0` to `ne3`" => vec!["ne0", "ne1", "ne2", "ne3"],
                name => vec![name.trim_end_matches('`')],
            }
        });
        let header =
            run!["--quiet", "sql", format!("SELECT * FROM {table} LIMIT 1"), run, "-o", "csv"];
        let header: Vec<&str> = header.lines().next().unwrap().split(',').collect();
        assert_eq!(header, columns.collect::<Vec<_>>(), "{table}");
    }
}
