//! Options that describe traces: accepted where they apply, rejected where they do not.

use std::path::Path;

use crate::support::{
    arg, args, fail, file_of, known_run, moe_analyze, renumbered, repository, run,
};

const MODEL: &str = "fixtures/tiny-qwen3moe-Q4_K_M.gguf";

/// A trace with other operation numbers yields the same results with the operation names.
#[test]
fn every_reader_of_records_accepts_operation_names() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    known_run(&run);
    let (trace, ops) = renumbered(&run, dir.path());
    let bare = run.join("trace.bin");
    let model = repository(MODEL);
    let named = ["--ops", arg(&ops)];
    for command in [
        &["hotness", "-o", "csv"][..],
        &["accesses", "-o", "csv", "--model", arg(&model)],
        &["graph", "-o", "json", "--phase", "prompt"],
        &["simulate", "-o", "csv", "--model", arg(&model), "--budget-mib", "1"],
    ] {
        let of = |path: &Path, more: &[&str]| run!["--quiet", command, path, more];
        assert_eq!(of(&trace, &named), of(&bare, &[]), "{command:?}");
    }
    let diff = |more: &[&str]| {
        let args = ["--quiet", "diff", arg(&run), arg(&trace)];
        let output = moe_analyze().args(args![args, more]).output().unwrap();
        output.status.code()
    };
    assert_eq!(diff(&named), Some(0));
    assert_ne!(diff(&[]), Some(0));
}

/// Options without effect are errors.
#[test]
fn rejects_options_without_effect() {
    let dir = tempfile::tempdir().unwrap();
    let (run, out) = (dir.path().join("run"), dir.path().join("tables"));
    known_run(&run);
    let (trace, ops) = renumbered(&run, dir.path());
    let route = repository("fixtures/foreign/bigmoeonedge/small.route.csv");
    let model = repository(MODEL);
    let with_out = ["--out", arg(&out)];
    let with_budget = ["--model", arg(&model), "--budget-mib", "1"];
    for (command, path, option, more) in [
        ("parquet", &run, ["--top-k", "4"], &with_out[..]),
        ("parquet", &run, ["--ops", arg(&ops)], &with_out),
        ("parquet", &run, ["--model", arg(&model)], &with_out),
        ("parquet", &route, ["--ops", arg(&ops)], &with_out),
        ("hotness", &run, ["--top-k", "4"], &[]),
        ("hotness", &run, ["--ops", arg(&ops)], &[]),
        ("hotness", &route, ["--ops", arg(&ops)], &[]),
        ("simulate", &run, ["--top-k", "4"], &[]),
        ("plan", &run, ["--top-k", "4"], &with_budget),
        ("graph", &run, ["--ops", arg(&ops)], &[]),
        ("accesses", &run, ["--ops", arg(&ops)], &[]),
        ("diff", &run, ["--ops", arg(&ops)], &[arg(&run)]),
        ("convert", &run, ["--top-k", "4"], &["--to", "jsonl", "--out", arg(&out)]),
    ] {
        let args = args!["--quiet", command, path, more, option];
        let failure = fail![args];
        assert!(failure.contains(option[0]), "{args:?}: {failure}");
        assert!(failure.contains("omit the option"), "{failure}");
        assert!(!out.exists(), "{args:?}");
    }
    // An option may apply to only one of several inputs.
    run!["--quiet", "hotness", run, trace, "--ops", ops];
}

/// A model of the same shape with another architecture is a different model.
#[test]
fn rejects_model_that_differs_from_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let (run, tables) = (dir.path().join("run"), dir.path().join("tables"));
    known_run(&run);
    run!["--quiet", "parquet", run, "--out", tables];
    let other = repository("fixtures/tiny-gpt-oss-MXFP4.gguf");
    let transfers = run.join("transfers.jsonl");
    let line = r#"{"sequence_id":0,"token_id":0,"phase":0,"layer_id":0,"n_tokens":1,"n_experts":4,"n_fetched":0,"bytes":0,"window":{"start_ns":1,"end_ns":2}}"#;
    std::fs::write(transfers, line).unwrap();
    let of_runs = [&["accesses"][..], &["overlap"]];
    let of_all = [&["hotness"][..], &["plan", "--budget-mib", "1"], &["simulate"], &["replay"]];
    let cases = of_runs.iter().map(|command| (&run, command));
    let cases = cases.chain([&run, &tables].into_iter().flat_map(|path| {
        let commands = of_all.iter();
        commands.map(move |command| (path, command))
    }));
    for (path, command) in cases {
        let args = args!["--quiet", command, path, "--model", other];
        let line = fail![args];
        let expected =
            format!(": it has architecture qwen3moe, but the model {} has gpt-oss", arg(&other));
        assert!(line.contains(&expected) && line.contains(arg(path)), "{line}");
    }
}

/// A trace of probabilities does not contain the number of experts per token: `plan` uses --top-k, like `hotness`.
#[test]
fn plan_accepts_top_k_and_ops() {
    let dir = tempfile::tempdir().unwrap();
    let trace = repository("fixtures/foreign/rtrace/small.rtrace");
    let experts = (0..2).flat_map(|layer| (0..8).map(move |e| format!("{layer},{e},1\n")));
    let sizes = format!("layer,expert,bytes\n{}", experts.collect::<String>());
    let sizes = file_of(dir.path(), "sizes.csv", sizes);
    let options = ["--sizes", arg(&sizes), "--budget-mib", "1", "-o", "csv"];
    let plan = args!["--quiet", "plan", options];
    assert!(fail![plan, trace].contains("--top-k"));
    let rows = run![plan, trace, "--top-k", "2"];
    let hits = |row: &str| {
        let fields: Vec<u32> = row.split(',').map(|field| field.parse().unwrap()).collect();
        (fields[0], fields[1], fields[5])
    };
    let mut hits: Vec<(u32, u32, u32)> = rows.lines().skip(1).map(hits).collect();
    hits.sort_unstable();
    // The two most likely experts of each of its nine rows of probabilities, computed by another program.
    let [of_first, of_second] =
        [&[(0, 1), (1, 2), (3, 2), (5, 4), (7, 1)][..], &[(0, 1), (2, 2), (4, 1), (6, 4)]];
    let of_first = of_first.iter().map(|&(expert, n)| (0, expert, n));
    let of_second = of_second.iter().map(|&(expert, n)| (1, expert, n));
    assert_eq!(hits, of_first.chain(of_second).collect::<Vec<_>>());

    let learn = r#"{"schema": "llama.cpp.moe_layer_opt_perf.v1", "layers": [{"layer": 0, "experts": [[1, 1]]}]}"#;
    let learn = file_of(dir.path(), "learn.json", learn);
    let line = fail![plan, learn, "--top-k", "2"];
    assert!(line.contains("--top-k applies to traces"), "{line}");
    assert!(line.contains("omit the option"), "{line}");
}

/// --top-k does not override the number of experts per token in a trace, in its header or its rows.
#[test]
fn warns_about_top_k_that_contradicts_the_trace() {
    for trace in ["bigmoeonedge/small.route.csv", "lattice/small.jsonl", "jsonl/small.jsonl"] {
        let trace = repository(&format!("fixtures/foreign/{trace}"));
        let hotness = |more: &[&str]| {
            let args = args!["hotness", trace, more];
            let assert = moe_analyze().args(args).assert().success();
            let output = assert.get_output();
            [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned())
        };
        let [plain, _] = hotness(&[]);
        for top_k in ["1", "7"] {
            let [text, warnings] = hotness(&["--top-k", top_k]);
            let warning = format!(
                "warning: the trace has 2 experts per token; the specified top-k of {top_k} is ignored"
            );
            assert!(warnings.contains(&warning), "{warnings}");
            assert_eq!(text, plain);
        }
        let [_, warnings] = hotness(&["--top-k", "2"]);
        assert!(!warnings.contains("warning"), "{warnings}");
    }
}

/// A trace without a manifest has no map; the model provides it.
#[test]
fn tables_of_a_trace_use_the_map_of_the_model() {
    let dir = tempfile::tempdir().unwrap();
    let (run, whole, bare) =
        (dir.path().join("run"), dir.path().join("whole"), dir.path().join("bare"));
    known_run(&run);
    let trace = run.join("trace.bin");
    let model = repository(MODEL);
    run!["--quiet", "parquet", run, "--out", whole];
    let args = ["--quiet", "parquet", arg(&trace), "--out", arg(&bare)];
    run![args, "--model", model];
    let accesses = |tables: &Path| {
        let path = tables.join("accesses.parquet");
        let file = std::fs::File::open(path).unwrap();
        let reader = parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder::try_new(file);
        let batches = reader.unwrap().build().unwrap();
        batches
            .map(|batch| batch.unwrap().columns().to_vec())
            .collect::<Vec<_>>()
    };
    assert_eq!(accesses(&whole), accesses(&bare));
    assert!(bare.join("gguf-map.parquet").exists());
}

/// The former name of an option selects the same output as the current name.
#[test]
fn accepts_former_option_names() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    known_run(&run);
    let model = repository(MODEL);
    let plot = |name: &str, option| {
        let out = dir.path().join(name);
        run!["hotness", run, "--plot", out, option, "entropy"];
        std::fs::read(out).unwrap()
    };
    let plots =
        ["--plot-kind", "--picture"].map(|option| plot(&format!("{}.svg", &option[2..]), option));
    assert_eq!(plots[0], plots[1]);
    let machine = |gb_s, us, first| {
        let speed = [gb_s, "10", us, "5", first, "0.5", "--policy", "static"];
        run!["--quiet", "simulate", run, "--model", model, "--budget-mib", "1", speed, "-o", "csv"]
    };
    assert_eq!(
        machine("--pcie-gb-s", "--pcie-us", "--train-fraction"),
        machine("--link-gb-s", "--link-us", "--first")
    );
    let map = |option| run!["gguf-map", model, option, "gguf-dump"];
    assert_eq!(map("--format"), map("--form"));
}
