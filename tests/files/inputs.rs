//! No output replaces an input or another output of the same command.

use std::fs;
use std::os::unix::fs::symlink;

use super::{MODEL, contents, names, run_in, stderr_of};
use crate::support::{arg, fail, moe_analyze, repository, run};

#[test]
fn rejects_outputs_that_are_inputs() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let run = run_in(dir.path());
    fs::copy(repository(MODEL), at("m.gguf")).unwrap();
    fs::hard_link(at("m.gguf"), at("hard.gguf")).unwrap();
    symlink(at("m.gguf"), at("soft.gguf")).unwrap();
    fs::hard_link(run.join("manifest.json"), at("hard.json")).unwrap();
    symlink(&run, at("soft-run")).unwrap();
    run!["hotness", run, "--out", at("learn.json")];
    fs::hard_link(at("learn.json"), at("learn-2.json")).unwrap();
    fs::write(at("prompts.jsonl"), "{\"prompt\": \"a\"}\n").unwrap();
    fs::hard_link(at("prompts.jsonl"), at("usage.json")).unwrap();
    run!["parquet", run, "--out", at("tables")];
    run!["convert", run, "--to", "thesis-json", "--out", at("thesis")];
    fs::create_dir(at("mesh")).unwrap();
    let mesh = repository("fixtures/foreign/mesh-llm");
    for name in names(&mesh) {
        fs::copy(mesh.join(&name), at("mesh").join(&name)).unwrap();
    }
    symlink("mesh", at("soft-mesh")).unwrap();
    // A line that is also a valid prompt.
    fs::write(run.join("transfers.jsonl"), "{\"prompt\": \"a\"}\n").unwrap();
    symlink(run.join("trace.bin"), at("soft-trace")).unwrap();
    let model = at("m.gguf");
    let all = || ["run", ".", "tables", "thesis", "mesh"].map(|name| contents(&at(name)));
    let before = all();

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
        &["report", "run", "--out", "run/report.html"],
        &["hotness", "run", "--out", "run/manifest.json"],
        &["hotness", "run", "--matrix", "soft-run/matrix.csv"],
        &["hotness", "run", "--plot", "run/plot.svg"],
        &["hotness", "learn.json", "--out", "learn-2.json"],
        &["hotness", "tables", "--matrix", "tables/routing.parquet"],
        &["accesses", "run", "--out", "run/accesses.csv"],
        &["graph", "run/trace.bin", "--out", "run/manifest.json"],
        &["graph", "soft-trace", "--out", "run/manifest.json"],
        &["hotness", "run/trace.bin", "--out", "run/manifest.json"],
        &["hotness", "run/trace.bin", "--matrix", "run/gguf-map.parquet"],
        &["accesses", "run/trace.bin", "--model", "m.gguf", "--out", "run/manifest.json"],
        &["buffers", "run/buffers.jsonl", "--out", "run/manifest.json"],
        &["parquet", "run/trace.bin", "--out", "run"],
        &["record", "--prompts", "run/transfers.jsonl", "--out", "run"],
        &["simulate", "run", "--plot", "run/plot.svg"],
        &["plan", "learn.json", "--model", "m.gguf", "--budget-mib", "1", "--out", "learn-2.json"],
        &["parquet", "run", "--out", "run"],
        &["parquet", "run", "--dataset", "run/data"],
        &["convert", "run", "--to", "jsonl", "--out", "run/trace.bin"],
        &["convert", "thesis", "--to", "thesis-json", "--out", "thesis"],
        &["convert", "mesh", "--to", "mesh-llm", "--out", "mesh"],
        &["convert", "soft-mesh", "--to", "mesh-llm", "--out", "mesh/sub"],
        &["convert", "mesh", "--to", "mesh-llm", "--out", "."],
        &["parquet", "mesh", "--out", "mesh"],
        &["hotness", "mesh", "--out", "mesh/learn.json"],
        &[
            "record", "--prompts", "prompts.jsonl", "--expert-trace-output", "usage.json", "--out",
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
        assert!(line.starts_with("moe-analyze: ") && line.contains("input"), "{case:?}: {stderr}");
    }
    assert!(before == all(), "a refused command changed a file");
    assert!(model.exists());
}

/// A trace.bin alone is not a run, so outputs can be next to it.
#[test]
fn writes_next_to_a_trace_without_a_run() {
    let dir = tempfile::tempdir().unwrap();
    let run = run_in(dir.path());
    let alone = dir.path().join("alone");
    fs::create_dir(&alone).unwrap();
    let trace = alone.join("trace.bin");
    fs::copy(run.join("trace.bin"), &trace).unwrap();
    run!["hotness", trace, "--out", alone.join("learn.json")];
    let line = fail!["hotness", trace, "--out", trace, "--force"];
    assert!(line.contains("is an input"), "{line}");
}

#[test]
fn rejects_shard_of_the_input_as_output() {
    let dir = tempfile::tempdir().unwrap();
    let shard = |n: u32| dir.path().join(format!("m-0000{n}-of-00002.gguf"));
    fs::write(shard(1), "first").unwrap();
    fs::write(shard(2), "second").unwrap();
    let line = fail!["gguf-map", shard(1), "--manifest-out", shard(2), "--force"];
    assert!(line.contains("is an input"), "{line}");
    assert_eq!(fs::read_to_string(shard(2)).unwrap(), "second");
}

#[test]
fn rejects_two_outputs_with_one_path() {
    let dir = tempfile::tempdir().unwrap();
    let run = run_in(dir.path());
    fs::create_dir(dir.path().join("d")).unwrap();
    symlink("d", dir.path().join("e")).unwrap();
    for case in [
        &["hotness", arg(&run), "--out", "y.json", "--matrix", "./y.json"][..],
        &["hotness", arg(&run), "--out", "d/y.json", "--matrix", "e/y.json"],
        &["parquet", arg(&run), "--out", "t", "--dataset", "d/../t"],
        &["record", "-n", "1", "-p", "a", "--out", "d", "--expert-trace-output", "d/manifest.json"],
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
fn checks_output_of_the_environment() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let args = ["record", "-n", "1", "-p", "a", "--force", "--out", arg(&out)];
    run![args];
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
fn output_of_the_environment_replaces_no_input() {
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
