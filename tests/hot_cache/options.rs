//! Options of a hot cache: spellings of the fork, variables, and combinations that do not fit together.

use std::fs;
use std::path::Path;

use serde_json::Value;

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
            "--hot-cache-device", "CPU,CPU,CPU", "--update-rate", "0.5",
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
            "--moe-hot-cache-device",
            "CPU",
            "--moe-hot-cache-second-device",
            "CPU",
            "--moe-hot-cache-third-device",
            "CPU",
            "--moe-hot-cache-qwen-weighting",
            "pressure",
            "--moe-hot-cache-qwen-layer-curve",
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

/// An option of the second or third lane does not concern the lanes before it.
#[test]
fn options_of_later_lanes_leave_earlier_lanes_unchanged() {
    let work = Workplace::new();
    let learn = ["--moe-hot-cache", arg(&work.learn)];
    let run = work.record("run", &[&learn[..], &["--moe-hot-cache-third-max-mib", "1"]].concat());
    let lanes = hot_cache(&run).lanes;
    let budgets: Vec<u64> = lanes.iter().map(|lane| lane.budget_bytes >> 20).collect();
    assert_eq!(budgets, [0, 0, 1]);
    let auto = [
        "--moe-hot-cache-max-mib",
        "-1",
        "--moe-hot-cache-second-max-mib",
        "-1",
        "--moe-hot-cache-second-auto-reserve-mib",
        "1e9",
    ];
    let run = work.record("auto", &[&learn[..], &auto].concat());
    let lanes = hot_cache(&run).lanes;
    assert!(lanes[0].budget_bytes > 0, "{lanes:?}");
    assert_eq!(lanes[1].budget_bytes, 0, "{lanes:?}");
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
    assert_eq!(recorded("LLAMA_MOE_HOT_CACHE_QWEN_WEIGHTING", "rank").weighting, "balanced");
    for variable in [
        "LLAMA_MOE_HOT_CACHE_LAYER_CURVE",
        "LLAMA_MOE_HOT_CACHE_QWEN_LAYER_CURVE",
        "LLAMA_MOE_HOT_CACHE_GEMMA4_LAYER_CURVE",
    ] {
        assert_eq!(recorded(variable, "1").layer_curve, 1.0, "{variable}");
    }
    // An option overrides all variables.
    let mut command = with("LLAMA_MOE_HOT_CACHE_WEIGHTING", "rank");
    command.args(["--moe-hot-cache-qwen-weighting", "smooth"]);
    command.assert().success();
    assert_eq!(hot_cache(&out).weighting, "smooth");
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
        (&[&["--hot-cache", learn]], "--hot-cache has no effect without --policy hot-cache;"),
        (&[&["--perf", "full"]], "--perf has no effect without --policy hot-cache or dynamic;"),
        (&[&["--policy", "hot-cache"]], "pass a plan or a learn file with --hot-cache"),
        (&[&hot], "pass --hot-cache-mib N"),
        (&[&hot, &["--hot-cache-mib", "1,1,1,1"]], "at most 3 lanes"),
        (&[&hot, &mib, &["--hot-cache-reserve-mib", "1"]], "without --hot-cache-mib auto"),
        (
            &[&hot, &["--hot-cache-mib", "auto", "--hot-cache-reserve-mib", "1,1"]],
            "more values than --hot-cache-mib",
        ),
        (&[&hot, &mib, &["--hot-cache-device", "CPU,CPU"]], "2 values for 1 lane"),
        (&[&hot, &mib, &["--hot-cache-device", "CUDA0"]], "CUDA0 is not in the list of devices"),
        (&[&hot, &mib, &["--hot-cache-device", "gpu"]], "CPU, CUDA0, CUDA1, ..."),
        (&[&hot, &["--hot-cache-mib", "-2,1"]], "value '-2' for '--hot-cache-mib"),
        (&[&hot, &["--hot-cache-mib", "1000000000001"]], "from 0 to 1e12, or auto"),
        (
            &[&hot, &["--hot-cache-mib", "auto", "--hot-cache-reserve-mib", "-1,2"]],
            "value '-1' for '--hot-cache-reserve-mib",
        ),
        (&[&hot, &mib, &["--update-rate", "nan"]], "from 0 to 1"),
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
    let unknown = of(&format!(r#"{{{schema}, "layers": [{{"layer": 9, "experts": [[1, 2]]}}]}}"#));
    assert!(unknown.contains("contains no expert of the model"), "{unknown}");
    assert!(of("{}").contains("is not a plan"), "an object");
    assert!(of("{").contains("neither a plan nor a learn file"), "a part of an object");
    for text in ["[1]", "", "\u{0}"] {
        let message = of(text);
        assert_eq!(message.matches("cache.json").count(), 1, "{message}");
    }
    let path = work.path("missing.json");
    let cache = ["--policy", "hot-cache", "--hot-cache", arg(&path), "--hot-cache-mib", "1"];
    let message = fail!["record", "--model", model(), cache];
    assert_eq!(message.matches("missing.json").count(), 1, "{message}");
}

/// Nothing is learned if the learn file could not be written or used.
#[test]
fn checks_the_learn_file_before_learning() {
    let work = Workplace::new();
    let (out, learned) = (work.path("run"), work.path("learned.json"));
    let warmup = file_of(work.dir.path(), "warmup.txt", "int main");
    let learn = ["--auto-learn", "--warmup-prompt", arg(&warmup)];
    let message = |file: &Path, more: &[&str]| {
        let cache = args!["--policy", "hot-cache", "--hot-cache", file, learn, more];
        let message = fail!["record", "--model", model(), "-n", "2", "--out", out, cache];
        assert!(!out.exists() && !learned.exists(), "{message}");
        message
    };
    assert!(message(&learned, &[]).contains("pass --hot-cache-mib N"));
    let nowhere = work.path("nowhere/learned.json");
    let error = message(&nowhere, &["--hot-cache-mib", "1"]);
    assert!(error.contains("nowhere") && error.contains("does not exist; create it"), "{error}");
}

/// A plan that was changed, or made for another model. Nothing is written.
#[test]
fn rejects_plans_with_wrong_contents() {
    type Change = dyn Fn(&mut Value);
    let work = Workplace::new();
    let out = work.path("run");
    let budget = ["--budget-mib", "1", "-o", "json"];
    let plan = run!["--quiet", "plan", work.learn, "--model", model(), budget];
    let message_of = |text: &str| {
        let file = file_of(work.dir.path(), "plan.json", text);
        let how = ["--policy", "hot-cache", "--hot-cache", arg(&file)];
        let message = fail!["record", "--model", model(), "-n", "2", "--out", out, how];
        assert!(!out.exists(), "{message}");
        assert!(message.contains("plan.json"), "{message}");
        message
    };
    let changed = |change: &Change| {
        let mut plan: Value = serde_json::from_str(&plan).unwrap();
        change(&mut plan);
        message_of(&plan.to_string())
    };
    let cases: &[(&Change, &str)] = &[
        (&|plan| plan["selected"][0]["lane"] = 1.into(), "in lane 1, which the plan does not list"),
        (&|plan| plan["selected"][0]["expert"] = 32.into(), "which the model does not have"),
        (&|plan| plan["selected"][0]["layer"] = 6.into(), "which the model does not have"),
        (&|plan| plan["selected"][0]["expert"] = 65536.into(), "65536"),
        (&|plan| plan["selected"][0]["layer"] = (-1).into(), "-1"),
        (&|plan| plan["selected"][0]["bytes"] = 5.into(), "but 5 bytes in the plan"),
        (&|plan| plan["selected"][1] = plan["selected"][0].clone(), "twice"),
        (&|plan| plan["lanes"] = Value::Array(Vec::new()), "0 lanes, but a hot cache has 1 to 3"),
        (&|plan| plan["lanes"] = vec![plan["lanes"][0].clone(); 4].into(), "has 4 lanes"),
        (&|plan| plan["weighting"] = "some".into(), "some"),
        (&|plan| plan["strategy"] = "some".into(), "some"),
        (&|plan| plan["layer_curve"] = 1.5.into(), "out of range (0..=1)"),
    ];
    for (change, expected) in cases {
        let message = changed(change);
        assert!(message.contains(expected), "{expected}: {message}");
    }
    for end in [0, 1, plan.len() / 2, plan.trim_end().len() - 1] {
        message_of(&plan[..end]);
    }
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
