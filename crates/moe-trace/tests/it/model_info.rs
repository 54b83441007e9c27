//! Parameters of a model from its GGUF file.

use moe_gguf::Gguf;
use moe_testkit::gguf::{ARRAY, Raw, U32, U64};
use moe_trace::{InvalidModel, LayerId, ModelError, ModelInfo};

/// A model whose layers select these numbers of experts for a token.
fn model(n_expert_used: &[u32]) -> ModelInfo {
    let list = Raw::new(0, 3)
        .kv_string("general.architecture", "qwen3moe")
        .kv_u32("qwen3moe.block_count", n_expert_used.len() as u32)
        .string("qwen3moe.expert_used_count")
        .u32(ARRAY)
        .u32(U32)
        .u64(n_expert_used.len() as u64);
    let raw = n_expert_used.iter().fold(list, |raw, &n| raw.u32(n));
    let gguf = Gguf::from_bytes("model.gguf", raw.bytes).unwrap();
    ModelInfo::from_gguf("model.gguf", &gguf).unwrap()
}

#[test]
fn reads_a_number_of_selected_experts_for_each_layer() {
    let model_info = model(&[1, 2, 0, 4]);
    assert_eq!(model_info.n_expert_used, None);
    let of_block = |block| model_info.n_expert_used_in(LayerId(block));
    let expected = [Some(1), Some(2), None, Some(4), None];
    assert_eq!([0, 1, 2, 3, 4].map(of_block), expected);
    assert_eq!(model_info.max_expert_used(), Some(4));
    // The trace's values take precedence over those of the model.
    let mut of_trace = ModelInfo {
        n_expert_used: Some(3),
        ..ModelInfo::default()
    };
    of_trace.fill_from(&model_info);
    assert_eq!(of_trace.max_expert_used(), Some(3));
    assert_eq!(of_trace.n_expert_used_in(LayerId(3)), Some(3));
    let mut unknown = ModelInfo::default();
    unknown.fill_from(&model_info);
    assert_eq!(unknown.max_expert_used(), Some(4));
}

#[test]
fn reads_a_list_of_equal_numbers_as_one_number() {
    let model_info = model(&[0, 2, 2]);
    assert_eq!(model_info.n_expert_used, Some(2));
    assert!(model_info.n_expert_used_by_block.is_empty());
    assert_eq!(model_info.max_expert_used(), Some(2));
    assert_eq!(model(&[0, 0]).max_expert_used(), None);
}

/// A model with `n_block` blocks, of which `n_nextn` belong to the MTP head.
fn with_mtp_head(n_block: u32, n_nextn: u32) -> Result<ModelInfo, ModelError> {
    let raw = Raw::new(0, 3)
        .kv_string("general.architecture", "glm4moe")
        .kv_u32("glm4moe.block_count", n_block)
        .kv_u32("glm4moe.nextn_predict_layers", n_nextn);
    let gguf = Gguf::from_bytes("model.gguf", raw.bytes).unwrap();
    ModelInfo::from_gguf("model.gguf", &gguf)
}

#[test]
fn refuses_model_without_hidden_layers() {
    assert_eq!(with_mtp_head(5, 4).unwrap().n_hidden_layer(), Some(1));
    for n_nextn in [5, 6, u32::MAX] {
        let error = with_mtp_head(5, n_nextn).unwrap_err();
        let source = InvalidModel::NoHiddenLayer {
            n_nextn,
            n_layer: 5,
        };
        assert!(
            matches!(&error, ModelError::Invalid { path, source: found } if path == "model.gguf" && *found == source),
            "{error}"
        );
        assert_eq!(
            error.to_string(),
            format!(
                "model.gguf: no hidden layers: 5 blocks (`block_count`), of which {n_nextn} belong to the MTP head (`nextn_predict_layers`); \
                 the file is damaged; convert the model again"
            )
        );
    }
    let error = with_mtp_head(0, 0).unwrap_err();
    assert!(
        error.to_string().contains("no hidden layers: 0 blocks"),
        "{error}"
    );
    let error = with_mtp_head(5000, 1).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("5000 layers is more than the limit"),
        "{error}"
    );
}

#[test]
fn refuses_more_selected_experts_than_experts() {
    let error = |key: &str, value: u64| {
        let raw = Raw::new(0, 3)
            .kv_string("general.architecture", "qwen3moe")
            .kv_u32("qwen3moe.expert_count", 8)
            .string(&format!("qwen3moe.{key}"))
            .u32(U64)
            .u64(value);
        let gguf = Gguf::from_bytes("model.gguf", raw.bytes).unwrap();
        ModelInfo::from_gguf("model.gguf", &gguf).unwrap_err()
    };
    let message = error("expert_used_count", 9).to_string();
    assert!(
        message.contains("9 experts for a token (`expert_used_count`), but only 8 in a layer"),
        "{message}"
    );
    // A number that exceeds 32 bits does not count as a missing key.
    for key in ["expert_used_count", "block_count"] {
        let error = error(key, 1 << 40);
        assert!(
            matches!(
                error,
                ModelError::Invalid {
                    source: InvalidModel::TooMany { .. },
                    ..
                }
            ),
            "{key}: {error}"
        );
    }
}
