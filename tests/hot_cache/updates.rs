//! Updates after each sequence or its prompt, and caches that a run learns.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use moe_trace::{ExpertId, LayerId, Phase, Run};
use serde_json::Value;

use super::{Workplace, hot_cache, slots_of_report, slots_of_trace, sum};
use crate::support::{arg, args, file_of, moe_analyze, run};

/// Number of exchanges after each sequence.
fn exchanged(work: &Workplace, name: &str, options: &[&str]) -> Vec<u64> {
    let cache = ["--hot-cache", arg(&work.learn)];
    let run = work.record(name, &[&cache[..], options].concat());
    assert_eq!(slots_of_report(&run), slots_of_trace(&run), "{name}");
    hot_cache(&run)
        .requests
        .iter()
        .map(|request| request.exchanged)
        .collect()
}

/// The rules of the fork: at most the rate, and none with several lanes.
#[test]
fn update_rate_limits_exchanges() {
    let work = Workplace::new();
    let mib = ["--hot-cache-mib", "1"];
    assert_eq!(exchanged(&work, "none", &mib), [0, 0, 0]);
    let some = exchanged(&work, "some", &[&mib[..], &["--update-rate", "0.05"]].concat());
    let all = exchanged(&work, "all", &[&mib[..], &["--update-rate", "1"]].concat());
    assert!(some[0] > 0 && some[0] < all[0], "{some:?} {all:?}");
    let lanes = ["--hot-cache-mib", "1,1", "--update-rate", "1"];
    assert_eq!(exchanged(&work, "lanes", &lanes), [0, 0, 0]);
}

/// A sequence and a phase.
type Part = (u32, Phase);

/// Layer, expert and lane of each selection.
type Selections = Vec<(LayerId, ExpertId, u8)>;

fn selections(run: &Path) -> BTreeMap<Part, Selections> {
    let mut selections = BTreeMap::<Part, Selections>::new();
    for operation in Run::open(run).unwrap().routing() {
        let head = operation.head();
        let (layer, phase) = (head.layer().unwrap(), Phase::try_from(head.phase).unwrap());
        let part = selections.entry((head.sequence_id.get(), phase));
        let experts = operation.tokens().flat_map(|token| token.experts());
        let experts = experts.map(|expert| (layer, expert.expert_id, expert.lane));
        part.or_default().extend(experts);
    }
    selections
}

/// With updates after prompts, the generated tokens of each sequence have other experts in the cache than its prompt. The results
/// are those of a run without updates, and the counters agree with the trace.
#[test]
fn prompt_updates_the_cache_before_the_first_generated_token() {
    let work = Workplace::new();
    let cache = ["--hot-cache", arg(&work.learn), "--hot-cache-mib", "1"];
    let update = [&cache[..], &["--update-rate", "1", "--update-after", "prompt"]].concat();
    let [plain, updated] = [("plain", &cache[..]), ("updated", &update)]
        .map(|(name, options)| work.record(name, options));
    assert_eq!(slots_of_report(&updated), slots_of_trace(&updated));
    let requests = hot_cache(&updated).requests;
    assert!(requests.iter().all(|request| request.exchanged > 0), "{requests:?}");
    assert_eq!(hot_cache(&updated).update_after, "prompt");
    assert_eq!(hot_cache(&plain).update_after, "request");

    let [plain, updated] = [&plain, &updated].map(|run| selections(run));
    let experts = |part: &Selections| {
        let experts = part.iter().map(|&(layer, expert, _)| (layer, expert));
        experts.collect::<Vec<_>>()
    };
    for (part, selected) in &plain {
        assert_eq!(experts(&updated[part]), experts(selected), "{part:?}");
    }
    let first = (0, Phase::Prompt);
    assert_eq!(updated[&first], plain[&first], "the first prompt uses the planned cache");
    // Each phase of a sequence has one cache, and that of the generated tokens is another one.
    let mut n_changed = 0;
    for sequence in 0..3 {
        let [prompt, generated] = [Phase::Prompt, Phase::Generate].map(|phase| {
            let lanes: BTreeSet<_> = updated[&(sequence, phase)].iter().copied().collect();
            let lane_of: BTreeMap<_, _> = lanes
                .iter()
                .map(|&(layer, expert, lane)| ((layer, expert), lane))
                .collect();
            assert_eq!(lane_of.len(), lanes.len(), "sequence {sequence}, {phase:?}");
            lane_of
        });
        let changed = generated
            .iter()
            .filter(|(key, lane)| prompt.get(key).is_some_and(|before| before != *lane));
        n_changed += changed.count();
    }
    assert!(n_changed > 0);

    // A replay makes the same exchanges.
    let out = work.path("replayed");
    let how = ["--policy", "hot-cache", "-r", "1", "-t", "1"];
    let recorded = work.path("updated");
    run!["--quiet", "replay", recorded, "--model", super::model(), how, update, "--out", out];
    assert_eq!(hot_cache(&out).requests, requests);
    assert_eq!(slots_of_trace(&out), slots_of_trace(&recorded));
}

/// The faster the lane and the longer the horizon, the more exchanges pay.
#[test]
fn payback_exchanges_only_what_pays() {
    let work = Workplace::new();
    let with = |name: &str, horizon: &str, bandwidths: &str| {
        let rule = ["--update-policy", "payback", "--update-horizon", horizon];
        let cache = ["--hot-cache-mib", "1,1", "--update-bandwidths", bandwidths];
        exchanged(&work, name, &[&rule[..], &cache].concat())
    };
    assert_eq!(with("slow", "1000", "10,10,10"), [0, 0, 0], "a lane as slow as the CPU");
    assert_eq!(with("short", "0.001", "10,1000,10"), [0, 0, 0]);
    let few = with("few", "4", "10,1000,10");
    let many = with("many", "1000", "10,1000,10");
    let sum = |exchanged: &[u64]| exchanged.iter().sum::<u64>();
    assert!(sum(&few) > 0 && sum(&few) < sum(&many), "{few:?} {many:?}");
}

/// A learned cache contains the experts of the warm-up prompt, and others in free memory.
#[test]
fn learns_from_the_warmup_prompt() {
    let work = Workplace::new();
    let warmup = file_of(work.dir.path(), "warmup.txt", "The kernel driver is responsible for\n");
    let file = work.path("learned.json");
    let learn = ["--hot-cache", arg(&file), "--hot-cache-mib", "2", "--auto-learn"];
    let options = [&learn[..], &["--warmup-prompt", arg(&warmup)]].concat();
    let run = work.record("learning", &options);
    let first = hot_cache(&run);
    assert_eq!((first.kind.as_str(), first.fill_random), ("auto-learn", true));
    let counted = fs::read_to_string(&file).unwrap();
    let report: Value = serde_json::from_str(&counted).unwrap();
    assert_eq!(report["summary"]["hot_slot_ratio"], 0.0);
    // 9 tokens with 4 experts in each layer but the last, which computes only the last token.
    assert_eq!(report["layers"][0]["cold_slots_total"], 36);
    assert_eq!(slots_of_report(&run), slots_of_trace(&run), "the warm-up prompt is not counted");
    assert!(sum(&slots_of_report(&run)).0 > 0);

    // The next run reads the file.
    let second = hot_cache(&work.record("second", &options));
    assert_eq!(second.kind, "learn");
    assert_eq!(second.lanes, first.lanes);
    assert_eq!(fs::read_to_string(&file).unwrap(), counted);
}

/// A warm-up prompt is a request: its exchanges precede the first sequence.
#[test]
fn warmup_prompt_updates_the_cache() {
    let work = Workplace::new();
    let warmup = file_of(work.dir.path(), "warmup.txt", "int main(void) { return 0; }");
    let cache = ["--hot-cache", arg(&work.learn), "--hot-cache-mib", "1", "--update-rate", "1"];
    let cold = work.record("cold", &cache);
    let warm = work.record("warm", &[&cache[..], &["--warmup-prompt", arg(&warmup)]].concat());
    let first = |run| hot_cache(run).requests[0].clone();
    assert_ne!(first(&cold).hot_slots, first(&warm).hot_slots);
    assert_eq!(slots_of_report(&warm), slots_of_trace(&warm));
}

#[test]
fn warns_of_a_warmup_prompt_without_updates() {
    let work = Workplace::new();
    let warmup = file_of(work.dir.path(), "warmup.txt", "int main(void) { return 0; }");
    let notes = |name: &str, options: &[&str]| {
        let out = work.path(name);
        let inputs = args!["record", "--model", super::model(), "-n", "1", "--out", out];
        let cache =
            ["--policy", "hot-cache", "--hot-cache-mib", "1", "--warmup-prompt", arg(&warmup)];
        let done = moe_analyze()
            .args(args![inputs, cache, options])
            .assert()
            .success();
        String::from_utf8(done.get_output().stderr.clone()).unwrap()
    };
    let warning = "warning: --warmup-prompt does not change the cache with an update rate of 0";
    let learned = work.path("learned.json");
    for (name, options, warns) in [
        ("fixed", &["--hot-cache", arg(&work.learn)][..], true),
        ("updated", &["--hot-cache", arg(&work.learn), "--update-rate", "1"], false),
        ("learned", &["--hot-cache", arg(&learned), "--auto-learn"], false),
    ] {
        let notes = notes(name, options);
        assert_eq!(notes.contains(warning), warns, "{name}: {notes}");
    }
}

/// The cache of a replay starts with the plan in each run over the trace.
#[test]
fn replay_updates_between_sequences() {
    let work = Workplace::new();
    let cache = ["--hot-cache", arg(&work.learn), "--hot-cache-mib", "1", "--update-rate", "0.1"];
    let recorded = work.record("recorded", &cache);
    let out = work.path("replayed");
    let how = ["--policy", "hot-cache", "-r", "2", "-t", "1"];
    run!["--quiet", "replay", recorded, "--model", super::model(), how, cache, "--out", out];
    assert_eq!(hot_cache(&out).requests, hot_cache(&recorded).requests);
    assert_eq!(slots_of_trace(&out), slots_of_trace(&recorded));
}
