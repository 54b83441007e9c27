//! Every kind of trace, and every source of expert sizes.

use std::path::Path;

use std::fs;

use super::simulate;
use moe_gguf::Gguf;

use crate::support::{
    N_LAYER, arg, args, fail, file_of, known_run, known_run_of, repository, run, write_gguf,
};

const MODEL: &str = "fixtures/tiny-qwen3moe-Q4_K_M.gguf";

/// A run, its trace.bin and its tables are the same trace; sizes come from the run's map, from the model, or from the table.
#[test]
fn run_trace_and_tables_yield_equal_results() {
    let dir = tempfile::tempdir().unwrap();
    let (run, tables) = (dir.path().join("run"), dir.path().join("tables"));
    known_run(&run);
    run!["--quiet", "parquet", run, "--out", tables];
    let model = repository(MODEL);
    let model = ["--model", arg(&model)];
    let of_run = simulate(&run, "0..3+1", "belady,lru,clock", &[]);
    assert_eq!(of_run.len(), 12);
    let lookups = of_run[&(1, "lru".to_owned())]["look_ups"];
    assert_eq!(lookups, known_lookups() as f64);
    assert_eq!(of_run, simulate(&run, "0..3+1", "belady,lru,clock", &model));
    assert_eq!(of_run, simulate(&run.join("trace.bin"), "0..3+1", "belady,lru,clock", &model));
    assert_eq!(of_run, simulate(&tables, "0..3+1", "belady,lru,clock", &model));
}

/// Number of distinct experts of each batch of the known run, counted independently.
fn known_lookups() -> usize {
    use crate::support::{N_LAYER, experts_of, tokens_of};
    let distinct = |layer: u32, tokens: std::ops::Range<u32>| {
        let mut experts: Vec<u32> = tokens.flat_map(|token| experts_of(token, layer)).collect();
        experts.sort_unstable();
        experts.dedup();
        experts.len()
    };
    let of_layer = |layer: u32| {
        let generated = tokens_of(layer, 1).map(|token| distinct(layer, token..token + 1));
        distinct(layer, tokens_of(layer, 0)) + generated.sum::<usize>()
    };
    (0..N_LAYER).map(of_layer).sum()
}

#[test]
fn rejects_unknown_expert_sizes() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    known_run(&run);
    let trace = run.join("trace.bin");
    let failure = fail!["--quiet", "simulate", trace];
    assert!(failure.contains("--model") && failure.contains("--sizes"), "{failure}");

    let sizes = dir.path().join("sizes.csv");
    let all: String = (0..6u32)
        .flat_map(|layer| (0..32).map(move |expert| format!("{layer},{expert},1048576\n")))
        .collect();
    fs::write(&sizes, format!("layer,expert,bytes\n{all}")).unwrap();
    let rows = simulate(&trace, "100,192", "lru", &["--sizes", arg(&sizes)]);
    let row = &rows[&(192, "lru".to_owned())];
    // Experts of 1 MiB: the bytes read equal the misses.
    assert_eq!(row["read_mib"], row["look_ups"] - row["hits"]);
    assert_eq!(row["evictions"], 0.0);
}

#[test]
fn rejects_counts_without_order() {
    let counts = repository("fixtures/foreign/coli-usage/small.coli_usage");
    let failure = fail!["--quiet", "simulate", counts];
    assert!(failure.contains("only counts"), "{failure}");
    let learn = repository("fixtures/foreign/npy/counts.npy");
    let failure = fail!["--quiet", "simulate", learn, "--top-k", "2"];
    assert!(failure.contains("only counts"), "{failure}");
}

/// Other inputs are checked against the trace's model, which the trace or `--model` provides.
#[test]
fn rejects_learn_files_and_predictions_of_another_model() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    known_run(&run);
    let (trace, model) = (run.join("trace.bin"), repository(MODEL));
    let learn = |name: &str, n_expert: u32, layer: u32| {
        let text = format!(
            r#"{{"schema": "llama.cpp.moe_layer_opt_perf.v1", "n_expert": {n_expert}, "layers": [
            {{"layer": {layer}, "calls": 1, "experts": [[7, 1]]}}]}}"#
        );
        file_of(dir.path(), name, text)
    };
    let (few, own) = (learn("few.json", 8, 0), learn("own.json", 32, 5));
    let deep = learn("deep.json", 32, 6);
    let other = repository("fixtures/foreign/bigmoeonedge/small.route.csv");
    let learnt = |file: &Path| args!["--policy", "hotcache", "--learn", file];
    let predicted = |file: &Path| {
        let link = ["--policy", "lru", "--pcie-gb-s", "1", "--window-us", "1"];
        args![link, "--predictions", file]
    };
    let with_run = args!["--quiet", "simulate", run, "--budget-mib", "1"];
    let bare = args!["--quiet", "simulate", trace, "--budget-mib", "1", "--model", model];
    for simulate in [with_run, bare] {
        for (more, path, expected) in [
            (learnt(&few), &few, ": it has 8 experts in a layer, but the model"),
            (learnt(&deep), &deep, " contains expert 7 of layer 6, which"),
            (learnt(&other), &other, ": it has 2 layers, but the model"),
            (predicted(&other), &other, ": it has 2 layers, but the model"),
        ] {
            let line = fail![simulate, more];
            let expected = format!("moe-analyze: {}{expected}", arg(path));
            assert!(line.starts_with(&expected), "{line}");
        }
        run![simulate, learnt(&own)];
        run![simulate, learnt(&run)];
        run![simulate, predicted(&run)];
    }
}

/// Chunk experts (`_chexps`, as in GroveMoE) belong to several experts each, so they are not part of an expert's size.
#[test]
fn expert_sizes_are_equal_with_and_without_the_model() {
    let dir = tempfile::tempdir().unwrap();
    let (run, model) = (dir.path().join("run"), dir.path().join("chunks.gguf"));
    let plain = Gguf::open(repository(MODEL)).unwrap();
    let chunks = (0..N_LAYER).flat_map(|layer| {
        ["gate", "up", "down"].map(|part| {
            let name = format!("blk.{layer}.ffn_{part}_chexps.weight");
            (name, vec![256, 64, 16])
        })
    });
    write_gguf(&model, Some(&plain), &[], &chunks.collect::<Vec<_>>());
    known_run_of(&run, &Gguf::open(&model).unwrap());
    let simulated = |more: &[&str]| {
        let args = ["--quiet", "simulate", arg(&run), "--budget-mib", "1", "-o", "csv"];
        run![args, more]
    };
    let without = simulated(&[]);
    assert_eq!(simulated(&["--model", arg(&model)]), without);
    // The sizes of the model do not include chunk experts, either.
    let column = |text: &str, name: &str| -> Vec<String> {
        let mut lines = text.lines().map(|line| line.split(','));
        let at = lines.next().unwrap().position(|column| column == name);
        let at = at.unwrap_or_else(|| panic!("{name} in {text}"));
        lines
            .map(|mut line| line.nth(at).unwrap().to_owned())
            .collect()
    };
    let own = simulated(&["--model", arg(&repository(MODEL))]);
    for name in ["hits", "hit_pct_decode"] {
        assert_eq!(column(&own, name), column(&without, name), "{name}");
    }
}
