//! Timestamps of runs on a GPU, with a replacement for its driver: runs are sound for every placement of the model.

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use moe_trace::Run;

use crate::support::gpu::{stand_in, with_gpu};
use crate::support::{arg, args};

const MODELS: [&str; 4] =
    ["tiny-qwen3moe-Q4_K_M", "tiny-gpt-oss-MXFP4", "random-qwen2moe-F16", "random-dots1-F16"];

/// Placements of layers, experts and matrices.
const PLACES: [&[&str]; 9] = [
    &["--device", "cuda"],
    &["--device", "cuda", "-ngl", "0"],
    &["--device", "cuda", "-ngl", "1"],
    &["--device", "cuda", "-ngl", "3"],
    &["--device", "cuda", "--vram-mib", "2"],
    &["--device", "cuda", "--vram-mib", "6"],
    &["--device", "cuda", "-ngl", "3", "--n-cpu-moe", "2"],
    // The shared expert runs on the CPU next to the experts that the GPU computes.
    &["--device", "cuda", "-ngl", "0", "--override-tensor", "_exps=CUDA0"],
    // Only some operations of a layer.
    &[
        "--device",
        "cuda",
        "--override-tensor",
        "attn_k=CPU,attn_output=CPU,ffn_up_exps=CPU,shexp=CPU",
    ],
];

/// The same on several GPUs, of which the first can be listed more than once.
const SEVERAL: [&[&str]; 8] = [
    &["--device", "cuda:0,cuda:0"],
    &["--device", "cuda:0,cuda:1"],
    &["--device", "cuda:1,cuda:0,cuda:1", "-ts", "1,0,2"],
    &["--device", "cuda:0,cuda:1", "-ngl", "3", "--n-cpu-moe", "2"],
    &["--device", "cuda:0,cuda:1", "--vram-mib", "1,6"],
    // The experts of a layer on another GPU than the layer, or on both.
    &["--device", "cuda:0,cuda:1", "-ts", "1", "-ot", "blk.[13].*_exps=CUDA0,_exps=CUDA1"],
    &["--device", "cuda:0,cuda:1", "-ot", "ffn_down_exps=CUDA0,_exps=CUDA1,attn_k=CPU"],
    &["--device", "cuda:0,cuda:1", "-ngl", "0", "-ot", "_exps=CUDA1,attn_q=CUDA0,shexp=CUDA0"],
];

const POLICIES: [&[&str]; 7] = [
    &["--policy", "cpu"],
    &["--policy", "gpu"],
    &["--policy", "gpu", "--offload-min-batch", "1"],
    &["--policy", "post-fetch"],
    &["--policy", "post-fetch", "--postfetch-cpu-limit", "2"],
    &[
        "--policy", "post-fetch", "--postfetch-cpu-limit", "1", "--postfetch-max-transfers", "1",
        "--postfetch-block-on-miss", "0",
    ],
    &["--policy", "post-fetch", "--postfetch-use-dedicated-streams", "0"],
];

const BATCHES: [&str; 3] = ["1", "3", "512"];

/// Two sequences.
const PROMPTS: &str = r#"{"prompt": "The quick brown fox jumps"}
{"prompt": "over"}
"#;

/// Records a run, and returns its faults.
fn faults(stand_in: &Path, model: &Path, out: &Path, options: &[&str]) -> Vec<String> {
    let prompts = out.with_extension("txt");
    std::fs::write(&prompts, PROMPTS).unwrap();
    let always = ["--quiet", "record", "-n", "3", "--ignore-eos", "-t", "1"];
    let files = ["--model", arg(model), "--prompts", arg(&prompts), "--out", arg(out)];
    let args = args![always, files, options];
    let mut command = with_gpu(stand_in, "", &args);
    let done = command.env("STAND_IN_GPUS", "2").output().unwrap();
    if !done.status.success() {
        let stderr = String::from_utf8_lossy(&done.stderr).into_owned();
        return vec![format!("{}: {stderr}", done.status)];
    }
    let run = Run::open(out).unwrap();
    assert!(run.trace.records().len() > 100);
    let faults = moe_trace::check::check(&run);
    let mut wrong: Vec<String> = faults.iter().map(ToString::to_string).collect();
    for gpu in run.manifest.unwrap().gpus() {
        let fallbacks = gpu.fallbacks.as_ref().unwrap();
        // With a memory limit, the remaining tensors run on the CPU.
        if fallbacks.operations > 0 && !options.contains(&"--vram-mib") {
            wrong.push(format!("{:?}: {fallbacks:?}", gpu.device));
        }
    }
    wrong
}

#[test]
fn every_policy_and_placement_records_a_sound_run() {
    leave_sound_runs(&PLACES);
}

#[test]
fn several_gpus_record_a_sound_run() {
    leave_sound_runs(&SEVERAL);
}

/// Name of the result of each record in a run on these devices.
fn recorded_operations(stand_in: &Path, out: &Path, devices: &str) -> Vec<String> {
    let model = moe_testkit::fixture("tiny-qwen3moe-Q4_K_M.gguf");
    let always = ["--quiet", "record", "-n", "8", "--ignore-eos", "-t", "1"];
    let run = ["--prompt", "The quick brown fox", "--model", arg(&model), "--out", arg(out)];
    let mut command = with_gpu(stand_in, "", args![always, run, ["--device", devices]]);
    command.env("STAND_IN_GPUS", "2").env("STAND_IN_LOAD", "1");
    command.assert().success();
    let run = Run::open(out).unwrap();
    let names = run.trace.records().iter();
    names.map(|record| record.dst_name().into_owned()).collect()
}

/// Records are in the order of their starts. If each GPU reads the result of the previous one, this is the order of the graph. A clock
/// whose offset is only known from delayed calls must not change it.
#[test]
fn records_of_split_layers_are_in_the_order_of_the_graph() {
    let Some(stand_in) = stand_in() else { return };
    let dir = tempfile::tempdir().unwrap();
    let record =
        |name, devices| recorded_operations(stand_in.path(), &dir.path().join(name), devices);
    let graph = record("cpu", "cpu");
    assert!(graph.len() > 1000, "{} records", graph.len());
    for (name, devices) in [("twice", "cuda:0,cuda:0"), ("both", "cuda:0,cuda:1,cuda:0")] {
        let recorded = record(name, devices);
        let differ = graph.iter().zip(&recorded).position(|(a, b)| a != b);
        assert_eq!((recorded.len(), differ), (graph.len(), None), "{devices}");
    }
}

/// Every policy with every placement; batch sizes and models alternate.
fn leave_sound_runs(places: &[&[&str]]) {
    let Some(stand_in) = stand_in() else { return };
    let dir = tempfile::tempdir().unwrap();
    let mut cases = Vec::new();
    for place in places {
        for policy in POLICIES {
            let (batch, model) = (cases.len() % BATCHES.len(), cases.len() % MODELS.len());
            let options = [*place, policy, &["--batch-size", BATCHES[batch]]].concat();
            cases.push((MODELS[model], options));
        }
    }
    let next = Mutex::new(cases.iter().enumerate());
    let wrong = Mutex::new(Vec::new());
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let Some((i, (model, options))) = next.lock().unwrap().next() else {
                        return;
                    };
                    let file: PathBuf = moe_testkit::fixture(format!("{model}.gguf"));
                    let out = dir.path().join(i.to_string());
                    let found = faults(stand_in.path(), &file, &out, options);
                    std::fs::remove_dir_all(&out).ok();
                    if !found.is_empty() {
                        wrong
                            .lock()
                            .unwrap()
                            .push(format!("{model} {}: {found:?}", options.join(" ")));
                    }
                }
            });
        }
    });
    let wrong = wrong.into_inner().unwrap();
    let n = cases.len();
    assert!(wrong.is_empty(), "{} of {n} runs:\n{}", wrong.len(), wrong.join("\n"));
}
