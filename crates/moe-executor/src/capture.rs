//! Captures the graph of a forward pass while its operations run: once for each phase, so it costs nothing per token.

use moe_trace::graph::{Graph, GraphBuilder, GraphSource, trimmed};
use moe_trace::{LayerId, Phase, TokenId};

use crate::activation::NodeName;
use crate::recorder::Source;

/// The graph of the operations of the current pass so far.
#[derive(Default)]
pub(crate) struct Capture {
    builder: GraphBuilder,
    /// Position of the pass's first token.
    position: Option<TokenId>,
}

impl Capture {
    /// Adds an operation on `n_tokens` tokens, the first at `position`.
    pub(crate) fn operation(
        &mut self,
        op: u8,
        dst: NodeName,
        sources: &[Source],
        position: TokenId,
        n_tokens: usize,
    ) {
        self.position.get_or_insert(position);
        let described: Vec<Described> = sources.iter().map(Described::of).collect();
        let sources: Vec<GraphSource> = described.iter().map(Described::as_source).collect();
        let op = moe_trace::ops::name(op).unwrap_or("unknown");
        let (name, layer) = (dst.to_string(), dst.layer());
        self.builder
            .operation(op, &name, layer, n_tokens as u32, &sources);
    }

    /// Adds the result of the last operation, which no operation reads.
    pub(crate) fn result(&mut self, result: &Source) {
        self.builder.result(&Described::of(result).as_source());
    }

    /// The graph of a pass of `phase`.
    pub(crate) fn finish(self, phase: Phase) -> Graph {
        self.builder
            .finish(phase, self.position.unwrap_or_default())
    }
}

/// A source with its name as text.
struct Described {
    name: String,
    is_weight: bool,
    address: u64,
    size_bytes: u64,
    shape: Vec<u64>,
    dtype: String,
    layer: Option<LayerId>,
}

impl Described {
    fn of(source: &Source) -> Described {
        match *source {
            Source::Weight(place, address, suffix) => Described {
                name: format!("{}{suffix}", place.name),
                is_weight: true,
                address,
                size_bytes: place.size_bytes,
                shape: trimmed(&place.ne),
                dtype: place.ty.name().to_lowercase(),
                layer: place.layer,
            },
            Source::Buffer {
                name,
                suffix,
                address,
                size_bytes,
                ne,
                dtype,
                ..
            } => Described {
                name: format!("{name}{suffix}"),
                is_weight: false,
                address,
                size_bytes,
                shape: trimmed(&ne),
                dtype: dtype.to_owned(),
                layer: name.layer(),
            },
        }
    }

    fn as_source(&self) -> GraphSource<'_> {
        GraphSource {
            name: &self.name,
            is_weight: self.is_weight,
            address: self.address,
            size_bytes: self.size_bytes,
            shape: &self.shape,
            dtype: &self.dtype,
            layer: self.layer,
        }
    }
}
