//! Graphviz DOT output, with labels like those of `ggml_graph_dump_dot`: `name (type)|place [shape]|operation`.

use std::collections::BTreeMap;
use std::io::{self, Write};

use moe_files::text::is_hidden;
use moe_ids::LayerId;

use super::{Category, Graph, LEAF, Node};

impl Graph {
    /// Writes the graph as DOT. The nodes of a layer are a cluster.
    ///
    /// # Errors
    /// `out` cannot be written.
    pub fn write_dot(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(out, "digraph G {{")?;
        writeln!(out, "  newrank = true;\n  rankdir = TB;")?;
        writeln!(out, "  node [fontname = \"Helvetica\", fontsize = 10];")?;
        // `None` sorts first: nodes without a layer are written before the clusters.
        let mut layers: BTreeMap<Option<LayerId>, Vec<usize>> = BTreeMap::new();
        for (i, node) in self.nodes.iter().enumerate() {
            layers.entry(node.layer_id).or_default().push(i);
        }
        for (layer, places) in layers {
            if let Some(layer) = layer {
                writeln!(
                    out,
                    "  subgraph cluster_{layer} {{\n    label = \"layer {layer}\";"
                )?;
            }
            let indent = if layer.is_some() { "    " } else { "  " };
            for i in places {
                write_node(out, indent, i, &self.nodes[i])?;
            }
            if layer.is_some() {
                writeln!(out, "  }}")?;
            }
        }
        for edge in &self.edges {
            writeln!(
                out,
                "  \"{}\" -> \"{}\" [ arrowhead = vee; style = solid; label = \"{}\"; ]",
                quoted(&edge.source),
                quoted(&edge.target),
                quoted(&edge.label)
            )?;
        }
        writeln!(out, "}}")
    }
}

fn write_node(out: &mut dyn Write, indent: &str, place: usize, node: &Node) -> io::Result<()> {
    let shape: Vec<String> = node.shape.iter().map(u64::to_string).collect();
    let name = format!("{} ({})", field(&node.label), field(&node.dtype));
    let shape = shape.join(", ");
    let label = match node.operation.as_str() {
        LEAF => format!("<x>{name}|{LEAF} {place} [{shape}]"),
        operation => format!("{name}|{place} [{shape}]|<x>{}", field(operation)),
    };
    writeln!(
        out,
        "{indent}\"{}\" [ style = filled; fillcolor = \"{}\"; shape = record; label = \"{label}\"; ]",
        quoted(&node.id),
        colour(node.category),
    )
}

fn colour(category: Category) -> &'static str {
    match category {
        Category::Input => "#d9d9e3",
        Category::Attention => "#cfe3f5",
        Category::Ffn => "#fcde9c",
        Category::Norm => "#e4ecd2",
        Category::Output => "#f3c6cf",
        Category::Other => "#ffffff",
    }
}

/// Escapes text for a quoted string; control characters become spaces.
fn quoted(text: &str) -> String {
    text.replace(is_hidden, " ")
        .replace('\\', "\\\\")
        .replace('"', "\\\"")
}

/// Escapes text for a field of a record-shaped label, in which some characters separate fields.
fn field(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in quoted(text).chars() {
        if matches!(c, '{' | '}' | '|' | '<' | '>') {
            escaped.push('\\');
        }
        escaped.push(c);
    }
    escaped
}
