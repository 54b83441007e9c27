//! Every kind of input, several inputs, and the removal of temporary tables.

use std::fs;

use super::*;
use crate::support::{N_GENERATED, renumbered};

const N_ROUTING: &str = "SELECT COUNT(*) AS n FROM routing";

#[test]
fn tables_and_datasets_equal_the_run() {
    let (dir, run) = fixture();
    let path = |name: &str| dir.path().join(name);
    run!["--quiet", "parquet", run, "--out", path("tables"), "--dataset", path("dataset")];
    run!["--quiet", "hotness", run, "--matrix", path("h.parquet"), "-o", "csv"];
    let n = rows(N_ROUTING, &[&run]);
    assert_eq!(n, ["348"]);
    for input in ["tables", "dataset", "tables/routing.parquet"] {
        assert_eq!(rows(N_ROUTING, &[&path(input)]), n, "{input}");
    }
    let counts =
        "SELECT layer_id, expert_id, \"count\", mass FROM hotness ORDER BY layer_id, expert_id";
    let hotness = rows(counts, &[&run]);
    for input in ["tables", "dataset", "tables/routing.parquet", "h.parquet"] {
        assert_eq!(rows(counts, &[&path(input)]), hotness, "{input}");
    }
    let ops = "SELECT COUNT(*) AS n FROM ops JOIN accesses USING (op_index)";
    assert_eq!(rows(ops, &[&path("tables")]), rows(ops, &[&run]));
    // The name of a table that another program wrote identifies it.
    fs::copy(path("tables/ops.parquet"), path("ops.parquet")).unwrap();
    assert_eq!(rows("SELECT COUNT(*) AS n FROM ops", &[&path("ops.parquet")]), ["168"]);
}

#[test]
fn trace_without_manifest_uses_the_map_of_the_model() {
    let (dir, run) = fixture();
    let (trace, ops) = renumbered(&run, dir.path());
    let args = args!["-o", "csv", "--ops", ops, "--model", repository(MODEL)];
    let query = "SELECT COUNT(*) AS n, COUNT(m.expert_id) AS experts FROM accesses AS a \
                 JOIN map AS m ON a.file_offset = m.file_offset JOIN ops AS o USING (op_index) WHERE o.op = 'MUL_MAT_ID'";
    let csv = run!["--quiet", "sql", query, trace, args];
    assert_eq!(csv, "n,experts\n549,549\n");
}

#[test]
fn foreign_traces_have_routing_and_hotness() {
    let route = repository("fixtures/foreign/jsonl/with-weights.jsonl");
    let query = "SELECT layer_id, expert_id, COUNT(*) AS n, SUM(weight) AS mass FROM routing GROUP BY layer_id, expert_id ORDER BY layer_id, expert_id";
    let expected = [
        "0,0,1,0.75", "0,1,2,1", "0,3,2,1", "0,5,4,2", "0,7,1,0.25", "1,0,1,0.375", "1,2,2,1",
        "1,4,2,1", "1,6,5,2.625",
    ];
    assert_eq!(rows(query, &[&route]), expected);
    let hotness = "SELECT layer_id, expert_id, \"count\", mass FROM hotness WHERE \"count\" > 0 ORDER BY layer_id, expert_id";
    assert_eq!(rows(hotness, &[&route]), expected);
    let sequences = "SELECT DISTINCT sequence_id, phase FROM routing";
    assert_eq!(rows(sequences, &[&route]), ["4,"]);
}

#[test]
fn counts_have_only_hotness() {
    let learn = repository("fixtures/foreign/learn/smallest.json");
    let query =
        "SELECT layer_id, SUM(\"count\") AS n FROM hotness GROUP BY layer_id ORDER BY layer_id";
    assert_eq!(rows(query, &[&learn]), ["0,10", "1,10"]);
    let message = crate::support::fail!["--quiet", "sql", N_ROUTING, learn];
    assert!(message.contains("smallest.json"), "{message}");
}

#[test]
fn several_runs_are_one_table_with_a_run_column() {
    let (dir, run) = fixture();
    let other = dir.path().join("other");
    run!["--quiet", "record", "-n", "2", "-p", "a", "--ignore-eos", "--out", other];
    let n_of = |path: &Path| rows(N_ROUTING, &[path])[0].parse::<u64>().unwrap();
    let ids: Vec<String> = [&run, &other]
        .map(|path| moe_trace::Run::open(path).unwrap().id())
        .into();
    let mut expected =
        vec![format!("{},{}", ids[0], n_of(&run)), format!("{},{}", ids[1], n_of(&other))];
    expected.sort();
    let query = "SELECT run, COUNT(*) AS n FROM routing GROUP BY run ORDER BY run";
    assert_eq!(rows(query, &[&run, &other]), expected);
    // Like in a dataset.
    let dataset = dir.path().join("dataset");
    for run in [&run, &other] {
        run!["--quiet", "parquet", run, "--dataset", dataset];
    }
    assert_eq!(rows(query, &[&dataset]), expected);
    let query = "SELECT run, SUM(\"count\") AS n FROM hotness GROUP BY run ORDER BY run";
    assert_eq!(rows(query, &[&run, &other]), expected);
    assert_eq!(rows(query, &[&dataset]), expected);
    let twice = crate::support::fail!["--quiet", "sql", N_ROUTING, run, run];
    assert!(twice.contains("are the same run"), "{twice}");
    // A table that one input does not have.
    let route = repository("fixtures/foreign/jsonl/with-weights.jsonl");
    let query = "SELECT COUNT(*) AS n FROM ops WHERE phase = 'GENERATE'";
    let output = moe_analyze()
        .args(args!["sql", query, run, route, "-o", "csv"])
        .assert()
        .success();
    let stderr = String::from_utf8_lossy(&output.get_output().stderr).into_owned();
    assert!(stderr.contains("with-weights.jsonl has no table ops"), "{stderr}");
    let stdout = String::from_utf8_lossy(&output.get_output().stdout).into_owned();
    assert_eq!(stdout, format!("n\n{}\n", N_GENERATED * 6 * 4));
}

fn tables_of(inputs: &[&Path]) -> String {
    rows("SHOW TABLES", inputs).join(" ")
}

#[test]
fn show_tables_lists_all_tables_of_the_inputs() {
    let (dir, run) = fixture();
    let path = |name: &str| dir.path().join(name);
    run!["--quiet", "parquet", run, "--out", path("tables"), "--dataset", path("dataset")];
    let foreign = |name: &str| repository(&format!("fixtures/foreign/{name}"));
    for (input, tables) in [
        (run.clone(), "ops accesses routing map hotness"),
        (run.join("trace.bin"), "ops accesses routing hotness"),
        (path("tables"), "ops accesses routing hotness"),
        (path("dataset"), "ops accesses routing hotness"),
        (path("tables/ops.parquet"), "ops"),
        (path("tables/routing.parquet"), "routing hotness"),
        (foreign("jsonl/with-weights.jsonl"), "routing hotness"),
        (foreign("npy/vllm-routed.npy"), "routing hotness"),
        // The number of experts per token, which the trace needs, is missing.
        (foreign("rtrace/small.rtrace"), "routing hotness"),
        (foreign("npy/counts.npy"), "hotness"),
        (foreign("learn/smallest.json"), "hotness"),
        (repository(MODEL), "map"),
    ] {
        assert_eq!(tables_of(&[&input]), tables, "{}", input.display());
    }
    let learn = foreign("learn/smallest.json");
    assert_eq!(tables_of(&[&learn, &repository(MODEL)]), "map hotness");
    let json = run!["--quiet", "sql", "show tables;", repository(MODEL), "-o", "jsonl"];
    assert_eq!(json, "{\"name\":\"map\"}\n");
    let message = crate::support::fail!["--quiet", "sql", "SELECT * FROM ops", learn];
    assert!(message.ends_with("smallest.json: hotness\n"), "{message}");
    // The columns are listed once.
    let message = crate::support::fail!["--quiet", "sql", "SELECT foo FROM hotness", learn];
    let expected = "unable to find column \"foo\"; tables: hotness (";
    assert!(message.contains(expected), "{message}");
}

fn entries(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect()
}

#[test]
fn temporary_tables_are_removed() {
    let (dir, run) = fixture();
    let temporary = dir.path().join("temporary");
    fs::create_dir(&temporary).unwrap();
    for (query, code) in [(N_ROUTING, 0), ("SELECT nothing FROM ops", 2)] {
        let mut command = moe_analyze();
        command
            .env("TMPDIR", &temporary)
            .args(args!["sql", query, run]);
        command.assert().code(code);
        assert_eq!(entries(&temporary), [""; 0], "{query}");
    }
    // With --out they are next to the output.
    let missing = dir.path().join("missing");
    let out = temporary.join("n.csv");
    let mut command = moe_analyze();
    command
        .env("TMPDIR", &missing)
        .args(args!["--quiet", "sql", N_ROUTING, run, "--out", out]);
    command.assert().success();
    assert_eq!(entries(&temporary), ["n.csv"]);
    assert_eq!(fs::read_to_string(&out).unwrap(), "n\n348\n");
    let mut command = moe_analyze();
    command
        .env("TMPDIR", &missing)
        .args(args!["--quiet", "sql", N_ROUTING, run]);
    let message = String::from_utf8(command.assert().code(2).get_output().stderr.clone()).unwrap();
    assert!(message.contains("missing"), "{message}");
}

/// The process is interrupted while it writes temporary tables or runs the query.
#[cfg(unix)]
#[test]
fn interrupt_removes_temporary_tables() {
    let (dir, run) = fixture();
    let records = fs::read(run.join("trace.bin")).unwrap();
    let trace = dir.path().join("trace.bin");
    fs::write(&trace, records.repeat((100 << 20) / records.len())).unwrap();
    let temporary = dir.path().join("temporary");
    fs::create_dir(&temporary).unwrap();
    let mut command = std::process::Command::new(assert_cmd::cargo::cargo_bin!("moe-analyze"));
    let query = "SELECT a.op_index FROM accesses AS a JOIN accesses AS b ON a.source = b.source ORDER BY a.op_index";
    command
        .env("TMPDIR", &temporary)
        .args(args!["--quiet", "sql", query, trace]);
    let mut child = command
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    while entries(&temporary).is_empty() {
        assert!(child.try_wait().unwrap().is_none(), "it ended before it wrote a table");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    let kill = std::process::Command::new("kill")
        .args(["-TERM", &child.id().to_string()])
        .status();
    assert!(kill.unwrap().success());
    assert!(!child.wait().unwrap().success());
    assert_eq!(entries(&temporary), [""; 0]);
}
