//! Counters and records agree with the routing decisions and the contents of the cache.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use moe_executor::cpu::threads::Threads;
use moe_executor::recorder::Recorder;
use moe_executor::{CacheParams, Model, Session};
use moe_gguf::map::OffsetMap;
use moe_gguf::{ExpertId, Gguf, LayerId};
use moe_placement::perf::{PerfMode, SharedCounters};
use moe_placement::random::SplitMix64;
use moe_trace::record::lane;
use moe_trace::{Manifest, Run, RunOptions, RunWriter, TRACE_FILE, TensorAccessLog, Trace, check};

use super::{MODELS, moe_layers, open, pairs, random_lanes, request};

/// Selections of each expert.
type Selections = BTreeMap<(LayerId, ExpertId), u64>;

/// A session that counts the selections that its router makes.
fn observed<'a>(session: &mut Session<'a, '_>) -> Rc<RefCell<Selections>> {
    let selections = Rc::new(RefCell::new(Selections::new()));
    let seen = selections.clone();
    session.observe(Box::new(move |routed| {
        for &id in routed.ids {
            let key = (routed.layer, ExpertId(id as u32));
            *seen.borrow_mut().entry(key).or_default() += 1;
        }
    }));
    selections
}

#[test]
fn counts_hot_and_cold_selections_of_each_expert() {
    let mut random = SplitMix64::new(7);
    let threads = Threads::new(2).unwrap();
    for name in MODELS {
        let gguf = open(name);
        let model = Model::load(&gguf).unwrap();
        for (n_lanes, percent, mode) in [
            (0, 0, PerfMode::Update),
            (1, 0, PerfMode::Full),
            (2, 40, PerfMode::Update),
            (3, 70, PerfMode::Full),
            (2, 100, PerfMode::Update),
        ] {
            let what = format!("{name}, {n_lanes} lanes, {percent} %, {mode}");
            let mut session =
                Session::new(&model, &threads, Recorder::new(None), CacheParams::new(64)).unwrap();
            let lanes = match n_lanes {
                0 => Vec::new(),
                n => random_lanes(&model, &mut random, n, percent),
            };
            session
                .expert_cache()
                .enable_hot_cache(&lanes, mode)
                .unwrap();
            let counters = session.counters().unwrap();
            let observed = observed(&mut session);
            request(&mut session, 0, 50);
            let cached = pairs(&lanes);
            let (mut hot, mut cold) = (0, 0);
            for layer in moe_layers(&model) {
                for expert in (0..model.hparams().n_expert as u32).map(ExpertId) {
                    let n = observed
                        .borrow()
                        .get(&(layer, expert))
                        .copied()
                        .unwrap_or(0);
                    let expected = if cached.contains(&(layer, expert)) {
                        (n, 0)
                    } else {
                        (0, n)
                    };
                    (hot, cold) = (hot + expected.0, cold + expected.1);
                    let counted = counters.lock().selections(layer, expert);
                    assert_eq!(counted, expected, "{what}: {expert} of layer {layer}");
                }
            }
            let counters = counters.lock();
            assert_eq!(
                (counters.hot_slots(), counters.cold_slots()),
                (hot, cold),
                "{what}"
            );
            assert_eq!(counters.updates(), 7, "{what}");
            let events = session.hot_cache().unwrap().events();
            assert_eq!(events.failed_calls, 0);
            if percent == 100 {
                let calls = 7 * moe_layers(&model).len() as u64;
                assert_eq!(
                    (events.skipped_hot, events.skipped_cold),
                    (0, calls),
                    "{what}"
                );
            }
        }
    }
}

#[test]
fn counts_nothing_while_counters_are_off() {
    let gguf = open("random-llama-F16.gguf");
    let model = Model::load(&gguf).unwrap();
    let threads = Threads::new(1).unwrap();
    let mut session =
        Session::new(&model, &threads, Recorder::new(None), CacheParams::new(64)).unwrap();
    let lanes = random_lanes(&model, &mut SplitMix64::new(1), 1, 50);
    session
        .expert_cache()
        .enable_hot_cache(&lanes, PerfMode::Off)
        .unwrap();
    let counters = session.counters().unwrap();
    request(&mut session, 0, 50);
    assert_eq!(counters.lock().updates(), 0);
    assert_eq!(counters.lock().hit_rate(), None);
    // The mode may change between two passes.
    counters.lock().set_mode(PerfMode::Update);
    request(&mut session, 1, 50);
    assert_eq!(counters.lock().updates(), 7);
    assert!(counters.lock().hit_rate().is_some_and(|rate| rate > 0.0));
}

/// Records of a request, and the faults of the run.
fn record(gguf: &Gguf, percent: usize) -> (Vec<TensorAccessLog>, Vec<String>, SharedCounters) {
    let model = Model::load(gguf).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let (map, options) = (OffsetMap::new(gguf), RunOptions::default());
    let writer = RunWriter::create(&run, Manifest::default(), &map, options).unwrap();
    let threads = Threads::new(2).unwrap();
    let mut session = Session::new(
        &model,
        &threads,
        Recorder::new(Some(writer)),
        CacheParams::new(64),
    )
    .unwrap();
    let lanes = random_lanes(&model, &mut SplitMix64::new(3), 2, percent);
    session
        .expert_cache()
        .enable_hot_cache(&lanes, PerfMode::Update)
        .unwrap();
    let counters = session.counters().unwrap();
    request(&mut session, 0, 50);
    let (recorder, ended) = session.into_recorder();
    ended.unwrap();
    recorder.into_writer().unwrap().finish().unwrap();
    let records = Trace::open(run.join(TRACE_FILE)).unwrap().records().into();
    let faults = check::check(&Run::open(&run).unwrap());
    let faults = faults.iter().map(ToString::to_string).collect();
    (records, faults, counters)
}

#[test]
fn records_the_lane_of_each_expert_and_the_operations_of_a_run_without_cache() {
    for name in MODELS {
        let gguf = open(name);
        let (plain, faults, _) = record(&gguf, 0);
        assert_eq!(faults, [""; 0], "{name}");
        for percent in [50, 100] {
            let (records, faults, counters) = record(&gguf, percent);
            assert_eq!(faults, [""; 0], "{name}, {percent} %");
            let operations = |records: &[TensorAccessLog]| {
                let operation = |r: &TensorAccessLog| {
                    let sources = r.sources().iter().map(|s| s.name().into_owned());
                    let experts: Vec<i32> = r.expert_ids().iter().map(|id| id.get()).collect();
                    let names: Vec<String> = sources.collect();
                    (r.operation_type, r.dst_name().into_owned(), names, experts)
                };
                records.iter().map(operation).collect::<Vec<_>>()
            };
            assert!(
                operations(&records) == operations(&plain),
                "{name}, {percent} %"
            );
            let down = records
                .iter()
                .filter(|r| r.dst_name().starts_with("ffn_moe_down-"));
            let mut lanes = BTreeMap::<u8, u64>::new();
            for record in down {
                let n = record.expert_ids().len();
                for lane in &record.expert_lane[..n] {
                    *lanes.entry(*lane).or_default() += 1;
                }
            }
            let n = |lane| lanes.get(&lane).copied().unwrap_or(0);
            let counters = counters.lock();
            assert_eq!(
                n(lane::HOT_CACHE),
                counters.hot_slots(),
                "{name}, {percent} %"
            );
            assert_eq!(n(lane::CPU), counters.cold_slots(), "{name}, {percent} %");
            assert_eq!(
                lanes.values().sum::<u64>(),
                n(lane::HOT_CACHE) + n(lane::CPU)
            );
        }
    }
}
