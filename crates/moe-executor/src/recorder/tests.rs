//! Times and order of records, with a simulated GPU whose event times are given.

use moe_gguf::Gguf;
use moe_gguf::map::OffsetMap;
use moe_trace::{Manifest, Phase, Run, RunOptions};
use tempfile::TempDir;

use super::rows::Finished;
use super::*;
use crate::cuda::{self, Download};

const FIRST: TokenSequence = TokenSequence {
    id: 0,
    phase: Phase::Prompt,
};

const GPU: DeviceId = DeviceId::Gpu(0);

/// Events of a pass at times that a test sets.
#[derive(Default)]
struct Events(Vec<Instant>);

impl Events {
    fn at(&mut self, time: Instant) -> Event {
        self.0.push(time);
        Event::new(self.0.len() - 1)
    }
}

impl Finished for Events {
    fn time(&self, _: DeviceId, event: Event) -> cuda::Result<Instant> {
        Ok(self.0[event.index()])
    }

    fn downloaded(&self, _: &Download) -> cuda::Result<(&[i32], &[f32])> {
        Ok((&[], &[]))
    }
}

/// A recorder in a pass, and the directory of its run.
fn recorder() -> (Recorder, TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let gguf = Gguf::open(moe_testkit::fixture("random-llama-F16.gguf")).unwrap();
    let (map, options) = (OffsetMap::new(&gguf), RunOptions::default());
    let run = dir.path().join("run");
    let writer = RunWriter::create(&run, Manifest::default(), &map, options).unwrap();
    let mut recorder = Recorder::new(Some(writer));
    begin(&mut recorder);
    (recorder, dir)
}

fn begin(recorder: &mut Recorder) {
    recorder.begin(PassInfo {
        first: FIRST,
        is_complete: false,
    });
}

fn op(recorder: &mut Recorder, name: &'static str, when: When) {
    let tokens = PassTokens {
        positions: &[0],
        sequences: &[FIRST],
    };
    recorder.op(when, 0, NodeName::global(name), &[], tokens);
}

/// Name, start and duration of each record, in ns from `origin`. Timestamps must not decrease.
fn written(recorder: Recorder, dir: &TempDir, origin: Instant) -> Vec<(String, i64, u64)> {
    let origin = recorder.clock.ns(origin) as i64;
    recorder.into_writer().unwrap().finish().unwrap();
    let run = Run::open(dir.path().join("run")).unwrap();
    let faults = moe_trace::check::check(&run);
    let timestamp_fault = faults.iter().find(|fault| fault.field == "timestamp_ns");
    assert_eq!(timestamp_fault, None);
    let records = run.trace.records().iter();
    let read = records.map(|record| {
        let start = record.timestamp_ns.get() as i64 - origin;
        let name = record.dst_name().into_owned();
        (name, start, record.duration_ns.get())
    });
    read.collect()
}

const US: Duration = Duration::from_micros(1);

#[test]
fn excludes_the_wait_for_a_gpu_from_the_duration() {
    const WAIT: Duration = Duration::from_millis(5);
    let (mut recorder, dir) = recorder();
    let start = recorder.start();
    std::thread::sleep(WAIT);
    let end_of_wait = Instant::now();
    recorder.host_is_free();
    op(&mut recorder, "x", When::Cpu(start));
    // An upper bound of the duration, even if this thread was descheduled in between.
    let rest = end_of_wait.elapsed().as_nanos() as u64;
    let written = written(recorder, &dir, start);
    let [(_, begin, duration)] = written.as_slice() else {
        panic!("one operation: {written:?}")
    };
    assert!(*begin >= WAIT.as_nanos() as i64, "{begin}");
    assert!(*duration <= rest, "{duration} > {rest}");
}

/// The GPU starts a kernel after the CPU has computed a later operation, which does not read the kernel's result.
#[test]
fn sorts_concurrent_operations_by_start() {
    let (mut recorder, dir) = recorder();
    recorder.wait_for_gpu();
    let origin = recorder.pass_start;
    let mut events = Events::default();
    let later = Instant::now() + 500 * US;
    let [from, to] = [later, later + 300 * US].map(|at| events.at(at));
    op(&mut recorder, "kernel", When::Gpu(GPU, from, to));
    op(&mut recorder, "fused", When::Fused);
    recorder.host_is_free();
    let start = recorder.start();
    op(&mut recorder, "cpu", When::Cpu(start));
    let after = [later + 300 * US, later + 310 * US].map(|at| events.at(at));
    op(&mut recorder, "next", When::Gpu(GPU, after[0], after[1]));
    recorder.write_pending(&events).unwrap();
    let written = written(recorder, &dir, origin);
    let names: Vec<&str> = written.iter().map(|(name, ..)| name.as_str()).collect();
    assert_eq!(names, ["cpu", "kernel", "fused", "next"]);
    let kernel = (later - origin).as_nanos() as i64;
    let gpu: Vec<(i64, u64)> = written[1..].iter().map(|w| (w.1, w.2)).collect();
    assert_eq!(
        gpu,
        [
            (kernel, 300_000),
            (kernel + 1, 0),
            (kernel + 300_000, 10_000)
        ]
    );
}

/// CUDA events have a resolution of half a microsecond, so the measured duration of a kernel may be 0.
#[test]
fn fused_operations_do_not_start_after_the_end_of_their_kernel() {
    let (mut recorder, dir) = recorder();
    recorder.wait_for_gpu();
    let origin = recorder.pass_start;
    let mut events = Events::default();
    let [from, to] = [0, 2].map(|ns| events.at(origin + 10 * US + Duration::from_nanos(ns)));
    let end = events.at(origin + 20 * US);
    op(&mut recorder, "kernel", When::Gpu(GPU, from, to));
    for name in ["second", "third", "fourth"] {
        op(&mut recorder, name, When::Fused);
    }
    op(&mut recorder, "next", When::Gpu(GPU, to, end));
    recorder.write_pending(&events).unwrap();
    let starts: Vec<i64> = written(recorder, &dir, origin)
        .iter()
        .map(|(_, start, _)| *start)
        .collect();
    assert_eq!(starts, [10_000, 10_001, 10_002, 10_002, 10_002]);
}

#[test]
fn cpu_operation_after_a_launch_starts_after_the_launch() {
    let (mut recorder, dir) = recorder();
    recorder.wait_for_gpu();
    let origin = recorder.pass_start;
    let start = recorder.start();
    op(&mut recorder, "first", When::Cpu(start));
    // The launch takes 100 µs on the CPU; the GPU starts immediately.
    let mut events = Events::default();
    let launched = Instant::now();
    let [from, to] = [launched, launched + US].map(|at| events.at(at));
    std::thread::sleep(100 * US);
    recorder.host_is_free();
    op(&mut recorder, "kernel", When::Gpu(GPU, from, to));
    let start = recorder.start();
    op(&mut recorder, "last", When::Cpu(start));
    recorder.write_pending(&events).unwrap();
    let written = written(recorder, &dir, origin);
    let names: Vec<&str> = written.iter().map(|(name, ..)| name.as_str()).collect();
    assert_eq!(names, ["first", "kernel", "last"]);
    assert!(written[2].1 >= written[1].1 + 100_000, "{written:?}");
}

#[test]
fn drops_operations_of_a_failed_pass() {
    let (mut recorder, dir) = recorder();
    recorder.wait_for_gpu();
    let mut events = Events::default();
    let at = events.at(Instant::now());
    op(&mut recorder, "lost", When::Gpu(GPU, at, at));
    begin(&mut recorder);
    let origin = recorder.pass_start;
    op(&mut recorder, "kept", When::Cpu(origin));
    recorder.write_pending(&events).unwrap();
    let written = written(recorder, &dir, origin);
    assert_eq!(written.len(), 1);
    assert_eq!(written[0].0, "kept");
}

/// Passes that the thread has not written yet count towards the limit, and their records are not lost.
#[test]
fn passes_on_the_thread_count_towards_the_limit() {
    let dir = tempfile::tempdir().unwrap();
    let gguf = Gguf::open(moe_testkit::fixture("random-llama-F16.gguf")).unwrap();
    let options = RunOptions {
        max_trace_bytes: Some(100 * 1024),
        ..RunOptions::default()
    };
    let (map, run) = (OffsetMap::new(&gguf), dir.path().join("run"));
    let writer = RunWriter::create(&run, Manifest::default(), &map, options).unwrap();
    let mut recorder = Recorder::new(Some(writer));
    recorder.wait_for_gpu();
    let mut passes = 0;
    while recorder.has_room(30) {
        begin(&mut recorder);
        let start = recorder.start();
        for _ in 0..30 {
            op(&mut recorder, "x", When::Cpu(start));
        }
        recorder.write_pending(&Events::default()).unwrap();
        passes += 1;
    }
    assert_eq!(passes, 3);
    // Without a check, the error of the thread is returned at the latest by the next wait.
    begin(&mut recorder);
    let start = recorder.start();
    for _ in 0..30 {
        op(&mut recorder, "x", When::Cpu(start));
    }
    let written = recorder
        .write_pending(&Events::default())
        .and_then(|()| recorder.wait());
    assert!(
        matches!(
            written,
            Err(Error::Trace(moe_trace::Error::TraceFull { .. }))
        ),
        "{written:?}"
    );
    assert_eq!(recorder.into_writer().unwrap().finish().unwrap(), 100);
}

#[test]
fn pauses_between_passes() {
    let (mut recorder, dir) = recorder();
    recorder.wait_for_gpu();
    let origin = recorder.pass_start;
    for (name, mode) in [
        ("first", Some(Mode::All)),
        ("paused", None),
        ("experts", Some(Mode::Experts)),
        ("last", Some(Mode::All)),
    ] {
        recorder.set_mode(mode);
        begin(&mut recorder);
        let start = recorder.start();
        op(&mut recorder, name, When::Cpu(start));
        recorder.write_pending(&Events::default()).unwrap();
        recorder.wait().unwrap();
    }
    let written = written(recorder, &dir, origin);
    let names: Vec<&str> = written.iter().map(|(name, ..)| name.as_str()).collect();
    assert_eq!(names, ["first", "last"]);
}
