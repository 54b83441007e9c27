//! Graphs of passes: reconstructed from records, and written as DOT and JSON.

use moe_trace::graph::{self, Graph, GraphBuilder, GraphSource};
use moe_trace::ops::{ADD_ID, GET_ROWS, MUL_MAT};
use moe_trace::passes::Passes;
use moe_trace::record::{PHASE_GENERATE, PHASE_PROMPT};
use moe_trace::{Error, LayerId, Phase, TensorAccessLog, TokenId};

use super::common::{expert_layer, gpt_oss, read_buffer, read_tensor, record, run_of};

/// The edges as (source, target, label).
fn edges(graph: &Graph) -> Vec<(&str, &str, &str)> {
    let label = |id: &str| {
        let place: usize = id.strip_prefix("node_").unwrap().parse().unwrap();
        graph.nodes[place].label.as_str()
    };
    let edges = graph.edges.iter();
    edges
        .map(|e| (label(&e.source), label(&e.target), e.label.as_str()))
        .collect()
}

/// A pass over one token: embedding, a matrix multiplication and the experts in layers 0 and 1, the output.
fn pass(clock: u64, token: u32, phase: u8) -> Vec<TensorAccessLog> {
    let (gguf, _) = gpt_oss();
    let mut records = Vec::new();
    let mut embd = record(clock, GET_ROWS, "embd");
    read_tensor(&mut embd, &gguf, "token_embd.weight");
    read_buffer(&mut embd, "inp_tokens", 4096, 4);
    records.push(embd);
    for layer in 0..2 {
        let clock = clock + 100 * u64::from(layer);
        let mut q = record(clock + 1, MUL_MAT, &format!("Qcur-{layer}"));
        q.layer_id.set(layer);
        read_tensor(&mut q, &gguf, &format!("blk.{layer}.attn_q.weight"));
        read_buffer(&mut q, "embd (view) (permuted)", 1, 64);
        records.push(q);
        records.extend(expert_layer(
            &gguf,
            clock + 2,
            layer,
            token,
            &[&[0, 1, 2, 3]],
        ));
    }
    let mut output = record(clock + 300, MUL_MAT, "result_output");
    read_tensor(&mut output, &gguf, "output.weight");
    read_buffer(&mut output, "ffn_moe_down-1", 3, 64);
    records.push(output);
    for record in &mut records {
        record.token_id.set(token);
        record.phase = phase;
    }
    records
}

#[test]
fn reconstructs_graph_of_a_pass_from_records() {
    let tmp = tempfile::tempdir().unwrap();
    let mut records = pass(1, 0, PHASE_PROMPT);
    records.extend(pass(1000, 1, PHASE_GENERATE));
    records.extend(pass(2000, 2, PHASE_GENERATE));
    let run = run_of(tmp.path(), &records);
    let n: Vec<usize> = Passes::new(run.trace.operations())
        .map(|p| p.n_operations())
        .collect();
    assert_eq!(n, [10, 10, 10]);

    let graph = graph::reconstruct(&run, Phase::Generate).unwrap();
    assert_eq!(
        (graph.token_id, graph.phase.as_deref()),
        (TokenId(1), Some("GENERATE"))
    );
    assert_eq!(graph.metadata.layers, 2);
    let operations: Vec<&str> = graph.nodes[..10]
        .iter()
        .map(|n| n.operation.as_str())
        .collect();
    let experts = ["MUL_MAT", "MUL_MAT_ID", "MUL_MAT_ID", "MUL_MAT_ID"];
    let expected = [&["GET_ROWS"], &experts[..], &experts, &["MUL_MAT"]].concat();
    assert_eq!(operations, expected);
    assert!(
        graph.nodes[10..]
            .iter()
            .all(|node| node.operation == "CONST")
    );

    let edges = edges(&graph);
    assert_eq!(edges.len(), 2 + 2 * 2 + 6 * 3 + 2);
    for edge in [
        ("token_embd.weight", "embd", "src 0"),
        ("inp_tokens", "embd", "src 1"),
        ("embd", "Qcur-1", "src 1 (view) (permuted)"),
        ("blk.1.ffn_up_exps.weight", "ffn_moe_up-1", "src 0"),
        ("ffn_moe_down-1", "result_output", "src 1"),
    ] {
        assert!(edges.contains(&edge), "{edge:?}");
    }
    // A tensor that is read twice is one node.
    let n_nodes = 10 + 2 + 2 * (1 + 3 + 2) + 1;
    assert_eq!(graph.nodes.len(), n_nodes);
    let node = |label: &str| graph.nodes.iter().find(|n| n.label == label).unwrap();
    let (gguf, _) = gpt_oss();
    let up = gguf.tensor("blk.1.ffn_up_exps.weight").unwrap();
    assert_eq!(node("blk.1.ffn_up_exps.weight").shape, up.ne[..3]);
    assert_eq!(node("blk.1.ffn_up_exps.weight").dtype, "f16");
    assert_eq!(
        node("blk.1.ffn_up_exps.weight").size_bytes,
        Some(up.size_bytes)
    );
    assert_eq!(
        (node("embd").dtype.as_str(), node("embd").layer_id),
        ("unknown", None)
    );
    assert_eq!(
        graph::reconstruct(&run, Phase::Prompt).unwrap().token_id,
        TokenId(0)
    );
}

#[test]
fn returns_no_graph_of_a_missing_phase() {
    let tmp = tempfile::tempdir().unwrap();
    let run = run_of(tmp.path(), &pass(1, 0, PHASE_PROMPT));
    assert_eq!(graph::reconstruct(&run, Phase::Generate), None);
}

#[test]
fn resolves_a_name_to_its_newest_result() {
    let mut builder = GraphBuilder::new();
    let source = |name| GraphSource {
        name,
        ..Default::default()
    };
    builder.operation("MUL_MAT", "Kcur-0", Some(LayerId(0)), 3, &[source("x")]);
    builder.operation("ADD_ID", "Kcur-0", Some(LayerId(0)), 3, &[source("Kcur-0")]);
    builder.operation(
        "SET_ROWS",
        "cache_k_l0 (view)",
        Some(LayerId(0)),
        3,
        &[source("Kcur-0 (view)"), source("cache_k_l0")],
    );
    builder.operation(
        "ARGSORT",
        "ffn_moe_argsort-0",
        Some(LayerId(0)),
        3,
        &[source("cache_k_l0 (view)")],
    );
    builder.operation(
        "GET_ROWS",
        "y",
        Some(LayerId(0)),
        3,
        &[source("ffn_moe_topk-0")],
    );
    let graph = builder.finish(Phase::Prompt, TokenId(7));
    let ids: Vec<_> = graph
        .edges
        .iter()
        .map(|e| (e.source.as_str(), e.target.as_str()))
        .collect();
    let leaf = |label: &str| {
        let is = |n: &graph::Node| n.label == label && n.operation == "CONST";
        format!("node_{}", graph.nodes.iter().position(is).unwrap())
    };
    assert_eq!(
        ids,
        [
            (leaf("x").as_str(), "node_0"),
            ("node_0", "node_1"),
            ("node_1", "node_2"),
            (leaf("cache_k_l0").as_str(), "node_2"),
            ("node_2", "node_3"),
            ("node_3", "node_4"),
        ]
    );
    assert_eq!(graph.metadata.n_tokens, Some(3));
}

#[test]
fn starts_a_pass_where_layers_restart() {
    let tmp = tempfile::tempdir().unwrap();
    let (gguf, _) = gpt_oss();
    // Expert operations only, of one layer, then of three layers.
    for layers in [1, 3] {
        let mut records = Vec::new();
        for token in 0..4u32 {
            for layer in 0..layers {
                let clock = u64::from(1 + token * 100) + u64::from(layer) * 10;
                records.extend(expert_layer(&gguf, clock, layer, token, &[&[0, 1, 2, 3]]));
            }
        }
        let mut bias = record(500, ADD_ID, "ffn_moe_gate_biased-0");
        bias.layer_id.set(layers - 1);
        bias.token_id.set(3);
        records.push(bias);
        let run = run_of(&tmp.path().join(layers.to_string()), &records);
        let passes = Passes::new(run.trace.operations());
        let passes: Vec<_> = passes.map(|p| (p.token_id().0, p.n_operations())).collect();
        let n = usize::from(layers) * 3;
        assert_eq!(passes, [(0, n), (1, n), (2, n), (3, n + 1)]);
    }
}

#[test]
fn writes_valid_dot_and_json() {
    let tmp = tempfile::tempdir().unwrap();
    let run = run_of(tmp.path(), &pass(1, 0, PHASE_PROMPT));
    let mut graph = graph::reconstruct(&run, Phase::Prompt).unwrap();
    let schema = std::fs::read_to_string(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../schemas/graph.schema.json"
    ));
    let schema = serde_json::from_str(&schema.unwrap()).unwrap();
    let schema = jsonschema::validator_for(&schema).unwrap();
    let json = serde_json::to_value(&graph).unwrap();
    let faults: Vec<_> = schema.iter_errors(&json).map(|e| e.to_string()).collect();
    assert!(faults.is_empty(), "{faults:?}");
    assert_eq!(serde_json::from_value::<Graph>(json).unwrap(), graph);

    graph.nodes[1].label = "a \"b\"|{c}\n".into();
    graph.nodes[2].label = "d\u{1b}[1m\u{202e}e".into();
    let mut dot = Vec::new();
    graph.write_dot(&mut dot).unwrap();
    let dot = String::from_utf8(dot).unwrap();
    assert!(dot.starts_with("digraph G {\n") && dot.ends_with("}\n"));
    for line in [
        r#"label = "<x>blk.1.ffn_up_exps.weight (f16)|CONST 22 ["#,
        r#"label = "embd (unknown)|0 []|<x>GET_ROWS"; ]"#,
        r#"label = "a \"b\"\|\{c\}  (unknown)|1 []|<x>MUL_MAT"; ]"#,
        r#"d [1m e (unknown)|2 "#,
        r#"subgraph cluster_1 {"#,
        r#""node_0" -> "node_1" [ arrowhead = vee; style = solid; label = "src 1 (view) (permuted)"; ]"#,
    ] {
        assert!(dot.contains(line), "{line}\n{dot}");
    }
    assert_eq!(dot.matches(" -> ").count(), graph.edges.len());
    assert_eq!(dot.matches("shape = record").count(), graph.nodes.len());
}

#[test]
fn reads_a_graph_of_the_thesis_and_refuses_invalid_json() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("token-00000.json");
    let node = r#"{"id":"node_0","address":"0x59","label":"inp_embd","operation":"get_rows(x)","shape":[2880,2],"dtype":"f32","layer_id":null,"category":"input","node_type":"embedding"}"#;
    let json = format!(
        r#"{{"token_id":0,"metadata":{{"total_nodes":1,"total_edges":0,"layers":24,"timestamp_generated":null}},"nodes":[{node}],"edges":[]}}"#
    );
    std::fs::write(&path, json).unwrap();
    let graph = Graph::read(&path).unwrap();
    assert_eq!(
        (graph.metadata.layers, graph.nodes[0].label.as_str()),
        (24, "inp_embd")
    );
    std::fs::write(&path, "{\"token_id\":").unwrap();
    let error = Graph::read(&path).unwrap_err();
    assert!(
        matches!(&error, Error::Json { path: at, what: "graph", .. } if *at == path),
        "{error:?}"
    );
}
