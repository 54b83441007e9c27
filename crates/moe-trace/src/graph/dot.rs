//! Graphviz's DOT, with labels as ggml's own dump has them: `name (type)|place [shape]|operation`.

use std::io::{self, Write};

use super::{Category, Graph, LEAF, Node};

impl Graph {
    /// Writes the graph as DOT, the nodes of a layer in a cluster.
    ///
    /// # Errors
    /// `out` cannot be written.
    pub fn write_dot(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(out, "digraph G {{")?;
        writeln!(out, "  newrank = true;\n  rankdir = TB;")?;
        writeln!(out, "  node [fontname = \"Helvetica\", fontsize = 10];")?;
        let layers = self.nodes.iter().filter_map(|node| node.layer_id);
        let n_layers = layers.max().map_or(0, |layer| u32::from(layer) + 1);
        let of = |layer: Option<u16>| {
            let nodes = self.nodes.iter().enumerate();
            nodes.filter(move |(_, node)| node.layer_id == layer)
        };
        for (i, node) in of(None) {
            write_node(out, "  ", i, node)?;
        }
        for layer in (0..n_layers).map_while(|layer| u16::try_from(layer).ok()) {
            writeln!(
                out,
                "  subgraph cluster_{layer} {{\n    label = \"layer {layer}\";"
            )?;
            for (i, node) in of(Some(layer)) {
                write_node(out, "    ", i, node)?;
            }
            writeln!(out, "  }}")?;
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

/// Text inside quotation marks.
fn quoted(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"")
}

/// Text inside a field of a record-shaped label, where some characters divide fields.
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
