//! Buffer events and the timeline of buffers.

use std::fs;

use moe_trace::buffers::{self, BufferEvent, Timeline};
use moe_trace::record::EXT_V1;
use moe_trace::{Error, TensorAccessLog};
use serde_json::{Value, json};

/// Weights of 1000 bytes; a cache of 100 bytes that grows to 300; a result of 50 bytes that is deallocated.
const EVENTS: &str = r#"{"timestamp_ms":0.5,"event":"alloc","buffer_id":9,"buffer_ptr":4096,"size":1000,"name":"model.gguf","backend":"mmap","usage":1,"layer":65535}
{"timestamp_ms":0.5,"event":"alloc","buffer_id":1,"buffer_ptr":8192,"size":100,"name":"cache_k_l0","backend":"CPU","usage":0,"layer":0}
{"timestamp_ms":1.0,"event":"alloc","buffer_id":2,"buffer_ptr":1,"size":50,"name":"logits","backend":"CPU","usage":2,"layer":65535}

{"timestamp_ms":3.0,"event":"dealloc","buffer_id":1}
{"timestamp_ms":3.0,"event":"alloc","buffer_id":1,"buffer_ptr":8192,"size":300,"name":"cache_k_l0","backend":"CPU","usage":0,"layer":0}
{"timestamp_ms":4.25,"event":"dealloc","buffer_id":2}
{"timestamp_ms":4.5,"event":"dealloc","buffer_id":77}
"#;

fn read(text: &str) -> Result<Vec<BufferEvent>, Error> {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("buffers.jsonl");
    fs::write(&path, text).unwrap();
    buffers::read(&path)
}

#[test]
fn timeline_sums_allocated_buffers() {
    let events = read(EVENTS).unwrap();
    let (timeline, n_strange) = Timeline::new(&events);
    assert_eq!(n_strange, 1);
    let json = serde_json::to_value(&timeline).unwrap();
    assert_eq!(
        json["metadata"],
        json!({
            "total_events": 7, "total_buffers": 4, "peak_occupancy_bytes": 1350, "peak_occupancy_mb": 0.0,
            "duration_ms": 4.0, "usage_breakdown": {"ANY": 2, "COMPUTE": 1, "WEIGHTS": 1},
        })
    );
    let taken: Vec<_> = timeline
        .timeline
        .iter()
        .map(|e| (e.event, e.cumulative_size, e.num_active_buffers))
        .collect();
    assert_eq!(
        taken,
        [
            ("alloc", 1000, 1),
            ("alloc", 1100, 2),
            ("alloc", 1150, 3),
            ("dealloc", 1050, 2),
            ("alloc", 1350, 3),
            ("dealloc", 1300, 2),
        ]
    );
    assert_eq!(
        json["buffers"][1],
        json!({"id": 1, "name": "cache_k_l0", "size": 100, "backend": "CPU", "usage": 0, "usage_name": "ANY",
               "layer": 0, "alloc_time_ms": 0.5, "dealloc_time_ms": 3.0})
    );
    assert_eq!(json["buffers"][3]["dealloc_time_ms"], Value::Null);
    assert_eq!(json["timeline"][5]["buffer_name"], "logits");
    let at_peak: Vec<_> = timeline.at_peak().iter().map(|b| (b.id, b.size)).collect();
    assert_eq!(at_peak, [(1, 300), (2, 50), (9, 1000)]);
}

#[test]
fn timeline_without_events_is_empty() {
    let (timeline, n_strange) = Timeline::new(&read("").unwrap());
    assert_eq!((timeline.metadata.peak_occupancy_bytes, n_strange), (0, 0));
    assert!(timeline.at_peak().is_empty());
}

#[test]
fn reports_invalid_lines_and_omits_a_truncated_one() {
    assert_eq!(read(&EVENTS[..EVENTS.len() - 20]).unwrap().len(), 6);
    for (wrong, line) in [
        (
            EVENTS.replace("\"dealloc\",\"buffer_id\":1", "\"lost\",\"buffer_id\":1"),
            5,
        ),
        (EVENTS.replacen("1000", "-1", 1), 1),
        (format!("{EVENTS}nonsense\n"), 9),
    ] {
        match read(&wrong) {
            Err(Error::Line { line: found, .. }) => assert_eq!(found, line),
            other => panic!("{other:?}"),
        }
    }
}

/// The error for a file of another format does not claim a damaged line.
#[test]
fn recognizes_files_of_other_formats() {
    for text in [
        "{\n",
        "{\"a\":1}",
        "[1,2]\n[3]\n",
        "layer,expert\n0,1\n",
        "x",
    ] {
        let error = read(text).unwrap_err();
        assert!(
            matches!(error, Error::OtherLines { line: 1, .. }),
            "{text:?}: {error}"
        );
    }
    let error = read("GGUF\u{3}\0\0\0").unwrap_err();
    assert!(matches!(error, Error::OtherContent { .. }), "{error}");
    let message = error.to_string();
    assert!(
        message.ends_with("it is a GGUF file, not the buffers.jsonl of a run: pass that file, or its run directory"),
        "{message}"
    );
    // An incomplete first event.
    assert_eq!(read(&EVENTS[..20]).unwrap(), []);
}

/// The last operation starts 2 ms after the first event and takes 3 ms.
#[test]
fn end_of_run_is_on_the_clock_of_the_events() {
    let text = r#"{"timestamp_ms":0.5,"timestamp_ns":7000000,"event":"dealloc","buffer_id":1}"#;
    let mut last = TensorAccessLog::default();
    last.timestamp_ns.set(9_000_000);
    last.duration_ns.set(3_000_000);
    assert_eq!(
        buffers::end_of_run_ms(&read(text).unwrap(), &last),
        Some(2.5)
    );
    last.ext_version = EXT_V1;
    assert_eq!(
        buffers::end_of_run_ms(&read(text).unwrap(), &last),
        Some(5.5)
    );
    // Events of other programs have no time on the trace's clock.
    assert_eq!(buffers::end_of_run_ms(&read(EVENTS).unwrap(), &last), None);
}

#[test]
fn ignores_unknown_keys_and_byte_order_mark() {
    let expected = read(EVENTS).unwrap();
    let more = EVENTS.replace("\"event\":", "\"later\":{\"buffer_id\":5},\"event\":");
    assert_eq!(read(&more).unwrap(), expected);
    assert_eq!(read(&format!("\u{feff}{EVENTS}")).unwrap(), expected);
}

#[test]
fn reads_single_line_with_byte_order_mark() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("buffers.jsonl");
    let line = EVENTS.lines().next().unwrap();
    fs::write(&path, format!("\u{feff}{line}")).unwrap();
    assert_eq!(buffers::read(&path).unwrap().len(), 1);
    assert_eq!(buffers::truncation(&path).unwrap(), None);
}

#[test]
fn events_follow_their_schema() {
    let schema = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../schemas/buffers.schema.json"
    );
    let schema = serde_json::from_str(&fs::read_to_string(schema).unwrap()).unwrap();
    let schema = jsonschema::validator_for(&schema).unwrap();
    for event in read(EVENTS).unwrap() {
        let json = serde_json::to_value(&event).unwrap();
        assert!(schema.is_valid(&json), "{json}");
        assert_eq!(serde_json::from_value::<BufferEvent>(json).unwrap(), event);
    }
    assert!(!schema.is_valid(&json!({"timestamp_ms": 1, "event": "alloc", "buffer_id": 1})));
}
