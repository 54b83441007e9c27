//! Options of a hot cache: spellings of the fork, variables, and combinations that do not fit together.

use std::fs;

use super::{Workplace, hot_cache, model};
use crate::support::{arg, args, fail, file_of, moe_analyze, run};

#[test]
fn accepts_spellings_of_the_fork() {
    let work = Workplace::new();
    let learn = arg(&work.learn);
    let own = work.record(
        "own",
        &[
            "--hot-cache", learn, "--hot-cache-mib", "1,2,1", "--hot-cache-strategy", "hot-even",
            "--hot-cache-weighting", "pressure", "--hot-cache-layer-curve", "0.25",
            "--update-rate", "0.5",
        ],
    );
    let fork = work.record(
        "fork",
        &[
            "--moe-hot-cache",
            learn,
            "--moe-hot-cache-max-mib",
            "1",
            "--moe-hot-cache-second-max-mib",
            "2",
            "--moe-hot-cache-third-max-mib",
            "1",
            "--moe-hot-cache-device-strategy",
            "hot-even",
            "--moe-hot-cache-weighting",
            "pressure",
            "--moe-hot-cache-layer-curve",
            "0.25",
            "--moe-hot-cache-update-rate",
            "0.5",
        ],
    );
    let (own, fork) = (hot_cache(&own), hot_cache(&fork));
    assert_eq!(own, fork);
    assert_eq!((own.weighting.as_str(), own.layer_curve), ("pressure", 0.25));
    assert_eq!((own.strategy.as_str(), own.update_rate), ("hot-even", 0.5));
    assert_eq!(
        own.lanes
            .iter()
            .map(|lane| lane.budget_bytes >> 20)
            .collect::<Vec<_>>(),
        [1, 2, 1]
    );
}

#[test]
fn reads_variables_of_the_fork() {
    let work = Workplace::new();
    let out = work.path("run");
    let args = args![
        "--quiet",
        "record",
        "--model",
        model(),
        "-n",
        "2",
        "--out",
        out,
        "--policy",
        "hot-cache",
        "--hot-cache",
        work.learn,
        "--hot-cache-mib",
        "2"
    ];
    let with = |variable: &str, value: &str| {
        let mut command = moe_analyze();
        command.env(variable, value).args(&args).arg("--force");
        command
    };
    let recorded = |variable, value| {
        with(variable, value).assert().success();
        hot_cache(&out)
    };
    assert_eq!(recorded("LLAMA_MOE_HOT_CACHE_WEIGHTING", "rank").weighting, "balanced");
    assert_eq!(recorded("LLAMA_MOE_HOT_CACHE_LAYER_CURVE", "1").layer_curve, 1.0);
    assert_eq!(recorded("LLAMA_MOE_LAYER_PERF", "1").perf, "full");
    let plain = recorded("LLAMA_MOE_HOT_CACHE_FILL_RANDOM", "0");
    let filled = recorded("LLAMA_MOE_HOT_CACHE_FILL_RANDOM", "1");
    assert!(filled.lanes[0].planned_bytes >= plain.lanes[0].planned_bytes);
    assert!(filled.fill_random && !plain.fill_random);

    let failed = with("LLAMA_MOE_LAYER_PERF", "some").assert().code(2);
    let stderr = String::from_utf8_lossy(&failed.get_output().stderr).into_owned();
    assert!(stderr.contains("'some' for LLAMA_MOE_LAYER_PERF"), "{stderr}");
    // Variables of a cache do not concern other policies.
    let mut command = moe_analyze();
    command.env("LLAMA_MOE_LAYER_PERF", "some");
    command.args(args!["--quiet", "record", "-n", "2", "--force", "--out", out]);
    command.assert().success();
}

#[test]
fn rejects_options_that_do_not_fit() {
    let work = Workplace::new();
    let learn = arg(&work.learn);
    let plan = work.path("plan.json");
    let budget = ["--budget-mib", "1", "-o", "json"];
    fs::write(&plan, run!["--quiet", "plan", work.learn, "--model", model(), budget]).unwrap();
    let plan = arg(&plan);
    let warmup = file_of(work.dir.path(), "warmup.txt", "int main");
    let warmup = arg(&warmup);
    let hot = ["--policy", "hot-cache", "--hot-cache", learn];
    let mib = ["--hot-cache-mib", "1"];
    let cases: &[(&[&[&str]], &str)] = &[
        (&[&["--hot-cache", learn]], "--hot-cache has no effect without --policy hot-cache"),
        (&[&["--perf", "full"]], "--perf has no effect without --policy hot-cache"),
        (&[&["--policy", "hot-cache"]], "pass a plan or a learn file with --hot-cache"),
        (&[&hot], "pass --hot-cache-mib N"),
        (&[&hot, &["--hot-cache-mib", "1,1,1,1"]], "at most 3 lanes"),
        (&[&hot, &mib, &["--hot-cache-reserve-mib", "1"]], "without --hot-cache-mib auto"),
        (
            &[&hot, &["--hot-cache-mib", "auto", "--hot-cache-reserve-mib", "1,1"]],
            "more values than --hot-cache-mib",
        ),
        (&[&hot, &mib, &["--update-policy", "fork"]], "an update rate of 0"),
        (&[&hot, &mib, &["--update-after", "prompt"]], "--update-after has no effect"),
        (&[&hot, &mib, &["--update-horizon", "5"]], "without --update-policy payback"),
        (
            &[&hot, &mib, &["--update-policy", "payback", "--update-bandwidths", "1,2"]],
            "needs three values",
        ),
        (&[&hot, &mib, &["--perf", "off", "--update-rate", "1"]], "--perf off counts nothing"),
        (&[&hot, &mib, &["--auto-learn"]], "pass --warmup-prompt"),
        (
            &[&["--policy", "hot-cache", "--hot-cache", plan], &mib],
            "--hot-cache-mib has no effect with a plan",
        ),
        (
            &[&["--engine", "llama.cpp"], &hot, &mib],
            "--policy hot-cache has no effect with --engine llama.cpp",
        ),
    ];
    let out = work.path("run");
    for (options, expected) in cases {
        let options = options.concat();
        let message = fail!["record", "--model", model(), "-n", "2", "--out", out, options];
        assert!(message.contains(expected), "{options:?}: {message}");
        assert!(!out.exists(), "{options:?}");
    }
    let warm = ["--warmup-prompt", warmup];
    let message = fail!["replay", work.path("first"), "--model", model(), hot, mib, warm];
    assert!(message.contains("replay runs only the MoE layers"), "{message}");
}

/// Errors of the file of `--hot-cache`, before anything is written.
#[test]
fn rejects_files_of_other_models_and_formats() {
    let work = Workplace::new();
    let out = work.path("run");
    let of = |text: &str| {
        let file = file_of(work.dir.path(), "cache.json", text);
        let cache = ["--hot-cache", arg(&file), "--hot-cache-mib", "1"];
        let model = args!["--model", model(), "-n", "2", "--out", out, "--policy", "hot-cache"];
        let message = fail!["record", model, cache];
        assert!(!out.exists());
        message
    };
    let schema = r#""schema": "llama.cpp.moe_layer_opt_perf.v1""#;
    let other = of(&format!(
        r#"{{{schema}, "n_expert": 64, "layers": [{{"layer": 0, "experts": [[1, 2]]}}]}}"#
    ));
    assert!(other.contains("64"), "{other}");
    let empty = of(&format!(r#"{{{schema}, "layers": []}}"#));
    assert!(empty.contains("contains no activations"), "{empty}");
    assert!(of("{}").contains("is not a plan"), "an object");
    assert!(of("[1]").contains("cache.json"), "an array");
}

/// A cache without room for an expert computes everything on the CPU.
#[test]
fn empty_cache_changes_nothing() {
    let work = Workplace::new();
    let run = work.record("run", &["--hot-cache", arg(&work.learn), "--hot-cache-mib", "0"]);
    assert_eq!(super::sum(&super::slots_of_report(&run)).0, 0);
    let cache = hot_cache(&run);
    assert!(cache.lanes[0].experts.is_empty());
    assert_eq!(cache.lanes[0].bytes, 0);
}
