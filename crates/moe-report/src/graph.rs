//! Layout of a computation graph: rows by the longest path within a layer, and the layers as bands one below the other.
//!
//! A leaf (a tensor of the model, an input) is in the row above its first reader. The time is linear in the number of nodes and edges,
//! except for sorting within a row.

use std::collections::{BTreeMap, HashMap};

use moe_trace::graph::{Graph, LEAF, Node};
use moe_trace::{LayerId, Phase};

use crate::document::{self, layer_or_none};
use crate::model::ModelTable;

const WIDTH: u32 = 150;
const HEIGHT: u32 = 34;
/// Distance between the centers of neighbors in a row.
const COLUMN: u32 = 170;
/// Distance between rows.
const ROW: u32 = 56;
const MARGIN: u32 = 40;

/// Place of a node before coordinates are known.
#[derive(Clone, Copy, Debug, Default)]
struct Place {
    band: usize,
    row: usize,
}

/// Lays a graph out.
pub(crate) fn layout(graph: &Graph, phase: Phase, model: &ModelTable) -> document::Graph {
    let edges = edges(graph);
    let n = graph.nodes.len();
    let mut sources: Vec<Vec<usize>> = vec![Vec::new(); n];
    let mut readers: Vec<Vec<usize>> = vec![Vec::new(); n];
    for &[source, target] in &edges {
        sources[target].push(source);
        readers[source].push(target);
    }
    let places = places(graph, &sources, &readers);
    let (columns, n_columns) = columns(graph, &places, &sources, &readers);
    let rows = row_numbers(&places);
    let width = n_columns.max(1) * COLUMN + 2 * MARGIN;
    let mut height = 2 * MARGIN;
    let mut nodes = Vec::with_capacity(n);
    for (i, node) in graph.nodes.iter().enumerate() {
        let y = MARGIN + HEIGHT / 2 + rows[i] * ROW;
        height = height.max(y + HEIGHT / 2 + MARGIN);
        nodes.push(document::Node {
            x: MARGIN + columns[i],
            y,
            w: WIDTH,
            h: HEIGHT,
            label: node.label.clone(),
            op: node.operation.clone(),
            layer: layer_or_none(node.layer_id),
            category: node.category.as_str(),
            tensor: tensor_of(graph, i, &sources[i], model),
            shape: node.shape.clone(),
            dtype: node.dtype.clone(),
        });
    }
    document::Graph {
        phase: match phase {
            Phase::Prompt => "prompt",
            Phase::Generate => "generate",
        },
        width,
        height,
        nodes,
        edges,
    }
}

/// The edges as pairs of indices of nodes. Edges of unknown nodes are omitted.
fn edges(graph: &Graph) -> Vec<[usize; 2]> {
    let nodes = graph.nodes.iter().enumerate();
    let by_id: HashMap<&str, usize> = nodes.map(|(i, node)| (node.id.as_str(), i)).collect();
    let edges = graph.edges.iter().filter_map(|edge| {
        let source = by_id.get(edge.source.as_str())?;
        let target = by_id.get(edge.target.as_str())?;
        Some([*source, *target])
    });
    edges.collect()
}

/// The tensor of the model that a leaf is, or that an operation reads first; -1 for none.
fn tensor_of(graph: &Graph, node: usize, sources: &[usize], model: &ModelTable) -> i32 {
    let of = |node: usize| {
        let node = graph.nodes.get(node)?;
        Some(model.by_name(&node.label)).filter(|&tensor| tensor >= 0 && node.operation == LEAF)
    };
    let first = || sources.iter().find_map(|&source| of(source));
    of(node).or_else(first).unwrap_or(-1)
}

/// Whether a node is a leaf: no operation of the graph writes it.
fn is_leaf(graph: &Graph, node: usize) -> bool {
    graph
        .nodes
        .get(node)
        .is_some_and(|node| node.operation == LEAF)
}

/// The band of each operation: 0 before the first layer, then one for each layer, then one after the last layer.
fn bands(graph: &Graph) -> Vec<usize> {
    let layers = graph.nodes.iter().filter_map(|node| node.layer_id);
    let mut layers: Vec<LayerId> = layers.collect();
    layers.sort_unstable();
    layers.dedup();
    let is_in_layer = |node: &Node| node.operation != LEAF && node.layer_id.is_some();
    let last = graph.nodes.iter().rposition(is_in_layer);
    let mut before = 0;
    let mut bands = vec![0; graph.nodes.len()];
    for (i, node) in graph.nodes.iter().enumerate() {
        if node.operation == LEAF {
            continue;
        }
        before = match node.layer_id {
            Some(layer) => 1 + layers.partition_point(|&other| other < layer),
            None if last.is_some_and(|last| i > last) => layers.len() + 1,
            // An operation between two layers is in the band of the operation before it.
            None => before,
        };
        bands[i] = before;
    }
    bands
}

/// Band and row of each node. Operations have odd rows, leaves have even rows.
fn places(graph: &Graph, sources: &[Vec<usize>], readers: &[Vec<usize>]) -> Vec<Place> {
    let bands = bands(graph);
    let mut places = vec![Place::default(); graph.nodes.len()];
    // Operations are in order of execution, so the sources of an operation are before it.
    for (i, sources) in sources.iter().enumerate() {
        if is_leaf(graph, i) {
            continue;
        }
        let above = sources
            .iter()
            .filter(|&&source| source < i && !is_leaf(graph, source) && bands[source] == bands[i]);
        let row = above.map(|&source| places[source].row + 2).max();
        places[i] = Place {
            band: bands[i],
            row: row.unwrap_or(1),
        };
    }
    for (i, readers) in readers.iter().enumerate() {
        if !is_leaf(graph, i) {
            continue;
        }
        let operations = readers.iter().filter(|&&reader| !is_leaf(graph, reader));
        if let Some(&reader) = operations.min() {
            let Place { band, row } = places[reader];
            places[i] = Place {
                band,
                row: row.saturating_sub(1),
            };
        }
    }
    places
}

/// Number of the row of each node in the drawing. Rows without nodes are omitted, and a row between two bands is free.
fn row_numbers(places: &[Place]) -> Vec<u32> {
    let mut used: Vec<(usize, usize)> =
        places.iter().map(|place| (place.band, place.row)).collect();
    used.sort_unstable();
    used.dedup();
    let mut numbers: HashMap<(usize, usize), u32> = HashMap::new();
    let mut next = 0;
    let mut band = None;
    for &row in &used {
        if band.is_some_and(|band| band != row.0) {
            next += 1;
        }
        band = Some(row.0);
        numbers.insert(row, next);
        next += 1;
    }
    let number = |place: &Place| numbers.get(&(place.band, place.row)).copied();
    places
        .iter()
        .map(|place| number(place).unwrap_or(0))
        .collect()
}

/// Center of each node in its row, and the number of nodes of the longest row. Rows are centered.
fn columns(
    graph: &Graph,
    places: &[Place],
    sources: &[Vec<usize>],
    readers: &[Vec<usize>],
) -> (Vec<u32>, u32) {
    let mut rows: BTreeMap<(usize, usize), Vec<usize>> = BTreeMap::new();
    for (i, place) in places.iter().enumerate() {
        rows.entry((place.band, place.row)).or_default().push(i);
    }
    let longest = rows.values().map(Vec::len).max().unwrap_or(0);
    let n_columns = u32::try_from(longest).unwrap_or(u32::MAX).min(1 << 20);
    let mut x = vec![0u32; places.len()];
    // Leaves follow their readers, so the rows of operations come first.
    for of_leaves in [false, true] {
        for nodes in rows.values_mut() {
            let has_leaves = nodes.first().is_some_and(|&node| is_leaf(graph, node));
            if has_leaves != of_leaves {
                continue;
            }
            let desired = |node: usize| -> f64 {
                let near = if of_leaves {
                    &readers[node]
                } else {
                    &sources[node]
                };
                let near = near.iter().filter(|&&other| !is_leaf(graph, other));
                let near: Vec<f64> = near.map(|&other| f64::from(x[other])).collect();
                near.iter().sum::<f64>() / near.len().max(1) as f64
            };
            nodes.sort_by(|&a, &b| desired(a).total_cmp(&desired(b)));
            let n = u32::try_from(nodes.len()).unwrap_or(u32::MAX);
            let mut center = n_columns.saturating_sub(n) * COLUMN / 2 + COLUMN / 2;
            for &node in nodes.iter() {
                x[node] = center;
                center = center.saturating_add(COLUMN);
            }
        }
    }
    (x, n_columns)
}

#[cfg(test)]
mod tests {
    use moe_trace::TokenId;
    use moe_trace::graph::{GraphBuilder, GraphSource};

    use super::*;

    fn source(name: &str, is_weight: bool) -> GraphSource<'_> {
        GraphSource {
            name,
            is_weight,
            ..GraphSource::default()
        }
    }

    fn graph() -> Graph {
        let mut builder = GraphBuilder::new();
        let inputs = [source("token_embd.weight", true)];
        builder.operation("GET_ROWS", "embd", None, 1, &inputs);
        let mut before = "embd".to_owned();
        for layer in 0..2 {
            let weight = format!("blk.{layer}.attn_q.weight");
            let (q, out) = (format!("Qcur-{layer}"), format!("l_out-{layer}"));
            let id = Some(LayerId(layer));
            let sources = [source(&weight, true), source(&before, false)];
            builder.operation("MUL_MAT", &q, id, 1, &sources);
            let sources = [source(&q, false), source(&before, false)];
            builder.operation("ADD", &out, id, 1, &sources);
            before = out;
        }
        builder.operation(
            "RMS_NORM",
            "result_norm",
            None,
            1,
            &[source(&before, false)],
        );
        builder.finish(Phase::Generate, TokenId(3))
    }

    #[test]
    fn data_flows_down_and_layers_are_bands() {
        let drawing = layout(&graph(), Phase::Generate, &ModelTable::default());
        assert_eq!(drawing.phase, "generate");
        for &[source, target] in &drawing.edges {
            let (from, to) = (&drawing.nodes[source], &drawing.nodes[target]);
            assert!(from.y < to.y, "{} -> {}", from.label, to.label);
        }
        let rows = |layer: i32| {
            let nodes = drawing.nodes.iter().filter(move |node| node.layer == layer);
            nodes.map(|node| node.y)
        };
        assert!(rows(0).max() < rows(1).min());
        for (i, a) in drawing.nodes.iter().enumerate() {
            assert!(
                a.x >= a.w / 2 && a.x + a.w / 2 <= drawing.width,
                "{}",
                a.label
            );
            assert!(a.y + a.h / 2 <= drawing.height, "{}", a.label);
            let others = drawing.nodes[..i].iter().filter(|b| b.y == a.y);
            for b in others {
                assert!(a.x.abs_diff(b.x) >= a.w, "{} and {}", a.label, b.label);
            }
        }
    }
}
