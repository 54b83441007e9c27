//! Importance matrix of [llama.cpp](https://github.com/ggml-org/llama.cpp) in GGUF format: expert counts.
//!
//! The tensors `blk.N.ffn_{gate,gate_up,up,down}_exps.weight.counts` are F32 `ne = [1, n_expert]`. Each contains the number of tokens
//! that were routed to each expert, so one of them per layer is read. F32 counts of 2^24 and more are rounded. Compared with our
//! records, the format lacks tokens, order, phases and router weights.
//!
//! The older `.dat` format has one count per tensor. llama.cpp converts it to `[1, 1]`, which does not mean that the layer has one
//! expert, so such files are rejected.
//!
//! Definition: `tools/imatrix/imatrix.cpp` in that repository.

use std::collections::BTreeMap;

use moe_gguf::{GgmlType, Gguf, Tensor};
use moe_trace::{CountRow, ModelInfo};

use crate::{ForeignError, ImportOptions, Importer, Location, Output, Source};

/// Bytes of the key-value pair `general.type` = `imatrix`: key, type (string), length, value; little-endian and big-endian.
const TYPES: [&[u8]; 2] = [
    b"general.type\x08\0\0\0\x07\0\0\0\0\0\0\0imatrix",
    b"general.type\0\0\0\x08\0\0\0\0\0\0\0\x07imatrix",
];
/// Projections, by preference.
const PROJECTIONS: [&str; 4] = ["gate", "gate_up", "up", "down"];
/// A 32-bit float represents every integer up to this one.
const MAX_EXACT: f32 = (1 << 24) as f32;

/// Importer of importance matrices.
pub struct Imatrix;

impl Importer for Imatrix {
    fn name(&self) -> &'static str {
        "imatrix"
    }

    fn description(&self) -> &'static str {
        "importance matrix of llama.cpp (GGUF): counts"
    }

    fn is_binary(&self) -> bool {
        true
    }

    fn is_applicable(&self, sample: &[u8]) -> bool {
        let has = |key: &[u8]| sample.windows(key.len()).any(|bytes| bytes == key);
        matches!(sample.first_chunk(), Some(b"GGUF" | b"FUGG")) && TYPES.into_iter().any(has)
    }

    fn import(
        &self,
        source: &Source,
        _options: &ImportOptions,
        output: &mut Output<'_>,
    ) -> Result<(), ForeignError> {
        for file in source.files() {
            output.begin_file(file);
            import_counts(&Gguf::open(file)?, output)?;
        }
        output.note("the format does not distinguish the prompt and decode phases");
        Ok(())
    }
}

fn import_counts(gguf: &Gguf, output: &mut Output<'_>) -> Result<(), ForeignError> {
    let mut layers: BTreeMap<u64, (usize, &Tensor)> = BTreeMap::new();
    for tensor in gguf.tensors() {
        let Some((layer, rank)) = counts_of(&tensor.name) else {
            continue;
        };
        check_shape(gguf, tensor)
            .map_err(|error| output.invalid(Location::Element(tensor.name.clone()), error))?;
        let best = layers.entry(layer).or_insert((rank, tensor));
        if rank < best.0 {
            *best = (rank, tensor);
        }
    }
    let n_expert = layers.values().map(|(_, tensor)| tensor.ne[1]).max();
    output.model_info(&ModelInfo {
        n_expert: n_expert.and_then(|n| u32::try_from(n).ok()),
        ..ModelInfo::default()
    })?;
    for (layer, (_, tensor)) in layers {
        import_layer(gguf, layer, tensor, output)?;
    }
    Ok(())
}

/// Why a tensor does not contain the counts of a layer's experts.
#[derive(Debug, thiserror::Error)]
enum TensorError {
    #[error("the tensor has shape {0:?}; expected [1, n_expert]; the file is damaged")]
    Shape([u64; 4]),
    #[error("the tensor has type {0}; expected F32; the file is damaged")]
    Type(GgmlType),
    #[error(
        "the tensor has one count for all experts of the layer: the file was converted from the .dat format, which has no counts \
         per expert; compute the importance matrix again in GGUF format"
    )]
    OneCount,
    #[error(
        "the tensor has counts of {counts} experts, but {sums_name} has sums of {sums}; the file is damaged"
    )]
    OtherSums {
        counts: u64,
        sums: u64,
        sums_name: String,
    },
}

fn check_shape(gguf: &Gguf, tensor: &Tensor) -> Result<(), TensorError> {
    let [1, n_expert, 1, 1] = tensor.ne else {
        return Err(TensorError::Shape(tensor.ne));
    };
    if n_expert == 1 {
        return Err(TensorError::OneCount);
    }
    if tensor.ty != GgmlType::F32 {
        return Err(TensorError::Type(tensor.ty));
    }
    let name = tensor.name.strip_suffix(".counts").unwrap_or_default();
    let sums_name = format!("{name}.in_sum2");
    match gguf.tensor(&sums_name) {
        Some(sums) if sums.ne[1] != n_expert => Err(TensorError::OtherSums {
            counts: n_expert,
            sums: sums.ne[1],
            sums_name,
        }),
        _ => Ok(()),
    }
}

fn import_layer(
    gguf: &Gguf,
    layer: u64,
    tensor: &Tensor,
    output: &mut Output<'_>,
) -> Result<(), ForeignError> {
    let layer_id = output.layer_id(|| Location::Element(tensor.name.clone()), layer)?;
    let (counts, _) = gguf.data(tensor)?.as_chunks::<4>();
    for (expert, &count) in counts.iter().enumerate() {
        let at = || Location::Element(format!("{}[{expert}]", tensor.name));
        let count = f32::from_le_bytes(count);
        if !(count >= 0.0 && count.fract() == 0.0) {
            return Err(
                output.invalid(at(), format!("{count} is not a count; the file is damaged"))
            );
        }
        if count >= MAX_EXACT {
            output.note(
                "counts of 16,777,216 and more are rounded: the format contains 32-bit floats",
            );
        }
        #[expect(clippy::cast_possible_truncation, reason = "an integer, as checked")]
        let count = count as u64;
        let row = CountRow {
            layer_id,
            expert_id: output.expert_id(at, expert as u64)?,
            phase: None,
            count,
            mass: None,
        };
        output.count(at, &row)?;
    }
    Ok(())
}

/// The layer and the rank in [`PROJECTIONS`] of a tensor such as `blk.3.ffn_gate_exps.weight.counts`.
fn counts_of(name: &str) -> Option<(u64, usize)> {
    let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
    let projection = rest
        .strip_prefix("ffn_")?
        .strip_suffix("_exps.weight.counts")?;
    let rank = PROJECTIONS.iter().position(|&known| known == projection)?;
    Some((layer.parse().ok()?, rank))
}
