//! `plan`: the runtime's forty cases, sizes from models, budgets, explanations, command lines, updates, and what is refused.

mod support;

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use support::{arg, failure_of, moe_analyze, repository, stdout_of};
use tempfile::TempDir;

const QWEN: &str = "fixtures/tiny-qwen3moe-Q4_K_M.gguf";
const GPT_OSS: &str = "fixtures/tiny-gpt-oss-MXFP4.gguf";
/// Bytes of an expert of the gpt-oss fixture: three MXFP4 matrices of 64 × 256 and F32 biases of 64, 64 and 256.
const GPT_OSS_EXPERT: u64 = 3 * 64 * 256 / 32 * 17 + (64 + 64 + 256) * 4;

/// A directory with a small learn file, `learn.json`: layer 0 chose experts 3 (9 times), 5 (4) and 6 (1), layer 2 expert 1
/// (8).
fn workplace() -> TempDir {
    let dir = TempDir::new().unwrap();
    let learn = json!({"schema": "llama.cpp.moe_layer_opt_perf.v1", "n_expert": 32, "layers": [
        {"layer": 0, "calls": 7, "experts": [[3, 9], [5, 4], [6, 1]], "note": "kept"},
        {"layer": 2, "calls": 7, "experts": [[1, 8]]}]});
    fs::write(dir.path().join("learn.json"), learn.to_string()).unwrap();
    dir
}

fn write(dir: &TempDir, name: &str, text: &str) -> PathBuf {
    let path = dir.path().join(name);
    fs::write(&path, text).unwrap();
    path
}

fn json_of(args: &[&str]) -> Value {
    serde_json::from_str(&stdout_of(args)).unwrap()
}

/// `(layer, expert, lane)` of a plan.
fn selected(plan: &Value) -> Vec<(u64, u64, u64)> {
    let number = |entry: &Value, key| entry[key].as_u64().unwrap();
    let selected = plan["selected"].as_array().unwrap().iter();
    selected
        .map(|entry| {
            (
                number(entry, "layer"),
                number(entry, "expert"),
                number(entry, "lane"),
            )
        })
        .collect()
}

/// The answers of the runtime's own parser, weighting and planner.
#[test]
fn the_runtimes_forty_cases() {
    let dir = TempDir::new().unwrap();
    let cases = fs::read_to_string(repository("fixtures/hot-cache/plans.json")).unwrap();
    let cases: Vec<Value> = serde_json::from_str(&cases).unwrap();
    assert_eq!(cases.len(), 40);
    for (number, case) in cases.iter().enumerate() {
        let learn = write(&dir, "learn.json", &case["learn"].to_string());
        let rows = case["sizes"].as_array().unwrap().iter();
        let rows = rows.map(|row| format!("{},{},{}\n", row[0], row[1], row[2]));
        let sizes = write(
            &dir,
            "sizes.csv",
            &format!("layer,expert,bytes\n{}", rows.collect::<String>()),
        );
        let budgets: Vec<String> = case["lane_budgets"]
            .as_array()
            .unwrap()
            .iter()
            .map(Value::to_string)
            .collect();
        let plan = json_of(&[
            "plan",
            arg(&learn),
            "--sizes",
            arg(&sizes),
            "--budget-bytes",
            &budgets.join(","),
            "--weighting",
            case["weighting"].as_str().unwrap(),
            "--layer-curve",
            &case["layer_curve"].to_string(),
            "--strategy",
            case["strategy"].as_str().unwrap(),
            "-o",
            "json",
        ]);
        let expected = &case["expected"];
        let scores = expected["ranking"].as_array().unwrap();
        let mut expected_selected = Vec::new();
        for (lane, expected) in expected["lanes"].as_array().unwrap().iter().enumerate() {
            assert_eq!(
                plan["lanes"][lane]["used_bytes"], expected["used_bytes"],
                "case {number}"
            );
            assert_eq!(
                plan["lanes"][lane]["budget_bytes"], case["lane_budgets"][lane],
                "case {number}"
            );
            for expert in expected["selected"].as_array().unwrap() {
                let score = scores
                    .iter()
                    .find(|row| row[0] == expert[0] && row[1] == expert[1])
                    .unwrap();
                expected_selected.push(json!([expert[0], expert[1], score[2], lane]));
            }
        }
        let found = plan["selected"].as_array().unwrap().iter();
        let found: Vec<Value> = found
            .map(|entry| {
                json!([
                    entry["layer"],
                    entry["expert"],
                    entry["score"],
                    entry["lane"]
                ])
            })
            .collect();
        assert_eq!(found, expected_selected, "case {number}");
    }
}

/// Two experts and an empty one in layer 0, one and an empty one in layer 2: five, to the byte.
#[test]
fn sizes_come_from_the_model() {
    let dir = workplace();
    let (learn, model) = (dir.path().join("learn.json"), repository(GPT_OSS));
    let plan = |bytes: u64| {
        let bytes = bytes.to_string();
        json_of(&[
            "plan",
            arg(&learn),
            "--model",
            arg(&model),
            "--budget-bytes",
            &bytes,
            "--weighting",
            "flat",
            "-o",
            "json",
        ])
    };
    let five = plan(5 * GPT_OSS_EXPERT);
    assert_eq!(selected(&five), [(0, 3, 0), (2, 1, 0), (0, 5, 0)]);
    assert_eq!(five["lanes"][0]["used_bytes"], 5 * GPT_OSS_EXPERT);
    assert!(
        five["selected"]
            .as_array()
            .unwrap()
            .iter()
            .all(|entry| entry["bytes"] == GPT_OSS_EXPERT)
    );
    assert_eq!(five["estimated_hit_share"], 21.0 / 22.0);
    assert_eq!(
        selected(&plan(5 * GPT_OSS_EXPERT - 1)),
        [(0, 3, 0), (2, 1, 0)]
    );
}

/// Of gpt-oss the runtime weighs by time, with a curve of 1; of other models by place.
#[test]
fn defaults_are_the_runtimes() {
    let dir = workplace();
    let learn = dir.path().join("learn.json");
    let defaults = |model: &str, more: &[&str]| {
        let model = repository(model);
        let args = [
            "plan",
            arg(&learn),
            "--model",
            arg(&model),
            "--budget-mib",
            "1",
            "-o",
            "json",
        ];
        let plan = json_of(&[&args, more].concat());
        (plan["weighting"].clone(), plan["layer_curve"].clone())
    };
    assert_eq!(defaults(QWEN, &[]), (json!("flat"), json!(0.5)));
    assert_eq!(defaults(GPT_OSS, &[]), (json!("time"), json!(1.0)));
    let told = ["--weighting", "capped", "--layer-curve", "0.25"];
    assert_eq!(defaults(GPT_OSS, &told), (json!("smooth"), json!(0.25)));
    // A curve out of range becomes 0.5, and that is told.
    assert_eq!(
        defaults(GPT_OSS, &["--layer-curve", "-3"]),
        (json!("time"), json!(0.5))
    );
    let model = repository(GPT_OSS);
    moe_analyze()
        .args([
            "plan",
            arg(&learn),
            "--model",
            arg(&model),
            "--budget-mib",
            "1",
            "--layer-curve",
            "nan",
        ])
        .assert()
        .success()
        .stderr("warning: --layer-curve NaN is not from 0 to 1; as in the runtime, 0.5 is taken\n");
}

#[test]
fn budgets() {
    let dir = workplace();
    let (learn, model) = (dir.path().join("learn.json"), repository(QWEN));
    let lanes = |more: &[&str], path: Option<&Path>| {
        let mut command = moe_analyze();
        if let Some(path) = path {
            command.env("PATH", path);
        }
        command
            .args([
                "--quiet",
                "plan",
                arg(&learn),
                "--model",
                arg(&model),
                "-o",
                "json",
            ])
            .args(more);
        let output = command.output().unwrap();
        let plan: Value = serde_json::from_slice(&output.stdout).ok()?;
        let lanes = plan["lanes"].as_array().unwrap().iter();
        Some(
            lanes
                .map(|lane| lane["budget_bytes"].as_u64().unwrap())
                .collect::<Vec<_>>(),
        )
    };
    let mib = 1 << 20;
    assert_eq!(
        lanes(&["--budget-mib", "1,3"], None).unwrap(),
        [mib, 3 * mib]
    );
    // The published vector, and the reserve of a further lane.
    let auto = [
        "--budget-mib",
        "auto,-1",
        "--free-mib",
        "4096.5,600",
        "--kv-mib",
        "1024",
        "--reserve-mib",
        "512",
    ];
    assert_eq!(lanes(&auto, None).unwrap(), [2560 * mib, 88 * mib]);
    assert_eq!(
        lanes(&["--budget-mib", "auto", "--free-mib", "1025"], None).unwrap(),
        [mib]
    );

    let nowhere = dir.path().join("nowhere");
    assert_eq!(lanes(&["--budget-mib", "auto"], Some(&nowhere)), None);
    let error = moe_analyze()
        .env("PATH", &nowhere)
        .args([
            "plan",
            arg(&learn),
            "--model",
            arg(&model),
            "--budget-mib",
            "auto",
        ])
        .assert()
        .code(2);
    let error = String::from_utf8_lossy(&error.get_output().stderr).into_owned();
    assert!(
        error.contains("--free-mib") && error.lines().count() == 1,
        "{error}"
    );
}

/// Where there is a GPU, its driver's tool is asked.
#[cfg(unix)]
#[test]
fn free_memory_is_read_from_the_gpu() {
    use std::os::unix::fs::PermissionsExt as _;

    let dir = workplace();
    let tool = write(&dir, "nvidia-smi", "#!/bin/sh\necho 2050\necho 3000\n");
    fs::set_permissions(&tool, fs::Permissions::from_mode(0o755)).unwrap();
    let (learn, model) = (dir.path().join("learn.json"), repository(QWEN));
    let output = moe_analyze()
        .env("PATH", dir.path())
        .args([
            "plan",
            arg(&learn),
            "--model",
            arg(&model),
            "--budget-mib",
            "auto,auto",
            "-o",
            "json",
        ])
        .output()
        .unwrap();
    let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(plan["lanes"][0]["budget_bytes"], (2050 - 1024) << 20);
    assert_eq!(plan["lanes"][1]["budget_bytes"], (3000u64 - 512) << 20);
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(told.contains("lane 0: 2050 MiB free"), "{told}");
}

/// The cut file keeps unknown keys, holds the experts of the plan alone, and gives the same plan again.
#[test]
fn the_learn_file_is_cut_to_the_plan() {
    let dir = workplace();
    let (learn, cut, model) = (
        dir.path().join("learn.json"),
        dir.path().join("cut.json"),
        repository(QWEN),
    );
    let budget = (3 * 29_696).to_string();
    let args = |learn| {
        [
            "plan",
            learn,
            "--model",
            arg(&model),
            "--budget-bytes",
            &budget,
            "-o",
            "json",
        ]
    };
    let plan = json_of(&[&args(arg(&learn))[..], &["--out", arg(&cut)]].concat());
    assert_eq!(selected(&plan), [(0, 3, 0), (0, 5, 0)]);
    let expected = json!({"schema": "llama.cpp.moe_layer_opt_perf.v1", "n_expert": 32, "layers": [
        {"layer": 0, "calls": 7, "experts": [[3, 9], [5, 4]], "note": "kept"}]});
    let written: Value = serde_json::from_str(&fs::read_to_string(&cut).unwrap()).unwrap();
    assert_eq!(written, expected);
    assert_eq!(selected(&json_of(&args(arg(&cut)))), selected(&plan));

    let again = [&args(arg(&learn))[..], &["--out", arg(&cut)]].concat();
    assert!(failure_of(&again).contains("--force"));
    stdout_of(&[&again[..], &["--force"]].concat());
}

/// Both files together have 5 before 3; with a half-life of one file the older one counts half, and 3 is first again.
#[test]
fn files_are_merged_and_fade() {
    let dir = workplace();
    let older = json!({"schema": "llama.cpp.moe_layer_perf.v1", "layers": [{"layer": 0, "experts": [[5, 8]]}]});
    let older = write(&dir, "older.json", &older.to_string());
    let (learn, model) = (dir.path().join("learn.json"), repository(QWEN));
    let first = |more: &[&str]| {
        let args = [
            "plan",
            arg(&older),
            arg(&learn),
            "--model",
            arg(&model),
            "--budget-mib",
            "1",
            "-o",
            "json",
        ];
        let plan = json_of(&[&args, more].concat());
        let first = &plan["selected"][0];
        (
            first["expert"].as_u64().unwrap(),
            first["hits"].as_u64().unwrap(),
        )
    };
    assert_eq!(first(&[]), (5, 12));
    assert_eq!(first(&["--half-life", "1"]), (3, 9));
}

/// A run is counted as `hotness` counts it.
#[test]
fn runs_are_counted() {
    let dir = TempDir::new().unwrap();
    let (run, learn) = (dir.path().join("run"), dir.path().join("learn.json"));
    support::known_run(&run);
    stdout_of(&["hotness", arg(&run), "--out", arg(&learn)]);
    let model = repository(QWEN);
    let plan = |source| {
        let plan = json_of(&[
            "plan",
            source,
            "--model",
            arg(&model),
            "--budget-mib",
            "1",
            "-o",
            "json",
        ]);
        plan["selected"].clone()
    };
    assert_eq!(plan(arg(&run)), plan(arg(&learn)));
    // Expert 3 is in every choice of the known run.
    assert_eq!(plan(arg(&run))[0]["expert"], 3);
}

#[test]
fn explanations() {
    let dir = workplace();
    let (learn, model) = (dir.path().join("learn.json"), repository(GPT_OSS));
    let args = [
        "plan",
        arg(&learn),
        "--model",
        arg(&model),
        "--budget-bytes",
        "120000",
        "--weighting",
        "flat",
        "--explain",
        "0:3",
        "--explain",
        "0:5",
        "--explain",
        "1:1",
    ];
    let text = stdout_of(&args);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 3, "{text}");
    assert!(
        lines[0]
            .starts_with("expert 3 of layer 0 is in: place 1 of 4 with score 3000009 for 9 hits"),
        "{text}"
    );
    // Four experts fit: 3 and 1 of two layers, each with an empty one.
    assert!(
        lines[1].contains("needed 27648 bytes and lane 0 had 9408 left"),
        "{text}"
    );
    assert!(lines[2].contains("counts no choice of it"), "{text}");
    let plan = json_of(&[&args[..], &["-o", "json"]].concat());
    assert_eq!(plan["explanations"][1]["cached"], false);
    assert_eq!(plan["explanations"][1]["cost"], 27_648);
    assert_eq!(plan["explanations"][1]["free"], 9408);
    let csv = stdout_of(&[&args[..], &["-o", "csv"]].concat());
    assert!(
        csv.starts_with("layer,expert,cached,hits,score,place,why\n0,3,yes,9,3000009,1,"),
        "{csv}"
    );
}

/// What is printed for a person ends with the commands; a program gets the same ones.
#[test]
fn command_lines() {
    let dir = workplace();
    let (learn, model) = (dir.path().join("learn.json"), repository(GPT_OSS));
    let args = [
        "plan",
        arg(&learn),
        "--model",
        arg(&model),
        "--budget-mib",
        "2,1",
        "--strategy",
        "hot-even",
        "--layer-curve",
        "0.25",
    ];
    let text = stdout_of(&args);
    let hot_cache = format!(
        "LLAMA_MOE_HOT_CACHE_FILL_RANDOM=0 llama-server --model {} --cpu-moe --moe-hot-cache {} --moe-hot-cache-device CUDA0 \
         --moe-hot-cache-max-mib 2 --moe-hot-cache-second-device CUDA1 --moe-hot-cache-second-max-mib 1 \
         --moe-hot-cache-device-strategy hot-even --moe-hot-cache-weighting time --moe-hot-cache-layer-curve 0.25",
        arg(&model),
        arg(&learn)
    );
    assert!(text.contains(&hot_cache), "{text}");
    assert!(text.contains("an estimate"), "{text}");
    // A layer's experts are 32 × 27,648 bytes: three fit into 3 MiB, and the best are the two that were chosen and a third.
    assert!(
        text.contains(
            r"--override-tensor 'blk\.(1|3|4)\.ffn_(up|down|gate|gate_up)_(ch|)exps=CPU'"
        ),
        "{text}"
    );
    let plan = json_of(&[&args[..], &["-o", "json"]].concat());
    assert_eq!(plan["hot_cache"]["command"], hot_cache);
    assert_eq!(plan["llama_cpp"]["layers_on_gpu"], json!([0, 2, 5]));
    assert_eq!(plan["llama_cpp"]["estimated_hit_share"], 1.0);

    // Where the last layers do as well, they are counted; where all or none fit, there is nothing to count.
    let uniform = json!({"schema": "llama.cpp.moe_layer_perf.v1", "layers":
        (0..6).map(|layer| json!({"layer": layer, "experts": [[0, 5]]})).collect::<Vec<_>>()});
    let uniform = write(&dir, "uniform.json", &uniform.to_string());
    let stock = |mib: &str| {
        let plan = json_of(&[
            "plan",
            arg(&uniform),
            "--model",
            arg(&model),
            "--budget-mib",
            mib,
            "-o",
            "json",
        ]);
        let command = plan["llama_cpp"]["command"].as_str().unwrap().to_owned();
        command
            .split_once("--n-gpu-layers 99")
            .unwrap()
            .1
            .trim()
            .to_owned()
    };
    assert_eq!(stock("3"), "--n-cpu-moe 3");
    assert_eq!(stock("0"), "--cpu-moe");
    assert_eq!(stock("6"), "");
}

#[test]
fn rows_in_every_format() {
    let dir = workplace();
    let (learn, model) = (dir.path().join("learn.json"), repository(QWEN));
    let print = |format| {
        stdout_of(&[
            "plan",
            arg(&learn),
            "--model",
            arg(&model),
            "--budget-mib",
            "1",
            "-o",
            format,
        ])
    };
    assert_eq!(
        print("csv"),
        "layer,expert,bytes,score,lane,hits\n0,3,29696,3000009,0,9\n2,1,35840,3000008,0,8\n0,5,29696,2000004,0,4\n0,6,29696,1000001,0,1\n"
    );
    assert_eq!(print("jsonl").lines().count(), 4);
    assert_eq!(print("md").lines().count(), 2 + 4);
    assert_eq!(print("table").lines().count(), 1 + 4);
}

/// Expert 9 was chosen more than the cached 5, which gives way; the rate lets one of two exchanges through.
#[test]
fn updates() {
    let dir = workplace();
    let (learn, model) = (dir.path().join("learn.json"), repository(QWEN));
    let plan = stdout_of(&[
        "plan",
        arg(&learn),
        "--model",
        arg(&model),
        "--budget-mib",
        "1",
        "-o",
        "json",
    ]);
    let plan = write(&dir, "plan.json", &plan);
    let live = |enabled: bool| {
        json!({"enabled": enabled, "mode": "update", "schema": "llama.cpp.moe_layer_opt_perf.v1", "n_expert": 32,
            "layers": [
                {"layer": 0, "calls": 10, "hot_slots_total": 30, "cold_slots_total": 10,
                 "hot_experts": [[3, 20], [5, 4], [6, 6]], "cold_experts": [[9, 10]]},
                {"layer": 2, "calls": 10, "hot_slots_total": 0, "cold_slots_total": 40, "cold_experts": [[7, 40]]}]})
        .to_string()
    };
    let report = write(&dir, "live.json", &live(true));
    let update = |current: &Path, more: &[&str]| {
        json_of(
            &[
                &["plan", arg(&report), "--update", arg(current), "-o", "json"],
                more,
            ]
            .concat(),
        )
    };
    let all = update(&plan, &[]);
    let swaps = |update: &Value| -> Vec<Value> {
        let exchanges = update["exchanges"].as_array().unwrap().iter();
        exchanges
            .map(|e| json!([e["layer"], e["evict"], e["add"]]))
            .collect()
    };
    // `flat` scores: in layer 2 expert 7 comes for 1, which was not chosen at all; in layer 0 expert 9 is second of four.
    assert_eq!(swaps(&all), [json!([2, 1, 7]), json!([0, 5, 9])]);
    assert_eq!(all["exchanges"][0]["gain"], 4_000_040);
    assert_eq!(all["exchanges"][1]["gain"], 3_000_010 - 1_000_004);
    assert_eq!(all["hit_rate"], 0.375);
    assert_eq!(
        (
            &all["hot_experts"],
            &all["candidates"],
            &all["exchanged"],
            &all["layers_changed"]
        ),
        (&json!(4), &json!(2), &json!(2), &json!(2))
    );
    // A quarter of four cached experts is one.
    assert_eq!(
        swaps(&update(&plan, &["--update-rate", "0.25"])),
        [json!([2, 1, 7])]
    );
    assert_eq!(update(&plan, &["--update-rate", "-1"])["exchanged"], 0);
    // A learn file tells a cache too.
    assert_eq!(update(&learn, &[]), all);
    let table = stdout_of(&["plan", arg(&report), "--update", arg(&plan)]);
    assert!(
        table.contains("2 exchanges of 2") && table.contains("37.5 % of 80 slots"),
        "{table}"
    );

    // Recording was off: the runtime does nothing.
    fs::write(&report, live(false)).unwrap();
    assert_eq!(update(&plan, &[])["exchanged"], 0);
}

/// With experts that were never chosen the room is filled, the same ones for the same seed; not unless asked for.
#[test]
fn random_fill() {
    let dir = workplace();
    let (learn, model) = (dir.path().join("learn.json"), repository(GPT_OSS));
    let plan = |more: &[&str]| {
        let args = [
            "plan",
            arg(&learn),
            "--model",
            arg(&model),
            "--budget-mib",
            "1",
            "-o",
            "json",
        ];
        json_of(&[&args, more].concat())
    };
    assert_eq!(selected(&plan(&[])).len(), 4);
    let filled = plan(&["--fill-random"]);
    assert!(selected(&filled).len() > 20);
    assert_eq!(filled, plan(&["--fill-random=7171941"]));
    assert_ne!(selected(&filled), selected(&plan(&["--fill-random=1"])));
    assert!(
        filled["hot_cache"]["command"]
            .as_str()
            .unwrap()
            .starts_with("LLAMA_MOE_HOT_CACHE_FILL_RANDOM=1 ")
    );
}

#[test]
fn what_cannot_be_done_is_told_in_a_line() {
    let dir = workplace();
    let file = |name: &str, text: &str| write(&dir, name, text);
    let (learn, model) = (dir.path().join("learn.json"), repository(QWEN));
    let wide = file(
        "wide.json",
        r#"{"schema":"llama.cpp.moe_layer_perf.v1","layers":[{"layer":0,"experts":[[4294967296,1]]}]}"#,
    );
    let off = file(
        "off.json",
        r#"{"enabled":false,"schema":"llama.cpp.moe_layer_perf.v1","layers":[]}"#,
    );
    let other = file(
        "other.json",
        r#"{"schema":"llama.cpp.moe_layer_perf.v1","n_expert":8,"layers":[]}"#,
    );
    let sizes = file("sizes.csv", "layer,expert,bytes\n0,1,x\n");
    let none = dir.path().join("none.json");
    let (learn, model, sizes) = (arg(&learn), arg(&model), arg(&sizes));
    let with = |learn| vec!["plan", learn, "--model", model, "--budget-mib", "1"];
    let cases = [
        (with(arg(&wide)), "4294967296"),
        (with(arg(&off)), "record a longer run"),
        (with(model), "--model"),
        (with(arg(&none)), "none.json"),
        ([with(learn), vec![arg(&other)]].concat(), "n_expert"),
        (
            [with(learn), vec!["--weighting", "smooth_pressure"]].concat(),
            "smooth-pressure",
        ),
        (
            [with(learn), vec!["--strategy", "even"]].concat(),
            "even-split",
        ),
        ([with(learn), vec!["--explain", "3"]].concat(), "3:17"),
        ([with(learn), vec!["--half-life", "0"]].concat(), "above 0"),
        ([with(learn), vec!["--free-mib", "9"]].concat(), "auto"),
        ([with(learn), vec!["--out", "plan.txt"]].concat(), ".json"),
        ([with(learn), vec!["--sizes", sizes]].concat(), "--sizes"),
        (vec!["plan", learn, "--model", model], "--budget-mib"),
        (vec!["plan", learn, "--budget-mib", "1"], "--model"),
        (
            vec!["plan", learn, "--model", model, "--budget-mib", "1,1,1,1"],
            "1 to 3",
        ),
        (
            vec!["plan", learn, "--model", model, "--budget-mib", "1.5"],
            "whole number",
        ),
        (
            vec![
                "plan",
                learn,
                "--model",
                model,
                "--budget-mib",
                "auto",
                "--free-mib",
                "1,2",
            ],
            "--free-mib",
        ),
        (
            vec!["plan", learn, "--model", learn, "--budget-mib", "1"],
            "learn.json",
        ),
        (
            vec!["plan", learn, "--sizes", sizes, "--budget-mib", "1"],
            "line 2",
        ),
        (vec!["plan", learn, "--update", sizes], "sizes.csv"),
        (
            vec!["plan", learn, "--update", arg(&off)],
            "names no expert",
        ),
    ];
    for (args, told) in cases {
        let error = failure_of(&args);
        assert!(error.contains(told), "{args:?}: {error}");
    }
}
