//! `report`: the JSON block and the tables of the page, for every kind of input.

mod page;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use moe_trace::record::RECORD_SIZE;
use serde_json::Value;

use crate::support::{
    ALL, N_EXPERT, N_GENERATED, N_PROMPT, arg, args, fail, known_counts, known_run, moe_analyze,
    repository, run,
};

use page::Page;

const MODEL: &str = "fixtures/tiny-qwen3moe-Q4_K_M.gguf";
const PROMPT: &str = "The kernel driver is responsible for";

fn record(dir: &Path, name: &str, options: &[&str]) -> (PathBuf, String) {
    let out = dir.join(name);
    let fixed = ["--quiet", "record", "--prompt", PROMPT, "--n-predict", "12", "--keep-prompt"];
    let text = run![fixed, "--model", repository(MODEL), options, "--out", out];
    (out, text)
}

/// Counts above 0 that `hotness -o json` prints.
fn hotness(path: &Path) -> BTreeMap<(u32, u32), u64> {
    let rows = run!["--quiet", "hotness", path, "-o", "json"];
    let rows: Vec<Value> = serde_json::from_str(&rows).unwrap();
    let number = |row: &Value, key: &str| row[key].as_u64().unwrap();
    let rows = rows.iter().map(|row| {
        let place = (number(row, "layer_id") as u32, number(row, "expert_id") as u32);
        (place, number(row, "count"))
    });
    rows.filter(|&(_, count)| count > 0).collect()
}

#[test]
fn report_of_a_run_contains_its_trace() {
    let dir = tempfile::tempdir().unwrap();
    let (run, generated) = record(dir.path(), "run", &[]);
    let out = dir.path().join("report.html");
    run!["--quiet", "report", run, "--out", out];
    let page = Page::read(&out);
    let size = fs::metadata(run.join("trace.bin")).unwrap().len();
    let n_records = usize::try_from(size).unwrap() / RECORD_SIZE;
    assert_eq!(page.column("0-records", "op").len(), n_records);
    assert_eq!(page.counts(0), hotness(&run));

    let info = page.input(0);
    assert_eq!((&info["kind"], &info["time_unit"]), (&"run".into(), &"ns".into()));
    assert_eq!(info["name"], arg(&run));
    assert_eq!((info["layers"].as_array().unwrap().len(), &info["top_k"]), (6, &4.into()));
    assert_eq!(info["layers"][0]["n_expert"], N_EXPERT);
    let file = &info["files"][0];
    assert_eq!(file["size"], fs::metadata(repository(MODEL)).unwrap().len());
    // Every expert operation has a route, and reads the bytes of its four experts.
    let experts = info["tensors"].as_array().unwrap();
    let records = ["tensor", "route", "bytes"].map(|name| page.column("0-records", name));
    let mut n_expert_records = 0;
    for row in 0..n_records {
        let [tensor, route, bytes] = records.map(|column| column[row]);
        let is_expert = tensor >= 0.0 && experts[tensor as usize]["category"] == "expert";
        assert_eq!(is_expert, route >= 0.0, "record {row}");
        if is_expert {
            n_expert_records += 1;
            let tensor = &experts[tensor as usize];
            let size = tensor["size"].as_f64().unwrap() / tensor["n_expert"].as_f64().unwrap();
            assert_eq!(bytes, 4.0 * size, "record {row}");
        }
    }
    assert!(n_expert_records > 0);

    // The text of the tokens is the prompt and the generated text.
    let tokens = &info["tokens"];
    let text = |phase: u64| -> String {
        let texts = tokens["text"].as_array().unwrap().iter();
        let texts = texts.zip(tokens["phase"].as_array().unwrap());
        let texts = texts.filter(|(_, found)| **found == phase);
        texts.map(|(text, _)| text.as_str().unwrap()).collect()
    };
    assert!(text(0).ends_with(PROMPT), "{}", text(0));
    assert_eq!(text(1), generated.strip_suffix('\n').unwrap());

    let names = info["names"].as_array().unwrap();
    for (graph, phase) in info["graphs"]
        .as_array()
        .unwrap()
        .iter()
        .zip(["prompt", "generate"])
    {
        assert_eq!(graph["phase"], phase);
        let nodes = graph["nodes"].as_array().unwrap();
        let operations = nodes.iter().filter(|node| node["op"] != "CONST");
        assert!(operations.clone().count() > 50);
        assert!(
            operations
                .clone()
                .all(|node| names.contains(&node["label"]))
        );
    }
    assert_eq!(info["graphs"].as_array().unwrap().len(), 2);
    assert!(!info["buffers"].as_array().unwrap().is_empty());
    for id in ["coverage-0", "balance-0", "cache-0", "lanes-0", "buffers-0", "speed-0"] {
        page.chart(id);
    }
    assert!(!page.has_chart("coverage-compared"));
    assert!(page.html.contains("<title>") && !page.html.contains("<!--report:"));
}

#[test]
fn known_run_without_graphs() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    known_run(&run);
    let out = dir.path().join("report.html");
    run!["--quiet", "report", run, "--out", out];
    let page = Page::read(&out);
    assert_eq!(page.counts(0), known_counts(&ALL));
    let tokens = &page.input(0)["tokens"];
    let n_tokens = (N_PROMPT + N_GENERATED) as usize;
    assert_eq!(tokens["position"].as_array().unwrap().len(), n_tokens);
    assert!(
        tokens["text"]
            .as_array()
            .unwrap()
            .iter()
            .all(Value::is_null)
    );
    let weights = ["w0", "w1", "w2", "w3"].map(|name| page.column("0-routing", name)[0]);
    assert_eq!(weights, [128.0, 64.0, 32.0, 32.0]);
    assert_eq!(page.input(0)["lanes"][page.column("0-routing", "l0")[0] as usize], "cpu");
    let graphs = page.input(0)["graphs"].as_array().unwrap();
    assert_eq!(graphs.len(), 2);
    let prompt = graphs[0]["nodes"].as_array().unwrap();
    assert_eq!(prompt.iter().filter(|node| node["op"] != "CONST").count(), 6 * 4);

    // The trace alone has the same routing; the model provides its tensors.
    let bare = run.join("trace.bin");
    run!["--quiet", "report", bare, "--model", repository(MODEL), "--out", out, "--force"];
    let with_model = Page::read(&out);
    assert_eq!(with_model.input(0)["kind"], "trace");
    assert_eq!(with_model.counts(0), known_counts(&ALL));
    assert_eq!(with_model.input(0)["tensors"], page.input(0)["tensors"]);
    assert_eq!(with_model.tables["0-records"]["bytes"], page.tables["0-records"]["bytes"]);
    run!["--quiet", "report", bare, "--out", out, "--force"];
    let without_model = Page::read(&out);
    assert_eq!(without_model.input(0)["tensors"], Value::Array(Vec::new()));
    assert!(without_model.column("0-records", "bytes").contains(&-1.0));
    assert!(
        without_model.chart("cache-0")["x"]["label"]
            .as_str()
            .unwrap()
            .contains("experts")
    );
}

#[test]
fn traces_of_other_tools() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("report.html");
    let report = |input: &Path| {
        run!["--quiet", "report", input, "--out", out, "--force"];
        Page::read(&out)
    };
    let golden = |name: &str| repository("fixtures/foreign").join(name);

    let route = golden("bigmoeonedge/small.route.csv");
    let page = report(&route);
    assert_eq!(page.counts(0), hotness(&route));
    assert_eq!(
        (&page.input(0)["kind"], &page.input(0)["time_unit"]),
        (&"bigmoeonedge".into(), &"step".into())
    );
    assert_eq!(page.input(0)["ops"], serde_json::json!(["ROUTING"]));
    let n_rows = page.column("0-routing", "token").len();
    assert_eq!(page.column("0-records", "token").len(), n_rows);
    assert!(
        page.column("0-records", "duration")
            .iter()
            .all(|&duration| duration == -1.0)
    );

    let thesis = golden("thesis/small.bin");
    let page = report(&thesis);
    assert_eq!(page.counts(0), hotness(&thesis));
    assert_eq!(
        (&page.input(0)["kind"], &page.input(0)["time_unit"]),
        (&"thesis".into(), &"ns".into())
    );
    assert_ne!(page.input(0)["ops"], serde_json::json!(["ROUTING"]));

    // Counts have no tables.
    let page = report(&golden("learn/new.json"));
    assert!(page.tables.is_empty());
    page.chart("coverage-0");
    let layers = &page.input(0)["layers"];
    assert_eq!(layers[1]["n_expert"], 8);
    let learn = hotness(&golden("learn/new.json"));
    for (&(layer, expert), &count) in &learn {
        let layers = layers.as_array().unwrap().iter();
        let mut layers = layers.filter(|found| found["index"] == layer);
        let selections = &layers.next().unwrap()["selections"];
        assert_eq!(selections[expert as usize], count, "layer {layer}, expert {expert}");
    }
    assert!(!page.has_chart("stability-0") && !page.has_chart("cache-0"));
    let notes = page.input(0)["notes"].to_string();
    assert!(notes.contains("only counts"), "{notes}");

    let (run, tables) = (dir.path().join("run"), dir.path().join("tables"));
    known_run(&run);
    run!["--quiet", "parquet", run, "--out", tables];
    let page = report(&tables);
    assert_eq!(page.counts(0), known_counts(&ALL));
    assert_eq!(
        (&page.input(0)["kind"], &page.input(0)["time_unit"]),
        (&"tables".into(), &"ns".into())
    );
}

#[test]
fn lanes_of_post_fetch_and_hot_cache() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("post-fetch");
    let transfers = crate::overlap::example();
    crate::overlap::recorded(&run, &transfers);
    let out = dir.path().join("report.html");
    run!["--quiet", "report", run, "--out", out];
    let page = Page::read(&out);
    // A window, a copy and a product of each layer.
    let tracks = page.column("0-spans", "track");
    assert_eq!(tracks.len(), 3 * transfers.len());
    assert_eq!(page.input(0)["tracks"][1]["kind"], "transfer");
    assert_eq!(page.column("0-spans", "start")[0], 0.0);
    let bytes = tracks.iter().zip(page.column("0-spans", "bytes"));
    for (&track, &bytes) in bytes {
        assert_eq!(bytes, if track == 1.0 { 1e6 } else { -1.0 });
    }
    let overlap = page.chart("overlap-0");
    assert_eq!(overlap["series"].as_array().unwrap().len(), 4);
    // The transfers of the prompt hide in longer windows.
    assert_eq!(overlap["series"][0]["y"][0], 100.0);

    let (first, _) = record(dir.path(), "first", &[]);
    let cache = ["--policy", "hot-cache", "--hot-cache", arg(&first), "--hot-cache-mib", "1"];
    let (hot, _) = record(dir.path(), "hot", &cache);
    run!["--quiet", "report", hot, "--out", out, "--force"];
    let page = Page::read(&out);
    assert_eq!(page.counts(0), hotness(&hot));
    let series = page.chart("lanes-0")["series"].as_array().unwrap();
    assert!(series.iter().any(|series| series["name"] == "hot_cache"));
    let rate = page.chart("requests-0")["series"][0]["y"][0]
        .as_f64()
        .unwrap();
    assert!(rate > 0.0 && rate < 100.0, "{rate}");
}

#[test]
fn two_inputs_are_compared() {
    let dir = tempfile::tempdir().unwrap();
    let (first, second) = (dir.path().join("first"), dir.path().join("second"));
    known_run(&first);
    known_run(&second);
    let out = dir.path().join("report.html");
    run!["--quiet", "report", first, second, "--out", out];
    let page = Page::read(&out);
    assert_eq!(
        (page.input(0)["name"].as_str(), page.input(1)["name"].as_str()),
        (first.to_str(), second.to_str())
    );
    assert_eq!(page.tables["0-records"], page.tables["1-records"]);
    for id in ["coverage-compared", "cache-compared"] {
        let chart = page.chart(id);
        assert!(chart.get("input").is_none());
        assert_eq!(
            (&chart["series"][0]["input"], &chart["series"][1]["input"]),
            (&0.into(), &1.into())
        );
    }
    run!["--quiet", "report", first, first, "--out", out, "--force"];
    let same = Page::read(&out);
    assert_ne!(same.input(0)["name"], same.input(1)["name"]);
}

#[test]
fn limits_the_number_of_records() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    known_run(&run);
    let out = dir.path().join("report.html");
    let output = moe_analyze()
        .args(args!["report", run, "--max-records", "100", "--out", out])
        .output()
        .unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{stderr}");
    let n_records = fs::metadata(run.join("trace.bin")).unwrap().len() / RECORD_SIZE as u64;
    let page = Page::read(&out);
    let n_kept = page.column("0-records", "op").len();
    assert!((70..=100).contains(&n_kept), "{n_kept}");
    let note = format!("the first {n_kept} of {n_records} records");
    assert!(stderr.contains(&note), "{stderr}");
    assert!(page.input(0)["notes"].to_string().contains(&note));

    let route = repository("fixtures/foreign/bigmoeonedge/small.route.csv");
    run!["--quiet", "report", route, "--max-records", "3", "--out", out, "--force"];
    assert_eq!(Page::read(&out).column("0-records", "op").len(), 3);
}

#[test]
fn refuses_wrong_inputs_and_outputs() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    known_run(&run);
    let (out, text) = (dir.path().join("report.html"), dir.path().join("report.txt"));
    let line = fail!["report", run, "--out", text];
    assert!(line.contains("report.txt: the extension must be .html"), "{line}");
    let line = fail!["report", run, "--out", run.join("report.html")];
    assert!(line.contains("report.html"), "{line}");
    assert!(!run.join("report.html").exists());
    let line = fail!["report", repository(MODEL), "--out", out];
    assert!(line.contains("is a model, which contains no routing"), "{line}");
    let line = fail![
        "report",
        run,
        "--model",
        repository("fixtures/tiny-gpt-oss-MXFP4.gguf"),
        "--out",
        out
    ];
    assert!(line.contains("gpt-oss"), "{line}");
    fail!["report", run, run, run, "--out", out];
    fail!["report", run, "--max-records", "0", "--out", out];
    fail!["report", run];
    assert!(!out.exists());

    fs::write(&out, "mine").unwrap();
    let line = fail!["report", run, "--out", out];
    assert!(line.contains("--force"), "{line}");
    assert_eq!(fs::read_to_string(&out).unwrap(), "mine");
    run!["--quiet", "report", run, "--out", out, "--force"];
    Page::read(&out);
}

/// A program with the name of the browser's starter receives the path of the report.
#[cfg(all(unix, not(target_os = "macos")))]
#[test]
fn opens_the_report() {
    use std::os::unix::fs::PermissionsExt;

    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    known_run(&run);
    let (out, opened) = (dir.path().join("report.html"), dir.path().join("opened"));
    let browser = dir.path().join("bin/xdg-open");
    fs::create_dir(dir.path().join("bin")).unwrap();
    let open = |script: &str| {
        fs::write(&browser, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&browser, fs::Permissions::from_mode(0o755)).unwrap();
        let output = moe_analyze()
            .args(args!["report", run, "--out", out, "--force", "--open"])
            .env("PATH", dir.path().join("bin"))
            .output()
            .unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let stderr = open(&format!("echo \"$1\" > {}", arg(&opened)));
    assert!(!stderr.contains("warning"), "{stderr}");
    let expected = fs::canonicalize(&out).unwrap();
    assert_eq!(fs::read_to_string(&opened).unwrap().trim_end(), arg(&expected));
    let stderr = open("exit 3");
    assert!(stderr.contains("warning: xdg-open failed"), "{stderr}");
}
