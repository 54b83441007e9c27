//! Rows, plots and notes.

use std::collections::{BTreeMap, BTreeSet};

use super::simulate;
use crate::support::{arg, args, fail, file_of, known_run, moe_analyze, repository, run};

const SMALL: &str = "fixtures/foreign/bigmoeonedge/small.route.csv";

#[test]
fn all_formats_contain_all_rows() {
    let trace = repository(SMALL);
    let args = args!["--quiet", "simulate", trace, "--budget-mib", "1,2", "--policy", "lru,random"];
    let print = |format: &str| run![args, "-o", format];
    assert_eq!(print("csv").lines().count(), 5);
    assert_eq!(print("md").lines().count(), 6);
    assert_eq!(print("table").lines().count(), 5);
    let json: serde_json::Value = serde_json::from_str(&print("json")).unwrap();
    assert_eq!(json.as_array().unwrap().len(), 4);
    assert_eq!(json[0]["policy"], "lru");
    assert_eq!(json[0]["budget_mib"], 1);
    assert!(json[0]["hit_pct_cum"].is_number());
}

#[test]
fn all_omits_policies_that_need_a_learn_file() {
    let trace = repository(SMALL);
    let args = ["simulate", arg(&trace), "--budget-mib", "1", "--policy", "all", "-o", "csv"];
    let assert = moe_analyze().args(args).assert().success();
    let output = assert.get_output();
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(stdout.contains("\n1,arc,") && !stdout.contains("hotcache"), "{stdout}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("omitted hotcache"));
    let failure = fail!["simulate", trace, "--policy", "hotcache"];
    assert!(failure.contains("--learn"), "{failure}");
    let learnt = run![args, "--learn", trace];
    assert!(learnt.contains("\n1,hotcache,"), "{learnt}");
}

#[test]
fn plots_hit_rate_curves() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    known_run(&run);
    for name in ["curve.png", "curve.svg"] {
        let plot = dir.path().join(name);
        let args = ["--quiet", "simulate", arg(&run), "--policy", "all", "--plot", arg(&plot)];
        run![args];
        assert!(fail![args].contains("--force"));
    }
    let (width, height) = moe_testkit::png_size(&dir.path().join("curve.png"));
    let svg = std::fs::read_to_string(dir.path().join("curve.svg")).unwrap();
    assert!(svg.contains(&format!("width=\"{width}\" height=\"{height}\"")));
    assert!(svg.contains("MiB"));
    // Every policy has a line and a legend entry.
    let csv = run!["--quiet", "simulate", run, "--policy", "all", "-o", "csv"];
    let policies: BTreeSet<&str> = csv
        .lines()
        .skip(1)
        .map(|line| line.split(',').nth(1).unwrap())
        .collect();
    assert!(policies.len() >= 13, "{policies:?}");
    for policy in &policies {
        assert!(svg.contains(&format!(">\n{policy}\n<")), "{policy}");
    }
    assert!(svg.matches("<polyline").count() >= policies.len());
}

/// The bytes of experts that a token reads are printed with the cache sizes below them.
#[test]
fn warns_about_caches_below_one_token() {
    let sizes = (0..6u32).flat_map(|layer| (0..32).map(move |e| format!("{layer},{e},1048576\n")));
    let dir = tempfile::tempdir().unwrap();
    let (run, table) = (dir.path().join("run"), dir.path().join("sizes.csv"));
    known_run(&run);
    std::fs::write(&table, format!("layer,expert,bytes\n{}", sizes.collect::<String>())).unwrap();
    let budgets = ["--budget-mib", "23,24,192", "--sizes", arg(&table)];
    let args = args!["simulate", run, "--policy", "lru", budgets];
    let assert = moe_analyze().args(args).assert().success();
    let stderr = String::from_utf8_lossy(&assert.get_output().stderr).into_owned();
    // Four experts of 1 MiB in six layers.
    assert!(
        stderr.contains("at most 24.0 MiB of experts") && stderr.contains("(23 MiB)"),
        "{stderr}"
    );
    assert!(stderr.contains("all experts fit into 192 MiB"), "{stderr}");
}

#[test]
fn rejects_invalid_options() {
    let trace = repository(SMALL);
    for (option, value, expected) in [
        ("--policy", "best", "unknown policy"),
        ("--budget-mib", "8..4", "a range must ascend"),
        ("--budget-mib", "1..5+0", "the step of a range must be above 0"),
        ("--train-fraction", "2", "0 to 1"),
        ("--plot", "curve.pdf", ".png"),
        ("--sample", "0", "above 0"),
        ("--sample", "0.5", "pass --policy lru"),
    ] {
        let failure = fail!["simulate", trace, option, value];
        assert!(failure.contains(expected), "{failure}");
    }
    // An estimate has no speeds.
    let sampled = ["simulate", arg(&trace), "--policy", "lru", "--sample", "0.5"];
    let failure = fail![sampled, "--pcie-gb-s", "25"];
    assert!(failure.contains("--pcie-gb-s"), "{failure}");
}

/// Misses determine the speed.
#[test]
fn prints_bounds_of_speed() {
    let trace = repository("fixtures/simulate/mixed.route.csv");
    let print = |more: &[&str]| {
        let args = ["--quiet", "simulate", arg(&trace), "--budget-mib", "2,40", "--policy", "lru"];
        run![args, "-o", "json", more]
    };
    let json = |text: &str| -> serde_json::Value { serde_json::from_str(text).unwrap() };
    assert!(json(&print(&[]))[0].get("tokens_s_min").is_none());
    let link = ["--pcie-gb-s", "0.001048576", "--other-ms", "500"];
    let rows = json(&print(&link));
    // With 2 MiB every token misses its eight experts: 7 MiB at 1 MiB/s, and half a second of compute time.
    assert_eq!(rows[0]["tokens_s_min"], 0.133);
    assert_eq!(rows[0]["tokens_s_max"], 0.143);
    assert!(rows[1]["tokens_s_min"].as_f64() > rows[0]["tokens_s_max"].as_f64());
    assert!(rows[0].get("s_mbu_pct_min").is_none());
    let memory = ["--memory-gb-s", "1", "--dense-mib", "10"];
    let rows = json(&print(&[&link[..], &memory].concat()));
    assert!(rows[0]["s_mbu_pct_max"].is_number());
    let failure = fail!["simulate", trace, "--other-ms", "5"];
    assert!(failure.contains("--pcie-gb-s"), "{failure}");
}

/// Speedup over no cache, which is 4 s/token on the CPU. A cache of 2 MiB cannot reach it at this PCIe bandwidth.
#[test]
fn reports_caches_that_do_not_pay_off() {
    let trace = repository("fixtures/simulate/mixed.route.csv");
    let args = |link: &'static str| {
        let mut args = vec!["simulate", arg(&trace), "--budget-mib", "2,40", "-o", "json"];
        args.extend(["--policy", "lru,staticoracle", "--pcie-gb-s", link]);
        args.extend(["--cpu-expert-us", "500000"]);
        args
    };
    let run = |link| {
        let assert = moe_analyze().args(args(link)).assert().success();
        let output = assert.get_output();
        let rows: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        (rows, String::from_utf8_lossy(&output.stderr).into_owned())
    };
    // Eight experts of half a second each; 7 MiB of misses take seven seconds at 1 MiB/s.
    let (rows, stderr) = run("0.001048576");
    assert!(stderr.contains("all experts on the CPU: 0.25 tokens/s"), "{stderr}");
    assert!(stderr.contains("no hits at 2 MiB: lru\n"), "{stderr}");
    assert!(stderr.contains("not faster than without a cache at 2 MiB: lru\n"), "{stderr}");
    assert!(!stderr.contains("staticoracle"), "{stderr}");
    assert_eq!(rows[0]["tokens_s_min"], 0.143);
    assert_eq!(rows[0]["speedup_serial"], 0.571);
    // The CPU computes the experts that the plan misses.
    let missed = 100.0 - rows[1]["hit_pct_decode"].as_f64().unwrap();
    let speedup = rows[1]["speedup_serial"].as_f64().unwrap();
    assert!((speedup - 100.0 / missed).abs() < 0.001, "{speedup}");
    let (_, stderr) = run("0.000001");
    assert!(stderr.contains("not faster than without a cache at 2 MiB: lru"), "{stderr}");
}

/// Batch sizes from which copying experts is faster than computing them on the CPU.
#[test]
fn prints_the_offload_crossover() {
    let trace = repository("fixtures/simulate/mixed.route.csv");
    let args = ["simulate", arg(&trace), "--pcie-gb-s", "0.1", "-o", "json"];
    let run = |more: &[&str]| {
        let assert = moe_analyze().args(args![args, more]).assert().success();
        let output = assert.get_output();
        let rows: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        (rows, String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (rows, stderr) = run(&["--offload", "--cpu-expert-us", "4000"]);
    assert!(stderr.contains("GPU is unknown and counts as 0"), "{stderr}");
    let rows = rows.as_array().unwrap();
    assert_eq!(rows.len(), 13);
    // A token selects eight experts; each further token takes the CPU as long as the first.
    assert_eq!(rows[0]["n_tokens"], 1);
    assert_eq!(rows[0]["distinct_experts"], 8.0);
    assert_eq!(rows[0]["cpu_ms"], 32.0);
    assert_eq!(rows[12]["cpu_ms"], 4096.0 * 32.0);
    assert_eq!(rows[0]["faster"], "cpu");
    assert_eq!(rows[12]["faster"], "gpu");
    let least = stderr.split("GGML_OP_OFFLOAD_MIN_BATCH=").nth(1).unwrap();
    let least: u64 = least.split([' ', '\n']).next().unwrap().parse().unwrap();
    for row in rows {
        let is_gpu = row["n_tokens"].as_u64().unwrap() >= least;
        assert_eq!(row["faster"] == "gpu", is_gpu, "{row} {least}");
    }
    let (_, stderr) = run(&["--offload", "--cpu-expert-us", "1", "--cpu-next-us", "0"]);
    assert!(stderr.contains("not faster"), "{stderr}");
    let (_, stderr) = run(&["--offload", "--cpu-expert-us", "1000000", "--gpu-expert-us", "1"]);
    assert!(stderr.contains("batches of at least 1 token;"), "{stderr}");
    assert!(!stderr.contains("unknown"), "{stderr}");
    let failure = fail![args, "--offload"];
    assert!(failure.contains("--cpu-expert-us"), "{failure}");
}

/// The windows of a run come from its timestamps and differ between layers. `--window-us` overrides them.
#[test]
fn reads_windows_from_the_timestamps_of_a_run() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    known_run(&run);
    let args = ["simulate", arg(&run), "--budget-mib", "1", "--policy", "lru"];
    let link = ["--predictor", "previous", "--pcie-gb-s", "10", "-o", "json"];
    let output = moe_analyze().args(args![args, link]).assert().success();
    let stderr = String::from_utf8_lossy(&output.get_output().stderr).into_owned();
    // Four microseconds between consecutive layers, six layers.
    let expected = "compute time per layer from the trace's timestamps: 4 to 4 µs, 24 µs/token";
    assert!(stderr.contains(expected), "{stderr}");
    let named = moe_analyze()
        .args(args![args, link, "--window-us", "7"])
        .assert()
        .success();
    let stderr = String::from_utf8_lossy(&named.get_output().stderr).into_owned();
    assert!(!stderr.contains("from the trace's timestamps"), "{stderr}");
}

/// The trace as its own predictions is always correct. A predictor needs a PCIe bandwidth and, without timestamps, a window.
#[test]
fn prints_one_row_per_predictor() {
    let trace = repository("fixtures/simulate/mixed.route.csv");
    let trace = arg(&trace);
    let args = ["--quiet", "simulate", trace, "--budget-mib", "8", "--policy", "lru,layer"];
    let link = ["--pcie-gb-s", "10", "--predictor", "previous,hottest,markov,coactivation"];
    let failure = fail![args, link];
    assert!(failure.contains("--window-us"), "{failure}");
    let more = ["--window-us", "1000", "--predictions", trace, "-o", "json"];
    let rows: serde_json::Value = serde_json::from_str(&run![args, link, more]).unwrap();
    let rows = rows.as_array().unwrap();
    assert_eq!(rows.len(), 2 * 6);
    let given = &rows[5];
    assert_eq!(given["predictor"], "predictions");
    assert_eq!(given["precision_pct"], 100.0);
    assert_eq!(given["wasted"], 0);
    // The only layer without a prediction is the first layer after each prompt.
    assert!(given["missed"].as_u64().unwrap() <= 2 * 2);
    let none = &rows[0];
    assert_eq!(none["predictor"], "none");
    assert!(none["precision_pct"].is_null());
    assert_eq!(none["hits"], given["hits"]);
    assert!(none["stall_ms_token"].as_f64() > given["stall_ms_token"].as_f64());
    let failure = fail!["simulate", trace, "--predictor", "previous"];
    assert!(failure.contains("--pcie-gb-s"), "{failure}");
    let failure = fail![args, link, more, "--prefetch-depth", "4"];
    assert!(failure.contains("out of range (1..=3)"), "{failure}");
    for option in [["--prefetch-depth", "2"], ["--prefetch-experts", "2"], ["--window-us", "2"]] {
        let failure = fail!["simulate", trace, "--budget-mib", "8", option];
        assert!(failure.contains("--predictor <NAME[,…]>|--predictions <TRACE>"), "{failure}");
    }
}

/// The last layer has no later layer to prefetch for.
#[test]
fn prefetching_needs_two_layers() {
    let dir = tempfile::tempdir().unwrap();
    let trace = file_of(dir.path(), "t.jsonl", "{\"t\":0,\"layer\":0,\"experts\":[1]}\n");
    let sizes = file_of(dir.path(), "s.csv", "layer,expert,bytes\n0,1,1048576\n");
    let args = args!["simulate", trace, "--sizes", sizes, "--budget-mib", "1"];
    let failure = fail!["--quiet", args, "--pcie-gb-s", "10", "--predictor", "previous"];
    let expected = "needs at least 2 MoE layers, but the trace has 1; omit --predictor";
    assert!(failure.contains(expected), "{failure}");
}

/// A sample of all experts equals LRU; a smaller sample has a confidence interval.
#[test]
fn sample_reports_its_confidence_interval() {
    let trace = repository("fixtures/simulate/mixed.route.csv");
    let budgets = "4,12,24";
    let whole = simulate(&trace, budgets, "lru", &[]);
    let sampled = |rate: &str| {
        let args = args![
            "--quiet", "simulate", trace, "--budget-mib", budgets, "--policy", "lru", "--sample",
            rate, "-o", "csv"
        ];
        let csv = run![args];
        let mut lines = csv
            .lines()
            .map(|line| line.split(',').map(str::to_owned).collect());
        let columns: Vec<String> = lines.next().unwrap();
        let rows = lines.map(|fields: Vec<String>| -> BTreeMap<String, String> {
            columns.iter().cloned().zip(fields).collect()
        });
        rows.collect::<Vec<_>>()
    };
    let all = sampled("1");
    assert_eq!(all.len(), 3);
    for row in &all {
        let number = |column: &str| row[column].parse::<f64>().unwrap();
        let exact = &whole[&(row["budget_mib"].parse().unwrap(), "lru".to_owned())];
        for column in ["hit_pct_cum", "hit_pct_decode", "read_mib", "evictions", "look_ups"] {
            assert_eq!(number(column), exact[column], "{column}");
        }
        assert_eq!(number("hit_pct_cum_error"), 0.0);
    }
    let half = sampled("0.5");
    assert!(
        half.iter()
            .any(|row| row["hit_pct_cum_error"].parse::<f64>().unwrap() > 0.0)
    );
}
