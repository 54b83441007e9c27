//! Models laid out anew: nothing changes but places.

use moe_gguf::check::check;
use moe_gguf::layers::layer_order;
use moe_gguf::{ExpertId, GgmlType, Gguf, LayerId, Value};
use moe_synth::relayout::{Error, ExpertOrders, Layout, TensorOrder, n_experts};
use moe_synth::write::{Header, Writer};
use moe_testkit::gguf::{F32, Raw};

fn fixture(name: &str) -> Gguf {
    Gguf::open(moe_testkit::fixture(name)).unwrap()
}

/// An order for the experts of one layer.
fn order_of(layer: u16, order: &[u32]) -> ExpertOrders {
    let order = order.iter().copied().map(ExpertId).collect();
    ExpertOrders::from([(LayerId(layer), order)])
}

/// Lays a model out anew and makes sure of everything that holds of every layout.
fn relayout(gguf: &Gguf, order: TensorOrder, experts: &ExpertOrders) -> Gguf {
    let layout = Layout::new(gguf, order, experts).unwrap();
    let bytes = layout.write(gguf, Vec::new()).unwrap();
    assert_eq!(bytes.len() as u64, layout.file_size());
    let new = Gguf::from_bytes("new.gguf", bytes).unwrap();
    assert_eq!(layout.differences(gguf, &new).unwrap(), [""; 0]);
    let report = check(&new);
    assert!(report.is_sound() && report.llama_cpp_refuses.is_empty());
    new
}

fn data<'g>(gguf: &'g Gguf, name: &str) -> &'g [u8] {
    gguf.data(gguf.tensor(name).unwrap()).unwrap()
}

/// A model of small F32 tensors; element `i` of tensor `t` is `1000 t + i`.
fn model(keys: &[(&str, Value)], tensors: &[(&str, &[u64])]) -> Gguf {
    let mut header = Header::new();
    for (key, value) in keys {
        header.set(key, value).unwrap();
    }
    for (name, ne) in tensors {
        header.tensor(name, GgmlType::F32, ne).unwrap();
    }
    let mut writer = Writer::new(Vec::new(), header).unwrap();
    for (t, (_, ne)) in tensors.iter().enumerate() {
        for i in 0..ne.iter().product() {
            writer
                .write(&(1000.0 * t as f32 + i as f32).to_le_bytes())
                .unwrap();
        }
    }
    Gguf::from_bytes("model.gguf", writer.finish().unwrap()).unwrap()
}

fn f32s(gguf: &Gguf, name: &str) -> Vec<f32> {
    let bytes = data(gguf, name).as_chunks::<4>().0;
    bytes.iter().map(|&b| f32::from_le_bytes(b)).collect()
}

#[test]
fn as_it_is_gives_the_same_file() {
    for name in ["tiny-qwen3moe-Q4_K_M.gguf", "tiny-gpt-oss-MXFP4.gguf"] {
        let gguf = fixture(name);
        let new = relayout(&gguf, TensorOrder::File, &ExpertOrders::new());
        assert!(
            new.files()[0].contents() == gguf.files()[0].contents(),
            "{name}"
        );
    }
}

#[test]
fn numeric_lays_the_layers_in_order() {
    let names = [
        "blk.10.ffn_norm.weight",
        "blk.1.ffn_norm.weight",
        "blk.2.ffn_norm.weight",
    ];
    let shapes: Vec<(&str, &[u64])> = names.iter().map(|&name| (name, &[8][..])).collect();
    let gguf = model(&[], &shapes);
    assert!(!layer_order(&gguf).is_sequential());
    let new = relayout(&gguf, TensorOrder::Numeric, &ExpertOrders::new());
    let order = layer_order(&new);
    assert!(order.is_sequential() && order.seeks == 0);
    assert_eq!(f32s(&new, names[0])[..2], [0.0, 1.0]);
    assert_eq!(f32s(&new, names[2])[..2], [2000.0, 2001.0]);
}

#[test]
fn everything_of_an_expert_moves_with_it() {
    let gguf = fixture("tiny-gpt-oss-MXFP4.gguf");
    let n_expert = n_experts(&gguf)[&LayerId(3)];
    assert_eq!(n_expert, 32);
    let order: Vec<u32> = (0..n_expert).map(|i| (i * 5 + 3) % n_expert).collect();
    let new = relayout(&gguf, TensorOrder::File, &order_of(3, &order));

    let mut moved = Vec::new();
    for tensor in gguf.tensors() {
        let (old, new) = (data(&gguf, &tensor.name), data(&new, &tensor.name));
        if old == new {
            continue;
        }
        moved.push(tensor.name.as_str());
        let size = old.len() / n_expert as usize;
        for (place, &expert) in order.iter().enumerate() {
            let old = &old[expert as usize * size..][..size];
            assert!(
                new[place * size..][..size] == *old,
                "{} {place}",
                tensor.name
            );
        }
    }
    moved.sort_unstable();
    assert_eq!(
        moved,
        [
            "blk.3.ffn_down_exps.bias",
            "blk.3.ffn_down_exps.weight",
            "blk.3.ffn_gate_exps.bias",
            "blk.3.ffn_gate_exps.weight",
            "blk.3.ffn_gate_inp.bias",
            "blk.3.ffn_gate_inp.weight",
            "blk.3.ffn_up_exps.bias",
            "blk.3.ffn_up_exps.weight",
        ]
    );
}

#[test]
fn scales_and_selection_biases_move_too_and_shared_experts_do_not() {
    let tensors: [(&str, &[u64]); 6] = [
        ("blk.0.ffn_up_exps.weight", &[2, 1, 3]),
        ("blk.0.ffn_up_exps.scale", &[3]),
        ("blk.0.exp_probs_b.bias", &[3]),
        ("blk.0.ffn_gate_inp.weight", &[2, 3]),
        ("blk.0.ffn_gate_inp_shexp.weight", &[3]),
        ("blk.0.ffn_up_shexp.weight", &[2, 3]),
    ];
    let new = relayout(
        &model(&[], &tensors),
        TensorOrder::File,
        &order_of(0, &[2, 0, 1]),
    );
    assert_eq!(f32s(&new, tensors[0].0), [4.0, 5.0, 0.0, 1.0, 2.0, 3.0]);
    assert_eq!(f32s(&new, tensors[1].0), [1002.0, 1000.0, 1001.0]);
    assert_eq!(f32s(&new, tensors[2].0), [2002.0, 2000.0, 2001.0]);
    assert_eq!(
        f32s(&new, tensors[3].0),
        [3004.0, 3005.0, 3000.0, 3001.0, 3002.0, 3003.0]
    );
    assert_eq!(f32s(&new, tensors[4].0), [4000.0, 4001.0, 4002.0]);
    assert_eq!(f32s(&new, tensors[5].0)[..2], [5000.0, 5001.0]);
}

/// Like LongCat-Flash: in each layer 8 experts with weights, and 4 outputs of the router that select no weights.
fn longcat() -> Gguf {
    let keys = [
        (
            "general.architecture",
            Value::String("longcat-flash".into()),
        ),
        ("longcat-flash.block_count", Value::U32(2)),
        ("longcat-flash.expert_count", Value::U32(8)),
        ("longcat-flash.expert_used_count", Value::U32(2)),
    ];
    let shapes: [(&str, &[u64]); 5] = [
        ("ffn_gate_inp.weight", &[16, 12]),
        ("ffn_gate_exps.weight", &[16, 4, 8]),
        ("ffn_up_exps.weight", &[16, 4, 8]),
        ("ffn_down_exps.weight", &[4, 16, 8]),
        ("exp_probs_b.bias", &[12]),
    ];
    let tensors = (0..2).flat_map(|layer| {
        let named = shapes.map(|(name, ne)| (format!("blk.{layer}.{name}"), ne));
        named.into_iter()
    });
    let tensors: Vec<(String, &[u64])> = tensors.collect();
    let tensors: Vec<_> = tensors
        .iter()
        .map(|(name, ne)| (name.as_str(), *ne))
        .collect();
    model(&keys, &tensors)
}

#[test]
fn router_with_more_rows_than_experts_moves_with_them() {
    let gguf = longcat();
    let order: Vec<u32> = (0..8).rev().collect();
    let orders = order_of(0, &order);
    let new = relayout(&gguf, TensorOrder::File, &orders);
    for (name, n_slice) in [
        ("blk.0.ffn_gate_inp.weight", 12),
        ("blk.0.exp_probs_b.bias", 12),
        ("blk.0.ffn_gate_exps.weight", 8),
        ("blk.0.ffn_up_exps.weight", 8),
        ("blk.0.ffn_down_exps.weight", 8),
    ] {
        let (old, new) = (data(&gguf, name), data(&new, name));
        let size = old.len() / n_slice;
        for (place, now) in new.chunks_exact(size).enumerate() {
            let expert = order.get(place).map_or(place, |&expert| expert as usize);
            assert!(now == &old[expert * size..][..size], "{name} {place}");
        }
    }
    for name in ["blk.1.ffn_gate_inp.weight", "blk.1.exp_probs_b.bias"] {
        assert_eq!(data(&new, name), data(&gguf, name));
    }
}

#[test]
fn verification_compares_router_rows_with_experts() {
    let gguf = longcat();
    let orders = order_of(0, &[7, 6, 5, 4, 3, 2, 1, 0]);
    let layout = Layout::new(&gguf, TensorOrder::File, &orders).unwrap();
    let good = layout.write(&gguf, Vec::new()).unwrap();
    let open = |bytes: &[u8]| Gguf::from_bytes("new.gguf", bytes.to_vec()).unwrap();
    assert_eq!(layout.differences(&gguf, &open(&good)).unwrap(), [""; 0]);
    for tensor in ["blk.0.ffn_gate_inp.weight", "blk.0.exp_probs_b.bias"] {
        let mut bad = good.clone();
        // The router as it was: what a permutation of the experts alone would leave.
        let at = open(&good).tensor(tensor).unwrap().offset as usize;
        let old = data(&gguf, tensor);
        bad[at..at + old.len()].copy_from_slice(old);
        let found = layout.differences(&gguf, &open(&bad)).unwrap();
        let expected = format!("row 0 of \"{tensor}\" is not that of the expert that is there");
        assert!(found.contains(&expected), "{found:?}");
    }
}

/// As wide as it has experts: the name says which tensors belong to experts, not the size.
#[test]
fn tensors_of_other_meaning_stay_where_sizes_coincide() {
    let tensors: [(&str, &[u64]); 10] = [
        ("blk.0.ffn_gate_inp.weight", &[3, 3]),
        ("blk.0.ffn_gate_inp.scale", &[3]), // gemma4: of the router's input
        ("blk.0.ffn_up_exps.weight", &[3, 3, 3]),
        ("blk.0.ffn_up_exps.bias", &[3, 3]),
        ("blk.0.ffn_down_exps.input_scale", &[3]),
        ("blk.0.ffn_norm.weight", &[3]),
        ("blk.0.ffn_norm_exps.weight", &[3]), // arctic: of the experts' common input
        ("blk.0.ffn_latent_up.weight", &[3, 3]),
        ("blk.0.ffn_routed_up.weight", &[3, 3]),
        ("blk.0.ffn_gate_inp_shexp.weight", &[3]),
    ];
    let gguf = model(&[], &tensors);
    let new = relayout(&gguf, TensorOrder::File, &order_of(0, &[2, 0, 1]));
    let moved: Vec<&str> = tensors
        .iter()
        .map(|(name, _)| *name)
        .filter(|name| data(&gguf, name) != data(&new, name))
        .collect();
    assert_eq!(
        moved,
        [
            "blk.0.ffn_gate_inp.weight",
            "blk.0.ffn_up_exps.weight",
            "blk.0.ffn_up_exps.bias",
            "blk.0.ffn_down_exps.input_scale",
        ]
    );
}

#[test]
fn layers_whose_router_cannot_follow_are_refused() {
    let experts: (&str, &[u64]) = ("blk.0.ffn_up_exps.weight", &[2, 1, 3]);
    let router: (&str, &[u64]) = ("blk.0.ffn_gate_inp.weight", &[2, 3]);
    let refused = |tensors: &[(&str, &[u64])], expected: &str| {
        let orders = order_of(0, &[2, 0, 1]);
        let error = Layout::new(&model(&[], tensors), TensorOrder::File, &orders).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
    };
    refused(&[experts], "no tensor blk.0.ffn_gate_inp.weight");
    let narrow: (&str, &[u64]) = ("blk.0.ffn_gate_inp.weight", &[2, 2]);
    refused(&[experts, narrow], "fewer rows than its layer has experts");
    for (name, expected) in [
        ("blk.0.ffn_gate_tid2eid.weight", "the numbers of experts"),
        ("blk.0.ffn_gate_inp_new.weight", "its name is not known"),
        ("blk.0.ffn_up_exps.zero_point", "its name is not known"),
        ("blk.0.ffn_foo_exps.weight", "its name is not known"),
        ("blk.0.ffn_foo.1.weight", "its name is not known"),
        ("blk.0.exp_foo.weight", "its name is not known"),
        ("blk.0.ffn_router.weight", "its name is not known"),
        ("blk.0.moe_scale", "its name is not known"),
    ] {
        refused(&[experts, router, (name, &[3])], expected);
    }
    let bias: (&str, &[u64]) = ("blk.0.ffn_up_exps.bias", &[2, 2]);
    refused(&[experts, router, bias], "one slice for each expert");
}

#[test]
fn experts_in_tensors_of_their_own_are_renamed() {
    let tensors: [(&str, &[u64]); 4] = [
        ("blk.1.ffn_gate_inp.weight", &[1, 3]),
        ("blk.1.ffn_up.0.weight", &[2]),
        ("blk.1.ffn_up.1.weight", &[2]),
        ("blk.1.ffn_up.2.weight", &[2]),
    ];
    let gguf = model(&[], &tensors);
    let n_permuted = |order: &[u32]| {
        let orders = order_of(1, order);
        let layout = Layout::new(&gguf, TensorOrder::HotFirst, &orders).unwrap();
        layout.n_permuted()
    };
    // The router, and the tensors that get another name.
    assert_eq!(n_permuted(&[1, 2, 0]), 1 + 3);
    assert_eq!(n_permuted(&[0, 2, 1]), 1 + 2);
    assert_eq!(n_permuted(&[0, 1, 2]), 0);
    let new = relayout(&gguf, TensorOrder::HotFirst, &order_of(1, &[1, 2, 0]));
    let names: Vec<&str> = new.tensors().iter().map(|t| t.name.as_str()).collect();
    assert_eq!(names, tensors.map(|t| t.0));
    assert_eq!(f32s(&new, "blk.1.ffn_up.0.weight"), [2000.0, 2001.0]);
    assert_eq!(f32s(&new, "blk.1.ffn_up.1.weight"), [3000.0, 3001.0]);
    assert_eq!(f32s(&new, "blk.1.ffn_up.2.weight"), [1000.0, 1001.0]);
    assert_eq!(f32s(&new, tensors[0].0), [1.0, 2.0, 0.0]);
}

/// Written anew, each tensor would have bytes of its own, and the file would look sound.
#[test]
fn overlapping_tensors_are_refused() {
    let raw = Raw::new(2, 0)
        .tensor("a", &[8], F32, 0)
        .tensor("b", &[8], F32, 0)
        .data(32, 64);
    let gguf = Gguf::from_bytes("overlap.gguf", raw.bytes).unwrap();
    let error = Layout::new(&gguf, TensorOrder::File, &ExpertOrders::new()).unwrap_err();
    let Error::Overlap { overlap, count: 1 } = error else {
        panic!("{error}");
    };
    assert!(
        overlap.starts_with("\"b\" overlaps \"a\" by 32 bytes"),
        "{overlap}"
    );
}

#[test]
fn shards_become_one_file_without_the_keys_of_shards() {
    let dir = tempfile::tempdir().unwrap();
    for (no, tensor) in ["blk.1.attn_q.weight", "blk.0.attn_q.weight"]
        .iter()
        .enumerate()
    {
        let mut header = Header::new();
        if no == 0 {
            header
                .set("general.architecture", &Value::String("x".into()))
                .unwrap();
        }
        header.set("split.no", &Value::U16(no as u16)).unwrap();
        header.set("split.count", &Value::U16(2)).unwrap();
        header.set("split.tensors.count", &Value::I32(2)).unwrap();
        header.tensor(tensor, GgmlType::F32, &[2, 2]).unwrap();
        let mut writer = Writer::new(Vec::new(), header).unwrap();
        writer.write(&[no as u8 + 1; 16]).unwrap();
        let name = format!("m-{:05}-of-00002.gguf", no + 1);
        std::fs::write(dir.path().join(name), writer.finish().unwrap()).unwrap();
    }
    let gguf = Gguf::open(dir.path().join("m-00002-of-00002.gguf")).unwrap();
    let new = relayout(&gguf, TensorOrder::Numeric, &ExpertOrders::new());
    let keys: Vec<&str> = new.metadata().iter().map(|(key, _)| key).collect();
    assert_eq!(keys, ["general.architecture"]);
    assert_eq!(new.tensors()[0].name, "blk.0.attn_q.weight");
    assert_eq!(data(&new, "blk.0.attn_q.weight"), [2; 16]);
}

#[test]
fn a_changed_byte_is_found() {
    let gguf = fixture("random-qwen3moe-F16.gguf");
    let layout = Layout::new(&gguf, TensorOrder::Numeric, &ExpertOrders::new()).unwrap();
    let mut bytes = layout.write(&gguf, Vec::new()).unwrap();
    let name = gguf.tensors()[5].name.clone();
    let at = {
        let new = Gguf::from_bytes("new", bytes.clone()).unwrap();
        new.tensor(&name).unwrap().offset as usize
    };
    bytes[at] ^= 1;
    let found = layout
        .differences(&gguf, &Gguf::from_bytes("new", bytes).unwrap())
        .unwrap();
    assert_eq!(found, [format!("the data of tensor {name:?} differs")]);
}

/// The error of laying out a model of the given tensors with an order for layer 0.
fn refusal(keys: &[(&str, Value)], tensors: &[(&str, &[u64])], order: &[u32]) -> Error {
    let orders = order_of(0, order);
    Layout::new(&model(keys, tensors), TensorOrder::File, &orders).unwrap_err()
}

#[test]
fn orders_that_do_not_fit_are_refused() {
    let experts: (&str, &[u64]) = ("blk.0.ffn_up_exps.weight", &[2, 1, 4]);
    let not_an_order = |order: &[u32], part: &str| {
        let error = refusal(&[], &[experts], order);
        assert!(
            matches!(
                error,
                Error::NotAnOrder {
                    layer: LayerId(0),
                    ..
                }
            ),
            "{error}"
        );
        assert!(error.to_string().contains(part), "{error}");
    };
    not_an_order(&[0, 1, 2], "names 3 experts, the layer has 4");
    not_an_order(&[0, 1, 2, 2], "names expert 2 twice");
    not_an_order(&[0, 1, 2, 4], "names expert 4");
    let error = refusal(
        &[],
        &[("blk.1.ffn_up_exps.weight", &[2, 1, 4])],
        &[0, 1, 2, 3],
    );
    assert!(
        matches!(error, Error::NoExperts { layer: LayerId(0) }),
        "{error}"
    );

    let grouped = [
        ("general.architecture", Value::String("deepseek2".into())),
        ("deepseek2.expert_group_count", Value::U32(2)),
    ];
    let error = refusal(&grouped, &[experts], &[0, 2, 1, 3]);
    assert!(
        matches!(
            error,
            Error::Groups {
                layer: LayerId(0),
                n_group: 2
            }
        ),
        "{error}"
    );
    let router: (&str, &[u64]) = ("blk.0.ffn_gate_inp.weight", &[2, 4]);
    let whole = order_of(0, &[3, 2, 0, 1]);
    let gguf = model(&grouped, &[experts, router]);
    assert!(Layout::new(&gguf, TensorOrder::File, &whole).is_ok());
    // Groups of which some have experts without weights cannot be told apart.
    let wide: (&str, &[u64]) = ("blk.0.ffn_gate_inp.weight", &[2, 6]);
    let error = refusal(&grouped, &[experts, wide], &[3, 2, 0, 1]);
    assert!(matches!(error, Error::Immovable { .. }), "{error}");

    for (name, ne) in [
        ("blk.0.ffn_up_chexps.weight", &[2, 1, 2][..]),
        ("blk.0.ffn_gate_tid2eid.weight", &[2, 9]),
        ("blk.0.ffn_up_exps.bias", &[2, 3]),
    ] {
        let error = refusal(&[], &[experts, router, (name, ne)], &[3, 2, 1, 0]);
        assert!(
            matches!(&error, Error::Immovable { tensor, .. } if tensor == name),
            "{error}"
        );
    }
}
