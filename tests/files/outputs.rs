//! Existing outputs, planted links, concurrent writers, and limits of the system.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use super::{MODEL, binary, contents, names, run_in, shell, start, stderr_of};
use crate::support::{arg, args, moe_analyze, repository, run};

/// The files of a conversion belong to one trace.
#[test]
fn force_removes_files_of_an_earlier_conversion() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let run = run_in(dir.path());
    let jsonl = at("t.jsonl");
    fs::write(&jsonl, "{\"t\":0,\"layer\":1,\"experts\":[5,1]}\n").unwrap();
    for (format, older, input) in
        [("thesis-json", "token-00099.json", &run), ("mesh-llm", "layer-099.csv", &jsonl)]
    {
        let out = at(format);
        let convert = ["convert", arg(input), "--to", format, "--out", arg(&out)];
        run![convert];
        let files = names(&out);
        fs::copy(out.join(&files[0]), out.join(older)).unwrap();
        for name in ["notes.txt", "token-1.json"] {
            fs::write(out.join(name), "older").unwrap();
        }
        run![convert, "--force"];
        let mut expected = [&files[..], &["notes.txt".into(), "token-1.json".into()]].concat();
        expected.sort();
        assert_eq!(names(&out), expected);
    }

    let tables = at("tables");
    run!["parquet", run, "--out", tables];
    fs::write(tables.join("notes.txt"), "mine").unwrap();
    run!["parquet", jsonl, "--out", tables, "--force"];
    assert_eq!(names(&tables), ["notes.txt", "routing.parquet"]);
    fs::write(tables.join("ops.parquet"), "of another program").unwrap();
    run!["parquet", jsonl, "--out", tables, "--force"];
    assert!(tables.join("ops.parquet").exists());
}

/// The map of a run's model stays next to the run's tables. A map of an unknown model is removed with a warning.
#[test]
fn keeps_map_of_the_same_model() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let (run, tables, jsonl) = (run_in(dir.path()), at("tables"), at("t.jsonl"));
    let map = tables.join("gguf-map.parquet");
    fs::write(&jsonl, "{\"t\":0,\"layer\":1,\"experts\":[5,1]}\n").unwrap();
    let parquet = |input: &Path| {
        let parquet = ["parquet", arg(input), "--out", arg(&tables), "--force"];
        let output = moe_analyze().args(parquet).assert().success();
        String::from_utf8(output.get_output().stderr.clone()).unwrap()
    };
    parquet(&run);
    for has_map in [true, false] {
        run!["gguf-map", repository(MODEL), "--out", map, "--force"];
        let expected = fs::read(&map).unwrap();
        if !has_map {
            fs::remove_file(run.join("gguf-map.parquet")).unwrap();
        }
        let stderr = parquet(&run);
        assert_eq!(fs::read(&map).unwrap(), expected, "{stderr}");
        assert!(!stderr.contains("removing"), "{stderr}");
    }
    run!["gguf-map", repository("fixtures/random-olmoe-F16.gguf"), "--out", map, "--force"];
    assert!(parquet(&run).contains("warning: removing "));
    assert!(!map.exists());
    run!["gguf-map", repository(MODEL), "--out", map];
    assert!(parquet(&jsonl).contains("warning: removing "));
    assert!(!map.exists());
}

#[test]
fn does_not_follow_planted_links() {
    let dir = tempfile::tempdir().unwrap();
    run_in(dir.path());
    let victim = dir.path().join("victim");
    fs::write(&victim, "precious").unwrap();
    // Temporary names that contain the process id; `exec` keeps it.
    for (plant, command) in [
        ("o/.ops.parquet.$BASHPID.tmp", "parquet run --out o"),
        ("o/.routing.parquet.$BASHPID.tmp", "parquet run --out o"),
        ("o/.$BASHPID.token-00000.json", "convert run --to thesis-json --out o --force"),
        ("o/.m.parquet.$BASHPID.tmp", "gguf-map run-model.gguf --out o/m.parquet"),
        ("o/.manifest.json.$BASHPID.tmp", "record -n 1 -p a --out o"),
        ("o/.$BASHPID.x.jsonl", "convert run --to jsonl --out o/x.jsonl"),
    ] {
        fs::create_dir(dir.path().join("o")).unwrap();
        fs::copy(repository(MODEL), dir.path().join("run-model.gguf")).unwrap();
        let script = format!("ln -s $PWD/victim {plant}; exec \"$0\" --quiet {command} >/dev/null");
        let output = shell(dir.path(), &script);
        assert!(output.status.success(), "{command}: {}", stderr_of(&output));
        assert_eq!(fs::read_to_string(&victim).unwrap(), "precious", "{command}");
        fs::remove_dir_all(dir.path().join("o")).unwrap();
    }
    let script = "mkdir o; echo s > o/.$BASHPID.x.jsonl; echo $BASHPID > pid; exec \"$0\" --quiet convert run --to jsonl --out o/x.jsonl";
    let output = shell(dir.path(), script);
    assert!(output.status.success(), "{}", stderr_of(&output));
    let process = fs::read_to_string(dir.path().join("pid")).unwrap();
    let kept = dir.path().join(format!("o/.{}.x.jsonl", process.trim()));
    assert_eq!(fs::read_to_string(kept).unwrap(), "s\n");
}

#[test]
fn refuses_output_that_is_a_symbolic_link() {
    let dir = tempfile::tempdir().unwrap();
    run_in(dir.path());
    let at = |name: &str| dir.path().join(name);
    fs::write(at("target"), "precious").unwrap();
    fs::create_dir(at("d")).unwrap();
    symlink("target", at("l.json")).unwrap();
    symlink("nowhere", at("dangling.svg")).unwrap();
    symlink("/proc/self/fd/1", at("stdout.jsonl")).unwrap();
    symlink("/dev/null", at("null.csv")).unwrap();
    symlink("d", at("e.json")).unwrap();
    fs::create_dir(at("tables")).unwrap();
    symlink("../target", at("tables/routing.parquet")).unwrap();
    fs::create_dir(at("thesis")).unwrap();
    symlink("../target", at("thesis/token-00000.json")).unwrap();
    let before = names(dir.path());
    for (link, command) in [
        ("l.json", "hotness run --out l.json"),
        ("dangling.svg", "hotness run --plot dangling.svg"),
        ("null.csv", "accesses run --out null.csv"),
        ("stdout.jsonl", "convert run --to jsonl --out stdout.jsonl"),
        ("/dev/stdout", "convert run --to jsonl --out /dev/stdout"),
        ("/dev/fd/1", "convert run --to jsonl --out /dev/fd/1"),
        ("/proc/self/fd/1", "convert run --to jsonl --out /proc/self/fd/1"),
        ("e.json", "graph run --out e.json"),
        ("tables/routing.parquet", "parquet run --out tables"),
    ] {
        for force in ["", " --force"] {
            // Standard output is a regular file.
            let script = format!("exec \"$0\" --quiet {command}{force} > stdout.txt");
            let output = shell(dir.path(), &script);
            let stderr = stderr_of(&output);
            assert_eq!(output.status.code(), Some(2), "{command}{force}: {stderr}");
            let expected = format!("{link} is a symbolic link; pass the path of its target");
            assert!(stderr.contains(&expected), "{command}{force}: {stderr}");
            fs::remove_file(at("stdout.txt")).unwrap();
            assert_eq!(names(dir.path()), before, "{command}{force}");
        }
    }
    let output = shell(dir.path(), "\"$0\" convert run --to thesis-json --out thesis --force");
    let stderr = stderr_of(&output);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("token-00000.json is a symbolic link"), "{stderr}");
    assert!(at("thesis/token-00000.json").is_symlink());
    for link in ["l.json", "dangling.svg", "tables/routing.parquet"] {
        assert!(at(link).is_symlink(), "{link}");
    }
    assert_eq!(fs::read_to_string(at("target")).unwrap(), "precious");
    // A link in a parent directory is followed.
    run!["hotness", at("run"), "--out", at("e.json/l.json")];
    assert!(at("d/l.json").is_file());
}

#[test]
fn one_of_two_concurrent_writers_succeeds() {
    let dir = tempfile::tempdir().unwrap();
    let run = run_in(dir.path());
    for round in 0..6 {
        let out = dir.path().join(format!("out-{round}"));
        let commands = [
            args!["parquet", run, "--out", out],
            args!["convert", run, "--to", "thesis-json", "--out", out],
            args!["convert", run, "--to", "jsonl", "--out", out],
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
            assert!(names(&out).iter().all(|name| !name.starts_with('.')), "{:?}", names(&out));
        }
    }
}

#[test]
fn concurrent_records_use_different_default_directories() {
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
fn file_size_limit_is_a_single_line_error() {
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
        assert!(line.starts_with("moe-analyze: ") && line.contains("File too large"), "{line}");
        assert!(!line.contains("Custom") && !line.contains("IoError"), "{line}");
        assert_eq!(names(dir.path()), before);
    }
}

/// The new manifest is on disk before any file of the old run is replaced.
#[test]
fn failed_manifest_keeps_the_old_run() {
    let dir = tempfile::tempdir().unwrap();
    let run = run_in(dir.path());
    let before = contents(&run);
    // A manifest is larger than 1 KiB.
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
