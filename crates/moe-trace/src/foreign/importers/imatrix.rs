//! The importance matrix of llama.cpp in its GGUF form: how many rows each expert multiplied.
//!
//! `blk.N.ffn_gate_exps.weight.counts` is F32 `[1, n_expert]` and counts a row for every token that was routed to the expert,
//! and so do the tensors of up and down: one of a layer is read. The old `.dat` form has no counts of experts.

use std::collections::BTreeMap;
use std::path::Path;

use moe_gguf::{GgmlType, Gguf, Tensor};

use crate::foreign::{At, CountRow, Facts, ForeignError, Importer, Options, Output, Source};

/// How `general.type` stands in the file: key, type (a string), length, value.
const TYPE: &[u8] = b"general.type\x08\0\0\0\x07\0\0\0\0\0\0\0imatrix";
/// Projections, the ones to be read first in front.
const PROJECTIONS: [&str; 4] = ["gate", "gate_up", "up", "down"];
/// From here on a 32-bit float does not tell one count from the next.
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

    fn is_applicable(&self, sample: &[u8]) -> bool {
        sample.starts_with(b"GGUF") && sample.windows(TYPE.len()).any(|bytes| bytes == TYPE)
    }

    fn import(
        &self,
        source: &Source,
        _options: &Options,
        output: &mut Output<'_>,
    ) -> Result<(), ForeignError> {
        for file in source.files() {
            output.begin_file(file);
            let gguf = Gguf::open(file).map_err(|error| damaged(file, &error))?;
            import_counts(file, &gguf, output)?;
        }
        output.note("an importance matrix does not tell prompt from generated tokens");
        Ok(())
    }
}

/// What the reader of GGUF says, without the file's name.
fn damaged(file: &Path, error: &moe_gguf::Error) -> ForeignError {
    let text = error.to_string();
    let named = format!("{}: ", file.display());
    ForeignError::file(file, text.strip_prefix(&named).unwrap_or(&text))
}

fn import_counts(file: &Path, gguf: &Gguf, output: &mut Output<'_>) -> Result<(), ForeignError> {
    let mut layers: BTreeMap<u64, (usize, &Tensor)> = BTreeMap::new();
    for tensor in gguf.tensors() {
        let Some((layer, rank)) = counts_of(&tensor.name) else {
            continue;
        };
        let best = layers.entry(layer).or_insert((rank, tensor));
        if rank < best.0 {
            *best = (rank, tensor);
        }
    }
    for (layer, (_, tensor)) in layers {
        import_layer(file, gguf, layer, tensor, output)?;
    }
    Ok(())
}

fn import_layer(
    file: &Path,
    gguf: &Gguf,
    layer: u64,
    tensor: &Tensor,
    output: &mut Output<'_>,
) -> Result<(), ForeignError> {
    let at = || At::Element(tensor.name.clone());
    let layer_id = output.id(at, "layer", layer)?;
    let [1, n_expert, 1, 1] = tensor.ne else {
        return Err(output.invalid(
            at(),
            format!("its shape {:?} is not [1, n_expert]", tensor.ne),
        ));
    };
    if tensor.ty != GgmlType::F32 {
        return Err(output.invalid(at(), format!("its type {} is not F32", tensor.ty)));
    }
    let data = gguf.data(tensor).map_err(|error| damaged(file, &error))?;
    output.facts(&Facts {
        n_expert: u32::try_from(n_expert).ok(),
        ..Facts::default()
    })?;
    let (counts, _) = data.as_chunks::<4>();
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
        let row = CountRow {
            layer_id,
            expert_id: output.id(at, "expert", expert as u64)?.into(),
            phase: None,
            count: count as u64,
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
