//! Models with their tensors and experts in another order.

use moe_gguf::check::check;
use moe_gguf::layers::layer_order;
use moe_gguf::{ExpertId, GgmlType, Gguf, LayerId, Value};
use moe_synth::relayout::{
    Error, ExpertOrders, ImmovableReason, Layout, OrderFault, TensorOrder, n_experts,
};
use moe_synth::write::{Header, Writer};
use moe_testkit::gguf::{F32, Raw};

fn fixture(name: &str) -> Gguf {
    Gguf::open(moe_testkit::fixture(name)).unwrap()
}

/// Returns an order for the experts of one layer.
fn order_of(layer: u16, order: &[u32]) -> ExpertOrders {
    let order = order.iter().copied().map(ExpertId).collect();
    ExpertOrders::from([(LayerId(layer), order)])
}

/// Writes a model in another order and checks properties of all layouts.
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

/// Returns a model of small F32 tensors. Element `i` of tensor `t` is `1000 t + i`.
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
fn file_order_reproduces_the_file() {
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
fn numeric_order_makes_layers_sequential() {
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
fn all_parts_of_an_expert_move_with_it() {
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
fn scales_and_selection_biases_move_but_shared_experts_do_not() {
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

/// Returns a model like LongCat-Flash: each layer has 8 experts with weights, and 4 router outputs for experts without weights.
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
fn permutes_only_the_expert_rows_of_a_larger_router() {
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
        // The old router, as if only the experts had been permuted.
        let start = open(&good).tensor(tensor).unwrap().offset as usize;
        let old = data(&gguf, tensor);
        bad[start..start + old.len()].copy_from_slice(old);
        let found = layout.differences(&gguf, &open(&bad)).unwrap();
        let row = format!("row 0 of \"{tensor}\"");
        assert!(found.iter().any(|line| line.starts_with(&row)), "{found:?}");
    }
}

/// All widths are equal to the number of experts. Names decide which tensors belong to experts, not shapes.
#[test]
fn permutes_tensors_by_name_and_not_by_shape() {
    let tensors: [(&str, &[u64]); 10] = [
        ("blk.0.ffn_gate_inp.weight", &[3, 3]),
        ("blk.0.ffn_gate_inp.scale", &[3]), // gemma4: scale of the router's input.
        ("blk.0.ffn_up_exps.weight", &[3, 3, 3]),
        ("blk.0.ffn_up_exps.bias", &[3, 3]),
        ("blk.0.ffn_down_exps.input_scale", &[3]),
        ("blk.0.ffn_norm.weight", &[3]),
        ("blk.0.ffn_norm_exps.weight", &[3]), // Arctic: norm of the common input of all experts.
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
fn rejects_layers_with_tensors_that_cannot_be_permuted() {
    let experts: (&str, &[u64]) = ("blk.0.ffn_up_exps.weight", &[2, 1, 3]);
    let router: (&str, &[u64]) = ("blk.0.ffn_gate_inp.weight", &[2, 3]);
    let error = rejection(&[], &[experts], &[2, 0, 1]);
    assert!(
        matches!(error, Error::NoRouter { layer: LayerId(0) }),
        "{error}"
    );
    let reason_of = |tensors: &[(&str, &[u64])]| match rejection(&[], tensors, &[2, 0, 1]) {
        Error::Immovable { reason, .. } => reason,
        other => panic!("{other}"),
    };
    let narrow: (&str, &[u64]) = ("blk.0.ffn_gate_inp.weight", &[2, 2]);
    assert_eq!(reason_of(&[experts, narrow]), ImmovableReason::RouterRows);
    for (name, expected) in [
        ("blk.0.ffn_gate_tid2eid.weight", ImmovableReason::ExpertIds),
        (
            "blk.0.ffn_gate_inp_new.weight",
            ImmovableReason::UnknownName,
        ),
        ("blk.0.ffn_up_exps.zero_point", ImmovableReason::UnknownName),
        ("blk.0.ffn_foo_exps.weight", ImmovableReason::UnknownName),
        ("blk.0.ffn_foo.1.weight", ImmovableReason::UnknownName),
        ("blk.0.exp_foo.weight", ImmovableReason::UnknownName),
        ("blk.0.ffn_router.weight", ImmovableReason::UnknownName),
        ("blk.0.moe_scale", ImmovableReason::UnknownName),
    ] {
        let tensors = [experts, router, (name, &[3][..])];
        assert_eq!(reason_of(&tensors), expected, "{name}");
    }
    let bias: (&str, &[u64]) = ("blk.0.ffn_up_exps.bias", &[2, 2]);
    assert_eq!(
        reason_of(&[experts, router, bias]),
        ImmovableReason::SliceCount
    );
}

#[test]
fn renames_tensors_with_a_single_expert() {
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
    // The router and the renamed tensors.
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

/// In the new file, each tensor would have separate bytes, and the damage would be hidden.
#[test]
fn rejects_overlapping_tensors() {
    let raw = Raw::new(2, 0)
        .tensor("a", &[8], F32, 0)
        .tensor("b", &[8], F32, 0)
        .data(32, 64);
    let gguf = Gguf::from_bytes("overlap.gguf", raw.bytes).unwrap();
    let error = Layout::new(&gguf, TensorOrder::File, &ExpertOrders::new()).unwrap_err();
    assert!(matches!(error, Error::Overlap { count: 1, .. }), "{error}");
}

#[test]
fn merges_shards_and_drops_split_keys() {
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
fn verification_finds_a_changed_byte() {
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

/// Returns the error of a layout with an order for layer 0.
fn rejection(keys: &[(&str, Value)], tensors: &[(&str, &[u64])], order: &[u32]) -> Error {
    let orders = order_of(0, order);
    Layout::new(&model(keys, tensors), TensorOrder::File, &orders).unwrap_err()
}

#[test]
fn rejects_orders_that_do_not_match_the_model() {
    let experts: (&str, &[u64]) = ("blk.0.ffn_up_exps.weight", &[2, 1, 4]);
    let n_expert = 4;
    for (order, expected) in [
        (&[0, 1, 2][..], OrderFault::Length { found: 3, n_expert }),
        (
            &[0, 1, 2, 2],
            OrderFault::Repeated {
                expert: ExpertId(2),
            },
        ),
        (
            &[0, 1, 2, 4],
            OrderFault::OutOfRange {
                expert: ExpertId(4),
                n_expert,
            },
        ),
    ] {
        let error = rejection(&[], &[experts], order);
        let message = error.to_string();
        assert!(
            message.ends_with("; list each expert from 0 to 3 once"),
            "{message}"
        );
        match error {
            Error::InvalidOrder { layer, fault, .. } => {
                assert_eq!((layer, fault), (LayerId(0), expected));
            }
            other => panic!("{other}"),
        }
    }
    let error = rejection(
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
    let error = rejection(&grouped, &[experts], &[0, 2, 1, 3]);
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
    let preserves_groups = order_of(0, &[3, 2, 0, 1]);
    let gguf = model(&grouped, &[experts, router]);
    assert!(Layout::new(&gguf, TensorOrder::File, &preserves_groups).is_ok());
    // The groups of experts without weights are unknown.
    let wide: (&str, &[u64]) = ("blk.0.ffn_gate_inp.weight", &[2, 6]);
    let error = rejection(&grouped, &[experts, wide], &[3, 2, 0, 1]);
    let reason = ImmovableReason::GroupedRouter;
    assert!(
        matches!(error, Error::Immovable { reason: found, .. } if found == reason),
        "{error}"
    );

    for (name, ne) in [
        ("blk.0.ffn_up_chexps.weight", &[2, 1, 2][..]),
        ("blk.0.ffn_gate_tid2eid.weight", &[2, 9]),
        ("blk.0.ffn_up_exps.bias", &[2, 3]),
    ] {
        let error = rejection(&[], &[experts, router, (name, ne)], &[3, 2, 1, 0]);
        assert!(
            matches!(&error, Error::Immovable { tensor, .. } if tensor == name),
            "{error}"
        );
    }
}
