//! Layer order, and the formats of the thesis's tensor tracer.

use moe_gguf::layers::layer_order;
use moe_gguf::map::OffsetMap;
use moe_gguf::tensor_tracer::{memory_map, write_gguf_dump_csv};
use moe_gguf::{ExpertId, Gguf, LayerId};
use moe_testkit::gguf::{F32, Raw};

use crate::opened::{Opened, fixture};

/// Returns a model with one tensor of 32 bytes per layer, in this order.
fn layers(order: &[u16]) -> Gguf {
    let raw = order
        .iter()
        .enumerate()
        .fold(Raw::new(order.len() as u64, 0), |raw, (i, layer)| {
            raw.tensor(
                &format!("blk.{layer}.attn_q.weight"),
                &[8],
                F32,
                32 * i as u64,
            )
        });
    raw.data(32, 32 * order.len()).open().unwrap()
}

#[test]
fn numeric_order_is_sequential() {
    let report = layer_order(&layers(&[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]));
    assert!(report.is_sequential() && !report.string_sorted);
    assert_eq!((report.seeks, report.seek_bytes), (0, 0));
}

#[test]
fn recognizes_layers_sorted_as_strings() {
    let report = layer_order(&layers(&[0, 1, 10, 11, 2, 3, 4, 5, 6, 7, 8, 9]));
    assert!(report.string_sorted && !report.is_sequential());
    assert_eq!(
        report.order,
        [0, 1, 10, 11, 2, 3, 4, 5, 6, 7, 8, 9].map(LayerId)
    );
    // A seek from layer 1 to 2, over 10 and 11, and a seek from the end of 9 back to the start of 10.
    assert_eq!((report.seeks, report.seek_bytes), (2, 2 * 32 + 10 * 32));
}

#[test]
fn other_orders_are_not_string_sorted() {
    let report = layer_order(&layers(&[0, 2, 1]));
    assert!(!report.string_sorted && !report.is_sequential());
    // A seek from layer 0 to 1, over 2, and a seek back over 1 and 2.
    assert_eq!((report.seeks, report.seek_bytes), (2, 32 + 64));
}

#[test]
fn counts_pieces_of_split_layers() {
    let gguf = Raw::new(3, 0)
        .tensor("blk.0.attn_q.weight", &[8], F32, 0)
        .tensor("blk.1.attn_q.weight", &[8], F32, 32)
        .tensor("blk.0.attn_k.weight", &[6], F32, 64)
        .data(32, 96)
        .open()
        .unwrap();
    let report = layer_order(&gguf);
    let pieces: Vec<_> = report
        .layers
        .iter()
        .map(|l| (l.layer_id.0, l.pieces, l.size_bytes))
        .collect();
    assert_eq!(pieces, [(0, 2, 56), (1, 1, 32)]);
    // A seek over layer 1 (32 bytes), and a seek from the end of the last tensor (byte 88) back to byte 32.
    assert_eq!((report.seeks, report.seek_bytes), (2, 32 + 56));
}

#[test]
fn fixtures_are_in_numeric_order() {
    for name in ["tiny-qwen3moe-Q4_K_M.gguf", "tiny-gpt-oss-MXFP4.gguf"] {
        let report = layer_order(&fixture(name));
        assert!(report.is_sequential(), "{name}");
        assert_eq!(report.order, [0, 1, 2, 3, 4, 5].map(LayerId));
    }
}

#[test]
fn writes_gguf_dump_csv() {
    let gguf = fixture("tiny-gpt-oss-MXFP4.gguf");
    let mut csv = Vec::new();
    write_gguf_dump_csv(&mut csv, &gguf, &OffsetMap::new(&gguf)).unwrap();
    let csv = String::from_utf8(csv).unwrap();
    let lines: Vec<_> = csv.lines().collect();
    assert_eq!(lines.len(), 1 + 117 + 6 * 3 * 31);
    assert_eq!(
        lines[0],
        "tensor_name,file_offset,size_bytes,layer_id,component_type,n_dims,dim0,dim1,dim2,dim3"
    );
    for line in [
        "token_embd.weight,131712,1114112,-1,Token Embeddings,2,256,4096,0,0",
        "blk.0.attn_q.weight,2363008,69632,0,Attention Q,2,256,256,0,0",
        "blk.0.attn_norm.weight,2360960,1024,0,Attention Norm,1,256,0,0,0",
        "blk.0.ffn_gate_exps.weight[1],2616608,8704,0,FFN Gate Expert 1,2,256,64,0,0",
        "blk.0.ffn_gate_exps.bias,2886432,8192,0,FFN Gate,2,64,32,0,0",
    ] {
        assert!(lines.contains(&line), "{line}");
    }
}

#[test]
fn writes_memory_map() {
    let gguf = fixture("tiny-gpt-oss-MXFP4.gguf");
    let rows = OffsetMap::new(&gguf);
    let map = memory_map(&gguf, &rows);
    assert_eq!(map.model_name, "tiny-gpt-oss-MXFP4");
    assert_eq!(map.total_size_bytes, gguf.files()[0].size_bytes);
    let metadata = &map.metadata;
    assert_eq!(
        (metadata.n_layers, metadata.n_vocab, metadata.n_embd),
        (6, 4096, 256)
    );
    let tensors: Vec<_> = map.tensors.iter().collect();
    assert_eq!(
        (metadata.n_tensors, tensors.len()),
        (117 + 6 * 3 * 31, 117 + 6 * 3 * 31)
    );
    assert!(tensors.is_sorted_by_key(|t| t.offset_start));
    assert!(
        tensors
            .windows(2)
            .all(|pair| pair[0].offset_end <= pair[1].offset_start)
    );

    let expert = tensors
        .iter()
        .find(|t| t.name == "blk.5.ffn_down_exps.weight[31]")
        .unwrap();
    assert_eq!((expert.category, expert.component), ("ffn", "down"));
    assert_eq!(
        (expert.expert_id, expert.layer_id),
        (Some(ExpertId(31)), Some(LayerId(5)))
    );
    assert_eq!(
        (expert.size_bytes, &expert.shape[..]),
        (8704, &[64, 256][..])
    );
    let value = tensors
        .iter()
        .find(|t| t.name == "blk.5.attn_v.bias")
        .unwrap();
    assert_eq!(
        (value.category, value.component, value.expert_id),
        ("attention", "value", None)
    );
}

#[test]
fn gguf_dump_csv_quotes_names_with_commas() {
    let gguf = Raw::new(1, 0)
        .tensor("a,\"b", &[8], F32, 0)
        .data(32, 32)
        .open()
        .unwrap();
    let mut csv = Vec::new();
    write_gguf_dump_csv(&mut csv, &gguf, &OffsetMap::new(&gguf)).unwrap();
    assert!(
        String::from_utf8(csv)
            .unwrap()
            .contains("\n\"a,\"\"b\",64,32,-1,Other,1,8,0,0,0\n")
    );
}
