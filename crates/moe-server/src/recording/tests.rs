use std::sync::mpsc;

use moe_engine::{RouterOutput, TokenSequence};
use moe_trace::tables::read_routing;
use moe_trace::{LayerId, Phase};

use super::*;

const LAYERS: u16 = 2;

/// Observes a pass with one token of each sequence `(id, position)`. Experts depend on sequence and layer.
fn pass(recording: &mut Recording, observer: &mut Observer, tokens: &[(u32, u32)]) {
    recording.begin_pass();
    layers(observer, tokens, LAYERS);
    recording.end_pass();
}

fn layers(observer: &mut Observer, tokens: &[(u32, u32)], n_layer: u16) {
    let positions: Vec<u32> = tokens.iter().map(|token| token.1).collect();
    let sequence = |&(id, _): &(u32, u32)| TokenSequence {
        id,
        phase: Phase::Generate,
    };
    let sequences: Vec<TokenSequence> = tokens.iter().map(sequence).collect();
    for layer in 0..n_layer {
        let ids: Vec<i32> = tokens
            .iter()
            .flat_map(|token| [token.0 as i32, 8 + i32::from(layer)])
            .collect();
        observer(&RouterOutput {
            layer: LayerId(layer),
            positions: &positions,
            sequences: &sequences,
            logits: &[],
            ids: &ids,
            weights: &vec![0.5; ids.len()],
            n_expert_used: 2,
        });
    }
}

#[test]
fn writes_a_table_for_each_request_without_repeated_and_failed_passes() {
    let dir = tempfile::tempdir().unwrap();
    let model = ModelInfo {
        n_layer: Some(LAYERS.into()),
        n_expert: Some(16),
        n_expert_used: Some(2),
        ..ModelInfo::default()
    };
    let params = RecordingParams::new(dir.path().join("traces"), model);
    let mut recording = Recording::start(params, |_| {}).unwrap();
    let mut observer = recording.observer();
    recording.begin(4);
    recording.begin(5);
    recording.begin(6);
    pass(&mut recording, &mut observer, &[(4, 0), (5, 0)]);
    // A failed pass.
    recording.begin_pass();
    layers(&mut observer, &[(6, 0)], LAYERS);
    recording.discard(6);
    // The session repeats a pass after its first layer.
    recording.begin_pass();
    layers(&mut observer, &[(4, 1)], 1);
    layers(&mut observer, &[(4, 1)], LAYERS);
    recording.end_pass();
    recording.end(4);
    recording.end(5);
    let counts = recording.counts();
    recording.finish();
    assert_eq!((counts.get().written, counts.get().failed), (2, 0));
    let mut directories: Vec<PathBuf> = std::fs::read_dir(dir.path().join("traces"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    directories.sort();
    let mut read = Vec::new();
    for directory in &directories {
        for batch in read_routing(directory.join("routing.parquet")).unwrap() {
            let batch = batch.unwrap();
            for row in 0..batch.len() {
                read.push((
                    batch.sequence_id().value(row),
                    batch.token_id()[row],
                    batch.layer_id()[row],
                    batch.expert_id()[row],
                ));
            }
        }
    }
    let token = |sequence: u32, position: u32| {
        (0..LAYERS).flat_map(move |layer| {
            [sequence, 8 + u32::from(layer)].map(|expert| (sequence, position, layer, expert))
        })
    };
    let expected: Vec<_> = token(4, 0).chain(token(4, 1)).chain(token(5, 0)).collect();
    assert_eq!(read, expected);
}

/// The writer holds the first trace while the next ones end.
#[test]
fn drops_and_counts_traces_while_the_disk_is_busy() {
    let (started, has_started) = mpsc::channel();
    let (release, released) = mpsc::channel::<()>();
    let write = move |finished: &Finished| {
        started.send(finished.sequence_id).unwrap();
        released.recv().map_err(|error| error.to_string())
    };
    let mut recording = Recording::with_writer(1, usize::MAX, write, |_| {}).unwrap();
    let mut observer = recording.observer();
    for id in 0..4 {
        recording.begin(id);
        pass(&mut recording, &mut observer, &[(id, 0)]);
        recording.end(id);
        if id == 0 {
            assert_eq!(has_started.recv().unwrap(), 0);
        }
    }
    // 0 is being written, 1 is in the queue.
    assert_eq!(recording.counts().get().dropped, 2);
    release.send(()).unwrap();
    // The second trace fails.
    drop(release);
    let counts = recording.counts();
    recording.finish();
    let counts = counts.get();
    assert_eq!((counts.written, counts.dropped, counts.failed), (1, 2, 1));
}

#[test]
fn reports_only_the_first_error() {
    let (sender, reported) = mpsc::channel();
    let write = |finished: &Finished| Err(format!("trace {}", finished.sequence_id));
    let report = move |error: &str| sender.send(error.to_owned()).unwrap();
    let mut recording = Recording::with_writer(8, usize::MAX, write, report).unwrap();
    let mut observer = recording.observer();
    for id in 1..4 {
        recording.begin(id);
        pass(&mut recording, &mut observer, &[(id, 0)]);
        recording.end(id);
    }
    let counts = recording.counts();
    recording.finish();
    assert_eq!((counts.get().written, counts.get().failed), (0, 3));
    assert_eq!(reported.iter().collect::<Vec<_>>(), ["trace 1"]);
}

#[test]
fn drops_requests_with_too_many_rows() {
    let mut recording = Recording::with_writer(8, 300, |_| Ok(()), |_| {}).unwrap();
    let mut observer = recording.observer();
    recording.begin(1);
    recording.begin(2);
    for position in 0..8 {
        pass(&mut recording, &mut observer, &[(1, position)]);
    }
    pass(&mut recording, &mut observer, &[(2, 0)]);
    recording.end(1);
    recording.end(2);
    let counts = recording.counts();
    recording.finish();
    assert_eq!((counts.get().written, counts.get().dropped), (1, 1));
}

#[test]
fn rejects_a_directory_that_cannot_be_written() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    let params = RecordingParams::new(file, ModelInfo::default());
    assert!(Recording::start(params, |_| {}).is_err());
    // Nothing remains of the check.
    let traces = dir.path().join("traces");
    let params = RecordingParams::new(traces.clone(), ModelInfo::default());
    Recording::start(params, |_| {}).unwrap().finish();
    assert_eq!(std::fs::read_dir(traces).unwrap().count(), 0);
}
