//! Inputs without routing, damaged inputs, and inputs of other formats.

use std::fs;
use std::path::Path;

use moe_trace::record::PHASE_PROMPT;

use super::Fixture;
use crate::support::{self, arg, args, fail, file_of, moe_analyze, run};

#[test]
fn rejects_inputs_without_routing() {
    let fixture = Fixture::new();
    let trace = fs::read(fixture.path("run/trace.bin")).unwrap();
    // An empty trace, and a trace with only the first operation, an attention product.
    for (name, bytes) in [("empty", &trace[..0]), ("dense", &trace[..1024])] {
        let run = fixture.path(name);
        fs::create_dir(&run).unwrap();
        fs::copy(fixture.path("run/manifest.json"), run.join("manifest.json")).unwrap();
        fs::write(run.join("trace.bin"), bytes).unwrap();
        let out = fixture.path("learn.json");
        let line = fail!["--quiet", "hotness", run, "--out", out];
        assert!(line.contains("contains no routed tokens"), "{line}");
        assert!(!out.exists());
    }
    // A run with only a prompt has no generated tokens.
    let records = trace
        .chunks(1024)
        .filter(|record| record[17] == PHASE_PROMPT);
    let prompt = fixture.path("prompt.bin");
    fs::write(&prompt, records.flatten().copied().collect::<Vec<u8>>()).unwrap();
    assert!(fail!["hotness", prompt, "--phase", "generate"].contains("contains no routed tokens"));
    run!["hotness", prompt, "--phase", "prompt"];
}

#[test]
fn reports_invalid_records() {
    let fixture = Fixture::new();
    let trace_file = fixture.path("run/trace.bin");
    let mut trace = fs::read(&trace_file).unwrap();
    let at = trace
        .chunks(1024)
        .position(|record| record[16] == moe_trace::ops::MUL_MAT_ID)
        .unwrap();
    trace[at * 1024 + 792..][..4].copy_from_slice(&77i32.to_le_bytes());
    fs::write(&trace_file, &trace).unwrap();
    let line = fail!["hotness", fixture.path("run")];
    assert!(line.contains("expert 77") && line.contains(&format!("record {at}")), "{line}");
}

/// Counts are summed exactly, or rejected.
#[test]
fn rejects_counts_beyond_64_bits() {
    let fixture = Fixture::new();
    let learn = |name: &str, counts: [u64; 2]| {
        let path = fixture.path(name);
        let pairs = serde_json::json!([[0, counts[0]], [1, counts[1]]]);
        let file = serde_json::json!({
            "schema": "llama.cpp.moe_layer_opt_perf.v1", "n_expert": 2, "n_expert_used": 1,
            "layers": [{"layer": 0, "calls": 1, "experts": pairs}],
        });
        fs::write(&path, file.to_string()).unwrap();
        path
    };
    let too_many = learn("many.json", [u64::MAX, 1]);
    let most = learn("most.json", [u64::MAX - 1, 1]);
    let one = learn("one.json", [1, 0]);
    let line = fail!["hotness", too_many, "-o", "csv"];
    assert!(line.contains("layer 0") && line.contains("64 bits"), "{line}");
    let rows = run!["--quiet", "hotness", most, "-o", "csv"];
    assert!(rows.contains("\n0,0,18446744073709551614,1,"), "{rows}");
    let usage = run!["--quiet", "hotness", most, "--usage"];
    assert!(usage.contains("18446744073709551614 activations"), "{usage}");
    let line = fail!["--quiet", "hotness", most, one];
    assert!(line.contains("64 bits") && line.contains(arg(&one)), "{line}");
}

/// Numbers of layers and experts above the limit do not allocate memory.
#[test]
fn reports_impossible_numbers_of_layers_and_experts() {
    let fixture = Fixture::new();
    let (run, tables) = (fixture.path("run"), fixture.path("impossible"));
    let model = support::repository("fixtures/tiny-qwen3moe-Q4_K_M.gguf");
    let manifest = fs::read_to_string(run.join("manifest.json")).unwrap();
    let mut manifest: serde_json::Value = serde_json::from_str(&manifest).unwrap();
    for (key, n) in
        [("n_expert_used", 4097u32), ("n_expert", 4_000_000_000), ("n_layer", 4_000_000_001)]
    {
        let own = manifest["model"][key].clone();
        manifest["model"][key] = n.into();
        fs::write(run.join("manifest.json"), manifest.to_string()).unwrap();
        manifest["model"][key] = own;
        let args = ["--quiet", "parquet", arg(&run), "--force", "--out"];
        run![args, tables];
        for path in [&run, &tables] {
            for more in [
                &["hotness"][..],
                &["hotness", "--table", "measures"],
                &["plan", "--model", arg(&model), "--budget-mib", "1"],
                &["simulate", "--model", arg(&model)],
            ] {
                let line = fail!["--quiet", more, path];
                assert!(line.contains(&n.to_string()) && line.contains(arg(path)), "{line}");
            }
        }
        let info = moe_analyze().args(args!["info", run]).assert().code(1);
        let facts = String::from_utf8_lossy(&info.get_output().stdout).into_owned();
        let fault = facts.lines().last().unwrap();
        assert!(
            fault.contains(&format!("manifest.json: {n} "))
                && fault.ends_with("is more than the limit of 4096; the file is damaged"),
            "{facts}"
        );
    }
}

#[test]
fn counts_complete_records_of_a_truncated_trace() {
    let fixture = Fixture::new();
    let trace = fs::read(fixture.path("run/trace.bin")).unwrap();
    let truncated = fixture.path("truncated.bin");
    fs::write(&truncated, &trace[..trace.len() - 100]).unwrap();
    let summary = run!["hotness", truncated];
    let counted = summary.lines().nth(1).unwrap();
    assert!(counted.starts_with("16 prompt and generated tokens"), "{summary}");
}

#[test]
fn invalid_input_is_one_line_and_exits_with_2() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name, bytes: &[u8]| file_of(dir.path(), name, bytes);
    let inputs = [
        (dir.path().join("absent"), "cannot open"),
        (file("empty.bin", b""), "is empty"),
        (file("text.bin", b"no trace at all"), "has an unknown format"),
        (file("zeros.bin", &[0; 4096]), "has an unknown format"),
        (
            file("table.parquet", b"PAR1 and then nothing"),
            "table.parquet: the file is damaged: Parquet error: Invalid Parquet file. Corrupt footer;",
        ),
        (file("learn.json", b"{}"), "JSON"),
        (support::repository("fixtures/random-qwen3moe-F16.gguf"), "is a model"),
        (dir.path().to_owned(), "neither a run directory"),
    ];
    for (path, expected) in &inputs {
        let line = fail!["hotness", path];
        assert!(line.contains(expected) && line.contains(arg(path)), "{expected}: {line}");
    }
    moe_analyze().args(["hotness"]).assert().code(2);
    // Every reader of tables reports it, with the file.
    let table = dir.path().join("table.parquet");
    let model = support::repository("fixtures/tiny-qwen3moe-Q4_K_M.gguf");
    for command in [
        &["simulate"][..],
        &["replay", "--model", arg(&model)],
        &["plan", "--model", arg(&model), "--budget-mib", "1"],
        &["convert", "--to", "jsonl", "--out", "unwritten.jsonl"],
    ] {
        let line = fail![command, table];
        assert!(
            line.contains(
                "table.parquet: the file is damaged: Parquet error: Invalid Parquet file."
            ),
            "{line}"
        );
        assert_eq!(line.matches(arg(&table)).count(), 1, "{line}");
    }
}

/// A trace of a newer version is reported as such, not as a trace without routing.
#[test]
fn reports_records_of_a_newer_version() {
    let fixture = Fixture::new();
    let (run, out) = (fixture.path("run"), fixture.path("out.jsonl"));
    let model = support::repository("fixtures/tiny-qwen3moe-Q4_K_M.gguf");
    let mut trace = fs::read(run.join("trace.bin")).unwrap();
    trace.chunks_mut(1024).for_each(|record| record[857] = 2);
    fs::write(run.join("trace.bin"), trace).unwrap();
    for command in [
        &["hotness"][..],
        &["simulate"],
        &["replay", "--model", arg(&model)],
        &["convert", "--to", "jsonl", "--out", arg(&out)],
    ] {
        let line = fail![command, run];
        assert!(line.contains("unknown ext_version 2"), "{line}");
    }
}

#[test]
fn warns_about_repeated_expert_of_a_token() {
    let fixture = Fixture::new();
    let line = |t: u32, experts: [u32; 2]| {
        format!("{{\"t\":{t},\"layer\":0,\"experts\":{experts:?},\"phase\":\"decode\"}}\n")
    };
    let path = fixture.path("twice.jsonl");
    fs::write(&path, line(0, [1, 1]) + &line(1, [2, 3])).unwrap();
    let warnings = |path: &Path, more: &[&str]| {
        let args = args!["hotness", path, more];
        let assert = moe_analyze().args(args).assert().success();
        String::from_utf8_lossy(&assert.get_output().stderr).into_owned()
    };
    let found = warnings(&path, &[]);
    assert!(found.contains("skipped 1 repeated expert"), "{found}");
    // A format with a row per slot contains repeated experts.
    let route = support::repository("fixtures/foreign/bigmoeonedge/small.route.csv");
    let rows = fs::read_to_string(route).unwrap();
    let twice = rows.replace("0,0,0,0,1,1,0.25", "0,0,0,0,1,5,0.25");
    assert_ne!(twice, rows);
    let path = fixture.path("twice.route.csv");
    fs::write(&path, twice).unwrap();
    for more in [&[][..], &["-o", "csv"]] {
        let found = warnings(&path, more);
        assert!(found.contains("1 routing decision with the same expert twice"), "{found}");
    }
}

/// The rows of a token are in the order of the slots 1, 0.
#[test]
fn counts_tokens_in_any_order_of_their_slots() {
    let fixture = Fixture::new();
    let route = support::repository("fixtures/foreign/bigmoeonedge/small.route.csv");
    let text = fs::read_to_string(&route).unwrap();
    let mut lines: Vec<&str> = text.lines().collect();
    let first = 1 + lines
        .iter()
        .position(|line| line.starts_with("turn,"))
        .unwrap();
    assert_eq!((lines.len() - first) % 2, 0);
    lines[first..]
        .chunks_mut(2)
        .for_each(|pair| pair.swap(0, 1));
    let path = fixture.path("swap.route.csv");
    fs::write(&path, lines.join("\n") + "\n").unwrap();
    let hotness = |path: &Path, more: &[&str]| run!["--quiet", "hotness", path, more];
    for more in [&[][..], &["-o", "json"]] {
        assert_eq!(hotness(&path, more), hotness(&route, more));
    }
}
