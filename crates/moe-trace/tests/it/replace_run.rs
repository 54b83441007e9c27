//! Creating a run in an existing directory: what is replaced, what is refused, and concurrent recorders.

use std::fs;

use moe_trace::buffers::{self, BufferEvent, Change};
use moe_trace::graph::{self, Graph, GraphBuilder};
use moe_trace::ops::MUL_MAT;
use moe_trace::{Error, Manifest, Phase, Run, RunOptions, RunWriter, TokenId};

use super::common::{gpt_oss, manifest, record};

/// Replaces an existing run.
fn force() -> RunOptions {
    RunOptions {
        force: true,
        ..Default::default()
    }
}

#[test]
fn replaces_only_a_run_directory_and_only_with_force() {
    let (_, map) = gpt_oss();
    let tmp = tempfile::tempdir().unwrap();
    let dir = tmp.path().join("run");
    let mut writer = RunWriter::create(&dir, manifest(), &map, RunOptions::default()).unwrap();
    *writer.next_record().unwrap() = record(1, MUL_MAT, "a");
    writer.finish().unwrap();
    fs::write(dir.join("notes.txt"), "mine").unwrap();

    let error = RunWriter::create(&dir, manifest(), &map, RunOptions::default())
        .err()
        .unwrap();
    assert!(matches!(error, Error::Exists { .. }), "{error}");
    assert_eq!(Run::open(&dir).unwrap().trace.records().len(), 1);
    RunWriter::create(&dir, manifest(), &map, force())
        .unwrap()
        .finish()
        .unwrap();
    assert_eq!(Run::open(&dir).unwrap().trace.records().len(), 0);
    assert_eq!(fs::read_to_string(dir.join("notes.txt")).unwrap(), "mine");

    let other = tmp.path().join("home");
    fs::create_dir(&other).unwrap();
    fs::write(other.join("thesis.tex"), "text").unwrap();
    for place in [&other, &other.join("thesis.tex")] {
        let error = RunWriter::create(place, manifest(), &map, force())
            .err()
            .unwrap();
        assert!(matches!(error, Error::NotReplaceable { .. }), "{error}");
    }
    assert_eq!(fs::read_dir(&other).unwrap().count(), 1);
}

/// The program prints it without reading the manifest again.
#[test]
fn finish_returns_the_expansion_that_the_manifest_contains() {
    let (_, map) = gpt_oss();
    let tmp = tempfile::tempdir().unwrap();
    let dir = tmp.path().join("run");
    let options = RunOptions {
        compress: true,
        ..Default::default()
    };
    let mut writer = RunWriter::create(&dir, manifest(), &map, options).unwrap();
    for n in 1..=600 {
        *writer.next_record().unwrap() = record(n, MUL_MAT, "a");
    }
    let (records, expansion) = writer.finish_with_expansion().unwrap();
    let stored = Run::open(&dir).unwrap().manifest.unwrap();
    assert_eq!((records, stored.records), (600, Some(600)));
    let bytes = expansion.unwrap().bytes;
    assert!(bytes > 0 && bytes.is_multiple_of(1024), "{bytes}");
    assert_eq!(stored.expansion.unwrap().bytes, bytes);
}

/// A link to itself is inaccessible also for root, who has all permissions.
#[cfg(unix)]
#[test]
fn reports_a_manifest_that_cannot_be_read() {
    let (_, map) = gpt_oss();
    let tmp = tempfile::tempdir().unwrap();
    let dir = tmp.path().join("run");
    RunWriter::create(&dir, manifest(), &map, RunOptions::default())
        .unwrap()
        .finish()
        .unwrap();
    let manifest_json = dir.join("manifest.json");
    fs::remove_file(&manifest_json).unwrap();
    std::os::unix::fs::symlink("manifest.json", &manifest_json).unwrap();
    let error = RunWriter::check(&dir, true).unwrap_err();
    assert!(matches!(error, Error::Io { .. }), "{error}");
    assert!(error.to_string().contains("manifest.json"), "{error}");
}

/// A recorder must not change directories with files of other programs.
#[test]
fn refuses_a_directory_with_a_manifest_of_another_program() {
    let (_, map) = gpt_oss();
    let run_manifest = format!("{{\"schema\": \"{}\"}}", moe_trace::manifest::SCHEMA);
    for (manifest_json, other) in [
        (
            r#"{"manifest_version": 3, "name": "an extension"}"#,
            "bg.js",
        ),
        ("{}", "bg.js"),
        ("{}", "trace.bin"),
        (r#"{"schema": "another.v1"}"#, "trace.bin"),
        ("not JSON", "trace.bin"),
        (&run_manifest, "bg.js"),
    ] {
        let tmp = tempfile::tempdir().unwrap();
        fs::write(tmp.path().join("manifest.json"), manifest_json).unwrap();
        fs::write(tmp.path().join(other), "precious").unwrap();
        let error = RunWriter::create(tmp.path(), manifest(), &map, force())
            .err()
            .unwrap();
        assert!(matches!(error, Error::NotReplaceable { .. }), "{error}");
        let read = |name| fs::read_to_string(tmp.path().join(name)).unwrap();
        assert_eq!(
            (read("manifest.json"), read(other)),
            (manifest_json.into(), "precious".into())
        );
        assert_eq!(fs::read_dir(tmp.path()).unwrap().count(), 2);
    }
}

#[test]
fn accepts_a_directory_of_an_interrupted_creation() {
    let (_, map) = gpt_oss();
    let temporary = |name: &str| format!(".{name}.abcDEF012345.moe-tmp");
    let states: [&[&str]; 5] = [
        &[".manifest.json.1.tmp"],
        &[&temporary("manifest.json")],
        &[
            &temporary("manifest.json"),
            &temporary("trace.bin"),
            "buffers.jsonl",
        ],
        &[
            &temporary("manifest.json"),
            "buffers.jsonl",
            "gguf-map.parquet",
        ],
        &[
            &temporary("manifest.json"),
            "buffers.jsonl",
            "gguf-map.parquet",
            "trace.bin",
        ],
    ];
    for state in states {
        let tmp = tempfile::tempdir().unwrap();
        for name in state {
            fs::write(tmp.path().join(name), "").unwrap();
        }
        let writer = RunWriter::create(tmp.path(), manifest(), &map, RunOptions::default());
        writer.unwrap().finish().unwrap();
        assert!(Run::open(tmp.path()).is_ok());
        assert_eq!(fs::read_dir(tmp.path()).unwrap().count(), 4, "{state:?}");
    }
    // A map of the run that was being created.
    let tmp = tempfile::tempdir().unwrap();
    let started = tmp.path().join(temporary("manifest.json"));
    manifest().write(&started).unwrap();
    fs::write(tmp.path().join("gguf-map.parquet"), "a map").unwrap();
    let writer = RunWriter::create(tmp.path(), manifest(), &map, RunOptions::default());
    assert_eq!(writer.unwrap().finish().unwrap(), 0);

    // A file with contents, or a file without a temporary manifest, is not from an interrupted creation.
    for (name, contents, other) in [
        ("gguf-map.parquet", "", None),
        ("trace.bin", "records", Some("manifest.json")),
        ("buffers.jsonl", "precious", Some("manifest.json")),
        ("gguf-map.parquet", "precious", Some("manifest.json")),
        ("buffers.jsonl", "", Some("h.json")),
        ("buffers.jsonl", "precious", Some("h.json")),
        ("gguf-map.parquet", "precious", Some("gguf-map.parquet")),
    ] {
        let tmp = tempfile::tempdir().unwrap();
        fs::write(tmp.path().join(name), contents).unwrap();
        if let Some(other) = other {
            fs::write(tmp.path().join(temporary(other)), "").unwrap();
        }
        let error = RunWriter::create(tmp.path(), manifest(), &map, force())
            .err()
            .unwrap();
        assert!(matches!(error, Error::NotReplaceable { .. }), "{error}");
        assert_eq!(fs::read_to_string(tmp.path().join(name)).unwrap(), contents);
    }
}

#[test]
fn refuses_to_read_a_run_that_was_being_replaced() {
    let (_, map) = gpt_oss();
    let tmp = tempfile::tempdir().unwrap();
    let mut writer =
        RunWriter::create(tmp.path(), manifest(), &map, RunOptions::default()).unwrap();
    *writer.next_record().unwrap() = record(1, MUL_MAT, "a");
    writer.finish().unwrap();
    let path = tmp.path().join("manifest.json");
    let mut written = Manifest::read(&path).unwrap();
    written.replacing = true;
    written.write(&path).unwrap();
    let error = Run::open(tmp.path()).unwrap_err();
    assert!(matches!(error, Error::Replacing { .. }), "{error}");
    // The old records still exist.
    assert_eq!(
        Run::open(tmp.path().join("trace.bin"))
            .unwrap()
            .trace
            .records()
            .len(),
        1
    );
    RunWriter::create(tmp.path(), manifest(), &map, force())
        .unwrap()
        .finish()
        .unwrap();
    assert!(Run::open(tmp.path()).is_ok());
}

#[cfg(unix)]
#[test]
fn does_not_follow_symlinks_in_a_run() {
    use std::os::unix::fs::symlink;
    let (_, map) = gpt_oss();
    let tmp = tempfile::tempdir().unwrap();
    let (dir, victims) = (tmp.path().join("run"), tmp.path().join("victims"));
    let writer = RunWriter::create(&dir, manifest(), &map, RunOptions::default()).unwrap();
    writer.finish().unwrap();
    fs::create_dir(&victims).unwrap();
    let names = ["transfers.jsonl", "prompt.json", "manifest.json.tmp"];
    for name in names {
        fs::write(victims.join(name), "precious").unwrap();
    }
    symlink(victims.join("transfers.jsonl"), dir.join("transfers.jsonl")).unwrap();
    symlink(&victims, dir.join("graph")).unwrap();
    let process = std::process::id();
    symlink(
        victims.join("manifest.json.tmp"),
        dir.join(format!(".manifest.json.{process}.tmp")),
    )
    .unwrap();
    let mut writer = RunWriter::create(&dir, manifest(), &map, force()).unwrap();
    let graph = GraphBuilder::new().finish(Phase::Prompt, TokenId(0));
    writer.write_graph(Phase::Prompt, &graph).unwrap();
    writer.write_transfers(&[]).unwrap();
    writer.finish().unwrap();
    for name in names {
        assert_eq!(
            fs::read_to_string(victims.join(name)).unwrap(),
            "precious",
            "{name}"
        );
    }
    assert!(Graph::read(&graph::path(&dir, Phase::Prompt)).is_ok());
    assert!(!dir.join("graph").is_symlink());
}

/// The new file would replace the link, not its target.
#[cfg(unix)]
#[test]
fn refuses_a_run_in_which_a_file_is_a_symlink() {
    let (_, map) = gpt_oss();
    let tmp = tempfile::tempdir().unwrap();
    let dir = tmp.path().join("run");
    let writer = RunWriter::create(&dir, manifest(), &map, RunOptions::default()).unwrap();
    writer.finish().unwrap();
    for name in ["buffers.jsonl", "trace.bin", "manifest.json"] {
        let (file, target) = (dir.join(name), tmp.path().join(name));
        fs::rename(&file, &target).unwrap();
        std::os::unix::fs::symlink(&target, &file).unwrap();
        let expected = format!(
            "{} is a symbolic link; pass the path of its target",
            file.display()
        );
        let before = fs::read(&target).unwrap();
        let error = RunWriter::check(&dir, true).unwrap_err();
        assert_eq!(error.to_string(), expected);
        let error = RunWriter::create(&dir, manifest(), &map, force())
            .err()
            .unwrap();
        assert_eq!(error.to_string(), expected);
        assert!(file.is_symlink());
        assert_eq!(fs::read(&target).unwrap(), before);
        fs::remove_file(&file).unwrap();
        fs::rename(&target, &file).unwrap();
    }
}

#[test]
fn does_not_replace_a_run_that_is_being_recorded() {
    let (_, map) = gpt_oss();
    let tmp = tempfile::tempdir().unwrap();
    let dir = tmp.path().join("run");
    let mut writer = RunWriter::create(&dir, manifest(), &map, RunOptions::default()).unwrap();
    *writer.next_record().unwrap() = record(1, MUL_MAT, "a");
    for force in [false, true] {
        let options = RunOptions {
            force,
            ..Default::default()
        };
        let error = RunWriter::create(&dir, manifest(), &map, options)
            .err()
            .unwrap();
        assert!(matches!(error, Error::InUse { .. }), "{error:?}");
    }
    assert!(Run::open(&dir).is_ok(), "the lock does not block readers");
    assert_eq!(writer.finish().unwrap(), 1);
    assert_eq!(Run::open(&dir).unwrap().trace.records().len(), 1);
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 4);
}

#[test]
fn removes_graphs_and_buffers_of_the_replaced_run() {
    let (_, map) = gpt_oss();
    let tmp = tempfile::tempdir().unwrap();
    let mut writer = RunWriter::create(tmp.path(), manifest(), &map, force()).unwrap();
    let graph = GraphBuilder::new().finish(Phase::Prompt, TokenId(0));
    writer.write_graph(Phase::Prompt, &graph).unwrap();
    let event = BufferEvent {
        timestamp_ms: 0.5,
        timestamp_ns: Some(500_000),
        change: Change::Dealloc { buffer_id: 3 },
    };
    writer
        .write_buffer_events(std::slice::from_ref(&event))
        .unwrap();
    writer
        .write_buffer_events(std::slice::from_ref(&event))
        .unwrap();
    writer.finish().unwrap();
    let written = graph::path(tmp.path(), Phase::Prompt);
    assert_eq!(Graph::read(&written).unwrap(), graph);
    let events = || buffers::read(&tmp.path().join(buffers::FILE_NAME)).unwrap();
    assert_eq!(events(), [event.clone(), event]);

    drop(RunWriter::create(tmp.path(), manifest(), &map, force()).unwrap());
    assert!(!written.exists());
    assert!(events().is_empty());
}

#[test]
fn only_one_of_concurrent_recorders_gets_the_directory() {
    let (_, map) = gpt_oss();
    let tmp = tempfile::tempdir().unwrap();
    let dir = tmp.path().join("deep/run");
    let started = std::sync::Barrier::new(4);
    let outcomes: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    let writer = RunWriter::create(&dir, manifest(), &map, RunOptions::default());
                    started.wait();
                    writer.map(drop)
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert_eq!(outcomes.iter().filter(|o| o.is_ok()).count(), 1);
    for error in outcomes.iter().filter_map(|outcome| outcome.as_ref().err()) {
        assert!(matches!(error, Error::InUse { .. }), "{error:?}");
    }
    assert!(Run::open(&dir).unwrap().manifest.is_some());
}

#[cfg(unix)]
#[test]
fn keeps_the_old_run_if_a_new_file_cannot_be_created() {
    let (_, map) = gpt_oss();
    let tmp = tempfile::tempdir().unwrap();
    let dir = tmp.path().join("run");
    let mut writer = RunWriter::create(&dir, manifest(), &map, RunOptions::default()).unwrap();
    *writer.next_record().unwrap() = record(1, MUL_MAT, "a");
    writer.finish().unwrap();
    // The new map cannot be created under its temporary name.
    let temporary = format!(".gguf-map.parquet.{}.tmp", std::process::id());
    fs::create_dir(dir.join(&temporary)).unwrap();
    let error = RunWriter::create(&dir, manifest(), &map, force())
        .err()
        .unwrap();
    assert!(error.to_string().contains("gguf-map"), "{error}");
    fs::remove_dir(dir.join(&temporary)).unwrap();
    let run = Run::open(&dir).unwrap();
    assert_eq!(run.trace.records().len(), 1);
    assert_eq!(run.manifest.unwrap().records, Some(1));
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 4);
}

/// The removal of an old file is the last step that can fail.
#[test]
fn restores_the_old_run_after_a_failed_removal() {
    let (_, map) = gpt_oss();
    let tmp = tempfile::tempdir().unwrap();
    let mut writer =
        RunWriter::create(tmp.path(), manifest(), &map, RunOptions::default()).unwrap();
    *writer.next_record().unwrap() = record(1, MUL_MAT, "a");
    let graph = GraphBuilder::new().finish(Phase::Prompt, TokenId(0));
    writer.write_graph(Phase::Prompt, &graph).unwrap();
    let event = BufferEvent {
        timestamp_ms: 0.5,
        timestamp_ns: Some(500_000),
        change: Change::Dealloc { buffer_id: 3 },
    };
    writer.write_buffer_events(&[event]).unwrap();
    writer.finish().unwrap();
    fs::create_dir(tmp.path().join("transfers.jsonl")).unwrap();
    let files = [
        "manifest.json",
        "gguf-map.parquet",
        "buffers.jsonl",
        "trace.bin",
        "graph/prompt.json",
    ];
    let contents = || files.map(|name| fs::read(tmp.path().join(name)).unwrap());
    let before = contents();

    let error = RunWriter::create(tmp.path(), manifest(), &map, force())
        .err()
        .unwrap();
    assert!(error.to_string().contains("transfers.jsonl"), "{error}");
    assert!(contents() == before);
    assert!(Run::open(tmp.path()).is_ok());
    assert_eq!(fs::read_dir(tmp.path()).unwrap().count(), 6);

    fs::remove_dir(tmp.path().join("transfers.jsonl")).unwrap();
    RunWriter::create(tmp.path(), manifest(), &map, force()).unwrap();
    assert!(!graph::path(tmp.path(), Phase::Prompt).exists());
    assert_eq!(fs::read_dir(tmp.path().join("graph")).unwrap().count(), 0);
}

#[test]
fn check_changes_nothing() {
    let (_, map) = gpt_oss();
    let tmp = tempfile::tempdir().unwrap();
    let dir = tmp.path().join("new/run");
    RunWriter::check(&dir, false).unwrap();
    assert_eq!(fs::read_dir(tmp.path()).unwrap().count(), 0);
    let writer = RunWriter::create(&dir, manifest(), &map, RunOptions::default()).unwrap();
    assert!(matches!(
        RunWriter::check(&dir, true),
        Err(Error::InUse { .. })
    ));
    writer.finish().unwrap();
    assert!(matches!(
        RunWriter::check(&dir, false),
        Err(Error::Exists { .. })
    ));
    RunWriter::check(&dir, true).unwrap();
    assert!(Run::open(&dir).is_ok());
    let other = tmp.path().join("new");
    assert!(matches!(
        RunWriter::check(&other, true),
        Err(Error::NotReplaceable { .. })
    ));
}
