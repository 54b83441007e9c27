//! Building a graph from operations in order of execution. Edges follow from the names of the sources.

use std::collections::HashMap;

use moe_ids::{LayerId, TokenId};

use super::{Category, Edge, Graph, LEAF, Metadata, Node, SCHEMA, UNKNOWN_TYPE};
use crate::names::{base_name, view_suffix};
use crate::phase::Phase;

/// Prefixes of views that have their own names in ggml graphs, and of the nodes that they are views of.
const RENAMED_VIEWS: [(&str, &str); 2] = [
    ("ffn_moe_topk-", "ffn_moe_argsort-"),
    ("kqv_out-", "__fattn__-"),
];

/// A source of an operation.
#[derive(Clone, Copy, Debug, Default)]
pub struct GraphSource<'a> {
    /// Name, including the suffix that ggml appends to a view.
    pub name: &'a str,
    /// Whether it is a tensor of the model.
    pub is_weight: bool,
    /// Address of the data; 0 if unknown.
    pub address: u64,
    /// Size in bytes.
    pub size_bytes: u64,
    /// Elements in each dimension (`ne`), fastest first; empty if unknown.
    pub shape: &'a [u64],
    /// Type of the elements; empty if unknown.
    pub dtype: &'a str,
    /// Layer, if the source belongs to one.
    pub layer: Option<LayerId>,
}

/// Builds a graph one operation at a time.
#[derive(Debug, Default)]
pub struct GraphBuilder {
    operations: Vec<Node>,
    leaves: Vec<Node>,
    edges: Vec<(Place, usize, String)>,
    /// The newest node of each name: several results may have the same name.
    named: HashMap<String, Place>,
    n_tokens: u32,
}

/// Position of a node. Leaves follow all operations, whose number is not known until the end.
#[derive(Clone, Copy, Debug)]
enum Place {
    Operation(usize),
    Leaf(usize),
}

impl GraphBuilder {
    /// An empty graph.
    pub fn new() -> GraphBuilder {
        GraphBuilder::default()
    }

    /// Adds an operation that writes `dst` over `n_tokens` tokens.
    pub fn operation(
        &mut self,
        operation: &str,
        dst: &str,
        layer: Option<LayerId>,
        n_tokens: u32,
        sources: &[GraphSource],
    ) {
        let index = self.operations.len();
        for (i, source) in sources.iter().enumerate() {
            let place = self.place_of(source);
            let label = format!("src {i}{}", view_suffix(source.name));
            self.edges.push((place, index, label));
        }
        let label = base_name(dst);
        self.operations
            .push(node(operation, label, layer, Category::of_node(label)));
        self.named.insert(label.to_owned(), Place::Operation(index));
        self.n_tokens = self.n_tokens.max(n_tokens);
    }

    /// Sets type, shape, address and size of the last operation's result. Other results have those that their readers state.
    pub fn result(&mut self, result: &GraphSource) {
        if let Some(node) = self
            .operations
            .last_mut()
            .filter(|node| node.label == result.name)
        {
            describe(node, result);
        }
    }

    /// The graph of a pass whose first token is at position `token_id`.
    pub fn finish(self, phase: Phase, token_id: TokenId) -> Graph {
        let n_operations = self.operations.len();
        let index = |place| match place {
            Place::Operation(i) => i,
            Place::Leaf(i) => n_operations + i,
        };
        let edges = self.edges.into_iter().map(|(source, target, label)| Edge {
            source: id(index(source)),
            target: id(target),
            label,
        });
        let edges: Vec<Edge> = edges.collect();
        let mut nodes = self.operations;
        nodes.extend(self.leaves);
        for (i, node) in nodes.iter_mut().enumerate() {
            node.id = id(i);
        }
        let highest = nodes.iter().filter_map(|node| node.layer_id).max();
        Graph {
            schema: Some(SCHEMA.to_owned()),
            phase: Some(phase.name().to_owned()),
            token_id,
            metadata: Metadata {
                total_nodes: nodes.len() as u64,
                total_edges: edges.len() as u64,
                layers: highest.map_or(0, |layer| u32::from(layer.0) + 1),
                timestamp_generated: None,
                n_tokens: Some(self.n_tokens),
            },
            nodes,
            edges,
        }
    }

    /// The node that a source names. Its unknown properties are set to those of the source.
    fn place_of(&mut self, source: &GraphSource) -> Place {
        let name = base_name(source.name);
        let known = self.named.get(name).or_else(|| {
            let renamed = RENAMED_VIEWS.iter().find_map(|(view, of)| {
                let layer = name.strip_prefix(view)?;
                self.named.get(&format!("{of}{layer}"))
            });
            renamed.filter(|_| !source.is_weight)
        });
        if let Some(&place) = known {
            if let Place::Operation(i) = place
                && let Some(node) = self.operations.get_mut(i)
                && node.shape.is_empty()
            {
                describe(node, source);
            }
            return place;
        }
        let category = if source.is_weight {
            Category::of_weight(name)
        } else {
            Category::of_node(name)
        };
        let mut leaf = node(LEAF, name, source.layer, category);
        describe(&mut leaf, source);
        let place = Place::Leaf(self.leaves.len());
        self.leaves.push(leaf);
        self.named.insert(name.to_owned(), place);
        place
    }
}

fn id(index: usize) -> String {
    format!("node_{index}")
}

fn node(operation: &str, label: &str, layer: Option<LayerId>, category: Category) -> Node {
    Node {
        id: String::new(),
        address: "0x0".to_owned(),
        label: label.to_owned(),
        operation: operation.to_owned(),
        shape: Vec::new(),
        dtype: UNKNOWN_TYPE.to_owned(),
        layer_id: layer,
        category,
        size_bytes: None,
    }
}

fn describe(node: &mut Node, source: &GraphSource) {
    node.address = format!("{:#x}", source.address);
    node.size_bytes = Some(source.size_bytes).filter(|&bytes| bytes > 0);
    node.shape = source.shape.to_vec();
    if !source.dtype.is_empty() {
        node.dtype = source.dtype.to_owned();
    }
}
