//! Arrays whose shape alone does not show what they hold, and experts for a token that the model does not have.

use super::servers::{counts, layer_error, read_bytes};
use super::*;

/// A `.npy` file of numbers that are written as `descr` names their type.
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

/// Four layers of 8 experts, of which a token selects 2.
fn small() -> ImportOptions {
    let mut options = model(4, 0, &[0, 1, 2, 3]);
    options.model.as_mut().unwrap().n_expert = Some(8);
    options
}

/// Counts `[3 steps, 4 layers, 8 experts]` as integers have the form of routing with 8 experts for a token.
#[test]
fn counts_with_the_form_of_routing_are_refused_for_a_model_with_fewer_experts_of_a_token() {
    let numbers = (0..3 * 4 * 8).map(|i: i64| (i % 5).to_le_bytes());
    let file = npy("<i8", &[3, 4, 8], numbers);
    let error = layer_error(read_bytes(&file, &small()));
    assert_eq!(
        error,
        LayerError::Slots {
            n_slots: 8,
            most: 2
        }
    );
    // Where the user names the number, that of the array is taken with a warning, as for other traces.
    let file = npy("<i8", &[1, 1, 3], [1i64, 5, 7].map(i64::to_le_bytes));
    let (summary, _) = read_bytes(&file, &options()).unwrap();
    assert!(
        has_note(&summary, "the top-k of 2 is passed over"),
        "{summary:?}"
    );
}

/// The experts that were seen go before those of the model, with a warning.
#[test]
fn lines_with_more_experts_than_the_model_selects_are_read_with_a_warning() {
    let text = "{\"t\":0,\"layer\":0,\"experts\":[0,1,2,3]}\n{\"t\":1,\"layer\":0,\"experts\":[4,5,6,7]}\n";
    let (summary, kept) = read_text_of(text, &small()).unwrap();
    assert_eq!(kept.rows.len(), 8);
    assert_eq!(summary.facts.n_expert_used, Some(4));
    assert!(
        has_note(
            &summary,
            "warning: the trace has 4 experts for a token, the model selects 2"
        ),
        "{summary:?}"
    );
    // A run may route a token to fewer experts than the model does.
    let text = "{\"t\":0,\"layer\":0,\"experts\":[0]}\n";
    let (summary, _) = read_text_of(text, &small()).unwrap();
    assert!(!has_note(&summary, "warning"), "{summary:?}");
}

/// A token has 2 experts in layer 0, for which the model selects 1.
#[test]
fn more_experts_than_the_model_selects_in_a_layer_are_reported() {
    let of_layers = |n_expert_used_by_block| ImportOptions {
        model: Some(Facts {
            n_expert: Some(8),
            n_expert_used_by_block,
            ..Facts::default()
        }),
        ..ImportOptions::default()
    };
    let text = "{\"t\":0,\"layer\":0,\"experts\":[0,1]}\n{\"t\":0,\"layer\":1,\"experts\":[4,5]}\n";
    let warning = "warning: in layer 0 the trace has more experts for a token than the 1 that";
    let (summary, _) = read_text_of(text, &of_layers(vec![1, 2])).unwrap();
    assert!(has_note(&summary, warning), "{summary:?}");
    let (summary, _) = read_text_of(text, &of_layers(vec![2, 3])).unwrap();
    assert!(!has_note(&summary, "warning"), "{summary:?}");
}

/// Counts `[steps, layers, experts]` have the shape of routing.
#[test]
fn arrays_whose_tokens_must_repeat_experts_are_refused() {
    let file = |numbers: [i64; 6]| npy("<i8", &[2, 1, 3], numbers.map(i64::to_le_bytes));
    let error = read_bytes(&file([1, 0, 1, 0, 1, 0]), &ImportOptions::default()).unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("[0, 0]: 3 experts in one layer, but no expert is above 1"),
        "{text}"
    );
    // Empty slots, and a token that was not routed.
    let (_, kept) = read_bytes(&file([1, 0, -1, 0, 0, 0]), &ImportOptions::default()).unwrap();
    assert_eq!(kept.rows.len(), 2);
}

/// `[6 tokens, 4 layers, 2]` as lists is either; as floats it has the form of MoE-Infinity's counts; of one layer it has the form
/// of counts.
#[test]
fn what_may_be_routing_is_not_counted_silently() {
    let experts: Vec<i32> = (0..8).collect::<Vec<_>>().repeat(6);
    let token = "[[0, 1], [2, 3], [4, 5], [6, 7]]";
    let lists = format!("[{}]", [token; 6].join(", "));
    let error = read_text_of(&lists, &options()).unwrap_err().to_string();
    assert!(error.contains("nothing shows which"), "{error}");
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
            has_note(&summary, "was read as counts of experts"),
            "{summary:?}"
        );
    }
    // The model's number of experts shows that they are counts.
    let mut two_experts = model(3, 0, &[0, 1, 2]);
    two_experts.model.as_mut().unwrap().n_expert = Some(2);
    let (summary, kept) = read_text_of(text, &two_experts).unwrap();
    assert!(!has_note(&summary, "was read as"), "{summary:?}");
    assert_eq!(counts(&kept)[&(1, 0)], 3);
    // Equal counts in a layer are no experts of a token.
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

/// Probabilities of 8 experts, which fall from the first to the last.
#[test]
fn a_layer_has_its_own_number_of_experts_of_a_token() {
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

/// A server's array has room for the most experts of any layer.
#[test]
fn a_response_has_the_most_experts_of_any_layer() {
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
