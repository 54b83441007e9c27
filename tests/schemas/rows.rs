//! Rows have the columns and types of `schemas/rows.md` and `schemas/accesses.md`, in this order.

use std::path::Path;

use serde_json::{Map, Value};

use super::{MODEL, recorded, text, update_inputs};
use crate::support::{Arg, args, file_of, moe_analyze, repository, run};

/// A column in a table of a Markdown file.
#[derive(Debug)]
pub struct Column {
    pub name: String,
    /// The alternatives of the second and third cell, or of the second cell only.
    pub types: Vec<String>,
    is_optional: bool,
}

impl Column {
    pub fn is_nullable(&self) -> bool {
        self.types.iter().any(|ty| ty == "null")
    }

    fn accepts(&self, value: &Value) -> bool {
        self.types.iter().any(|ty| match ty.as_str() {
            "null" => value.is_null(),
            "integer" => value.is_u64() || value.is_i64(),
            "number" => value.is_number(),
            "text" => value.is_string(),
            "any" => !value.is_null(),
            other => panic!("unknown type {other}"),
        })
    }
}

/// The columns in the first table of a section.
pub fn columns(markdown: &str, section: &str) -> Vec<Column> {
    let (_, section_text) = markdown
        .split_once(&format!("\n## {section}\n"))
        .unwrap_or_else(|| panic!("section {section} is missing"));
    let lines = section_text
        .lines()
        .skip_while(|line| !line.starts_with("| column |"));
    let lines = lines.skip(2).take_while(|line| line.starts_with('|'));
    lines.flat_map(row).collect()
}

/// The columns in a row of a table; `ne0` to `ne3` are four.
fn row(line: &str) -> Vec<Column> {
    let cells: Vec<&str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
    let types = cells[1]
        .split(", ")
        .chain((cells.len() > 3).then(|| cells[2]));
    let types: Vec<String> = types
        .filter(|ty| !ty.is_empty())
        .map(str::to_owned)
        .collect();
    let is_optional = cells[cells.len() - 1].starts_with("optional");
    let names = match cells[0] {
        "`ne0` to `ne3`" => vec!["ne0", "ne1", "ne2", "ne3"],
        name => vec![name.trim_matches('`')],
    };
    names
        .into_iter()
        .map(|name| Column {
            name: name.to_owned(),
            types: types.clone(),
            is_optional,
        })
        .collect()
}

/// Runs a command that prints JSON lines and compares its rows with a section of a file.
#[track_caller]
fn check_in(file: &str, section: &str, command: impl Arg) {
    let output = moe_analyze()
        .args(args!["--quiet", command, "-o", "jsonl"])
        .output()
        .unwrap();
    // `diff` exits with 1 if it finds a difference.
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(matches!(output.status.code(), Some(0 | 1)), "{section}: {stderr}");
    let output = String::from_utf8(output.stdout).unwrap();
    let declared = columns(&text(file), section);
    assert!(!output.is_empty(), "{section}: no rows");
    for line in output.lines() {
        let row: Map<String, Value> = serde_json::from_str(line).unwrap();
        let expected = declared
            .iter()
            .filter(|column| !column.is_optional || row.contains_key(&column.name));
        let expected: Vec<&Column> = expected.collect();
        let names: Vec<&String> = row.keys().collect();
        let expected_names: Vec<&String> = expected.iter().map(|column| &column.name).collect();
        assert_eq!(names, expected_names, "{section}");
        for column in expected {
            let value = &row[&column.name];
            assert!(column.accepts(value), "{section}: {column:?} is {value}");
        }
    }
}

#[track_caller]
fn check(section: &str, command: impl Arg) {
    check_in("rows.md", section, command);
}

#[test]
fn rows_of_a_run() {
    let dir = tempfile::tempdir().unwrap();
    let run = recorded(dir.path());
    let model = repository(MODEL);
    check("buffers", args!["buffers", run]);
    check("gguf-map", args!["gguf-map", model]);
    check("hotness", args!["hotness", run]);
    check("hotness --by", args!["hotness", run, "--by", "phase"]);
    for table in ["measures", "overall", "batches"] {
        check(&format!("hotness --table {table}"), args!["hotness", run, "--table", table]);
    }
    check("expert usage", args!["hotness", run, "--usage"]);
    check("replay", args!["replay", run, "--model", model, "-t", "1"]);
    for table in ["split", "drift", "convergence", "bootstrap"] {
        check(&format!("stability --table {table}"), args!["stability", run, "--table", table]);
    }
    for table in ["figures", "layers", "seeks", "working-sets", "experts", "reuse"] {
        check_in("accesses.md", table, args!["accesses", run, "--table", table]);
    }
}

#[test]
fn rows_of_domains() {
    let dir = tempfile::tempdir().unwrap();
    let line = |t: u32, seq: u32, other: u32| {
        format!("{{\"t\":{t},\"layer\":2,\"experts\":[0,{other}],\"seq\":{seq}}}\n")
    };
    let tokens = (0..8).map(|n| line(n % 4, n / 4, 1 + n / 4));
    let trace = file_of(dir.path(), "two.jsonl", tokens.collect::<String>());
    let labels = file_of(dir.path(), "labels.csv", "sequence,label\n0,code\n1,law\n");
    let command = args!["stability", trace, "--labels", labels, "--table", "domains"];
    check("stability --table domains", command);
}

#[test]
fn rows_of_two_runs() {
    let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let [a, b] = [0, 1].map(|i| recorded(dirs[i].path()));
    check("diff", args!["diff", a, b]);
}

#[test]
fn rows_of_benchmarks() {
    let tests = ["-p", "4", "-n", "2", "-r", "2", "-t", "1"];
    let bench = args!["bench", "--model", repository(MODEL), tests];
    check("bench", args![bench]);
    check("bench", args![bench, "--parallel", "2"]);
    let dir = tempfile::tempdir().unwrap();
    let cache = ["--policy", "hot-cache", "--hot-cache-percent", "50", "--perf", "off,full"];
    check("bench", args![bench, cache, "--hot-cache", recorded(dir.path())]);
}

#[test]
fn rows_of_simulations() {
    let dir = tempfile::tempdir().unwrap();
    let run = recorded(dir.path());
    let machine = [
        ["--pcie-gb-s", "0.5"],
        ["--pcie-us", "5"],
        ["--memory-gb-s", "4"],
        ["--dense-mib", "1"],
        ["--gpu-expert-us", "10"],
        ["--cpu-expert-us", "60"],
        ["--cpu-next-us", "20"],
    ];
    let simulate = args!["simulate", run, "--budget-mib", "0,2,4"];
    let policies = ["--policy", "lru,belady"];
    check("simulate", args![simulate, policies]);
    check("simulate", args![simulate, policies, machine.concat()]);
    let predictors = ["--policy", "lru", "--predictor", "previous,hottest"];
    check("simulate --predictor", args![simulate, predictors, machine.concat()]);
    check("simulate --offload", args!["simulate", run, "--offload", machine.concat()]);
    check("simulate --sample", args![simulate, "--policy", "lru", "--sample", "0.5"]);
}

#[test]
fn rows_of_plans() {
    let dir = tempfile::tempdir().unwrap();
    let (run, learn) = (recorded(dir.path()), dir.path().join("learn.json"));
    run!["--quiet", "hotness", run, "--out", learn];
    let plan = args!["plan", learn, "--model", repository(MODEL), "--budget-mib", "1"];
    check("plan", args![plan]);
    check("plan --explain", args![plan, "--explain", "0:0", "--explain", "5:31"]);
    let [report, current] = update_inputs(dir.path());
    check("plan --update", args!["plan", report, "--update", current]);
}

#[test]
fn rows_of_transfers_and_formats() {
    let dir = tempfile::tempdir().unwrap();
    crate::overlap::recorded(dir.path(), &crate::overlap::example());
    check("overlap", args!["overlap", dir.path()]);
    check("convert --list", args!["convert", "--list"]);
    check("info --architectures", args!["info", "--architectures"]);
}

/// `info` prints an object in JSON, so its columns are those of CSV.
#[test]
fn rows_of_info() {
    let csv = run!["--quiet", "info", repository(MODEL), "-o", "csv"];
    let declared = columns(&text("rows.md"), "info");
    let names: Vec<&str> = declared.iter().map(|column| column.name.as_str()).collect();
    assert_eq!(csv.lines().next().unwrap().split(',').collect::<Vec<_>>(), names);
}

/// Rows of an output file have the same columns as those on stdout.
#[test]
fn rows_of_files() {
    let dir = tempfile::tempdir().unwrap();
    let run = recorded(dir.path());
    let header = |path: &Path| {
        let text = std::fs::read_to_string(path).unwrap();
        text.lines().next().unwrap().to_owned()
    };
    let names = |section: &str, skip: usize| {
        let declared = columns(&text("rows.md"), section);
        let names = declared.iter().skip(skip).map(|column| column.name.clone());
        names.collect::<Vec<String>>().join(",")
    };
    let [map, matrix, usage] = ["map.csv", "matrix.csv", "usage.csv"].map(|f| dir.path().join(f));
    run!["--quiet", "gguf-map", repository(MODEL), "--out", map];
    assert_eq!(header(&map), names("gguf-map", 0));
    run!["--quiet", "hotness", run, "--matrix", matrix];
    assert_eq!(header(&matrix), names("hotness --by", 1));
    let record = ["--n-predict", "2", "--prompt", "The", "--out"];
    let out = dir.path().join("second");
    let model = repository(MODEL);
    run!["--quiet", "record", "--model", model, record, out, "--expert-trace-output", usage];
    assert_eq!(header(&usage), names("expert usage", 0));
}
