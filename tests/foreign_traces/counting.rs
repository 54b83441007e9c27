//! Counts of several traces in `hotness`, and learn files.

use std::fs;
use std::path::Path;

use serde_json::Value;

use super::{golden, hotness};
use crate::support::{Arg, arg, args, fail, run};

/// A trace shows only the highest expert and slot that were used; the model can have more.
#[test]
fn traces_without_number_of_experts_can_be_merged() {
    let dir = tempfile::tempdir().unwrap();
    let trace = |name: &str, experts: &str| {
        let path = dir.path().join(name);
        fs::write(&path, format!("{{\"t\":0,\"layer\":0,\"experts\":{experts}}}\n")).unwrap();
        path
    };
    let [a, b, c] = [("a", "[0,1]"), ("b", "[0,5]"), ("c", "[0,-1]")]
        .map(|(name, experts)| trace(&format!("{name}.jsonl"), experts));
    for files in [[&a, &b, &c], [&b, &c, &a], [&c, &a, &b]] {
        let counts = hotness(files[0], &[arg(files[1]), arg(files[2])]);
        assert_eq!(counts, [((0, 0), 3), ((0, 1), 1), ((0, 5), 1)].into());
    }
    let sizes = dir.path().join("sizes.csv");
    fs::write(&sizes, "layer,expert,bytes\n0,0,8\n0,1,8\n0,5,8\n").unwrap();
    let plan = ["--quiet", "plan", arg(&a), arg(&b), "--sizes", arg(&sizes)];
    run![plan, "--budget-mib", "1"];
    // A route trace declares 2 experts, but the other trace selects the sixth.
    let stated = dir.path().join("stated.csv");
    let text = "# n_expert=2 n_expert_used=1\nstep,layer,slot,expert\n0,0,0,1\n";
    fs::write(&stated, format!("# route_trace v1\n{text}")).unwrap();
    hotness(&stated, &[arg(&c)]);
    let error = fail!["--quiet", "hotness", stated, b];
    assert!(error.contains("2 against 6 experts in a layer"), "{error}");
}

/// `hotness --out` and `convert --to learn` write equal files for every trace.
#[test]
fn hotness_and_convert_write_equal_learn_files() {
    let dir = tempfile::tempdir().unwrap();
    let write = |args: &dyn Arg, name: &str| -> Value {
        let out = dir.path().join(name);
        run![args, "--out", out, "--force"];
        serde_json::from_slice(&fs::read(&out).unwrap()).unwrap()
    };
    let assert_same = |trace: &Path, more: &[&str]| {
        let counted = args!["--quiet", "hotness", trace, more];
        let converted = args!["--quiet", "convert", trace, "--to", "learn", more];
        let (counted, converted) = (write(&counted, "a.json"), write(&converted, "b.json"));
        assert_eq!(counted, converted, "{} {more:?}", trace.display());
    };
    for name in [
        "bigmoeonedge/small.route.csv",
        "coli-usage/small.coli_usage",
        "colibri-trace/small.txt",
        "ds4-hotlist/small.hotlist",
        "eplb/small.json",
        "expert-tracer/written.json",
        "jsonl/small.jsonl",
        "jsonl/with-weights.jsonl",
        "lattice/small.jsonl",
        "layer-expert/small.csv",
        "megatron/router_trace_rank0.jsonl",
        "mesh-llm",
        "moe-balance/small.jsonl",
        "npy/counts.npy",
        "npy/expert-parallel-rank.npy",
        "npy/vllm-routed.npy",
        "sglang-pt/per-token.pt",
        "sglang-pt/stat.pt",
        "sglang/physical.json",
        "thesis/small.bin",
        "vllm/lists.json",
    ] {
        assert_same(&golden(name), &[]);
        assert_same(&golden(name), &["--top-k", "2"]);
    }
}
