//! Recorded operations and graphs compared with the nodes of llama.cpp.

use std::collections::BTreeMap;

use moe_trace::graph::Graph;
use moe_trace::names::base_name;
use moe_trace::record::{FLAG_SOURCES_OMITTED, PHASE_PROMPT};
use moe_trace::{RunOptions, TensorAccessLog, ops};

use super::{LIMITS, record};

/// Nodes of llama.cpp's graph for a prompt with flash attention, by architecture: operation, name, names of the sources.
type Nodes = BTreeMap<String, Vec<(String, String, Vec<String>)>>;

/// Whether the names agree. Nodes without a name in llama.cpp have any name here.
fn same_name(theirs: &str, ours: &str) -> bool {
    theirs.starts_with("node_") || theirs == ours
}

fn follows_llama_cpp(file: &str, arch: &str) {
    let json = moe_testkit::reference::read("nodes");
    let nodes: Nodes = serde_json::from_slice(&json).unwrap();
    let prompt: Vec<u32> = (300..309).collect();
    let recorded = record(file, &prompt, LIMITS, RunOptions::default());
    for (graph, n_tokens) in recorded.graphs.iter().zip([9, 1]) {
        graph_follows_llama_cpp(&nodes[arch], graph);
        assert_eq!(graph.metadata.n_tokens, Some(n_tokens));
    }

    // One record per operation: the first of each group with the same start.
    let mut operations: Vec<&TensorAccessLog> = Vec::new();
    for record in recorded.records.iter().filter(|r| r.phase == PHASE_PROMPT) {
        let same = |last: &&TensorAccessLog| {
            (last.timestamp_ns, last.dst_name) == (record.timestamp_ns, record.dst_name)
        };
        if !operations.last().is_some_and(same) {
            operations.push(record);
        }
    }
    assert_eq!(operations.len(), nodes[arch].len());
    for ((op, name, sources), record) in nodes[arch].iter().zip(operations) {
        assert_eq!(
            ops::name(record.operation_type),
            Some(op.as_str()),
            "{name}"
        );
        let ours = record.dst_name();
        assert!(same_name(name, &ours), "{name} is recorded as {ours}");
        assert_eq!(
            record.sources().len(),
            sources.len().min(4),
            "sources of {name}"
        );
        assert_eq!(
            record.has_flag(FLAG_SOURCES_OMITTED),
            sources.len() > 4,
            "{name}"
        );
        for (theirs, ours) in sources.iter().zip(record.sources()) {
            assert!(
                same_name(theirs, &ours.name()),
                "{name} reads {theirs}, not {}",
                ours.name()
            );
        }
    }
}

/// Compares a recorded graph with the nodes of llama.cpp: operations in order, and the names of all their sources, including
/// the fifth.
fn graph_follows_llama_cpp(nodes: &[(String, String, Vec<String>)], graph: &Graph) {
    let (operations, leaves) = graph.nodes.split_at(nodes.len());
    assert!(leaves.iter().all(|node| node.operation == "CONST"));
    let place = |id: &str| -> usize { id.strip_prefix("node_").unwrap().parse().unwrap() };
    let mut edges = graph.edges.iter();
    for (i, ((op, name, sources), node)) in nodes.iter().zip(operations).enumerate() {
        assert_eq!(&node.operation, op, "{name}");
        assert!(
            same_name(name, &node.label) || base_name(name) == node.label,
            "{name}"
        );
        assert!(!node.shape.is_empty(), "{name}");
        for (n, theirs) in sources.iter().enumerate() {
            let edge = edges.next().unwrap();
            assert_eq!(place(&edge.target), i, "{name}");
            assert!(edge.label.starts_with(&format!("src {n}")), "{name}");
            let source = place(&edge.source);
            let ours = &graph.nodes[source];
            // In llama.cpp the selected experts are a view of the result of the argsort, with its own name.
            let renamed = theirs.replace("_topk-", "_argsort-");
            let read = base_name(&renamed);
            assert!(
                same_name(theirs, &ours.label) || read == ours.label,
                "{name} reads {theirs}"
            );
            assert!(
                source < i || ours.operation == "CONST",
                "{name} reads a later node"
            );
        }
    }
    assert!(edges.next().is_none());
    assert_eq!(graph.metadata.total_edges as usize, graph.edges.len());
}

#[test]
fn qwen3moe_records_the_nodes_of_llama_cpp() {
    follows_llama_cpp("random-qwen3moe-F16.gguf", "qwen3moe");
}

#[test]
fn llama_records_the_nodes_of_llama_cpp() {
    follows_llama_cpp("random-llama-F16.gguf", "llama");
}

#[test]
fn qwen2moe_records_the_nodes_of_llama_cpp() {
    follows_llama_cpp("random-qwen2moe-F16.gguf", "qwen2moe");
}

#[test]
fn olmoe_records_the_nodes_of_llama_cpp() {
    follows_llama_cpp("random-olmoe-F16.gguf", "olmoe");
}

#[test]
fn dots1_records_the_nodes_of_llama_cpp() {
    follows_llama_cpp("random-dots1-F16.gguf", "dots1");
}

#[test]
fn gpt_oss_records_the_nodes_of_llama_cpp() {
    follows_llama_cpp("random-gpt-oss-F16.gguf", "gpt-oss");
}
