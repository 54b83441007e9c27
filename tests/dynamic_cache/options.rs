//! Options of a dynamic cache that do not fit together.

use super::{Workplace, dynamic_cache};
use crate::support::{args, fail, file_of, run};

#[test]
fn rejects_settings_that_do_not_fit_together() {
    let work = Workplace::new("F16");
    let record = |options: &[&str]| {
        let out = work.path("run");
        fail!["record", "--model", work.model, "-n", "1", "--out", out, options]
    };
    let dynamic = ["--policy", "dynamic", "--hot-cache-mib", "4"];
    for (options, expected) in [
        (&["--policy", "dynamic"][..], "pass --hot-cache-mib N or --hot-cache-mib auto"),
        (&["--policy", "dynamic", "--hot-cache-mib", "1,1"], "pass one value"),
        (&["--cache-policy", "lfu"], "--cache-policy has no effect without --policy dynamic"),
        (&["--predictor", "markov"], "--predictor has no effect without --policy dynamic"),
        (&["--hot-cache-mib", "1"], "no effect without --policy hot-cache or dynamic"),
        (&[&dynamic[..], &["--perf", "off,full"]].concat(), "--perf has several values"),
        (
            &[&dynamic[..], &["--hot-cache", "x.json"]].concat(),
            "--hot-cache has no effect with --policy dynamic",
        ),
        (
            &[&dynamic[..], &["--update-rate", "1"]].concat(),
            "--update-rate has no effect with --policy dynamic",
        ),
        (
            &[&dynamic[..], &["--hot-cache-reserve-mib", "1"]].concat(),
            "without --hot-cache-mib auto",
        ),
        (
            &["--cache-policy", "foo"],
            "unknown policy \"foo\"; use lru, lfu, lfuda, lfru, slru, s3fifo, arc, clock, random, or layer followed by one of \
             these (`layer` alone is `layerlru`);",
        ),
        (
            &[&dynamic[..], &["--cache-policy", "belady"]].concat(),
            "--cache-policy: the policy belady needs the routing decisions of the future, which only a simulation knows; use lru, lfu,",
        ),
        (
            &[&dynamic[..], &["--cache-policy", "hotcache"]].concat(),
            "--cache-policy: the policy hotcache does not load missing experts; for fixed contents use a hot cache, else lru, lfu,",
        ),
        (
            &[&dynamic[..], &["--predictor", "markov", "--prefetch-depth", "4"]].concat(),
            "--prefetch-depth 4 is out of range (1..=3) for 4 MoE layers",
        ),
    ] {
        let message = record(options);
        assert!(message.contains(expected), "{options:?}: {message}");
    }
}

#[test]
fn predictor_needs_two_moe_layers() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("m.gguf");
    let spec = r#"{"arch": "qwen3moe", "n_layer": 1, "n_embd": 256, "n_head": 4, "n_expert": 8,
        "n_expert_used": 2, "n_ff_exp": 256, "vocab": {"n_tokens": 1000, "pre": "qwen2"}}"#;
    let spec = file_of(dir.path(), "spec.json", spec);
    run!["--quiet", "synth", "--spec", spec, "--out", model];
    let dynamic = ["--policy", "dynamic", "--hot-cache-mib", "4", "--predictor", "previous"];
    let record =
        args!["--quiet", "record", "--model", model, "-p", "a", "-n", "1", "--trace", "off"];
    let message = fail![record, dynamic];
    let expected = "prefetching needs at least 2 MoE layers, but the model has 1; omit --predictor";
    assert!(message.contains(expected), "{message}");
}

#[test]
fn manifest_describes_the_cache() {
    let work = Workplace::new("F32");
    let out = work.path("run");
    let cache = ["--policy", "dynamic", "--hot-cache-mib", "5", "--predictor", "markov"];
    run!["--quiet", "record", "--model", work.model, "-n", "2", "--out", out, cache];
    let cache = dynamic_cache(&out);
    assert_eq!((cache.policy.as_str(), cache.predictor.as_deref()), ("lru", Some("markov")));
    assert_eq!((cache.device.as_str(), cache.depth, cache.n_predict), ("CPU", 1, None));
    // Experts of 0.75 MiB; slots for one layer of two predicted experts; one dummy.
    assert_eq!((cache.budget_bytes, cache.n_slots, cache.n_prefetch_slots), (5 << 20, 6, 2));
    assert_eq!(cache.bytes, 9 * 3 * 256 * 256 * 4);
}
