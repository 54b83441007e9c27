//! Reconstruction of the graph of a pass from its records.

use std::collections::HashMap;

use moe_gguf::map::{MapRow, OffsetMap};

use super::{Graph, GraphBuilder, GraphSource};
use crate::operations::Operation;
use crate::passes::Passes;
use crate::phase::Phase;
use crate::run::Run;

/// The graph of the pass of a phase with the most operations, the first of them if several; `None` if there is no such pass.
///
/// A source that no record writes is a leaf: a record names at most four sources, and a trace may contain expert operations
/// only. Shapes and types come from the model's map; those of results are unknown.
pub fn reconstruct(run: &Run, phase: Phase) -> Option<Graph> {
    let passes = || Passes::new(run.trace.operations()).filter(|pass| pass.phase() == Some(phase));
    // `max_by_key` returns the last maximum, but the first is needed.
    let longest = passes().map(|pass| pass.n_operations()).max()?;
    let pass = passes().find(|pass| pass.n_operations() == longest)?;
    let weights = run.map.as_ref().map(Weights::new).unwrap_or_default();
    let mut builder = GraphBuilder::new();
    for operation in pass.operations() {
        add(&mut builder, run, &weights, &operation);
    }
    Some(builder.finish(phase, pass.token_id()))
}

fn add(builder: &mut GraphBuilder, run: &Run, weights: &Weights, operation: &Operation) {
    let head = operation.head();
    let names: Vec<_> = head.sources().iter().map(|source| source.name()).collect();
    let sources = head.sources().iter().zip(&names).enumerate();
    let sources = sources.map(|(i, (log, name))| {
        let weight = weights.get(name).filter(|_| log.is_disk());
        GraphSource {
            name,
            is_weight: log.is_disk(),
            address: log.tensor_ptr.get(),
            size_bytes: head.source_size(i),
            shape: weight.map_or(&[], |weight| &weight.shape),
            dtype: weight.map_or("", |weight| &weight.dtype),
            layer: log.layer(),
        }
    });
    let sources: Vec<GraphSource> = sources.collect();
    let number = head.operation_type;
    let unnamed = format!("op_{number}");
    let name = run.ops().name(number).unwrap_or(&unnamed);
    let tokens = u32::try_from(operation.tokens().count()).unwrap_or(u32::MAX);
    let n_tokens = if head.has_extension() {
        head.n_tokens.get()
    } else {
        tokens
    };
    builder.operation(name, &head.dst_name(), head.layer(), n_tokens, &sources);
}

/// Shapes and types of the model's tensors, by name.
#[derive(Default)]
struct Weights<'a>(HashMap<&'a str, Weight>);

struct Weight {
    shape: Vec<u64>,
    dtype: String,
}

impl<'a> Weights<'a> {
    fn new(map: &'a OffsetMap) -> Weights<'a> {
        let tensors = map.rows.chunk_by(|a, b| a.tensor_idx == b.tensor_idx);
        let tensors = tensors.filter_map(|rows| {
            let first = rows.first()?;
            let dtype = first.ty.name().to_lowercase();
            Some((
                &*first.tensor,
                Weight {
                    shape: shape(rows, first),
                    dtype,
                },
            ))
        });
        Weights(tensors.collect())
    }

    fn get(&self, name: &str) -> Option<&Weight> {
        self.0.get(name)
    }
}

/// Shape of an entire tensor, without trailing dimensions of one element.
fn shape(rows: &[MapRow], first: &MapRow) -> Vec<u64> {
    let mut ne = first.ne;
    if rows.len() > 1 {
        ne[2] = rows.len() as u64;
    }
    super::trimmed(&ne)
}
