//! Header, offset map and layout checks of the models in `fixtures/`.

use std::collections::BTreeMap;
use std::path::Path;

use moe_gguf::check::check;
use moe_gguf::map::{Category, OffsetMap, Projection};
use moe_gguf::{Error, ExpertId, GgmlType, Gguf, LayerId};

use crate::opened::fixture;

const FIXTURES: [&str; 4] = [
    "random-gpt-oss-F16.gguf",
    "random-qwen3moe-F16.gguf",
    "tiny-gpt-oss-MXFP4.gguf",
    "tiny-qwen3moe-Q4_K_M.gguf",
];

/// Number of tensors, number of key-values and data offset, as read by the Python package `gguf`.
#[test]
fn headers_agree_with_gguf_py() {
    let expected = [
        (79, 29, 31_744),
        (51, 28, 30_112),
        (117, 27, 131_712),
        (75, 27, 129_312),
    ];
    for (name, expected) in FIXTURES.iter().zip(expected) {
        let gguf = fixture(name);
        let file = &gguf.files()[0];
        assert_eq!(gguf.version(), 3, "{name}");
        assert_eq!(
            (
                gguf.tensors().len(),
                gguf.metadata().len(),
                file.data_offset
            ),
            expected,
            "{name}"
        );
        assert_eq!(
            file.size_bytes,
            std::fs::metadata(moe_testkit::fixture(name)).unwrap().len()
        );
    }
}

#[test]
fn fixtures_are_sound_and_sizes_add_up() {
    for name in FIXTURES {
        let gguf = fixture(name);
        let report = check(&gguf);
        assert!(report.is_sound(), "{name}: {report:?}");
        assert_eq!(report.llama_cpp_refuses, [], "{name}");
        assert_eq!(report.trailing_bytes, 0, "{name}");
        let sum = report.header_bytes + report.padding_bytes + report.tensor_bytes;
        assert_eq!(sum, gguf.files()[0].size_bytes, "{name}");
        assert_eq!(
            report
                .category_sizes
                .iter()
                .map(|s| s.size_bytes)
                .sum::<u64>(),
            report.tensor_bytes
        );
    }
}

#[test]
fn rows_cover_each_tensor_exactly() {
    for name in FIXTURES {
        let gguf = fixture(name);
        let mut next: BTreeMap<u32, u64> =
            gguf.tensors().iter().map(|t| (t.index, t.offset)).collect();
        for row in OffsetMap::new(&gguf).rows {
            let end = next.get_mut(&row.tensor_idx).unwrap();
            assert_eq!(row.file_offset, *end, "{name}: {row:?}");
            *end += row.size_bytes;
        }
        for tensor in gguf.tensors() {
            assert_eq!(
                next[&tensor.index],
                tensor.offset + tensor.size_bytes,
                "{name}: {}",
                tensor.name
            );
        }
    }
}

#[test]
fn maps_experts_of_quantized_qwen3moe() {
    let gguf = fixture("tiny-qwen3moe-Q4_K_M.gguf");
    let down = gguf.tensor("blk.0.ffn_down_exps.weight").unwrap();
    assert_eq!((down.ty, down.ne), (GgmlType::Q5_0, [64, 256, 32, 1]));
    assert_eq!((down.offset, down.size_bytes), (1_692_448, 360_448));

    let map = OffsetMap::new(&gguf);
    assert_eq!(map.rows.len(), 75 + 6 * 3 * 31);
    let experts: Vec<_> = map
        .rows
        .iter()
        .filter(|r| r.tensor_idx == down.index)
        .collect();
    assert_eq!(experts.len(), 32);
    let last = experts[31];
    assert_eq!(last.expert_id, Some(ExpertId(31)));
    assert_eq!(
        (last.layer_id, last.projection),
        (Some(LayerId(0)), Some(Projection::Down))
    );
    assert_eq!(
        (last.category, last.ne),
        (Category::Expert, [64, 256, 1, 1])
    );
    assert_eq!(
        (last.file_offset, last.size_bytes),
        (1_692_448 + 31 * 11_264, 11_264)
    );
}

#[test]
fn maps_biases_and_routers_of_gpt_oss_as_one_row_each() {
    let map = OffsetMap::new(&fixture("tiny-gpt-oss-MXFP4.gguf"));
    let of = |name: &str| {
        map.rows
            .iter()
            .filter(|r| &*r.tensor == name)
            .collect::<Vec<_>>()
    };
    let bias = of("blk.5.ffn_gate_exps.bias");
    assert_eq!(bias.len(), 1);
    assert_eq!(
        (bias[0].category, bias[0].expert_id),
        (Category::ExpertBias, None)
    );
    assert_eq!(
        (bias[0].layer_id, bias[0].projection),
        (Some(LayerId(5)), Some(Projection::Gate))
    );
    let router = of("blk.5.ffn_gate_inp.bias");
    assert_eq!(
        (router.len(), router[0].category, router[0].projection),
        (1, Category::Router, None)
    );
    assert_eq!(
        of("blk.0.attn_sinks.weight")[0].category,
        Category::Attention
    );
    assert_eq!(
        of("blk.0.post_attention_norm.weight")[0].category,
        Category::Norm
    );
    assert_eq!(of("output_norm.weight")[0].category, Category::Norm);
    assert_eq!(of("token_embd.weight")[0].category, Category::Embedding);
    assert_eq!(of("output.weight")[0].category, Category::Output);
    assert_eq!(of("output.weight")[0].layer_id, None);
}

#[test]
fn metadata_methods_check_types() {
    let gguf = fixture("tiny-qwen3moe-Q4_K_M.gguf");
    let metadata = gguf.metadata();
    assert_eq!(
        metadata.str("general.architecture").unwrap(),
        Some("qwen3moe")
    );
    assert_eq!(metadata.u32("qwen3moe.expert_count").unwrap(), Some(32));
    assert_eq!(metadata.u64("qwen3moe.expert_used_count").unwrap(), Some(4));
    assert_eq!(
        metadata
            .strings("tokenizer.ggml.tokens")
            .unwrap()
            .unwrap()
            .len(),
        4096
    );
    assert_eq!(
        metadata
            .i64s("tokenizer.ggml.token_type")
            .unwrap()
            .unwrap()
            .len(),
        4096
    );
    assert_eq!(metadata.u32("no.such.key").unwrap(), None);
    let error = metadata.f32("general.architecture").unwrap_err();
    assert!(
        matches!(&error, Error::WrongType { key, wanted: "an f32", .. } if key == "general.architecture"),
        "{error}"
    );
}

#[test]
fn opens_files_with_truncated_data() {
    let complete = std::fs::read(moe_testkit::fixture("random-qwen3moe-F16.gguf")).unwrap();
    let truncated: &'static [u8] = complete[..complete.len() - 100_000].to_vec().leak();
    let gguf = Gguf::from_static("truncated.gguf", truncated).unwrap();
    let first = gguf.tensor("token_embd.weight").unwrap();
    assert_eq!(
        gguf.data(first).unwrap(),
        &complete[30_112..30_112 + 65_536]
    );

    let last = gguf.tensors().last().unwrap();
    let error = gguf.data(last).unwrap_err();
    assert!(
        matches!(&error, Error::Truncated { path, tensor, file_size, .. }
            if path == Path::new("truncated.gguf") && *tensor == last.name && *file_size == truncated.len() as u64),
        "{error}"
    );
    let report = check(&gguf);
    assert!(!report.is_sound());
    assert_eq!(
        report.past_end.iter().map(|p| p.missing_bytes).sum::<u64>(),
        100_000
    );
}

#[test]
fn header_hash_does_not_depend_on_data() {
    let complete = std::fs::read(moe_testkit::fixture("random-qwen3moe-F16.gguf")).unwrap();
    let original = fixture("random-qwen3moe-F16.gguf").header_xxh3();
    let mut data = complete.clone();
    *data.last_mut().unwrap() ^= 1;
    assert_eq!(
        Gguf::from_static("data", data.leak())
            .unwrap()
            .header_xxh3(),
        original
    );
    let mut header = complete;
    header[30_112 - 64] ^= 1; // A byte in the table entries of the last tensors.
    if let Ok(gguf) = Gguf::from_static("header", header.leak()) {
        assert_ne!(gguf.header_xxh3(), original);
    }
}
