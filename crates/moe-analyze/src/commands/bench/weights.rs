//! Bytes of weights that a test reads.

use std::collections::BTreeMap;

use moe_gguf::Gguf;
use moe_gguf::experts::{ExpertParts, expert_bytes};
use moe_gguf::map::{Category, OffsetMap};
use moe_trace::{LayerId, ModelInfo};

/// Sizes of the weights that a forward pass reads.
pub struct Weights {
    /// Bytes that every pass reads: all tensors except embeddings, experts and the MTP head.
    dense: u64,
    /// Mean size of an expert of each layer in bytes.
    expert: BTreeMap<LayerId, f64>,
}

impl Weights {
    /// Returns the sizes of a model, and of adapters in its offset map.
    ///
    /// # Errors
    /// The header of the model is invalid.
    pub fn of(gguf: &Gguf, map: &OffsetMap) -> anyhow::Result<Weights> {
        let parts = ExpertParts::of(map);
        let n_hidden = ModelInfo::from_gguf("", gguf)?.n_hidden_layer();
        let is_read = |layer: Option<LayerId>| {
            layer.is_none_or(|layer| n_hidden.is_none_or(|n| u32::from(layer.0) < n))
        };
        let has_output = gguf.tensor("output.weight").is_some();
        let dense = map.rows.iter().filter(|row| match row.category {
            Category::Embedding if has_output => false,
            // Expert tensors that are not parts of an expert: a duplicate of a fused projection, or chunk experts.
            Category::Expert => false,
            _ => is_read(row.layer_id) && !parts.contains(row),
        });
        let dense = dense.map(|row| row.size_bytes).sum();
        let mut layers: BTreeMap<LayerId, (u64, u64)> = BTreeMap::new();
        for ((layer, _), bytes) in expert_bytes(map) {
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

    /// Returns the bytes that `n_passes` forward passes read. `selected` is the number of distinct experts per pass, summed over
    /// passes, by layer.
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

    /// A dense layer, then two MoE layers in which a token selects 4 experts of three 32 × 24 F16 matrices.
    #[test]
    fn counts_experts_of_moe_layers() {
        let gguf = Gguf::open(fixture("random-dots1-F16.gguf")).unwrap();
        let selected = [(LayerId(1), 4), (LayerId(2), 4)].into();
        let weights = Weights::of(&gguf, &OffsetMap::new(&gguf)).unwrap();
        assert_eq!(weights.read(1, &BTreeMap::new()), 198_016);
        assert_eq!(weights.read(1, &selected), 198_016 + 8 * 4_608);
        assert_eq!(weights.read(3, &selected), 3 * 198_016 + 8 * 4_608);
    }

    /// Experts include their biases. Expert sizes differ between layers. The block of the MTP head is not read.
    #[test]
    fn counts_biases_and_skips_the_mtp_head() {
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
        let weights = Weights::of(&gguf, &OffsetMap::new(&gguf)).unwrap();
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
