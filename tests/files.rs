//! Outputs of every command under adversity: inputs named as outputs, planted links, two writers at once, limits of the
//! system, signals, and processes that are killed.
#![cfg(unix)]

#[path = "files/errors.rs"]
mod errors;
mod support;

use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use moe_trace::Run;
use support::{arg, failure_of, known_run, moe_analyze, repository, stdout_of};

const MODEL: &str = "fixtures/tiny-qwen3moe-Q4_K_M.gguf";
/// How long a condition is waited for.
const PATIENCE: Duration = Duration::from_secs(120);

fn binary() -> PathBuf {
    assert_cmd::cargo::cargo_bin!("moe-analyze").to_owned()
}

fn start(args: &[&str]) -> Child {
    let mut command = Command::new(binary());
    command
        .args(args)
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    command.spawn().unwrap()
}

/// Runs a script with the binary as `$0`, in `dir`.
fn shell(dir: &Path, script: &str) -> Output {
    let mut command = Command::new("bash");
    command.arg("-c").arg(script).arg(binary()).current_dir(dir);
    command.output().unwrap()
}

fn stderr_of(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Waits until `condition` is true or the process has ended; returns whether it still runs.
fn wait_until(child: &mut Child, condition: impl Fn() -> bool) -> bool {
    let start = Instant::now();
    while !condition() {
        if child.try_wait().unwrap().is_some() {
            return false;
        }
        assert!(start.elapsed() < PATIENCE, "the condition was never true");
        std::thread::sleep(Duration::from_millis(1));
    }
    child.try_wait().unwrap().is_none()
}

fn signal(child: &Child, name: &str) {
    let kill = Command::new("kill")
        .args([name, &child.id().to_string()])
        .status();
    assert!(kill.unwrap().success());
}

fn run_in(dir: &Path) -> PathBuf {
    let run = dir.join("run");
    known_run(&run);
    run
}

/// The bytes of all files of a directory.
fn contents(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let read = |name: String| {
        let bytes = fs::read(dir.join(&name)).unwrap_or_default();
        (name, bytes)
    };
    names(dir).into_iter().map(read).collect()
}

#[test]
fn refuses_outputs_that_are_inputs() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let run = run_in(dir.path());
    fs::copy(repository(MODEL), at("m.gguf")).unwrap();
    fs::hard_link(at("m.gguf"), at("hard.gguf")).unwrap();
    symlink(at("m.gguf"), at("soft.gguf")).unwrap();
    fs::hard_link(run.join("manifest.json"), at("hard.json")).unwrap();
    symlink(&run, at("soft-run")).unwrap();
    stdout_of(&["hotness", arg(&run), "--out", arg(&at("learn.json"))]);
    fs::hard_link(at("learn.json"), at("learn-2.json")).unwrap();
    fs::write(at("prompts.jsonl"), "{\"prompt\": \"a\"}\n").unwrap();
    fs::hard_link(at("prompts.jsonl"), at("usage.json")).unwrap();
    stdout_of(&["parquet", arg(&run), "--out", arg(&at("tables"))]);
    stdout_of(&[
        "convert",
        arg(&run),
        "--to",
        "thesis-json",
        "--out",
        arg(&at("thesis")),
    ]);
    // A line that is a prompt, too.
    fs::write(run.join("transfers.jsonl"), "{\"prompt\": \"a\"}\n").unwrap();
    symlink(run.join("trace.bin"), at("soft-trace")).unwrap();
    let model = at("m.gguf");
    let before = (
        contents(&run),
        contents(dir.path()),
        contents(&at("tables")),
        contents(&at("thesis")),
    );

    let cases: &[&[&str]] = &[
        &["gguf-map", "m.gguf", "--manifest-out", "m.gguf"],
        &["gguf-map", "m.gguf", "--manifest-out", "hard.gguf"],
        &["gguf-map", "m.gguf", "--out", "./soft.gguf"],
        &["relayout", "m.gguf", "--out", "hard.gguf"],
        &["relayout", "soft.gguf", "--out", "m.gguf"],
        &["replay", "run", "--model", "m.gguf", "--out", "run"],
        &["replay", "run", "--model", "m.gguf", "--out", "soft-run"],
        &["replay", "run", "--model", "m.gguf", "--out", "run/sub"],
        &["graph", "run", "--out", "run/manifest.json"],
        &["graph", "run", "--out", "hard.json"],
        &["graph", "run", "--out", "run/new.json"],
        &["buffers", "run", "--out", "soft-run/x.json"],
        &["hotness", "run", "--out", "run/manifest.json"],
        &["hotness", "run", "--matrix", "soft-run/matrix.csv"],
        &["hotness", "run", "--plot", "run/plot.svg"],
        &["hotness", "learn.json", "--out", "learn-2.json"],
        &["hotness", "tables", "--matrix", "tables/routing.parquet"],
        &["accesses", "run", "--out", "run/accesses.csv"],
        &["graph", "run/trace.bin", "--out", "run/manifest.json"],
        &["graph", "soft-trace", "--out", "run/manifest.json"],
        &["hotness", "run/trace.bin", "--out", "run/manifest.json"],
        &[
            "hotness",
            "run/trace.bin",
            "--matrix",
            "run/gguf-map.parquet",
        ],
        &[
            "accesses",
            "run/trace.bin",
            "--model",
            "m.gguf",
            "--out",
            "run/manifest.json",
        ],
        &["buffers", "run/buffers.jsonl", "--out", "run/manifest.json"],
        &["parquet", "run/trace.bin", "--out", "run"],
        &["record", "--prompts", "run/transfers.jsonl", "--out", "run"],
        &["simulate", "run", "--plot", "run/plot.svg"],
        &[
            "plan",
            "learn.json",
            "--model",
            "m.gguf",
            "--budget-mib",
            "1",
            "--out",
            "learn-2.json",
        ],
        &["parquet", "run", "--out", "run"],
        &["parquet", "run", "--dataset", "run/data"],
        &["convert", "run", "--to", "jsonl", "--out", "run/trace.bin"],
        &[
            "convert",
            "thesis",
            "--to",
            "thesis-json",
            "--out",
            "thesis",
        ],
        &[
            "record",
            "--prompts",
            "prompts.jsonl",
            "--expert-trace-output",
            "usage.json",
            "--out",
            "new",
        ],
        &["record", "--model", "m.gguf", "--out", "m.gguf"],
    ];
    for case in cases {
        let output = moe_analyze()
            .args(*case)
            .arg("--force")
            .current_dir(dir.path())
            .output()
            .unwrap();
        let stderr = stderr_of(&output);
        assert_eq!(output.status.code(), Some(2), "{case:?}: {stderr}");
        let line = stderr.lines().last().unwrap();
        assert!(
            line.starts_with("moe-analyze: ") && line.contains("input"),
            "{case:?}: {stderr}"
        );
    }
    let after = (
        contents(&run),
        contents(dir.path()),
        contents(&at("tables")),
        contents(&at("thesis")),
    );
    assert!(before == after, "a refused command changed a file");
    assert!(model.exists());
}

/// A trace alone is no run, so that outputs may lie next to it.
#[test]
fn writes_next_to_a_trace_without_a_run() {
    let dir = tempfile::tempdir().unwrap();
    let run = run_in(dir.path());
    let alone = dir.path().join("alone");
    fs::create_dir(&alone).unwrap();
    let trace = alone.join("trace.bin");
    fs::copy(run.join("trace.bin"), &trace).unwrap();
    stdout_of(&[
        "hotness",
        arg(&trace),
        "--out",
        arg(&alone.join("learn.json")),
    ]);
    let line = failure_of(&["hotness", arg(&trace), "--out", arg(&trace), "--force"]);
    assert!(line.contains("is an input"), "{line}");
}

#[test]
fn refuses_a_shard_of_the_input_as_output() {
    let dir = tempfile::tempdir().unwrap();
    let shard = |n: u32| dir.path().join(format!("m-0000{n}-of-00002.gguf"));
    fs::write(shard(1), "first").unwrap();
    fs::write(shard(2), "second").unwrap();
    let line = failure_of(&[
        "gguf-map",
        arg(&shard(1)),
        "--manifest-out",
        arg(&shard(2)),
        "--force",
    ]);
    assert!(line.contains("is an input"), "{line}");
    assert_eq!(fs::read_to_string(shard(2)).unwrap(), "second");
}

#[test]
fn refuses_two_outputs_with_one_path() {
    let dir = tempfile::tempdir().unwrap();
    let run = run_in(dir.path());
    fs::create_dir(dir.path().join("d")).unwrap();
    symlink("d", dir.path().join("e")).unwrap();
    for case in [
        &[
            "hotness",
            arg(&run),
            "--out",
            "y.json",
            "--matrix",
            "./y.json",
        ][..],
        &[
            "hotness",
            arg(&run),
            "--out",
            "d/y.json",
            "--matrix",
            "e/y.json",
        ],
        &["parquet", arg(&run), "--out", "t", "--dataset", "d/../t"],
        &[
            "record",
            "-n",
            "1",
            "-p",
            "a",
            "--out",
            "d",
            "--expert-trace-output",
            "d/manifest.json",
        ],
    ] {
        let output = moe_analyze()
            .args(case)
            .arg("--force")
            .current_dir(dir.path())
            .output()
            .unwrap();
        let stderr = stderr_of(&output);
        assert_eq!(output.status.code(), Some(2), "{case:?}: {stderr}");
        assert!(stderr.contains("output"), "{stderr}");
    }
    assert_eq!(names(dir.path()), ["d", "e", "run"]);
}

#[test]
fn the_environments_output_is_checked_like_an_option() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let args = [
        "record",
        "-n",
        "1",
        "-p",
        "a",
        "--force",
        "--out",
        arg(&out),
    ];
    stdout_of(&args);
    let before = contents(&out);
    let output = moe_analyze()
        .args(args)
        .env("LLAMA_EXPERT_TRACE_OUTPUT", out.join("manifest.json"))
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", stderr_of(&output));
    assert!(before == contents(&out));
}

#[test]
fn the_environments_output_replaces_no_input() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::copy(repository(MODEL), at("model.json")).unwrap();
    fs::write(at("prompt.json"), "{\"prompt\": \"a\"}\n").unwrap();
    fs::hard_link(at("model.json"), at("hard.json")).unwrap();
    symlink("prompt.json", at("soft.json")).unwrap();
    let before = contents(dir.path());
    for (inputs, output) in [
        (&["-p", "a", "-m", "model.json"][..], "model.json"),
        (&["-p", "a", "-m", "model.json"], "hard.json"),
        (&["--prompts", "prompt.json"], "prompt.json"),
        (&["--prompt-file", "prompt.json"], "soft.json"),
    ] {
        for trace in ["off", "all"] {
            let output = moe_analyze()
                .args(["--quiet", "record", "-n", "1", "--force", "--trace", trace])
                .args(inputs)
                .env("LLAMA_EXPERT_TRACE_OUTPUT", output)
                .current_dir(dir.path())
                .output()
                .unwrap();
            let stderr = stderr_of(&output);
            assert_eq!(output.status.code(), Some(2), "{inputs:?}: {stderr}");
            assert!(stderr.contains("is an input"), "{inputs:?}: {stderr}");
            assert!(before == contents(dir.path()), "{inputs:?}");
        }
    }
}

/// The files of one conversion are those of one trace.
#[test]
fn force_leaves_no_files_of_an_earlier_conversion() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let run = run_in(dir.path());
    let jsonl = at("t.jsonl");
    fs::write(&jsonl, "{\"t\":0,\"layer\":1,\"experts\":[5,1]}\n").unwrap();
    for (format, older, input) in [
        ("thesis-json", "token-00099.json", &run),
        ("mesh-llm", "layer-099.csv", &jsonl),
    ] {
        let out = at(format);
        let convert = ["convert", arg(input), "--to", format, "--out", arg(&out)];
        stdout_of(&convert);
        let files = names(&out);
        fs::copy(out.join(&files[0]), out.join(older)).unwrap();
        for name in ["notes.txt", "token-1.json"] {
            fs::write(out.join(name), "older").unwrap();
        }
        stdout_of(&[&convert[..], &["--force"]].concat());
        let mut expected = [&files[..], &["notes.txt".into(), "token-1.json".into()]].concat();
        expected.sort();
        assert_eq!(names(&out), expected);
    }

    let tables = at("tables");
    stdout_of(&["parquet", arg(&run), "--out", arg(&tables)]);
    fs::write(tables.join("notes.txt"), "mine").unwrap();
    stdout_of(&["parquet", arg(&jsonl), "--out", arg(&tables), "--force"]);
    assert_eq!(names(&tables), ["notes.txt", "routing.parquet"]);
    fs::write(tables.join("ops.parquet"), "of another program").unwrap();
    stdout_of(&["parquet", arg(&jsonl), "--out", arg(&tables), "--force"]);
    assert!(tables.join("ops.parquet").exists());
}

/// Within its last page a truncated file raises no signal.
#[cfg(target_os = "linux")]
#[test]
fn tables_of_a_truncated_trace_are_not_written() {
    let dir = tempfile::tempdir().unwrap();
    let records = fs::read(run_in(dir.path()).join("trace.bin")).unwrap();
    let trace = dir.path().join("trace.bin");
    let n = (200 << 20) / records.len();
    let size = (n * records.len()).next_multiple_of(4096) as u64;
    fs::write(&trace, records.repeat(n)).unwrap();
    let file = fs::File::options().write(true).open(&trace).unwrap();
    file.set_len(size).unwrap();
    let out = dir.path().join("tables");
    let mut child = start(&["--quiet", "parquet", arg(&trace), "--out", arg(&out)]);
    assert!(wait_until(&mut child, || out.is_dir()));
    file.set_len(size - 1024).unwrap();
    let output = child.wait_with_output().unwrap();
    let stderr = stderr_of(&output);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(
        stderr.contains("trace.bin: the file was truncated"),
        "{stderr}"
    );
    assert_eq!(names(dir.path()), ["run", "trace.bin"]);
}

#[test]
fn follows_no_planted_link_and_keeps_foreign_files() {
    let dir = tempfile::tempdir().unwrap();
    run_in(dir.path());
    let victim = dir.path().join("victim");
    fs::write(&victim, "precious").unwrap();
    // Temporary names that contain the process id; `exec` keeps it.
    for (plant, command) in [
        ("o/.ops.parquet.$BASHPID.tmp", "parquet run --out o"),
        ("o/.routing.parquet.$BASHPID.tmp", "parquet run --out o"),
        (
            "o/.$BASHPID.token-00000.json",
            "convert run --to thesis-json --out o --force",
        ),
        (
            "o/.m.parquet.$BASHPID.tmp",
            "gguf-map run-model.gguf --out o/m.parquet",
        ),
        ("o/.manifest.json.$BASHPID.tmp", "record -n 1 -p a --out o"),
        (
            "o/.$BASHPID.x.jsonl",
            "convert run --to jsonl --out o/x.jsonl",
        ),
    ] {
        fs::create_dir(dir.path().join("o")).unwrap();
        fs::copy(repository(MODEL), dir.path().join("run-model.gguf")).unwrap();
        let script = format!("ln -s $PWD/victim {plant}; exec \"$0\" --quiet {command} >/dev/null");
        let output = shell(dir.path(), &script);
        assert!(output.status.success(), "{command}: {}", stderr_of(&output));
        assert_eq!(
            fs::read_to_string(&victim).unwrap(),
            "precious",
            "{command}"
        );
        fs::remove_dir_all(dir.path().join("o")).unwrap();
    }
    let script = "mkdir o; echo s > o/.$BASHPID.x.jsonl; echo $BASHPID > pid; exec \"$0\" --quiet convert run --to jsonl --out o/x.jsonl";
    let output = shell(dir.path(), script);
    assert!(output.status.success(), "{}", stderr_of(&output));
    let process = fs::read_to_string(dir.path().join("pid")).unwrap();
    let kept = dir.path().join(format!("o/.{}.x.jsonl", process.trim()));
    assert_eq!(fs::read_to_string(kept).unwrap(), "s\n");
    // A link in the place of the output is not replaced without --force, wherever it points.
    symlink("nowhere", dir.path().join("o/y.jsonl")).unwrap();
    let y = dir.path().join("o/y.jsonl");
    let line = failure_of(&[
        "convert",
        arg(&dir.path().join("run")),
        "--to",
        "jsonl",
        "--out",
        arg(&y),
    ]);
    assert!(line.contains("exists; pass --force"), "{line}");
}

#[test]
fn exactly_one_of_two_writers_wins() {
    let dir = tempfile::tempdir().unwrap();
    let run = run_in(dir.path());
    for round in 0..6 {
        let out = dir.path().join(format!("out-{round}"));
        let commands = [
            vec!["parquet", arg(&run), "--out", arg(&out)],
            vec![
                "convert",
                arg(&run),
                "--to",
                "thesis-json",
                "--out",
                arg(&out),
            ],
            vec!["convert", arg(&run), "--to", "jsonl", "--out", arg(&out)],
        ];
        let args = &commands[round % commands.len()];
        let children = [start(args), start(args)];
        let outputs = children.map(|child| child.wait_with_output().unwrap());
        let mut codes: Vec<_> = outputs.iter().map(|output| output.status.code()).collect();
        codes.sort();
        let stderr: String = outputs.iter().map(stderr_of).collect();
        assert_eq!(codes, [Some(0), Some(2)], "{args:?}: {stderr}");
        assert!(stderr.contains("exists"), "{stderr}");
        if out.is_dir() {
            assert!(
                names(&out).iter().all(|name| !name.starts_with('.')),
                "{:?}",
                names(&out)
            );
        }
    }
}

#[test]
fn two_records_without_out_use_two_directories() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = Command::new(binary());
    command
        .args(["--quiet", "record", "-n", "1", "-p", "a"])
        .current_dir(dir.path())
        .stdout(Stdio::null());
    let children: Vec<Child> = (0..4).map(|_| command.spawn().unwrap()).collect();
    for mut child in children {
        assert!(child.wait().unwrap().success());
    }
    assert_eq!(names(&dir.path().join("runs")).len(), 4);
}

#[test]
fn a_file_size_limit_is_one_line() {
    let dir = tempfile::tempdir().unwrap();
    run_in(dir.path());
    fs::copy(repository(MODEL), dir.path().join("m.gguf")).unwrap();
    for command in [
        "relayout m.gguf --out r.gguf",
        "hotness run --plot p.png",
        "convert run --to jsonl --out x.jsonl",
        "parquet run --out t",
    ] {
        let before = names(dir.path());
        let output = shell(dir.path(), &format!("ulimit -f 1; exec \"$0\" {command}"));
        let stderr = stderr_of(&output);
        assert_eq!(output.status.code(), Some(2), "{command}: {stderr}");
        let line = stderr.lines().last().unwrap();
        assert!(
            line.starts_with("moe-analyze: ") && line.contains("File too large"),
            "{line}"
        );
        assert!(
            !line.contains("Custom") && !line.contains("IoError"),
            "{line}"
        );
        assert_eq!(names(dir.path()), before);
    }
}

/// Before anything of a run is replaced, its new manifest is on the disk.
#[test]
fn a_manifest_that_cannot_be_written_leaves_the_old_run() {
    let dir = tempfile::tempdir().unwrap();
    let run = run_in(dir.path());
    let before = contents(&run);
    // A manifest is longer than 1 KiB.
    let script = "ulimit -f 1; exec \"$0\" record -n 1 -p a --out run --force";
    let output = shell(dir.path(), script);
    let stderr = stderr_of(&output);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    let line = stderr.lines().last().unwrap();
    assert!(
        line.starts_with("moe-analyze: cannot write run/manifest.json: File too large"),
        "{line}"
    );
    assert!(contents(&run) == before);
}

#[test]
fn signals_leave_no_temporary_files() {
    let spec = r#"{"arch": "qwen3moe", "n_layer": 8, "n_embd": 1024, "n_head": 4, "n_expert": 64,
        "n_expert_used": 4, "n_ff_exp": 1024, "quant": "F16", "vocab": {"n_tokens": 1000, "pre": "qwen2"}}"#;
    for (name, number) in [("-TERM", 15), ("-HUP", 1), ("-INT", 2)] {
        let dir = tempfile::tempdir().unwrap();
        let (spec_path, out) = (dir.path().join("spec.json"), dir.path().join("o"));
        fs::write(&spec_path, spec).unwrap();
        fs::create_dir(&out).unwrap();
        let model = out.join("m.gguf");
        let mut child = start(&[
            "--quiet",
            "synth",
            "--spec",
            arg(&spec_path),
            "--out",
            arg(&model),
        ]);
        assert!(wait_until(&mut child, || !names(&out).is_empty()));
        signal(&child, name);
        let output = child.wait_with_output().unwrap();
        // A hangup stays ignored under `nohup`, an interrupt in the background of a script.
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

/// Whether this process, and with it each program that it starts, ignores a signal. Where there is no /proc: no.
fn is_ignored(number: u32) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.map_or(0, |mask| u64::from_str_radix(mask.trim(), 16).unwrap());
    mask & 1 << (number - 1) != 0
}

#[test]
fn a_terminated_conversion_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (run, out) = (dir.path().join("run"), dir.path().join("thesis"));
    stdout_of(&[
        "record",
        "-n",
        "40",
        "-p",
        "a",
        "--ignore-eos",
        "--out",
        arg(&run),
    ]);
    let mut interrupted = 0;
    for _ in 0..5 {
        let mut child = start(&[
            "convert",
            arg(&run),
            "--to",
            "thesis-json",
            "--out",
            arg(&out),
        ]);
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

/// A recorder that is killed while it replaces a run leaves the old records or a new run, and the next one succeeds.
#[test]
fn a_killed_recorder_never_blocks_the_next() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let args = [
        "--quiet",
        "record",
        "-n",
        "2",
        "-p",
        "a",
        "--force",
        "--out",
        arg(&run),
    ];
    stdout_of(&args);
    let n_records = Run::open(&run).unwrap().trace.records().len();
    assert!(n_records > 0);
    let id = |run: &Path| Run::open(run).map(|run| run.id()).ok();
    for round in 0..10 {
        let before = (names(&run), id(&run));
        let mut child = start(&args);
        // Killed at a different change of the directory in each round.
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
        stdout_of(&args);
        assert_eq!(Run::open(&run).unwrap().trace.records().len(), n_records);
        assert!(
            names(&run).iter().all(|name| !name.starts_with('.')),
            "{:?}",
            names(&run)
        );
    }
}

/// The process has mapped the file when it is truncated.
#[cfg(target_os = "linux")]
#[test]
fn a_truncated_input_is_named() {
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
    let mut child = start(&["--quiet", "hotness", arg(&npy), "--out", arg(&out)]);
    let maps = PathBuf::from(format!("/proc/{}/maps", child.id()));
    assert!(wait_until(&mut child, || {
        fs::read_to_string(&maps).is_ok_and(|maps| maps.contains("big.npy"))
    }));
    let file = fs::File::options().write(true).open(&npy).unwrap();
    file.set_len(1_000_000).unwrap();
    let output = child.wait_with_output().unwrap();
    let stderr = stderr_of(&output);
    assert_eq!(
        output.status.code(),
        Some(2),
        "{:?} {stderr}",
        output.status
    );
    let line = format!(
        "moe-analyze: {}: the file was truncated while it was read; run the command again once it is complete\n",
        npy.display()
    );
    assert_eq!(stderr, line);
    assert_eq!(names(dir.path()), ["big.npy"]);
}

#[test]
fn record_without_a_trace_names_no_run() {
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
        .args([
            "--quiet",
            "record",
            "--trace",
            "off",
            "-p",
            "x",
            "-n",
            "3",
            "--model",
            arg(&model),
        ])
        .current_dir(dir.path())
        .output()
        .unwrap();
    let stderr = stderr_of(&output);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(
        !stderr.contains("runs/") && !stderr.contains("keeps"),
        "{stderr}"
    );
    assert_eq!(names(dir.path()), ["nan.gguf"]);
}

#[test]
fn truncated_buffer_events_are_reported() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    stdout_of(&["record", "-n", "2", "-p", "a", "--out", arg(&run)]);
    let events = run.join("buffers.jsonl");
    let bytes = fs::read(&events).unwrap();
    fs::write(&events, &bytes[..bytes.len() - 10]).unwrap();
    let assert = moe_analyze()
        .args(["buffers", arg(&run)])
        .assert()
        .success();
    let stderr = stderr_of(assert.get_output());
    assert!(stderr.contains("buffers.jsonl is truncated"), "{stderr}");
    let assert = moe_analyze().args(["info", arg(&run)]).assert().code(1);
    let stdout = String::from_utf8_lossy(&assert.get_output().stdout).into_owned();
    assert!(stdout.contains("buffers.jsonl is truncated"), "{stdout}");
}
