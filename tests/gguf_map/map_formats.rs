//! The JSON report, and the formats of TensorAccessLog.

use std::fs;

use serde_json::{Value, json};

use super::{output_of, write};
use crate::support::{arg, args, fail, repository, run};
use moe_testkit::gguf::{F32, Raw};

const MODEL: &str = "fixtures/tiny-gpt-oss-MXFP4.gguf";

#[test]
fn writes_memory_map() {
    let model = repository(MODEL);
    let map: Value =
        serde_json::from_str(&run!["gguf-map", model, "--format", "memory-map"]).unwrap();
    let keys: Vec<&String> = map.as_object().unwrap().keys().collect();
    assert_eq!(keys, ["model_name", "total_size_bytes", "metadata", "tensors"]);
    assert_eq!(
        map["metadata"],
        json!({ "n_layers": 6, "n_vocab": 4096, "n_embd": 256, "n_tensors": 675 })
    );
    let tensors = map["tensors"].as_array().unwrap();
    assert_eq!(tensors.len(), 675);
    assert_eq!(
        tensors[0],
        json!({
            "name": "token_embd.weight", "offset_start": 131_712, "offset_end": 1_245_824,
            "size_bytes": 1_114_112, "shape": [256, 4096], "category": "embedding",
            "layer_id": null, "component": "other", "component_type": "Token Embeddings",
        })
    );
    let expert = tensors
        .iter()
        .find(|t| t["name"] == "blk.0.ffn_gate_exps.weight[1]");
    assert_eq!(
        expert.unwrap(),
        &json!({
            "name": "blk.0.ffn_gate_exps.weight[1]", "offset_start": 2_616_608,
            "offset_end": 2_625_312, "size_bytes": 8704, "shape": [256, 64], "category": "ffn",
            "layer_id": 0, "component": "gate", "component_type": "FFN Gate Expert 1",
            "expert_id": 1,
        })
    );
}

#[test]
fn writes_gguf_dump() {
    let model = repository(MODEL);
    let csv = run!["gguf-map", model, "--format", "gguf-dump"];
    let lines: Vec<&str> = csv.lines().collect();
    assert_eq!(lines.len(), 1 + 675);
    assert_eq!(
        lines[0],
        "tensor_name,file_offset,size_bytes,layer_id,component_type,n_dims,dim0,dim1,dim2,dim3"
    );
    assert!(
        lines.contains(
            &"blk.0.ffn_gate_exps.weight[1],2616608,8704,0,FFN Gate Expert 1,2,256,64,0,0"
        )
    );
}

#[test]
fn rejects_encodings_that_a_format_lacks() {
    let model = repository(MODEL);
    let dir = tempfile::tempdir().unwrap();
    for (form, extension, other) in
        [("memory-map", "json", "csv"), ("gguf-dump", "csv", "json"), ("report", "json", "md")]
    {
        let own = ["gguf-map", arg(&model), "--format", form];
        let out = dir.path().join(format!("{form}.{extension}"));
        assert_eq!(run![own, "--out", out], "");
        let printed = run![own, "-o", extension];
        assert_eq!(fs::read_to_string(&out).unwrap(), printed);

        let line = fail![own, "-o", other];
        assert!(line.contains(form) && line.contains(&format!("-o {extension}")), "{line}");
        for name in ["map.parquet", "map"] {
            let line = fail![own, "--out", name];
            assert!(line.contains(form) && line.contains(&format!(".{extension}")), "{line}");
        }
    }
}

#[test]
fn report_contains_findings() {
    let dir = tempfile::tempdir().unwrap();
    // b starts inside a, c after a hole; the file ends inside c.
    let raw = Raw::new(3, 0)
        .tensor("blk.0.a", &[12], F32, 0)
        .tensor("blk.10.b", &[8], F32, 32)
        .tensor("blk.2.c", &[8], F32, 128)
        .data(32, 128 + 20);
    let path = write(dir.path(), raw);
    let (code, out, err) = output_of(args!["gguf-map", path, "--verify", "--format", "report"]);
    assert_eq!(code, 1, "{err}");
    let report: Value = serde_json::from_str(&out).unwrap();
    let check = &report["check"];
    let start = report["files"][0]["header_bytes"]
        .as_u64()
        .unwrap()
        .next_multiple_of(32);
    assert_eq!(report["files"][0]["name"], "test.gguf");
    assert_eq!(
        check["overlaps"],
        json!([{ "file": 0, "first": 0, "second": 1, "offset": start + 32, "size_bytes": 16 }])
    );
    assert_eq!(
        check["gaps"],
        json!([{ "file": 0, "after": 1, "before": 2, "offset": start + 64, "size_bytes": 64 }])
    );
    assert_eq!(check["past_end"], json!([{ "file": 0, "tensor": 2, "missing_bytes": 12 }]));
    assert_eq!(
        check["llama_cpp_refuses"],
        json!([{ "reason": "misplaced", "file": 0, "tensor": 1, "offset": 32, "expected": 64 }])
    );
    assert_eq!(report["layers"]["order"], json!([0, 10, 2]));
    assert_eq!(report["layers"]["string_sorted"], true);
    assert_eq!(report["data"], Value::Null, "overlapping data is not read");
}
