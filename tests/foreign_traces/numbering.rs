//! Layer numbers of servers and blocks of the model, through all commands.

use std::fs::File;
use std::sync::Arc;

use moe_gguf::GgmlType;
use moe_gguf::Value as Key;
use moe_synth::write::{Header, Writer};
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use parquet::file::metadata::KeyValue;
use parquet::file::properties::WriterProperties;

use super::*;
use crate::support::{arg, args, fail, moe_analyze, run};

/// A model of `n_block` blocks, the last `n_nextn` of the MTP head, with eight experts in the blocks `moe`, two per token.
pub fn write_model(path: &Path, n_block: u32, n_nextn: u32, moe: &[u32]) {
    let mut header = Header::new();
    let arch = Key::String("glm4moe".into());
    header.set("general.architecture", &arch).unwrap();
    for (key, value) in [
        ("block_count", n_block),
        ("nextn_predict_layers", n_nextn),
        ("expert_count", 8),
        ("expert_used_count", 2),
    ] {
        let key = format!("glm4moe.{key}");
        header.set(&key, &Key::U32(value)).unwrap();
    }
    for block in 0..n_block {
        if moe.contains(&block) {
            for name in ["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"] {
                let name = format!("blk.{block}.{name}.weight");
                header.tensor(&name, GgmlType::F32, &[8, 8, 8]).unwrap();
            }
        } else {
            let name = format!("blk.{block}.ffn_up.weight");
            header.tensor(&name, GgmlType::F32, &[8, 8]).unwrap();
        }
    }
    let data = vec![0; header.tensors().iter().map(|t| t.size_bytes as usize).sum()];
    let mut writer = Writer::new(File::create(path).unwrap(), header).unwrap();
    writer.write(&data).unwrap();
    writer.finish().unwrap();
}

/// The dump `name`, and its model.
fn dump(dir: &Path, name: &str) -> (PathBuf, PathBuf) {
    let model = dir.join("a model.gguf");
    if ["routed.npy", "vllm.json"].contains(&name) {
        write_model(&model, 5, 1, &[1, 2, 3, 4]);
    } else {
        write_model(&model, 4, 0, &[0, 1, 2, 3]);
    }
    (repository("fixtures/server-dumps").join(name), model)
}

#[test]
fn maps_layers_of_server_dumps_to_blocks() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["routed.npy", "vllm.json"] {
        let (trace, model) = dump(dir.path(), name);
        let experts = (1..4).flat_map(|layer| [(layer, layer), (layer, layer + 4)]);
        let expected: BTreeMap<_, _> = experts.map(|place| (place, 6)).collect();
        assert_eq!(hotness(&trace, &["--model", arg(&model)]), expected);
        let out = dir.path().join(format!("{name}.eplb.json"));
        let args = ["--model", arg(&model), "--to", "eplb", "--out", arg(&out)];
        run!["--quiet", "convert", trace, args];
        let matrix: Vec<Vec<u64>> =
            serde_json::from_str(&fs::read_to_string(&out).unwrap()).unwrap();
        assert_eq!(matrix.len(), 4);
        for (layer, row) in matrix.iter().enumerate() {
            let counts = row.iter().enumerate();
            for (expert, &count) in counts {
                let is_selected = layer > 0 && [layer, layer + 4].contains(&expert);
                assert_eq!(count, if is_selected { 6 } else { 0 }, "{layer} {expert}");
            }
        }
    }
}

#[test]
fn reads_responses_of_sglang() {
    let dir = tempfile::tempdir().unwrap();
    for (name, n_tokens) in [("from10.json", 10), ("chat.json", 20)] {
        let (trace, model) = dump(dir.path(), name);
        let experts = (0..4).flat_map(|layer| [(layer, 2 * layer), (layer, 2 * layer + 1)]);
        let expected: BTreeMap<_, _> = experts.map(|place| (place, n_tokens)).collect();
        assert_eq!(hotness(&trace, &["--model", arg(&model)]), expected, "{name}");
        // The response does not contain the number of experts per token.
        let error = fail!["--quiet", "hotness", trace];
        assert!(error.contains("--top-k") && error.contains("--model"), "{error}");
        // With this number only, the number of layers is assumed, which is a warning.
        let args = ["hotness", arg(&trace), "--top-k", "2"];
        let output = moe_analyze().args(args).assert().success();
        let notes = String::from_utf8_lossy(&output.get_output().stderr).into_owned();
        assert!(notes.contains("were assumed") && notes.contains("--model"), "{notes}");
    }
}

#[test]
fn rejects_dump_of_another_model() {
    let dir = tempfile::tempdir().unwrap();
    let (trace, _) = dump(dir.path(), "routed.npy");
    let model = dir.path().join("other.gguf");
    // Four MoE layers: an empty first layer of the dump does not contradict, five hidden layers do.
    write_model(&model, 6, 1, &[1, 2, 3, 4, 5]);
    let text = run!["--quiet", "hotness", trace, "--model", model];
    assert!(text.contains("3 layers"), "{text}");
    write_model(&model, 6, 1, &[0, 1, 2, 3, 4, 5]);
    let error = fail!["--quiet", "hotness", trace, "--model", model];
    assert!(
        error.contains(
            "4 layers are neither the 5 hidden layers of the model (without 1 of the MTP head)"
        ),
        "{error}"
    );
}

/// A table with damaged model metadata is not a table of an unknown model.
#[test]
fn rejects_unreadable_metadata_of_a_table() {
    let dir = tempfile::tempdir().unwrap();
    let tables = dir.path().join("tables");
    let route = golden("bigmoeonedge/small.route.csv");
    run!["--quiet", "parquet", route, "--out", tables];
    let table = tables.join("routing.parquet");
    for key in ["moe-analyze.model", "moe-analyze.expert_bytes"] {
        let reader = ParquetRecordBatchReaderBuilder::try_new(File::open(&table).unwrap()).unwrap();
        let metadata = reader.metadata().file_metadata().key_value_metadata();
        let mut metadata: Vec<KeyValue> = metadata.unwrap().clone();
        metadata.retain(|entry| entry.key != "ARROW:schema");
        let entry = metadata.iter_mut().find(|entry| entry.key == key).unwrap();
        entry.value = Some("{\"n_layer\": ".into());
        let schema = Arc::clone(reader.schema());
        let properties = WriterProperties::builder().set_key_value_metadata(Some(metadata));
        let damaged = dir.path().join("damaged.parquet");
        let file = File::create(&damaged).unwrap();
        let mut writer = ArrowWriter::try_new(file, schema, Some(properties.build())).unwrap();
        for batch in reader.build().unwrap() {
            writer.write(&batch.unwrap()).unwrap();
        }
        writer.close().unwrap();
        let out = dir.path().join("out.jsonl");
        let convert = ["convert", arg(&damaged), "--to", "jsonl", "--out", arg(&out)];
        let error = fail!["--quiet", convert];
        assert!(error.contains(key) && error.contains("damaged.parquet"), "{error}");
        if key == "moe-analyze.model" {
            let error = fail!["--quiet", "hotness", damaged];
            assert!(error.contains(key), "{error}");
        }
    }
}

/// The hot cache's command line contains a learn file, or is omitted.
#[test]
fn plan_prints_no_command_that_cannot_work() {
    let dir = tempfile::tempdir().unwrap();
    let (trace, model) = dump(dir.path(), "vllm.json");
    let plan = ["--quiet", "plan", arg(&trace), "--model", arg(&model), "--budget-mib", "1"];
    let text = run![plan];
    assert!(!text.contains("--moe-hot-cache"), "{text}");
    assert!(text.contains("--out FILE.json"), "{text}");
    let json: Value = serde_json::from_str(&run![plan, "-o", "json"]).unwrap();
    assert!(json["hot_cache"]["command"].is_null());
    assert!(
        json["hot_cache"]["caveats"][0]
            .as_str()
            .unwrap()
            .contains("--out")
    );
    // --out writes a learn file; paths with spaces are quoted.
    let out = dir.path().join("it's a learn file.json");
    let text = run![plan, "--out", out];
    let quoted = format!(
        "--model '{}' --cpu-moe --moe-hot-cache '{}'",
        arg(&model),
        arg(&out).replace('\'', r"'\''")
    );
    assert!(text.contains(&quoted), "{text}");
    // A shell reads the words as the files.
    let line = text
        .lines()
        .find(|line| line.contains("--moe-hot-cache"))
        .unwrap();
    let command = line
        .split_once(": ")
        .unwrap()
        .1
        .replace("llama-server", "printf '%s\\n'");
    let words = std::process::Command::new("sh")
        .args(["-c", &command])
        .output()
        .unwrap();
    let words = String::from_utf8(words.stdout).unwrap();
    for path in [&model, &out] {
        assert!(words.lines().any(|word| word == arg(path)), "{words}");
    }
    // The learn file is sufficient for the command, but the model file is required.
    let plan = ["--quiet", "plan", arg(&out), "--model", arg(&model), "--budget-mib", "1"];
    assert!(run![plan].contains(&quoted));
    let sizes = dir.path().join("sizes.csv");
    fs::write(&sizes, "layer,expert,bytes\n1,1,100\n").unwrap();
    let plan = ["--quiet", "plan", arg(&out), "--sizes", arg(&sizes), "--budget-mib", "1"];
    let text = run![plan];
    assert!(!text.contains("llama-server") && text.contains("--model"), "{text}");
    // Several learn files have no command.
    let copy = dir.path().join("copy.json");
    fs::copy(&out, &copy).unwrap();
    let plan = args!["--quiet", "plan", out, copy, "--model", model, "--budget-mib", "1"];
    let text = run![plan];
    assert!(!text.contains("--moe-hot-cache") && text.contains("--out FILE.json"), "{text}");
}
