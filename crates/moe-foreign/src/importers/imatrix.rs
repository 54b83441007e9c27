//! The importance matrix of llama.cpp in its GGUF form: how many rows each expert multiplied.
//!
//! `blk.N.ffn_gate_exps.weight.counts` is F32 `[1, n_expert]` and counts a row for every token that was routed to the expert,
//! and so do the tensors of up and down: one of a layer is read.
//!
//! The `.dat` format has one count per tensor. llama.cpp converts it to `[1, 1]`, which does not mean that the layer has one
//! expert: such a file is refused.

use std::collections::BTreeMap;

use moe_gguf::{GgmlType, Gguf, Tensor};
use moe_trace::{CountRow, Facts};

use crate::{At, ForeignError, ImportOptions, Importer, Output, Source};

/// `general.type` in the file: key, type (a string), length, value; little-endian and big-endian.
const TYPES: [&[u8]; 2] = [
    b"general.type\x08\0\0\0\x07\0\0\0\0\0\0\0imatrix",
    b"general.type\0\0\0\x08\0\0\0\0\0\0\0\x07imatrix",
];
/// Projections, the ones to be read first in front.
const PROJECTIONS: [&str; 4] = ["gate", "gate_up", "up", "down"];
/// From here on a 32-bit float does not distinguish one count from the next.
const EXACT: f32 = (1 << 24) as f32;

/// Importance matrix.
pub struct Imatrix;

impl Importer for Imatrix {
    fn name(&self) -> &'static str {
        "imatrix"
    }

    fn description(&self) -> &'static str {
        "importance matrix of llama.cpp (GGUF): rows that each expert multiplied"
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
        output.note("an importance matrix does not distinguish prompt from generated tokens");
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
            .map_err(|fault| output.invalid(At::Element(tensor.name.clone()), fault))?;
        let best = layers.entry(layer).or_insert((rank, tensor));
        if rank < best.0 {
            *best = (rank, tensor);
        }
    }
    let n_expert = layers.values().map(|(_, tensor)| tensor.ne[1]).max();
    output.facts(&Facts {
        n_expert: n_expert.and_then(|n| u32::try_from(n).ok()),
        ..Facts::default()
    })?;
    for (layer, (_, tensor)) in layers {
        import_layer(gguf, layer, tensor, output)?;
    }
    Ok(())
}

/// Why a tensor does not hold the counts of a layer's experts.
#[derive(Debug, thiserror::Error)]
enum ShapeFault {
    #[error("its shape {0:?} is not [1, n_expert]")]
    Shape([u64; 4]),
    #[error("its type {0} is not F32")]
    Type(GgmlType),
    #[error(
        "it holds one count for all experts of the layer, as after a conversion from the .dat format, which has no counts per \
         expert; compute the importance matrix again, in the GGUF format"
    )]
    OneCount,
    #[error(
        "it holds counts of {counts} experts, and {sums_name} sums of {sums}; the file is damaged"
    )]
    OtherSums {
        counts: u64,
        sums: u64,
        sums_name: String,
    },
}

fn check_shape(gguf: &Gguf, tensor: &Tensor) -> Result<(), ShapeFault> {
    let [1, n_expert, 1, 1] = tensor.ne else {
        return Err(ShapeFault::Shape(tensor.ne));
    };
    if n_expert == 1 {
        return Err(ShapeFault::OneCount);
    }
    if tensor.ty != GgmlType::F32 {
        return Err(ShapeFault::Type(tensor.ty));
    }
    let name = tensor.name.strip_suffix(".counts").unwrap_or_default();
    let sums_name = format!("{name}.in_sum2");
    match gguf.tensor(&sums_name) {
        Some(sums) if sums.ne[1] != n_expert => Err(ShapeFault::OtherSums {
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
    let layer_id = output.layer_id(|| At::Element(tensor.name.clone()), layer)?;
    let (counts, _) = gguf.data(tensor)?.as_chunks::<4>();
    for (expert, &count) in counts.iter().enumerate() {
        let at = || At::Element(format!("{}[{expert}]", tensor.name));
        let count = f32::from_le_bytes(count);
        if !(count >= 0.0 && count.fract() == 0.0) {
            return Err(
                output.invalid(at(), format!("{count} is not a count; the file is damaged"))
            );
        }
        if count >= EXACT {
            output.note("counts from 16,777,216 on are rounded: the format keeps 32-bit floats");
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

/// Layer and rank of the projection of `blk.3.ffn_gate_exps.weight.counts`.
fn counts_of(name: &str) -> Option<(u64, usize)> {
    let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
    let projection = rest
        .strip_prefix("ffn_")?
        .strip_suffix("_exps.weight.counts")?;
    let rank = PROJECTIONS.iter().position(|&known| known == projection)?;
    Some((layer.parse().ok()?, rank))
}
