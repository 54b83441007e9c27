//! Memory of a model and its context.

use serde_json::{Value, json};

use super::{GPT_OSS, QWEN, json_of, workplace, write};
use crate::support::{args, fail, repository, run};

/// Bytes of a row of the keys of the fixtures in F16: two heads of 64 elements.
const ROW: u64 = 2 * 64 * 2;

/// The memory of a plan with one lane.
fn memory_of(model: &str, more: &[&str]) -> Value {
    let dir = workplace();
    let learn = dir.path().join("learn.json");
    let plan = json_of(args![
        "plan",
        learn,
        "--model",
        repository(model),
        "--budget-mib",
        "1",
        "-o",
        "json",
        more
    ]);
    plan["memory"].clone()
}

#[test]
fn kv_cache_depends_on_the_options() {
    let kv = |more: &[&str]| {
        let memory = memory_of(QWEN, more);
        let gpu = &memory["gpus"][0];
        [&gpu["moe_analyze"]["kv_bytes"], &gpu["llama_cpp"]["kv_bytes"]]
            .map(|n| n.as_u64().unwrap())
    };
    // Keys and values of six layers. The training context is 1,024 tokens.
    let (halves, row) = (2 * 6, ROW);
    assert_eq!(kv(&[]), [halves * row * 1024; 2]);
    assert_eq!(kv(&["--ctx", "5000"]), [halves * row * 5000, halves * row * 5120]);
    assert_eq!(kv(&["--ctx", "4096", "--parallel", "4"]), [halves * row * 4096; 2]);
    assert_eq!(
        kv(&["--ctx", "1000", "--parallel", "3"]),
        [halves * row * 3 * 334, halves * row * 3 * 512]
    );
    let types = ["--cache-type-k", "q8_0", "--cache-type-v", "f32"];
    let both = 6 * (128 / 32 * 34 + 128 * 4);
    assert_eq!(kv(&types), [both * 1024; 2]);
}

/// Every second layer of gpt-oss has a window of 128 positions, to which llama.cpp adds a batch of 512.
#[test]
fn windows_limit_the_cache_of_llama_cpp() {
    let memory = memory_of(GPT_OSS, &["--ctx", "8192"]);
    let layers = memory["layers"].as_array().unwrap().iter();
    let k: Vec<u64> = layers
        .map(|layer| layer["k_bytes"].as_u64().unwrap())
        .collect();
    let (windowed, full) = (768 * ROW, 8192 * ROW);
    assert_eq!(k, [windowed, full, windowed, full, windowed, full]);
    let gpu = &memory["gpus"][0];
    assert_eq!(gpu["llama_cpp"]["kv_bytes"], 6 * (windowed + full));
    assert_eq!(gpu["moe_analyze"]["kv_bytes"], 12 * full);
    assert_eq!(gpu["llama_cpp"]["state_bytes"], 0);
    assert_eq!(gpu["llama_cpp"]["compute_bytes"], Value::Null);
}

/// All bytes of tensors are on a GPU, in CPU memory, or both.
#[test]
fn tensors_are_counted_once() {
    for model in [QWEN, GPT_OSS] {
        let gguf = moe_gguf::Gguf::open(repository(model)).unwrap();
        let total: u64 = gguf.tensors().iter().map(|tensor| tensor.size_bytes).sum();
        let memory = memory_of(model, &[]);
        let cpu = |key: &str| memory["cpu"][key].as_u64().unwrap();
        let sum = cpu("uncached_expert_bytes")
            + cpu("droppable_expert_bytes")
            + cpu("droppable_tensor_bytes")
            + cpu("embedding_bytes")
            + cpu("unused_tensor_bytes");
        assert_eq!(sum, total, "{model}");
        assert_eq!(cpu("pin_bytes"), cpu("uncached_expert_bytes"));
        let is_tied = gguf.tensor("output.weight").is_none();
        let copied = if is_tied { cpu("embedding_bytes") } else { 0 };
        let on_gpu = memory["gpus"][0]["tensor_bytes"].as_u64().unwrap();
        assert_eq!(on_gpu, cpu("droppable_tensor_bytes") + copied, "{model}");
    }
}

#[test]
fn automatic_budget_needs_no_other_number() {
    const MIB: u64 = 1 << 20;
    let dir = workplace();
    let (learn, model) = (dir.path().join("learn.json"), repository(QWEN));
    let plan = json_of(args![
        "plan", learn, "--model", model, "--budget-mib", "auto,auto", "--free-mib", "3000,1000",
        "--ctx", "100000", "-o", "json"
    ]);
    let gpus = plan["memory"]["gpus"].as_array().unwrap();
    let needed: Vec<u64> = gpus
        .iter()
        .map(|gpu| gpu["needed_bytes"].as_u64().unwrap())
        .collect();
    let budgets: Vec<u64> = plan["lanes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|lane| lane["budget_bytes"].as_u64().unwrap())
        .collect();
    let floor = |bytes: u64| bytes / MIB * MIB;
    assert_eq!(
        budgets,
        [floor((3000 - 1024) * MIB - needed[0]), floor((1000 - 512) * MIB - needed[1])]
    );
    // Three quarters of the six layers and the output are on the first GPU.
    let layers = plan["memory"]["layers"].as_array().unwrap().iter();
    let lanes: Vec<u64> = layers
        .map(|layer| layer["lane"].as_u64().unwrap())
        .collect();
    assert_eq!(lanes, [0, 0, 0, 0, 0, 0]);
    let kv = |gpu: usize| gpus[gpu]["llama_cpp"]["kv_bytes"].as_u64().unwrap();
    assert_eq!([kv(0), kv(1)], [12 * ROW * 100_096, 0]);
    assert!(needed[1] > 0, "{needed:?}");
}

#[test]
fn prints_the_command_of_this_program() {
    let dir = workplace();
    let (learn, model) = (dir.path().join("learn.json"), repository(GPT_OSS));
    let of = |more: &[&str]| {
        let plan = json_of(args!["plan", learn, "--model", model, "-o", "json", more]);
        plan["moe_analyze"].clone()
    };
    let (model_arg, learn_arg) = (model.display(), learn.display());
    let command = of(&["--budget-mib", "2"]);
    let expected = format!(
        "moe-analyze record --model {model_arg} --device cuda:0 --policy hot-cache --hot-cache {learn_arg} --hot-cache-mib 2 \
         --hot-cache-weighting time"
    );
    assert_eq!(command, json!({"command": expected, "caveats": []}));
    let more = [
        "--budget-mib", "2,1", "--strategy", "hot-even", "--ctx", "4096", "--parallel", "2",
        "--cache-type-k", "q8_0",
    ];
    let expected = format!(
        "moe-analyze record --model {model_arg} --device cuda:0,cuda:1 --policy hot-cache --hot-cache {learn_arg} --hot-cache-mib 2,1 \
         --hot-cache-strategy hot-even --hot-cache-weighting time --ctx-size 2048 --cache-type-k q8_0"
    );
    assert_eq!(of(&more)["command"], expected);
    // The learn file does not determine these plans.
    for more in [
        &["--budget-bytes", "100000"][..],
        &["--budget-mib", "2", "--fill-random"],
        &["--budget-mib", "2", "--layer-curve", "0.25"],
    ] {
        let command = of(more);
        assert_eq!(command["command"], Value::Null, "{more:?}");
        let caveat = command["caveats"][0].as_str().unwrap();
        assert!(caveat.contains("--hot-cache plan.json"), "{caveat}");
    }
    assert_eq!(of(&["--budget-mib", "0"]), json!({"command": null, "caveats": []}));
}

#[test]
fn prints_gpu_and_cpu_memory() {
    let dir = workplace();
    let (learn, model) = (dir.path().join("learn.json"), repository(QWEN));
    let text = run!["plan", learn, "--model", model, "--budget-mib", "1", "--ctx", "4096"];
    let title = "GPU memory for a context of 4096 tokens, 1 sequence, 512 tokens per pass, and a KV cache of f16 keys and f16 values:";
    assert!(text.contains(title), "{text}");
    for line in ["CPU memory in use: ", "  droppable after loading: ", "  useful to pin: "] {
        assert!(text.contains(&format!("\n{line}")), "{text}");
    }
    // Without a model, only the plan is known.
    let sizes = write(&dir, "sizes.csv", "layer,expert,bytes\n0,3,100\n0,5,100\n");
    let text = run!["plan", learn, "--sizes", sizes, "--budget-mib", "1"];
    assert!(!text.contains("GPU memory"), "{text}");
    let plan = json_of(args!["plan", learn, "--sizes", sizes, "--budget-mib", "1", "-o", "json"]);
    assert_eq!(plan["memory"], Value::Null);
}

/// The same check as before a run: the heads have 16 elements.
#[test]
fn rejects_cache_types_that_do_not_fit_the_heads() {
    let dir = workplace();
    let learn =
        r#"{"schema":"llama.cpp.moe_layer_opt_perf.v1","layers":[{"layer":0,"experts":[[1,2]]}]}"#;
    let learn = write(&dir, "small.json", learn);
    let model = repository("fixtures/random-qwen3moe-F16.gguf");
    let types = ["--cache-type-v", "q8_0"];
    let error = fail!["plan", learn, "--model", model, "--budget-mib", "1", types];
    assert!(error.contains("needs heads of a multiple of 32 elements"), "{error}");
}

#[test]
fn rejects_contexts_out_of_range() {
    let dir = workplace();
    let (learn, model) = (dir.path().join("learn.json"), repository(QWEN));
    for (option, value, range) in [
        ("--ctx", "0", "1..=16777216"),
        ("--parallel", "257", "1..=256"),
        ("--batch-size", "0", "1..=1048576"),
        ("--cache-type-k", "q4_0", "q8_0"),
    ] {
        let error = fail!["plan", learn, "--model", model, "--budget-mib", "1", option, value];
        assert!(error.contains(range), "{error}");
    }
}
