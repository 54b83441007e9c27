//! Signals, killed processes, and files that are truncated while or before they are read.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use moe_trace::Run;

use super::{binary, names, run_in, signal, start, stderr_of, wait_until};
use crate::support::{arg, args, moe_analyze, repository, run};

/// Truncation within the last page raises no signal.
#[cfg(target_os = "linux")]
#[test]
fn writes_no_tables_of_a_truncated_trace() {
    let dir = tempfile::tempdir().unwrap();
    let records = fs::read(run_in(dir.path()).join("trace.bin")).unwrap();
    let trace = dir.path().join("trace.bin");
    let n = (200 << 20) / records.len();
    let size = (n * records.len()).next_multiple_of(4096) as u64;
    fs::write(&trace, records.repeat(n)).unwrap();
    let file = fs::File::options().write(true).open(&trace).unwrap();
    file.set_len(size).unwrap();
    let out = dir.path().join("tables");
    let mut child = start(args!["--quiet", "parquet", trace, "--out", out]);
    assert!(wait_until(&mut child, || out.is_dir()));
    file.set_len(size - 1024).unwrap();
    let output = child.wait_with_output().unwrap();
    let stderr = stderr_of(&output);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("trace.bin: the file was truncated"), "{stderr}");
    assert_eq!(names(dir.path()), ["run", "trace.bin"]);
}

#[test]
fn signals_remove_temporary_files() {
    let spec = r#"{"arch": "qwen3moe", "n_layer": 8, "n_embd": 1024, "n_head": 4, "n_expert": 64,
        "n_expert_used": 4, "n_ff_exp": 1024, "quant": "F16", "vocab": {"n_tokens": 1000, "pre": "qwen2"}}"#;
    for (name, number) in [("-TERM", 15), ("-HUP", 1), ("-INT", 2)] {
        let dir = tempfile::tempdir().unwrap();
        let (spec_path, out) = (dir.path().join("spec.json"), dir.path().join("o"));
        fs::write(&spec_path, spec).unwrap();
        fs::create_dir(&out).unwrap();
        let model = out.join("m.gguf");
        let mut child = start(args!["--quiet", "synth", "--spec", spec_path, "--out", model]);
        assert!(wait_until(&mut child, || !names(&out).is_empty()));
        signal(&child, name);
        let output = child.wait_with_output().unwrap();
        // A hangup stays ignored under `nohup`, an interrupt in a background process of a script.
        if is_ignored(number) {
            assert_eq!(output.status.code(), Some(0), "{}", stderr_of(&output));
            assert_eq!(names(&out), ["m.gguf"]);
            continue;
        }
        assert_eq!(output.status.code(), Some(2), "{}", stderr_of(&output));
        assert!(stderr_of(&output).contains("interrupted"));
        assert_eq!(names(&out), [""; 0], "{name}");
    }
}

#[test]
fn signals_remove_the_trace_of_bench() {
    let model = repository("fixtures/random-qwen3moe-F16.gguf");
    let sizes = ["-t", "1", "-p", "4", "-n", "0", "-r", "100000", "--trace", "all"];
    for (name, number) in [("-TERM", 15), ("-HUP", 1), ("-INT", 2)] {
        let tmp = tempfile::tempdir().unwrap();
        let mut command = Command::new(binary());
        command
            .args(args!["--quiet", "bench", "--model", model, sizes])
            .env("TMPDIR", tmp.path())
            .stdout(Stdio::null());
        let mut child = command.spawn().unwrap();
        let trace = |name: &String| tmp.path().join(name).join("run/trace.bin").exists();
        assert!(wait_until(&mut child, || names(tmp.path()).iter().any(trace)));
        if is_ignored(number) {
            child.kill().unwrap();
            child.wait().unwrap();
            continue;
        }
        signal(&child, name);
        assert_eq!(child.wait().unwrap().signal(), Some(number as i32));
        assert_eq!(names(tmp.path()), [""; 0], "{name}");
    }
}

/// Returns whether this process, and therefore its child processes, ignore a signal; false without /proc.
fn is_ignored(number: u32) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.map_or(0, |mask| u64::from_str_radix(mask.trim(), 16).unwrap());
    mask & 1 << (number - 1) != 0
}

#[test]
fn terminated_conversion_leaves_no_files() {
    let dir = tempfile::tempdir().unwrap();
    let (run, out) = (dir.path().join("run"), dir.path().join("thesis"));
    run!["record", "-n", "40", "-p", "a", "--ignore-eos", "--out", run];
    let mut interrupted = 0;
    for _ in 0..5 {
        let mut child = start(args!["convert", run, "--to", "thesis-json", "--out", out]);
        wait_until(&mut child, || out.is_dir());
        signal(&child, "-TERM");
        let status = child.wait().unwrap();
        if status.signal().is_some() {
            interrupted += 1;
            assert!(!out.exists(), "{:?}", names(&out));
        } else {
            assert!(status.success());
            assert!(names(&out).iter().all(|name| !name.starts_with('.')));
            fs::remove_dir_all(&out).unwrap();
        }
    }
    assert!(interrupted > 0, "every conversion ended before its signal");
}

/// A recorder that is killed while it replaces a run leaves the old records or a new run, and the next recorder succeeds.
#[test]
fn killed_recorder_does_not_block_the_next() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let args = ["--quiet", "record", "-n", "2", "-p", "a", "--force", "--out", arg(&run)];
    run![args];
    let n_records = Run::open(&run).unwrap().trace.records().len();
    assert!(n_records > 0);
    let id = |run: &Path| Run::open(run).map(|run| run.id()).ok();
    for round in 0..10 {
        let before = (names(&run), id(&run));
        let mut child = start(args);
        // Killed after a different change of the directory in each round.
        wait_until(&mut child, || (names(&run), id(&run)) != before);
        for _ in 0..round * 2 {
            std::hint::black_box(names(&run));
        }
        let _ = child.kill();
        child.wait().unwrap();
        let trace = fs::metadata(run.join("trace.bin")).unwrap().len();
        if id(&run) == before.1 {
            assert_eq!(trace, n_records as u64 * 1024, "the old run is complete");
        }
        run![args];
        assert_eq!(Run::open(&run).unwrap().trace.records().len(), n_records);
        assert!(names(&run).iter().all(|name| !name.starts_with('.')), "{:?}", names(&run));
    }
}

/// The process has mapped the file when it is truncated.
#[cfg(target_os = "linux")]
#[test]
fn reports_truncated_input() {
    let dir = tempfile::tempdir().unwrap();
    let npy = dir.path().join("big.npy");
    // Tokens × layers × experts per token.
    let shape = "{'descr': '|u1', 'fortran_order': False, 'shape': (4000000, 8, 4), }";
    let text = format!("{shape:<117}\n");
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend((text.len() as u16).to_le_bytes());
    bytes.extend(text.as_bytes());
    bytes.extend([0u8, 1, 2, 3].repeat(8 * 4_000_000));
    fs::write(&npy, bytes).unwrap();

    let out = dir.path().join("learn.json");
    let mut child = start(args!["--quiet", "hotness", npy, "--out", out]);
    let maps = PathBuf::from(format!("/proc/{}/maps", child.id()));
    assert!(wait_until(&mut child, || {
        fs::read_to_string(&maps).is_ok_and(|maps| maps.contains("big.npy"))
    }));
    let file = fs::File::options().write(true).open(&npy).unwrap();
    file.set_len(1_000_000).unwrap();
    let output = child.wait_with_output().unwrap();
    let stderr = stderr_of(&output);
    assert_eq!(output.status.code(), Some(2), "{:?} {stderr}", output.status);
    let line = format!(
        "moe-analyze: {}: the file was truncated while it was read; run the command again once it is complete\n",
        npy.display()
    );
    assert_eq!(stderr, line);
    assert_eq!(names(dir.path()), ["big.npy"]);
}

#[test]
fn record_without_trace_mentions_no_run() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("nan.gguf");
    let mut bytes = fs::read(repository("fixtures/random-llama-F16.gguf")).unwrap();
    let gguf = moe_gguf::Gguf::open(repository("fixtures/random-llama-F16.gguf")).unwrap();
    let norm = gguf.tensor("output_norm.weight").unwrap();
    let start = norm.offset as usize;
    for value in bytes[start..start + norm.size_bytes as usize].chunks_exact_mut(4) {
        value.copy_from_slice(&f32::NAN.to_le_bytes());
    }
    fs::write(&model, bytes).unwrap();
    let output = moe_analyze()
        .args(args!["--quiet", "record", "--trace", "off", "-p", "x", "-n", "3", "--model", model])
        .current_dir(dir.path())
        .output()
        .unwrap();
    let stderr = stderr_of(&output);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(!stderr.contains("runs/") && !stderr.contains("keeps"), "{stderr}");
    assert_eq!(names(dir.path()), ["nan.gguf"]);
}

#[test]
fn reports_truncated_buffer_events() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    run!["record", "-n", "2", "-p", "a", "--out", run];
    let events = run.join("buffers.jsonl");
    let bytes = fs::read(&events).unwrap();
    fs::write(&events, &bytes[..bytes.len() - 10]).unwrap();
    let assert = moe_analyze().args(args!["buffers", run]).assert().success();
    let stderr = stderr_of(assert.get_output());
    assert!(stderr.contains("buffers.jsonl is truncated"), "{stderr}");
    let assert = moe_analyze().args(args!["info", run]).assert().code(1);
    let stdout = String::from_utf8_lossy(&assert.get_output().stdout).into_owned();
    assert!(stdout.contains("buffers.jsonl is truncated"), "{stdout}");
}
