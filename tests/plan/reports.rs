//! Reports of plans, and errors.

use std::fs;

use serde_json::json;

use super::{GPT_OSS, QWEN, json_of, plan_of, workplace, write};
use crate::support::{arg, args, expect_golden, fail, moe_analyze, repository, run};

#[test]
fn explains_decisions() {
    let dir = workplace();
    let (learn, model) = (dir.path().join("learn.json"), repository(GPT_OSS));
    let args = args![
        "plan", learn, "--model", model, "--budget-bytes", "120000", "--weighting", "flat",
        "--explain", "0:3", "--explain", "0:5", "--explain", "1:1"
    ];
    let text = run![args];
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 3, "{text}");
    assert!(
        lines[0].starts_with(
            "expert 3 of layer 0 is in the cache: rank 1 of 4 (score 3000009, 9 activations)"
        ),
        "{text}"
    );
    // Four experts fit: 3 and 1 of two layers, each with an empty one.
    assert!(lines[1].contains("needs 27648 bytes, but lane 0 had only 9408 bytes left"), "{text}");
    assert!(lines[2].contains("does not appear in the learn file"), "{text}");
    let plan = json_of(args![args, "-o", "json"]);
    assert_eq!(plan["explanations"][1]["cached"], false);
    assert_eq!(plan["explanations"][1]["cost"], 27_648);
    assert_eq!(plan["explanations"][1]["free"], 9408);
    let csv = run![args, "-o", "csv"];
    assert!(
        csv.starts_with("layer,expert,cached,hits,score,place,why\n0,3,yes,9,3000009,1,"),
        "{csv}"
    );
}

/// Counts experts that the model does not have, with correct plurals.
#[test]
fn warns_about_learn_file_of_another_model() {
    let dir = workplace();
    let model = repository(GPT_OSS);
    for (experts, expected) in [
        ("[[1, 8]]", "warning: 1 expert of the learn file is not in the model;"),
        ("[[1, 8], [2, 3]]", "warning: 2 experts of the learn file are not in the model;"),
    ] {
        let text = format!(
            r#"{{"schema": "llama.cpp.moe_layer_opt_perf.v1", "n_expert": 32, "layers": [
            {{"layer": 0, "calls": 7, "experts": [[3, 9]]}}, {{"layer": 40, "calls": 7, "experts": {experts}}}]}}"#
        );
        let learn = write(&dir, "other.json", &text);
        let args = ["plan", arg(&learn), "--model", arg(&model), "--budget-bytes", "120000"];
        let planned = moe_analyze().args(args).assert().success();
        let notes = String::from_utf8_lossy(&planned.get_output().stderr).into_owned();
        assert!(notes.contains(expected), "{notes}");
    }
}

#[test]
fn warns_about_experts_without_a_size() {
    let dir = workplace();
    let sizes = write(&dir, "z.csv", "layer,expert,bytes\n0,3,1000\n");
    for (experts, expected) in [
        ("[[3, 9], [1, 8]]", "1 expert of the learn file has no size in FILE; add its size, or"),
        (
            "[[3, 9], [1, 8], [2, 3]]",
            "2 experts of the learn file have no size in FILE; add their sizes, or",
        ),
    ] {
        let text = format!(
            r#"{{"schema": "llama.cpp.moe_layer_opt_perf.v1", "layers": [{{"layer": 0, "calls": 7, "experts": {experts}}}]}}"#
        );
        let learn = write(&dir, "other.json", &text);
        let args = ["plan", arg(&learn), "--sizes", arg(&sizes), "--budget-bytes", "120000"];
        let planned = moe_analyze().args(args).assert().success();
        let notes = String::from_utf8_lossy(&planned.get_output().stderr).into_owned();
        let expected = format!("warning: {}", expected.replace("FILE", arg(&sizes)));
        assert!(notes.contains(&expected), "{notes}");
        let explained = run![args, "--explain", "0:1"];
        assert!(explained.contains("the size of the expert is unknown"), "{explained}");
    }
}

/// The summary ends with the commands; JSON contains the same commands.
#[test]
fn prints_command_lines() {
    let dir = workplace();
    let (learn, model) = (dir.path().join("learn.json"), repository(GPT_OSS));
    let args = args![
        "plan", learn, "--model", model, "--budget-mib", "2,1", "--strategy", "hot-even",
        "--layer-curve", "0.25"
    ];
    let text = run![args];
    let hot_cache = format!(
        "LLAMA_MOE_HOT_CACHE_FILL_RANDOM=0 llama-server --model {} --cpu-moe --moe-hot-cache {} --moe-hot-cache-device CUDA0 \
         --moe-hot-cache-max-mib 2 --moe-hot-cache-second-device CUDA1 --moe-hot-cache-second-max-mib 1 \
         --moe-hot-cache-device-strategy hot-even --moe-hot-cache-weighting time --moe-hot-cache-layer-curve 0.25",
        arg(&model),
        arg(&learn)
    );
    assert!(text.contains(&hot_cache), "{text}");
    assert!(text.contains("(estimate"), "{text}");
    // A layer's experts are 32 × 27,648 bytes: three layers fit into 3 MiB, the best are the two with activations and a third.
    assert!(
        text.contains(
            r"--override-tensor 'blk\.(1|3|4)\.ffn_(up|down|gate|gate_up)_(ch|)exps=CPU'"
        ),
        "{text}"
    );
    let plan = json_of(args![args, "-o", "json"]);
    assert_eq!(plan["hot_cache"]["command"], hot_cache);
    assert_eq!(plan["llama_cpp"]["layers_on_gpu"], json!([0, 2, 5]));
    assert_eq!(plan["llama_cpp"]["estimated_hit_share"], 1.0);

    // --n-cpu-moe is used if the last layers do as well; no count is needed if all layers or none fit.
    let uniform = json!({"schema": "llama.cpp.moe_layer_perf.v1", "layers":
        (0..6).map(|layer| json!({"layer": layer, "experts": [[0, 5]]})).collect::<Vec<_>>()});
    let uniform = write(&dir, "uniform.json", &uniform.to_string());
    let stock = |mib: &str| {
        let plan =
            json_of(args!["plan", uniform, "--model", model, "--budget-mib", mib, "-o", "json"]);
        let command = plan["llama_cpp"]["command"].as_str().unwrap().to_owned();
        command
            .split_once("--n-gpu-layers 99")
            .unwrap()
            .1
            .trim()
            .to_owned()
    };
    // An empty cache is disabled and has no command.
    for budget in [["--budget-mib", "0"], ["--budget-bytes", "5"]] {
        let args = ["plan", arg(&learn), "--model", arg(&model)];
        let args = args![args, budget];
        let text = run![args];
        assert!(
            text.contains("hot cache (llama.cpp fork): no command, because no expert fits\nupstream llama.cpp: llama-server "),
            "{text}"
        );
        assert!(!text.contains("--moe-hot-cache"), "{text}");
        let plan = json_of(args![args, "-o", "json"]);
        assert_eq!(plan["hot_cache"], json!({"command": null, "caveats": []}));
    }
    assert_eq!(stock("3"), "--n-cpu-moe 3");
    assert_eq!(stock("0"), "--cpu-moe");
    assert_eq!(stock("6"), "");
}

#[test]
fn prints_rows_in_every_format() {
    let dir = workplace();
    let (learn, model) = (dir.path().join("learn.json"), repository(QWEN));
    for format in ["csv", "jsonl", "md", "table"] {
        let text = run![plan_of(&learn, &model), "-o", format];
        expect_golden(&format!("plan/rows.{format}"), &text);
    }
}

#[test]
fn prints_errors_in_one_line() {
    let dir = workplace();
    let file = |name: &str, text: &str| write(&dir, name, text);
    let (learn, model) = (dir.path().join("learn.json"), repository(QWEN));
    let wide = file(
        "wide.json",
        r#"{"schema":"llama.cpp.moe_layer_perf.v1","layers":[{"layer":0,"experts":[[4294967296,1]]}]}"#,
    );
    let off =
        file("off.json", r#"{"enabled":false,"schema":"llama.cpp.moe_layer_perf.v1","layers":[]}"#);
    let other =
        file("other.json", r#"{"schema":"llama.cpp.moe_layer_perf.v1","n_expert":8,"layers":[]}"#);
    let sizes = file("sizes.csv", "layer,expert,bytes\n0,1,x\n");
    let good = file("good.csv", "layer,expert,bytes\n0,1,9\n");
    let none = dir.path().join("none.json");
    let (learn, model, sizes) = (arg(&learn), arg(&model), arg(&sizes));
    let with = |learn| args!["plan", learn, "--model", model, "--budget-mib", "1"];
    let cases = [
        (with(arg(&wide)), "4294967296"),
        (with(arg(&off)), "off.json: the learn file contains no activations; record a longer run"),
        (with(model), "--model"),
        (with(arg(&none)), "none.json"),
        (args![with(learn), other], "other.json: it has 8 experts in a layer, but the model "),
        (args!["plan", learn, other, "--sizes", good, "--budget-mib", "1"], "n_expert"),
        (args![with(learn), "--weighting", "smooth_pressure"], "smooth-pressure"),
        (args![with(learn), "--strategy", "even"], "even-split"),
        (args![with(learn), "--explain", "3"], "3:17"),
        (args![with(learn), "--half-life", "0"], "above 0"),
        (args![with(learn), "--free-mib", "9"], "auto"),
        (args![with(learn), "--out", "plan.txt"], ".json"),
        (args![with(learn), "--sizes", sizes], "--sizes"),
        (args!["plan", learn, "--model", model], "--budget-mib"),
        (args!["plan", learn, "--budget-mib", "1"], "--model"),
        (args!["plan", learn, "--model", model, "--budget-mib", "1,1,1,1"], "1 to 3"),
        (args!["plan", learn, "--model", model, "--budget-mib", "1.5"], "an integer"),
        (
            args!["plan", learn, "--model", model, "--budget-mib", "auto", "--free-mib", "1,2"],
            "--free-mib",
        ),
        (args!["plan", learn, "--model", learn, "--budget-mib", "1"], "learn.json"),
        (args!["plan", learn, "--sizes", sizes, "--budget-mib", "1"], "line 2"),
        (
            args!["plan", learn, "--update", sizes],
            "sizes.csv: line 1, column 1: it is not JSON: expected value; pass the output of `plan -o json`, ",
        ),
        (args!["plan", learn, "--update", off], "contains no expert"),
    ];
    for (args, expected) in cases {
        let error = fail![args];
        assert!(error.contains(expected), "{args:?}: {error}");
    }
}

/// Every kind of plan matches the schema, and the schema rejects other documents.
#[test]
fn json_matches_the_schema() {
    let schema = fs::read_to_string(repository("schemas/plan.schema.json")).unwrap();
    let schema = jsonschema::validator_for(&serde_json::from_str(&schema).unwrap()).unwrap();
    let dir = workplace();
    let (learn, model) = (dir.path().join("learn.json"), repository(GPT_OSS));
    let forms: [&[&str]; 4] = [
        &["--budget-mib", "0"],
        &["--budget-bytes", "60000,90000,5", "--strategy", "even-split", "--fill-random"],
        &["--budget-bytes", "90000", "--explain", "0:3", "--explain", "0:6", "--explain", "8:0"],
        &["--budget-mib", "auto", "--free-mib", "2048", "--ctx", "4096", "--parallel", "4"],
    ];
    for form in forms {
        let args = ["plan", arg(&learn), "--model", arg(&model), "-o", "json"];
        let mut plan = json_of(args![args, form]);
        schema.validate(&plan).unwrap();
        plan["selected"] = json!([{"layer": 0}]);
        assert!(!schema.is_valid(&plan));
    }
}
