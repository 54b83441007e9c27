//! Bytes of weights that a test reads.

use std::collections::BTreeMap;

use moe_gguf::Gguf;
use moe_gguf::experts::{ExpertParts, expert_bytes};
use moe_gguf::map::{Category, OffsetMap};
use moe_trace::{Facts, LayerId};

/// What a pass reads of a model.
pub struct Weights {
    /// Bytes of what every pass reads: all tensors but the embeddings, the experts and the MTP head.
    dense: u64,
    /// Bytes of an expert of each layer; the mean where experts differ.
    expert: BTreeMap<LayerId, f64>,
}

impl Weights {
    pub fn of(gguf: &Gguf) -> anyhow::Result<Weights> {
        let map = OffsetMap::new(gguf);
        let parts = ExpertParts::of(&map);
        let n_hidden = Facts::of_model("", gguf)?.n_hidden_layer();
        let is_read = |layer: Option<LayerId>| {
            layer.is_none_or(|layer| n_hidden.is_none_or(|n| u32::from(layer.0) < n))
        };
        let has_output = gguf.tensor("output.weight").is_some();
        let dense = map.rows.iter().filter(|row| match row.category {
            Category::Embedding if has_output => false,
            // Tensors next to those that count as an expert: a twin of a fused projection, or chunk experts.
            Category::Expert => false,
            _ => is_read(row.layer_id) && !parts.contains(row),
        });
        let dense = dense.map(|row| row.size_bytes).sum();
        let mut layers: BTreeMap<LayerId, (u64, u64)> = BTreeMap::new();
        for ((layer, _), bytes) in expert_bytes(&map) {
            let (sum, n) = layers.entry(layer).or_default();
            *sum += bytes;
            *n += 1;
        }
        let mean = |(layer, (sum, n)): (LayerId, (u64, u64))| (layer, sum as f64 / n as f64);
        Ok(Weights {
            dense,
            expert: layers.into_iter().map(mean).collect(),
        })
    }

    /// Bytes that `n_passes` read, in which each layer selected so many experts, each once in a pass.
    pub fn read(&self, n_passes: u64, selected: &BTreeMap<LayerId, u64>) -> u64 {
        let experts = selected.iter().filter_map(|(layer, &n)| {
            let bytes = self.expert.get(layer)?;
            Some(bytes * n as f64)
        });
        n_passes * self.dense + experts.sum::<f64>() as u64
    }
}

#[cfg(test)]
mod tests {
    use moe_testkit::fixture;
    use moe_testkit::gguf::{F32, Raw};

    use super::*;

    /// A dense layer, then two of which a token selects 4 experts: three matrices of 32 × 24 F16 numbers each.
    #[test]
    fn experts_are_those_of_layers_that_have_some() {
        let gguf = Gguf::open(fixture("random-dots1-F16.gguf")).unwrap();
        let selected = [(LayerId(1), 4), (LayerId(2), 4)].into();
        let weights = Weights::of(&gguf).unwrap();
        assert_eq!(weights.read(1, &BTreeMap::new()), 198_016);
        assert_eq!(weights.read(1, &selected), 198_016 + 8 * 4_608);
        assert_eq!(weights.read(3, &selected), 3 * 198_016 + 8 * 4_608);
    }

    /// Biases of experts are read with them, an expert of one layer may be larger than that of another, and the block of the MTP
    /// head is not read.
    #[test]
    fn parts_of_experts_are_counted_with_them() {
        let layer = |raw: Raw, layer: u32, n_ff: u64| {
            raw.tensor(
                &format!("blk.{layer}.ffn_up_exps.weight"),
                &[4, n_ff, 2],
                F32,
                0,
            )
            .tensor(&format!("blk.{layer}.ffn_up_exps.bias"), &[n_ff, 2], F32, 0)
            .tensor(
                &format!("blk.{layer}.ffn_down_exps.weight"),
                &[n_ff, 4, 2],
                F32,
                0,
            )
            .tensor(&format!("blk.{layer}.ffn_gate_inp.weight"), &[4, 2], F32, 0)
        };
        let raw = Raw::new(13, 3)
            .kv_string("general.architecture", "glm4moe")
            .kv_u32("glm4moe.block_count", 3)
            .kv_u32("glm4moe.nextn_predict_layers", 1)
            .tensor("token_embd.weight", &[4, 16], F32, 0);
        let raw = layer(layer(layer(raw, 0, 8), 1, 16), 2, 8);
        let gguf = Gguf::from_bytes("model.gguf", raw.bytes.as_slice()).unwrap();
        let weights = Weights::of(&gguf).unwrap();
        let (embedding, router) = (4 * 16 * 4, 4 * 2 * 4);
        let dense = embedding + 2 * router;
        assert_eq!(weights.read(1, &BTreeMap::new()), dense);
        let expert = |n_ff: u64| (4 * n_ff + n_ff + 4 * n_ff) * 4;
        let selected = [(LayerId(0), 2), (LayerId(1), 1)].into();
        assert_eq!(
            weights.read(1, &selected),
            dense + 2 * expert(8) + expert(16)
        );
    }
}
