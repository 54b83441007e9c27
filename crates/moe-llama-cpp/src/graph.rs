//! The graph of a pass and the buffers of its nodes, in the formats of a run directory.

use std::collections::HashSet;
use std::time::Instant;

use moe_trace::LayerId;
use moe_trace::buffers::{Buffer, BufferEvent, Change};
use moe_trace::graph::{GraphBuilder, GraphSource, trimmed};
use moe_trace::names::{base_name, view_suffix};

use crate::layer::layer_of;
use crate::node::Node;

/// Adds a node to a graph. A source has the name of the node whose memory it uses, because a view may have any name.
pub fn add(
    builder: &mut GraphBuilder,
    op: &str,
    node: Node<'_>,
    layer: Option<LayerId>,
    n_tokens: usize,
) {
    let shape = |node: &Node<'_>| trimmed(&node.ne().map(|n| n as u64));
    let described: Vec<(String, Vec<u64>, Node<'_>)> = node
        .sources()
        .map(|source| {
            // The name of a copy has a suffix of its own, which the name of the source repeats.
            let name = base_name(source.storage().0.name());
            let name = format!("{name}{}", view_suffix(source.name()));
            (name, shape(&source), source)
        })
        .collect();
    let sources: Vec<GraphSource<'_>> = described
        .iter()
        .map(|(name, shape, source)| GraphSource {
            name,
            is_weight: source.is_weight(),
            address: source.address(),
            size_bytes: source.size_bytes(),
            shape,
            dtype: source.type_name(),
            layer: layer_of(name),
        })
        .collect();
    builder.operation(op, node.name(), layer, n_tokens as u32, &sources);
    builder.result(&GraphSource {
        name: base_name(node.name()),
        is_weight: false,
        address: node.address(),
        size_bytes: node.size_bytes(),
        shape: &shape(&node),
        dtype: node.type_name(),
        layer,
    });
}

/// Collects the buffers of nodes and reports each once. llama.cpp allocates them with the model and the context.
pub struct Buffers {
    origin: Instant,
    seen: HashSet<u64>,
    new: Vec<BufferEvent>,
}

impl Buffers {
    /// Starts without buffers.
    pub fn new() -> Buffers {
        Buffers {
            origin: Instant::now(),
            seen: HashSet::new(),
            new: Vec::new(),
        }
    }

    /// Adds the buffer of a node, if it is new.
    pub fn see(&mut self, node: Node<'_>) {
        let Some(buffer) = node.buffer() else {
            return;
        };
        if self.seen.insert(buffer.address) {
            self.new.push(BufferEvent {
                timestamp_ms: self.origin.elapsed().as_secs_f64() * 1e3,
                timestamp_ns: None,
                change: Change::Alloc(Buffer {
                    buffer_id: buffer.address,
                    buffer_ptr: buffer.address,
                    size: buffer.size_bytes,
                    backend: if buffer.name.contains("Mapped") {
                        "mmap".to_owned()
                    } else {
                        "CPU".to_owned()
                    },
                    name: buffer.name,
                    usage: buffer.usage,
                    layer: None,
                }),
            });
        }
    }

    /// The `alloc` events of buffers that were added since the last call.
    pub fn take_new(&mut self) -> Vec<BufferEvent> {
        std::mem::take(&mut self.new)
    }
}
