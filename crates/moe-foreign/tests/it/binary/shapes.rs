//! Arrays whose shape does not determine their content, and traces with another top-k than the model.

use moe_foreign::RoutingError;

use super::servers::{counts, layer_error, read_bytes};
use super::*;

/// A `.npy` file of numbers with the element type `descr`.
fn npy<const N: usize>(
    descr: &str,
    shape: &[usize],
    numbers: impl IntoIterator<Item = [u8; N]>,
) -> Vec<u8> {
    let shape = format!("{shape:?}").replace('[', "(").replace(']', ")");
    let header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}");
    let mut file = b"\x93NUMPY\x01\x00".to_vec();
    file.extend(u16::try_from(header.len()).unwrap().to_le_bytes());
    file.extend(header.as_bytes());
    file.extend(numbers.into_iter().flatten());
    file
}

/// A model of four layers with 8 experts, top-2.
fn small() -> ImportOptions {
    let mut options = model(4, 0, &[0, 1, 2, 3]);
    options.model.as_mut().unwrap().n_expert = Some(8);
    options
}

/// Integer counts `[3 steps, 4 layers, 8 experts]` have the shape of routing with top-8.
#[test]
fn rejects_counts_that_look_like_routing_with_a_higher_top_k() {
    let numbers = (0..3 * 4 * 8).map(|i: i64| (i % 5).to_le_bytes());
    let file = npy("<i8", &[3, 4, 8], numbers);
    let error = layer_error(read_bytes(&file, &small()));
    assert_eq!(error, LayerError::Slots { n_slots: 8, max: 2 });
    // If the user specifies the top-k, that of the array is used with a warning.
    let file = npy("<i8", &[1, 1, 3], [1i64, 5, 7].map(i64::to_le_bytes));
    let (summary, _) = read_bytes(&file, &options()).unwrap();
    assert!(
        has_note(&summary, "the specified top-k of 2 is ignored"),
        "{summary:?}"
    );
}

/// A mask `[2 tokens, 2 layers, 4 experts]` has the shape of routing, and `[layers, experts]` that of counts.
#[test]
fn rejects_masks_of_experts() {
    let mask = [[1u8], [0], [1], [0]].repeat(4);
    let routing = read_bytes(&npy("|b1", &[2, 2, 4], mask.clone()), &small()).unwrap_err();
    assert_eq!(routing.cause(), Some(&RoutingError::Mask), "{routing}");
    let counts = read_bytes(&npy("|b1", &[4, 4], mask), &small()).unwrap_err();
    assert_eq!(counts.cause(), Some(&CountError::Mask), "{counts}");
}

/// The top-k of the trace has precedence over that of the model.
#[test]
fn warns_of_lines_with_a_higher_top_k_than_the_model() {
    let text = "{\"t\":0,\"layer\":0,\"experts\":[0,1,2,3]}\n{\"t\":1,\"layer\":0,\"experts\":[4,5,6,7]}\n";
    let (summary, kept) = read_text_of(text, &small()).unwrap();
    assert_eq!(kept.rows.len(), 8);
    assert_eq!(summary.model_info.n_expert_used, Some(4));
    assert!(
        has_note(
            &summary,
            "warning: the trace has 4 experts per token, but the model selects 2"
        ),
        "{summary:?}"
    );
    // A run may select fewer experts than the model.
    let text = "{\"t\":0,\"layer\":0,\"experts\":[0]}\n";
    let (summary, _) = read_text_of(text, &small()).unwrap();
    assert!(!has_note(&summary, "warning"), "{summary:?}");
}

/// A token has 2 experts in layer 0, but the model selects 1 there.
#[test]
fn warns_of_a_layer_with_a_higher_top_k_than_the_model() {
    let of_layers = |n_expert_used_by_block| ImportOptions {
        model: Some(ModelInfo {
            n_expert: Some(8),
            n_expert_used_by_block,
            ..ModelInfo::default()
        }),
        ..ImportOptions::default()
    };
    let text = "{\"t\":0,\"layer\":0,\"experts\":[0,1]}\n{\"t\":0,\"layer\":1,\"experts\":[4,5]}\n";
    let warning = "warning: layer 0: the trace has more experts per token than the 1 that";
    let (summary, _) = read_text_of(text, &of_layers(vec![1, 2])).unwrap();
    assert!(has_note(&summary, warning), "{summary:?}");
    let (summary, _) = read_text_of(text, &of_layers(vec![2, 3])).unwrap();
    assert!(!has_note(&summary, "warning"), "{summary:?}");
}

/// Counts `[steps, layers, experts]` have the shape of routing.
#[test]
fn rejects_arrays_with_more_slots_than_expert_ids() {
    let file = |numbers: [i64; 6]| npy("<i8", &[2, 1, 3], numbers.map(i64::to_le_bytes));
    let error = read_bytes(&file([1, 0, 1, 0, 1, 0]), &ImportOptions::default()).unwrap_err();
    assert_eq!(
        error.location(),
        Some(&Location::Element("[0, 0]".into())),
        "{error}"
    );
    let cause = RoutingError::Repeated {
        n_used: 3,
        highest: 1,
    };
    assert_eq!(error.cause(), Some(&cause), "{error}");
    // An empty slot, and a token that was not routed.
    let (_, kept) = read_bytes(&file([1, 0, -1, 0, 0, 0]), &ImportOptions::default()).unwrap();
    assert_eq!(kept.rows.len(), 2);
}

/// Routing `[6 tokens, 4 layers, top-2]`. As lists it may be routing or counts. As floats it has the shape of MoE-Infinity's counts. One
/// layer of it has the shape of counts.
#[test]
fn warns_of_counts_that_may_be_routing() {
    let experts: Vec<i32> = (0..8).collect::<Vec<_>>().repeat(6);
    let token = "[[0, 1], [2, 3], [4, 5], [6, 7]]";
    let lists = format!("[{}]", [token; 6].join(", "));
    let error = read_text_of(&lists, &options()).unwrap_err();
    assert_eq!(
        error.cause::<CountError>(),
        Some(&CountError::Ambiguous),
        "{error}"
    );
    let floats = npy(
        "<f4",
        &[6, 4, 2],
        experts.iter().map(|&e| (e as f32).to_le_bytes()),
    );
    let layer = npy(
        "<i4",
        &[6, 2],
        [2, 3].repeat(6).into_iter().map(i32::to_le_bytes),
    );
    let text = "[[2, 3], [3, 2], [0, 3]]";
    for bytes in [&floats, &layer, text.as_bytes()] {
        let (summary, _) = read_bytes(bytes, &options()).unwrap();
        assert!(summary.counts > 0);
        assert!(
            has_note(&summary, "was read as expert counts"),
            "{summary:?}"
        );
    }
    // The model's number of experts shows that they are counts.
    let mut two_experts = model(3, 0, &[0, 1, 2]);
    two_experts.model.as_mut().unwrap().n_expert = Some(2);
    let (summary, kept) = read_text_of(text, &two_experts).unwrap();
    assert!(!has_note(&summary, "was read as"), "{summary:?}");
    assert_eq!(counts(&kept)[&(1, 0)], 3);
    // Equal counts in a layer cannot be the experts of a token.
    let (summary, _) = read_text_of("[[2, 2], [3, 2]]", &options()).unwrap();
    assert!(!has_note(&summary, "was read as"), "{summary:?}");
}

/// A model whose layers select 1, 2, 2 and 4 experts.
fn differing() -> ImportOptions {
    let mut options = model(4, 0, &[0, 1, 2, 3]);
    let model = options.model.as_mut().unwrap();
    model.n_expert_used = None;
    model.n_expert_used_by_block = vec![1, 2, 2, 4];
    options
}

/// Probabilities of 8 experts in descending order.
#[test]
fn uses_the_top_k_of_each_layer() {
    let mut bytes = b"RTRACE01".to_vec();
    bytes.extend([8u32, 0].map(u32::to_le_bytes).concat());
    for layer in 0..4u32 {
        bytes.extend([0, layer].map(u32::to_le_bytes).concat());
        bytes.extend((0..8u8).flat_map(|i| (0.5 / f32::from(i + 1)).to_le_bytes()));
    }
    let (_, kept) = read_bytes(&bytes, &differing()).unwrap();
    let of_layer = |layer: u16| {
        kept.rows
            .iter()
            .filter(|row| row.layer_id.0 == layer)
            .count()
    };
    assert_eq!([0, 1, 2, 3].map(of_layer), [1, 2, 2, 4]);

    let text = "layer,expert\n0,5\n0,6\n1,1\n1,2\n1,3\n1,4\n2,0\n2,1\n2,2\n2,3\n3,0\n3,1\n3,2\n3,3\n3,4\n3,5\n3,6\n3,7\n";
    let (summary, kept) = read_text_of(text, &differing()).unwrap();
    assert!(summary.missing.is_empty(), "{summary:?}");
    for row in &kept.rows {
        let expected = [1, 2, 2, 4][usize::from(row.layer_id.0)];
        assert!(row.slot < expected && row.token_id.0 < 2, "{row:?}");
    }
    assert_eq!(kept.rows.len(), 2 * (1 + 2 + 2 + 4));
}

/// A server's array has as many slots as the highest top-k of any layer.
#[test]
fn a_response_has_the_highest_top_k_of_any_layer() {
    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD;
    let token = [
        [3, -1, -1, -1],
        [0, 1, -1, -1],
        [4, 5, -1, -1],
        [0, 1, 2, 3i32],
    ];
    let token: Vec<u8> = token
        .concat()
        .into_iter()
        .flat_map(i32::to_le_bytes)
        .collect();
    let routed = STANDARD.encode(token.repeat(5));
    let text = format!(
        r#"{{"meta_info": {{"prompt_tokens": 4, "completion_tokens": 2, "routed_experts": "{routed}"}}}}"#
    );
    let (summary, kept) = read_text_of(&text, &differing()).unwrap();
    assert_eq!(kept.rows.len(), 5 * (1 + 2 + 2 + 4));
    assert!(!has_note(&summary, "warning"), "{summary:?}");
}
