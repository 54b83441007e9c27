//! Run directories: written, refused, replaced, cut, read back.

use std::fs;
use std::io::ErrorKind;

use moe_trace::buffers::{self, BufferEvent, Change};
use moe_trace::graph::{self, Graph, GraphBuilder};
use moe_trace::ops::{MUL_MAT, MUL_MAT_ID};
use moe_trace::{
    Error, Manifest, ManifestFault, Phase, Run, RunOptions, RunWriter, TokenId, Trace,
};
use zerocopy::IntoBytes;

use super::common::{expert_operation, gpt_oss, manifest, record};

#[test]
fn a_run_reads_back_as_written() {
    let (_, map) = gpt_oss();
    let tmp = tempfile::tempdir().unwrap();
    let dir = tmp.path().join("runs/demo");
    let mut writer = RunWriter::create(&dir, manifest(), &map, RunOptions::default()).unwrap();
    // Several blocks, one of them handed over before it is full.
    for i in 1..=1000 {
        *writer.next_record().unwrap() = record(i, MUL_MAT, &format!("node-{i}"));
        if i == 300 {
            writer.flush().unwrap();
        }
    }
    writer.manifest_mut().tokens.generated = 9;
    assert_eq!(writer.finish().unwrap(), 1000);

    let run = Run::open(&dir).unwrap();
    assert_eq!(run.trace.records().len(), 1000);
    for (i, read) in (1..).zip(run.trace.records()) {
        assert_eq!(
            read.as_bytes(),
            record(i, MUL_MAT, &format!("node-{i}")).as_bytes()
        );
    }
    assert_eq!(run.trace.cut_bytes(), 0);
    assert_eq!(run.map.as_ref(), Some(&map));
    let read = run.manifest.as_ref().unwrap();
    assert_eq!(read.records, Some(1000));
    assert_eq!(read.tokens.generated, 9);
    assert_eq!(read.model, manifest().model);
    assert!(
        read.run_id.starts_with("20260701T123456Z-"),
        "{}",
        read.run_id
    );
    assert_eq!(run.id(), read.run_id);
    assert_eq!(run.ops().name(MUL_MAT_ID), Some("MUL_MAT_ID"));
}

#[test]
fn the_manifest_follows_its_schema() {
    let (_, map) = gpt_oss();
    let tmp = tempfile::tempdir().unwrap();
    let schema = fs::read_to_string(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../schemas/run.schema.json"
    ))
    .unwrap();
    let schema = jsonschema::validator_for(&serde_json::from_str(&schema).unwrap()).unwrap();
    let check = |dir: &std::path::Path| {
        let json: serde_json::Value =
            serde_json::from_slice(&fs::read(dir.join("manifest.json")).unwrap()).unwrap();
        let faults: Vec<_> = schema
            .iter_errors(&json)
            .map(|error| error.to_string())
            .collect();
        assert!(faults.is_empty(), "{faults:?}");
        json
    };
    let mut full = manifest();
    let gpu = moe_trace::manifest::Gpu {
        device: Some("CUDA0".into()),
        ordinal: Some(0),
        name: "GPU".into(),
        memory_bytes: 1 << 34,
        driver: None,
        limit_bytes: Some(1 << 32),
        peak_bytes: Some(1 << 31),
        scratchpad_bytes: Some(1 << 20),
        fallbacks: Some(moe_trace::manifest::Fallbacks {
            operations: 3,
            tensors: 1,
            first_error: Some("no room".into()),
        }),
        offload_min_batch: Some(32),
        post_fetch: Some(moe_trace::manifest::PostFetch {
            enable: true,
            max_transfers: 8,
            ..Default::default()
        }),
    };
    let second = moe_trace::manifest::Gpu {
        device: Some("CUDA1".into()),
        ..gpu.clone()
    };
    full.set_gpus(vec![gpu, second]);
    full.sampling.seed = Some(3);
    full.sampling
        .parameters
        .insert("temperature".into(), 0.8.into());
    full.prompts = Some(vec!["The".into()]);
    let dir = tmp.path().join("run");
    let writer = RunWriter::create(&dir, full, &map, RunOptions::default()).unwrap();
    let json = check(&dir);
    assert_eq!(json.get("records"), None);
    assert_eq!(json["ops"]["30"], "MUL_MAT_ID");
    assert_eq!(json["sampling"]["temperature"], 0.8);
    assert_eq!(json["gpu"]["limit_bytes"], 1u64 << 32);
    assert_eq!(json["gpus"][0], json["gpu"]);
    assert_eq!(json["gpus"][1]["device"], "CUDA1");
    writer.finish().unwrap();
    assert_eq!(check(&dir)["records"], 0);

    let mut wrong = json.clone();
    wrong["model"]["files"][0]["size_bytes"] = (-1).into();
    assert!(!schema.is_valid(&wrong));
    let mut wrong = json.clone();
    wrong["gpu"]["peak_bytes"] = "2 GiB".into();
    assert!(!schema.is_valid(&wrong));
}

#[test]
fn keys_of_later_versions_are_kept() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("manifest.json");
    fs::write(
        &path,
        r#"{"schema":"moe-analyze.run.v1","later":{"a":[1]}}"#,
    )
    .unwrap();
    Manifest::read(&path).unwrap().write(&path).unwrap();
    let json: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    assert_eq!(json["later"]["a"][0], 1);

    // Within an object, unknown keys are ignored.
    fs::write(
        &path,
        r#"{"schema":"moe-analyze.run.v1","model":{"arch":"olmoe","later":1},"host":{"later":{}}}"#,
    )
    .unwrap();
    assert_eq!(Manifest::read(&path).unwrap().model.arch, "olmoe");

    fs::write(&path, r#"{"schema":"moe-analyze.run.v9"}"#).unwrap();
    let error = Manifest::read(&path).unwrap_err();
    assert!(
        matches!(&error, Error::Manifest { path: at, fault: ManifestFault::Schema { found } }
            if *at == path && found == "moe-analyze.run.v9"),
        "{error:?}"
    );
}

#[test]
fn a_manifest_may_have_a_byte_order_mark() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("manifest.json");
    let written = manifest();
    written.write(&path).unwrap();
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, format!("\u{feff}{text}")).unwrap();
    assert_eq!(Manifest::read(&path).unwrap(), written);
    assert_eq!(Manifest::missing_keys(&path).unwrap(), Vec::<&str>::new());
}

#[test]
fn what_was_flushed_is_readable_before_the_end() {
    let (_, map) = gpt_oss();
    let tmp = tempfile::tempdir().unwrap();
    let mut writer =
        RunWriter::create(tmp.path(), manifest(), &map, RunOptions::default()).unwrap();
    *writer.next_record().unwrap() = record(1, MUL_MAT, "a");
    writer.flush().unwrap();
    writer.flush().unwrap();
    // A slot that is not filled is no record, now or later.
    writer.next_record().unwrap();
    writer.flush().unwrap();
    assert_eq!(writer.records(), 1);
    // A thread writes it; the deadline only ends a test that would wait for ever.
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(120);
    while Trace::open(tmp.path().join("trace.bin"))
        .unwrap()
        .records()
        .is_empty()
    {
        assert!(
            std::time::Instant::now() < deadline,
            "the flushed record never arrived"
        );
        std::thread::yield_now();
    }
    writer.next_record().unwrap();
    *writer.next_record().unwrap() = record(2, MUL_MAT, "b");
    assert_eq!(writer.records(), 2);
    writer.next_record().unwrap();
    drop(writer);

    let run = Run::open(tmp.path()).unwrap();
    assert_eq!(
        run.trace
            .records()
            .iter()
            .map(|r| r.timestamp_ns.get())
            .collect::<Vec<_>>(),
        [1, 2]
    );
    assert_eq!(run.trace.size_bytes(), 2048);
    assert_eq!(
        run.manifest.unwrap().records,
        None,
        "a writer that was dropped has not finished"
    );
}

#[test]
fn the_limit_stops_the_recording_and_loses_nothing() {
    let (_, map) = gpt_oss();
    let tmp = tempfile::tempdir().unwrap();
    let options = RunOptions {
        max_trace_bytes: Some(3 * 1024 + 5),
        ..Default::default()
    };
    let mut writer = RunWriter::create(tmp.path(), manifest(), &map, options).unwrap();
    assert!(writer.has_room(3) && !writer.has_room(4));
    for i in 1..=3 {
        *writer.next_record().unwrap() = record(i, MUL_MAT, "a");
    }
    for _ in 0..2 {
        let Err(Error::TraceFull {
            max_bytes: 3072, ..
        }) = writer.next_record()
        else {
            panic!("the limit holds")
        };
    }
    assert!(writer.has_room(0) && !writer.has_room(1));
    assert_eq!(writer.finish().unwrap(), 3);
    assert_eq!(
        Trace::open(tmp.path().join("trace.bin"))
            .unwrap()
            .records()
            .len(),
        3
    );
}

#[test]
fn replaces_only_a_run_directory_and_only_on_request() {
    let (_, map) = gpt_oss();
    let tmp = tempfile::tempdir().unwrap();
    let force = RunOptions {
        force: true,
        ..Default::default()
    };
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
    RunWriter::create(&dir, manifest(), &map, force)
        .unwrap()
        .finish()
        .unwrap();
    assert_eq!(Run::open(&dir).unwrap().trace.records().len(), 0);
    assert_eq!(fs::read_to_string(dir.join("notes.txt")).unwrap(), "mine");

    let other = tmp.path().join("home");
    fs::create_dir(&other).unwrap();
    fs::write(other.join("thesis.tex"), "text").unwrap();
    for place in [&other, &other.join("thesis.tex")] {
        let error = RunWriter::create(place, manifest(), &map, force)
            .err()
            .unwrap();
        assert!(matches!(error, Error::NotReplaceable { .. }), "{error}");
    }
    assert_eq!(fs::read_dir(&other).unwrap().count(), 1);
}

/// Files of other programs in a directory that a recorder must not touch.
#[test]
fn refuses_a_directory_with_another_programs_manifest() {
    let (_, map) = gpt_oss();
    let force = RunOptions {
        force: true,
        ..Default::default()
    };
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
        let error = RunWriter::create(tmp.path(), manifest(), &map, force)
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
fn takes_a_directory_that_an_interrupted_creation_left() {
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

    // Without a temporary manifest, or with contents, it is not an interrupted creation.
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
        let force = RunOptions {
            force: true,
            ..Default::default()
        };
        let error = RunWriter::create(tmp.path(), manifest(), &map, force)
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
    // The old records are still there.
    assert_eq!(
        Run::open(tmp.path().join("trace.bin"))
            .unwrap()
            .trace
            .records()
            .len(),
        1
    );
    let force = RunOptions {
        force: true,
        ..Default::default()
    };
    RunWriter::create(tmp.path(), manifest(), &map, force)
        .unwrap()
        .finish()
        .unwrap();
    assert!(Run::open(tmp.path()).is_ok());
}

#[cfg(unix)]
#[test]
fn follows_no_link_that_was_planted_in_a_run() {
    use std::os::unix::fs::symlink;
    let (_, map) = gpt_oss();
    let tmp = tempfile::tempdir().unwrap();
    let (dir, victims) = (tmp.path().join("run"), tmp.path().join("victims"));
    let writer = RunWriter::create(&dir, manifest(), &map, RunOptions::default()).unwrap();
    writer.finish().unwrap();
    fs::create_dir(&victims).unwrap();
    let names = [
        "buffers.jsonl",
        "transfers.jsonl",
        "prompt.json",
        "manifest.json.tmp",
    ];
    for name in names {
        fs::write(victims.join(name), "precious").unwrap();
    }
    fs::remove_file(dir.join("buffers.jsonl")).unwrap();
    symlink(victims.join("buffers.jsonl"), dir.join("buffers.jsonl")).unwrap();
    symlink(victims.join("transfers.jsonl"), dir.join("transfers.jsonl")).unwrap();
    symlink(&victims, dir.join("graph")).unwrap();
    let process = std::process::id();
    symlink(
        victims.join("manifest.json.tmp"),
        dir.join(format!(".manifest.json.{process}.tmp")),
    )
    .unwrap();
    let force = RunOptions {
        force: true,
        ..Default::default()
    };
    let mut writer = RunWriter::create(&dir, manifest(), &map, force).unwrap();
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

#[test]
fn a_run_that_is_being_recorded_is_not_replaced() {
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
    assert!(Run::open(&dir).is_ok(), "readers are not kept out");
    assert_eq!(writer.finish().unwrap(), 1);
    assert_eq!(Run::open(&dir).unwrap().trace.records().len(), 1);
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 4);
}

#[test]
fn a_run_that_replaces_another_leaves_none_of_its_graphs_and_buffers() {
    let (_, map) = gpt_oss();
    let tmp = tempfile::tempdir().unwrap();
    let options = RunOptions {
        force: true,
        ..Default::default()
    };
    let mut writer = RunWriter::create(tmp.path(), manifest(), &map, options).unwrap();
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

    drop(RunWriter::create(tmp.path(), manifest(), &map, options).unwrap());
    assert!(!written.exists());
    assert!(events().is_empty());
}

#[test]
fn of_recorders_that_start_together_one_records() {
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
fn a_run_that_cannot_be_replaced_stays() {
    let (_, map) = gpt_oss();
    let tmp = tempfile::tempdir().unwrap();
    let dir = tmp.path().join("run");
    let mut writer = RunWriter::create(&dir, manifest(), &map, RunOptions::default()).unwrap();
    *writer.next_record().unwrap() = record(1, MUL_MAT, "a");
    writer.finish().unwrap();
    // The new map cannot be made under its temporary name.
    let temporary = format!(".gguf-map.parquet.{}.tmp", std::process::id());
    fs::create_dir(dir.join(&temporary)).unwrap();
    let options = RunOptions {
        force: true,
        ..Default::default()
    };
    let error = RunWriter::create(&dir, manifest(), &map, options)
        .err()
        .unwrap();
    assert!(error.to_string().contains("gguf-map"), "{error}");
    fs::remove_dir(dir.join(&temporary)).unwrap();
    let run = Run::open(&dir).unwrap();
    assert_eq!(run.trace.records().len(), 1);
    assert_eq!(run.manifest.unwrap().records, Some(1));
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 4);
}

/// The last step that can fail is an old file that cannot be removed.
#[test]
fn an_error_after_the_first_rename_restores_the_old_run() {
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

    let options = RunOptions {
        force: true,
        ..Default::default()
    };
    let error = RunWriter::create(tmp.path(), manifest(), &map, options)
        .err()
        .unwrap();
    assert!(error.to_string().contains("transfers.jsonl"), "{error}");
    assert!(contents() == before);
    assert!(Run::open(tmp.path()).is_ok());
    assert_eq!(fs::read_dir(tmp.path()).unwrap().count(), 6);

    fs::remove_dir(tmp.path().join("transfers.jsonl")).unwrap();
    RunWriter::create(tmp.path(), manifest(), &map, options).unwrap();
    assert!(!graph::path(tmp.path(), Phase::Prompt).exists());
    assert_eq!(fs::read_dir(tmp.path().join("graph")).unwrap().count(), 0);
}

#[test]
fn a_check_for_a_new_run_changes_nothing() {
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

#[test]
fn the_map_of_a_run_names_run_and_model() {
    let (_, map) = gpt_oss();
    let tmp = tempfile::tempdir().unwrap();
    let writer = RunWriter::create(tmp.path(), manifest(), &map, RunOptions::default()).unwrap();
    let id = writer.finish().map(|_| Run::open(tmp.path()).unwrap().id());
    let file = fs::File::open(tmp.path().join("gguf-map.parquet")).unwrap();
    let reader =
        parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder::try_new(file).unwrap();
    let metadata = reader.metadata().file_metadata().key_value_metadata();
    let value = |key: &str| {
        let entries = metadata.into_iter().flat_map(|entries| entries.iter());
        entries
            .filter(|entry| entry.key == key)
            .find_map(|entry| entry.value.clone())
            .unwrap()
    };
    assert_eq!(value("moe-analyze.run_id"), id.unwrap());
    let model: moe_trace::manifest::Model =
        serde_json::from_str(&value("moe-analyze.model")).unwrap();
    assert_eq!(model, manifest().model);
}

#[test]
fn a_killed_recorder_leaves_what_is_whole() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("trace.bin");
    let records: Vec<_> = (1..=5).map(|i| record(i, MUL_MAT, "a")).collect();
    let bytes = records.as_bytes();
    for (len, whole, cut) in [
        (5120, 5, 0),
        (5119, 4, 1023),
        (4096, 4, 0),
        (1, 0, 1),
        (0, 0, 0),
    ] {
        fs::write(&path, &bytes[..len]).unwrap();
        let trace = Trace::open(&path).unwrap();
        assert_eq!((trace.records().len(), trace.cut_bytes()), (whole, cut));
        assert_eq!(trace.operations().count(), whole);
    }
    // A file made at full capacity has a tail of zeros; what lies behind it is not looked at.
    let mut padded = bytes[..2048].to_vec();
    padded.extend([0; 3072]);
    padded.extend(&bytes[..1024]);
    fs::write(&path, padded).unwrap();
    let trace = Trace::open(&path).unwrap();
    assert_eq!((trace.records().len(), trace.operations().count()), (2, 2));
}

#[test]
fn operations_group_records_and_tokens_join_continuations() {
    let ids: Vec<i32> = (0..20).rev().collect();
    let head = record(10, MUL_MAT_ID, "ffn_moe_gate-3");
    let mut records = vec![record(9, MUL_MAT, "router-3")];
    records.extend(expert_operation(&head, 3, 100, &[&ids, &[5, -1, 4]]));
    records.push(record(10, MUL_MAT_ID, "ffn_moe_up-3"));
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("trace.bin");
    fs::write(&path, records.as_bytes()).unwrap();
    let trace = Trace::open(&path).unwrap();

    let operations: Vec<_> = trace.operations().collect();
    assert_eq!(
        operations
            .iter()
            .map(|op| (op.first_record(), op.records().len()))
            .collect::<Vec<_>>(),
        [(0, 1), (1, 3), (4, 1)]
    );
    let tokens: Vec<_> = operations[1].tokens().collect();
    assert_eq!(
        tokens
            .iter()
            .map(|token| token.token_id().0)
            .collect::<Vec<_>>(),
        [100, 101]
    );
    let first: Vec<_> = tokens[0]
        .experts()
        .map(|e| (i32::from(e.slot), e.expert_id.0 as i32))
        .collect();
    assert_eq!(first, (0..20).zip(ids).collect::<Vec<_>>());
    assert_eq!(tokens[0].experts().last().unwrap().weight, Some(0.05));
    let second: Vec<_> = tokens[1]
        .experts()
        .map(|e| (e.slot, e.expert_id.0))
        .collect();
    assert_eq!(second, [(0, 5), (2, 4)], "a negative id is an empty slot");
}

#[test]
fn a_plain_v4_record_has_no_extension() {
    let mut records = expert_operation(&record(1, MUL_MAT_ID, "ffn_moe_gate-0"), 0, 0, &[&[1, 2]]);
    records[0].ext_version = 0;
    records[0].flags = 1;
    records[0].sequence_id.set(9);
    assert!(!records[0].is_continuation());
    let operation = moe_trace::Operations::new(&records).next().unwrap();
    let token = operation.tokens().next().unwrap();
    assert_eq!(token.sequence_id(), None);
    assert!(token.experts().all(|e| e.weight.is_none() && e.lane == 0));
}

#[test]
fn what_is_no_run_says_so() {
    let tmp = tempfile::tempdir().unwrap();
    let error = Run::open(tmp.path()).unwrap_err();
    assert!(matches!(error, Error::NotARun { .. }), "{error}");
    let error = Run::open(tmp.path().join("absent")).unwrap_err();
    assert!(
        matches!(&error, Error::Io { path, source, .. }
            if path.ends_with("absent") && source.kind() == ErrorKind::NotFound),
        "{error:?}"
    );
}

#[test]
fn a_bare_trace_is_a_run_with_an_id_of_its_content() {
    let tmp = tempfile::tempdir().unwrap();
    let (a, b) = (tmp.path().join("a.bin"), tmp.path().join("b.bin"));
    fs::write(&a, record(1, MUL_MAT, "a").as_bytes()).unwrap();
    fs::write(&b, record(2, MUL_MAT, "a").as_bytes()).unwrap();
    let (run, other) = (Run::open(&a).unwrap(), Run::open(&b).unwrap());
    assert!(run.manifest.is_none() && run.map.is_none());
    assert!(run.id().starts_with("trace-"));
    assert_eq!(run.id(), Run::open(&a).unwrap().id());
    assert_ne!(run.id(), other.id());
    assert_eq!(run.ops().number("ADD_ID"), Some(3));
}
