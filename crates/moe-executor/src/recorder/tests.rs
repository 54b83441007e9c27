//! Times and order of records, with a GPU whose events are given.

use moe_gguf::Gguf;
use moe_gguf::map::OffsetMap;
use moe_trace::{Manifest, Phase, Run, RunOptions};
use tempfile::TempDir;

use super::rows::Finished;
use super::*;
use crate::cuda::{self, Download};

const GPU: DeviceId = DeviceId::Gpu(0);

/// Events of a pass at the times that a test gives.
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

/// A recorder in a pass, and where it writes.
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
        sequence_id: 0,
        phase: Phase::Prompt,
        is_whole: false,
    });
}

fn op(recorder: &mut Recorder, name: &'static str, when: When) {
    recorder.op(when, 0, NodeName::global(name), &[], 0, 1);
}

/// Name, start and duration of each record, ns from `origin`; the run must be sound.
fn written(recorder: Recorder, dir: &TempDir, origin: Instant) -> Vec<(String, i64, u64)> {
    let origin = recorder.clock.ns(origin) as i64;
    recorder.into_writer().unwrap().finish().unwrap();
    let run = Run::open(dir.path().join("run")).unwrap();
    let faults = moe_trace::check::check(&run);
    let of_time = faults.iter().find(|fault| fault.field == "timestamp_ns");
    assert_eq!(of_time, None);
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
fn wait_for_the_gpu_is_not_part_of_the_operation_that_waited() {
    const WAIT: Duration = Duration::from_millis(5);
    let (mut recorder, dir) = recorder();
    let start = recorder.start();
    std::thread::sleep(WAIT);
    let end_of_wait = Instant::now();
    recorder.host_is_free();
    op(&mut recorder, "x", When::Host(start));
    // However long this thread was stopped meanwhile, the operation took no longer than this.
    let rest = end_of_wait.elapsed().as_nanos() as u64;
    let written = written(recorder, &dir, start);
    let [(_, begin, duration)] = written.as_slice() else {
        panic!("one operation: {written:?}")
    };
    assert!(*begin >= WAIT.as_nanos() as i64, "{begin}");
    assert!(*duration <= rest, "{duration} > {rest}");
}

/// A kernel that the GPU gets to only after the host has gone on with an operation that does not read its result.
#[test]
fn operations_side_by_side_are_in_the_order_of_their_starts() {
    let (mut recorder, dir) = recorder();
    recorder.wait_for_gpu();
    let origin = recorder.pass_start;
    let mut events = Events::default();
    let later = Instant::now() + 500 * US;
    let [from, to] = [later, later + 300 * US].map(|at| events.at(at));
    op(&mut recorder, "kernel", When::Gpu(GPU, from, to));
    op(&mut recorder, "fused", When::Within);
    recorder.host_is_free();
    let start = recorder.start();
    op(&mut recorder, "host", When::Host(start));
    let after = [later + 300 * US, later + 310 * US].map(|at| events.at(at));
    op(&mut recorder, "next", When::Gpu(GPU, after[0], after[1]));
    recorder.settle(&events).unwrap();
    let written = written(recorder, &dir, origin);
    let names: Vec<&str> = written.iter().map(|(name, ..)| name.as_str()).collect();
    assert_eq!(names, ["host", "kernel", "fused", "next"]);
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

/// The driver's times have a resolution of half a microsecond: a kernel may seem to take none.
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
        op(&mut recorder, name, When::Within);
    }
    op(&mut recorder, "next", When::Gpu(GPU, to, end));
    recorder.settle(&events).unwrap();
    let starts: Vec<i64> = written(recorder, &dir, origin)
        .iter()
        .map(|(_, start, _)| *start)
        .collect();
    assert_eq!(starts, [10_000, 10_001, 10_002, 10_002, 10_002]);
}

#[test]
fn operation_after_a_launch_starts_after_it() {
    let (mut recorder, dir) = recorder();
    recorder.wait_for_gpu();
    let origin = recorder.pass_start;
    let start = recorder.start();
    op(&mut recorder, "first", When::Host(start));
    // The host launches for a while, and the GPU starts at once.
    let mut events = Events::default();
    let launched = Instant::now();
    let [from, to] = [launched, launched + US].map(|at| events.at(at));
    std::thread::sleep(100 * US);
    recorder.host_is_free();
    op(&mut recorder, "kernel", When::Gpu(GPU, from, to));
    let start = recorder.start();
    op(&mut recorder, "last", When::Host(start));
    recorder.settle(&events).unwrap();
    let written = written(recorder, &dir, origin);
    let names: Vec<&str> = written.iter().map(|(name, ..)| name.as_str()).collect();
    assert_eq!(names, ["first", "kernel", "last"]);
    assert!(written[2].1 >= written[1].1 + 100_000, "{written:?}");
}

#[test]
fn operations_of_a_pass_that_failed_are_dropped() {
    let (mut recorder, dir) = recorder();
    recorder.wait_for_gpu();
    let mut events = Events::default();
    let at = events.at(Instant::now());
    op(&mut recorder, "lost", When::Gpu(GPU, at, at));
    begin(&mut recorder);
    let origin = recorder.pass_start;
    op(&mut recorder, "kept", When::Host(origin));
    recorder.settle(&events).unwrap();
    let written = written(recorder, &dir, origin);
    assert_eq!(written.len(), 1);
    assert_eq!(written[0].0, "kept");
}
