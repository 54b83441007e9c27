//! Limits of file contents: no text of a file controls the terminal, and no size in a file determines how much memory is allocated.

use std::fmt::Debug;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use moe_gguf::map::OffsetMap;
use moe_trace::ops::MUL_MAT_ID;
use moe_trace::record::{EXT_V1, set_name};
use moe_trace::{Manifest, RunOptions, RunWriter, TensorAccessLog};
use tempfile::tempdir;

use crate::support::{Arg, arg, args, fail, file_of, known_run, moe_analyze, repository, run};

/// An escape sequence, a bell and a right-to-left override: eight bytes, like the architecture name of the fixture.
const HOSTILE: &str = "\u{1b}[1m\u{7}\u{202e}";
/// The same text, escaped.
const SHOWN: &str = r"\u{1b}[1m\u{7}\u{202e}";
/// Size of a sparse file that exceeds the memory limit of a command.
const HUGE: u64 = 5 << 30;

#[track_caller]
fn assert_harmless(text: &str) {
    let controls = |c: char| c != '\n' && (c.is_control() || c == '\u{202e}');
    assert!(!text.contains(controls), "{text:?}");
}

/// The qwen3moe fixture with another architecture.
fn hostile_model(dir: &Path) -> PathBuf {
    let mut bytes = fs::read(repository("fixtures/tiny-qwen3moe-Q4_K_M.gguf")).unwrap();
    let at = bytes.windows(8).position(|window| window == b"qwen3moe");
    let at = at.unwrap();
    bytes[at..at + 8].copy_from_slice(HOSTILE.as_bytes());
    file_of(dir, "hostile.gguf", bytes)
}

#[test]
fn escapes_control_characters_in_messages_and_tables() {
    let dir = tempdir().unwrap();
    let model = hostile_model(dir.path());
    let line = fail!["record", "--model", model, "--prompt", "x", "--trace", "off"];
    assert_harmless(&line);
    assert!(line.contains(SHOWN), "{line}");

    let run = dir.path().join(format!("run{HOSTILE}"));
    known_run(&run);
    let manifest = run.join("manifest.json");
    let text = fs::read_to_string(&manifest).unwrap();
    let json_text = serde_json::to_string(HOSTILE).unwrap();
    fs::write(&manifest, text.replace("\"qwen3moe\"", &json_text)).unwrap();
    for format in ["table", "md"] {
        let table = run!["info", run, "-o", format];
        assert_harmless(&table);
        assert!(table.contains(SHOWN), "{table}");
    }
    let json = run!["info", run, "-o", "json"];
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["architecture"], HOSTILE);
    assert!(run!["info", run, "-o", "csv"].contains(HOSTILE));

    // A path in an error, in notes, and in a summary on stdout.
    let missing = dir.path().join(format!("missing{HOSTILE}"));
    let line = fail!["info", missing];
    assert_harmless(&line);
    assert!(line.contains(SHOWN), "{line}");
    let out = dir.path().join(format!("learn{HOSTILE}.json"));
    let hotness = moe_analyze()
        .args(args!["hotness", run, "--out", out])
        .assert()
        .success();
    let notes = String::from_utf8_lossy(&hotness.get_output().stderr).into_owned();
    assert_harmless(&notes);
    assert!(notes.contains(SHOWN), "{notes}");
    assert_harmless(&String::from_utf8_lossy(&hotness.get_output().stdout));
}

#[test]
fn printed_command_lines_are_quoted_for_a_shell() {
    let dir = tempdir().unwrap();
    let model = dir.path().join(format!("m{HOSTILE}.gguf"));
    fs::copy(repository("fixtures/tiny-qwen3moe-Q4_K_M.gguf"), &model).unwrap();
    let run = dir.path().join("run");
    known_run(&run);
    let plan = run!["plan", run, "--model", model, "--budget-mib", "4"];
    assert_harmless(&plan);
    assert!(plan.contains(r"m\x1b[1m\x07\xe2\x80\xae.gguf'"), "{plan}");
}

#[test]
fn plots_are_valid_xml() {
    let dir = tempdir().unwrap();
    let run = dir.path().join(format!("run{HOSTILE}"));
    known_run(&run);
    let plot = dir.path().join("plot.svg");
    let events = format!(
        "{{\"timestamp_ms\":0,\"event\":\"alloc\",\"buffer_id\":1,\"buffer_ptr\":0,\"size\":64,\"name\":{}}}\n",
        serde_json::to_string(HOSTILE).unwrap()
    );
    fs::write(run.join("buffers.jsonl"), events).unwrap();
    run!["buffers", run, "--plot", plot];
    let svg = fs::read_to_string(plot).unwrap();
    assert_harmless(&svg);
    assert!(svg.contains(SHOWN), "{svg}");
}

#[test]
fn shortens_long_values() {
    let dir = tempdir().unwrap();
    let long = "x".repeat(70_000);
    let learn =
        file_of(dir.path(), "learn.json", format!("{{\"schema\":\"{long}\",\"layers\":[]}}"));
    let model = repository("fixtures/tiny-qwen3moe-Q4_K_M.gguf");
    let line = fail!["plan", learn, "--model", model, "--budget-mib", "1"];
    assert!(line.contains("schema") && line.len() < 600, "{line}");
    for args in [
        &["hotness", "x", "--phase", &long][..],
        &["info", &long],
        &["record", "--n-predict", &long],
    ] {
        let line = fail![args];
        assert!(line.len() < 1400, "{} bytes: {line}", line.len());
    }
}

/// Runs the binary in 4 GB of address space and expects exit 2 and one line; returns the line.
#[cfg(target_os = "linux")]
#[track_caller]
fn failure_in_4_gb(args: impl Arg + Debug) -> String {
    let output = std::process::Command::new("sh")
        .args(["-c", "ulimit -v 4000000; exec \"$0\" \"$@\""])
        .arg(assert_cmd::cargo::cargo_bin!("moe-analyze"))
        .args(args![args])
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{args:?}: {stderr}");
    let lines: Vec<&str> = stderr
        .lines()
        .filter(|line| line.starts_with("moe-analyze: "))
        .collect();
    assert_eq!(lines.len(), 1, "{args:?}: {stderr}");
    lines[0].to_owned()
}

/// A sparse file that starts with `head`.
#[cfg(target_os = "linux")]
fn huge_file(dir: &Path, name: &str, head: &str) -> PathBuf {
    let path = file_of(dir, name, head);
    File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(HUGE)
        .unwrap();
    path
}

#[cfg(target_os = "linux")]
#[test]
fn rejects_huge_files() {
    let dir = tempdir().unwrap();
    let dir = dir.path();
    let run = dir.join("run");
    known_run(&run);
    let model = repository("fixtures/tiny-qwen3moe-Q4_K_M.gguf");
    let (run, model) = (arg(&run), arg(&model));
    let huge = huge_file(dir, "huge", "");
    let huge = arg(&huge);
    let json = huge_file(dir, "huge.json", "{");
    let json = arg(&json);
    let learn = huge_file(dir, "learn.json", "{\"schema\":\"moe-layer-perf\",");
    let learn = arg(&learn);
    let trace = Path::new(run).join("trace.bin");
    let (trace, out) = (arg(&trace), dir.join("out.gguf"));
    let out = arg(&out);
    for (args, file) in [
        (&["buffers", huge][..], huge),
        (&["overlap", huge], huge),
        (&["plan", run, "--sizes", huge, "--budget-mib", "1"], huge),
        (&["plan", learn, "--model", model, "--budget-mib", "1"], learn),
        (&["plan", run, "--update", json], json),
        (&["stability", run, "--labels", huge, "--table", "domains"], huge),
        (&["hotness", trace, "--ops", huge], huge),
        (&["simulate", run, "--sizes", huge, "--budget-mib", "1"], huge),
        (&["relayout", model, "--permute-experts", json, "--out", out], json),
        (&["synth", "--spec", json, "--out", out], json),
        (&["record", "--prompts", huge, "--trace", "off"], huge),
        (&["info", learn], learn),
    ] {
        let line = failure_in_4_gb(args);
        assert!(line.contains(file), "{args:?}: {line}");
        assert!(
            line.contains("limit of ") || line.contains("larger than 256 MiB"),
            "{args:?}: {line}"
        );
    }
    for (name, args) in [
        ("manifest.json", &["hotness", run][..]),
        ("buffers.jsonl", &["buffers", run]),
        ("transfers.jsonl", &["overlap", run]),
        ("graph/prompt.json", &["graph", run, "--phase", "prompt"]),
    ] {
        let path = Path::new(run).join(name);
        let before = fs::read(&path).ok();
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        huge_file(Path::new(run), name, "{");
        let line = failure_in_4_gb(args);
        assert!(line.contains(arg(&path)) && line.contains("limit of "), "{name}: {line}");
        match before {
            Some(bytes) => fs::write(&path, bytes).unwrap(),
            None => fs::remove_file(&path).unwrap(),
        }
    }
}

/// JSON of 31 MiB, below the limit of a file, whose values need much more memory.
#[cfg(target_os = "linux")]
#[test]
fn limits_memory_of_json_values() {
    let dir = tempdir().unwrap();
    let dir = dir.path();
    let run = dir.join("run");
    known_run(&run);
    let model = repository("fixtures/tiny-qwen3moe-Q4_K_M.gguf");
    let (run, model) = (arg(&run), arg(&model));
    let objects = "{\"a\":0},".repeat((31 << 20) / 8);
    let learn = file_of(
        dir,
        "learn.json",
        format!(
            "{{\"schema\":\"llama.cpp.moe_layer_opt_perf.v1\",\"layers\":[],\"x\":[{objects}0]}}"
        ),
    );
    let order = file_of(dir, "order.json", format!("{{\"1\":[{objects}0]}}"));
    let (learn, order, out) = (arg(&learn), arg(&order), dir.join("out"));
    let (gguf, subset) = (out.with_extension("gguf"), out.with_extension("json"));
    let plan = ["--model", model, "--budget-mib", "1"];
    for (args, file) in [
        (args!["plan", learn, plan], learn),
        (args!["plan", learn, learn, plan], learn),
        (args!["plan", learn, "--out", subset, plan], learn),
        (args!["plan", run, "--update", learn], learn),
        (args!["plan", run, "--update", order], order),
        (args!["hotness", learn], learn),
        (args!["info", learn], learn),
        (args!["relayout", model, "--permute-experts", learn, "--out", gguf], learn),
        (args!["relayout", model, "--permute-experts", order, "--out", gguf], order),
        (args!["synth", "--spec", order, "--out", gguf], order),
    ] {
        let line = failure_in_4_gb(&args);
        assert!(
            line.contains(file) && line.contains("more memory than the limit of 536870912 bytes"),
            "{args:?}: {line}"
        );
    }
    let manifest = Path::new(run).join("manifest.json");
    fs::write(&manifest, format!("{{\"schema\":\"moe-analyze.run.v1\",\"x\":[{objects}0]}}"))
        .unwrap();
    for args in [
        &["info", run][..],
        &["hotness", run],
        &["diff", run, run],
        &["record", "-p", "a", "-n", "1", "--force", "--out", run],
    ] {
        let line = failure_in_4_gb(args);
        assert!(
            line.contains(run) && (line.contains("limit of ") || args[0] == "record"),
            "{args:?}: {line}"
        );
    }
}

/// A model of 9 layers of 4096 experts, whose pairs exceed the limit in total, but not in one layer.
#[cfg(target_os = "linux")]
#[test]
fn limits_pairs_of_experts() {
    const N_LAYER: u16 = 9;
    let dir = tempdir().unwrap();
    let (model, run) = (dir.path().join("wide.gguf"), dir.path().join("run"));
    let spec = serde_json::json!({
        "arch": "qwen3moe", "n_layer": N_LAYER, "n_embd": 32, "n_head": 1, "n_head_kv": 1, "head_dim": 32,
        "n_expert": 4096, "n_expert_used": 1, "n_ff_exp": 32,
        "vocab": { "n_tokens": 300, "pre": "qwen2" },
    });
    let spec = file_of(dir.path(), "spec.json", spec.to_string());
    run!["synth", "--spec", spec, "--sparse", "--out", model];
    let map = OffsetMap { rows: Vec::new() };
    let mut writer =
        RunWriter::create(&run, Manifest::default(), &map, RunOptions::default()).unwrap();
    for layer in 0..N_LAYER {
        let record = writer.next_record().unwrap();
        *record = TensorAccessLog {
            operation_type: MUL_MAT_ID,
            ext_version: EXT_V1,
            num_experts: 1,
            ..TensorAccessLog::default()
        };
        record.timestamp_ns.set(u64::from(layer) + 1);
        record.layer_id.set(layer);
        record.n_tokens.set(1);
        set_name(&mut record.dst_name, &format!("ffn_moe_gate-{layer}"));
    }
    writer.finish().unwrap();
    let (trace, out) = (run.join("trace.bin"), dir.path().join("out.gguf"));
    let line = failure_in_4_gb(args![
        "relayout", model, "--permute-experts", "coactivation", "--trace", trace, "--out", out
    ]);
    assert!(
        line.contains("layer 8 has 4096 experts") && line.contains("limited to 134217728 pairs"),
        "{line}"
    );
}

/// A map of 52 kB with a name of 1.5 GB.
#[cfg(target_os = "linux")]
#[test]
fn limits_strings_of_tables() {
    let dir = tempdir().unwrap();
    let run = dir.path().join("run");
    known_run(&run);
    let map = run.join("gguf-map.parquet");
    let bomb = repository("fixtures/reliability/parquet-string-bomb-gguf-map.parquet.zst");
    fs::write(&map, moe_testkit::reference::decompressed(&bomb)).unwrap();
    for args in [&["hotness", arg(&run)][..], &["accesses", arg(&run)]] {
        let line = failure_in_4_gb(args);
        assert!(line.contains("gguf-map.parquet: column "), "{line}");
    }
    // `info` reports the fault.
    let output = std::process::Command::new("sh")
        .args(["-c", "ulimit -v 4000000; exec \"$0\" \"$@\""])
        .arg(assert_cmd::cargo::cargo_bin!("moe-analyze"))
        .args(args!["info", map])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
}
