//! Responses and arrays of servers: where routing is, and how layers and tokens are numbered.

use std::collections::{BTreeMap, BTreeSet};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use moe_foreign::{EXPORTERS, Export, Input, JsonError, ResponseError};

use super::*;

fn dumps() -> PathBuf {
    fixtures().join("../server-dumps")
}

/// A model whose block 0 is dense, whose blocks 1 to 3 have experts, and whose block 4 is the MTP head with experts.
fn glm() -> ImportOptions {
    model(5, 1, &[1, 2, 3, 4])
}

/// A model of four blocks with experts.
fn all_moe() -> ImportOptions {
    model(4, 0, &[0, 1, 2, 3])
}

/// A `.npy` file of bytes.
fn npy(shape: &[usize], bytes: &[u8]) -> Vec<u8> {
    let header = format!("{{'descr': '|u1', 'fortran_order': False, 'shape': {shape:?}, }}")
        .replace('[', "(")
        .replace(']', ")");
    let mut file = b"\x93NUMPY\x01\x00".to_vec();
    file.extend(u16::try_from(header.len()).unwrap().to_le_bytes());
    file.extend(header.as_bytes());
    file.extend(bytes);
    file
}

pub(super) fn read_bytes(
    bytes: &[u8],
    options: &ImportOptions,
) -> Result<(Summary, Kept), ForeignError> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace");
    fs::write(&path, bytes).unwrap();
    read(&path, options)
}

pub(super) fn layer_error(result: Result<(Summary, Kept), ForeignError>) -> LayerError {
    match result.unwrap_err() {
        ForeignError::Layers { source, .. } => source,
        other => panic!("{other}"),
    }
}

fn layers(kept: &Kept) -> BTreeSet<u16> {
    let rows = kept.rows.iter().map(|row| row.layer_id.0);
    rows.chain(kept.counts.iter().map(|row| row.layer_id.0))
        .collect()
}

/// Counts by layer and expert.
pub(super) fn counts(kept: &Kept) -> BTreeMap<(u16, u32), u64> {
    let mut counts = BTreeMap::new();
    for row in &kept.rows {
        *counts.entry((row.layer_id.0, row.expert_id.0)).or_insert(0) += 1;
    }
    for row in &kept.counts {
        *counts.entry((row.layer_id.0, row.expert_id.0)).or_insert(0) += row.count;
    }
    counts
}

/// Counts of `n_tokens` tokens in layers 1 to 3, where layer l selects experts l and l + 4.
fn glm_counts(n_tokens: u64) -> BTreeMap<(u16, u32), u64> {
    let experts = (1..4).flat_map(|layer| [layer, layer + 4].map(|expert| (layer as u16, expert)));
    experts.map(|place| (place, n_tokens)).collect()
}

#[test]
fn limits_the_choices_of_a_response() {
    let routed = r#"{"index":0,"routed_experts":[[[1]]]}"#;
    let empty = |n: usize| ",{}".repeat(n);
    for text in [
        format!(r#"{{"choices":[{routed}{}]}}"#, empty(1 << 14)),
        format!(r#"[{{"choices":[{routed}]}}{}]"#, empty(1 << 17)),
        // An id that is neither a string nor a number.
        format!(r#"{{"id":[{{"a":0}}],"choices":[{routed}]}}"#),
        format!(r#"{{"choices":[{routed}],"meta_info":{{"id":{{}}}}}}"#),
    ] {
        let error = read_bytes(text.as_bytes(), &options()).unwrap_err();
        assert!(error.cause::<JsonError>().is_some(), "{error}");
    }
    let chunks = format!(
        "data: {{\"object\":\"a.chunk\",\"choices\":[{routed}{}]}}\n\ndata: {{\"object\":\"a.chunk\",\"choices\":[{{\"index\":1}}]}}\n",
        empty((1 << 14) - 1)
    );
    let error = read_bytes(chunks.as_bytes(), &options()).unwrap_err();
    let is_expected = matches!(
        error,
        ForeignError::Response {
            source: ResponseError::Choices { limit: 16_384 },
            ..
        }
    );
    assert!(is_expected, "{error}");
    // Nested choices are ignored; an id may be a number.
    let nested = format!(r#"{{"id":7,"choices":[{{"choices":[{routed}]}},{routed}]}}"#);
    let (_, kept) = read_bytes(nested.as_bytes(), &options()).unwrap();
    assert_eq!(kept.rows.len(), 1);
}

#[test]
fn reads_arrays_with_one_row_per_hidden_layer() {
    for name in ["routed.npy", "vllm.json"] {
        for options in [glm(), options()] {
            let (summary, kept) = read(&dumps().join(name), &options).unwrap();
            assert_eq!(kept.rows.len(), 6 * 3 * 2, "{name}");
            assert_eq!(counts(&kept), glm_counts(6), "{name}");
            // The empty row shows that there is one row per hidden layer.
            assert!(summary.missing.is_empty(), "{name}");
        }
    }
}

#[test]
fn reads_arrays_with_one_row_per_moe_layer() {
    let token = [1, 5, 2, 6, 3, 7];
    let dump = npy(&[4, 3, 2], &token.repeat(4));
    let (_, kept) = read_bytes(&dump, &glm()).unwrap();
    assert_eq!(counts(&kept), glm_counts(4));
    // Without the model, rows are numbered from 0, with a warning.
    let (summary, kept) = read_bytes(&dump, &options()).unwrap();
    assert_eq!(layers(&kept), [0, 1, 2].into());
    assert_eq!(summary.missing, [Missing::Layers].into());
}

#[test]
fn rejects_arrays_that_match_neither_layout() {
    // The first case has a row for the MTP head.
    let token = [0, 0, 1, 5, 2, 6, 3, 7, 1, 2];
    for (n_rows, bytes) in [(5, &token[..]), (2, &token[2..6]), (1, &token[2..4])] {
        let error = layer_error(read_bytes(&npy(&[1, n_rows, 2], bytes), &glm()));
        let expected = LayerError::Rows {
            n_rows,
            n_hidden: 4,
            n_moe: 3,
            n_nextn: 1,
        };
        assert_eq!(error, expected);
    }
    // The row of the dense layer is not empty.
    let error = layer_error(read_bytes(
        &npy(&[1, 4, 2], &[3, 4, 1, 5, 2, 6, 3, 7]),
        &glm(),
    ));
    assert_eq!(error, LayerError::Dense { layer: 0 });
    let error = layer_error(read_text_of("[[1, 0], [2, 3], [4, 5], [6, 7]]", &glm()));
    assert_eq!(error, LayerError::Dense { layer: 0 });
}

/// On the golden file of two layers of every format whose layers are rows of a server's array.
#[test]
fn every_array_format_maps_rows_to_blocks() {
    let by_number = ["imatrix/", "mbolt/", "rtrace/"];
    for name in FILES {
        if by_number.iter().any(|format| name.starts_with(format)) {
            continue;
        }
        let path = fixtures().join(name);
        let (summary, kept) = read(&path, &options()).unwrap();
        assert_eq!(layers(&kept), [0, 1].into(), "{name}");
        assert_eq!(summary.missing, [Missing::Layers].into(), "{name}");
        let expected = counts(&kept);
        // One row per MoE layer of a model whose first layer is dense and which has an MTP head.
        let (summary, kept) = read(&path, &model(4, 1, &[1, 2, 3])).unwrap();
        let shifted = expected.iter();
        let shifted: BTreeMap<_, _> = shifted.map(|(&(l, e), &n)| ((l + 1, e), n)).collect();
        assert_eq!(counts(&kept), shifted, "{name}");
        assert!(summary.missing.is_empty(), "{name}");
        // One row per hidden layer.
        let (_, kept) = read(&path, &model(3, 1, &[0, 1, 2])).unwrap();
        assert_eq!(counts(&kept), expected, "{name}");
        // A model with another number of layers. A response without a shape fits no number of tokens.
        let error = read(&path, &model(7, 0, &[1, 2, 3])).unwrap_err();
        let is_expected = matches!(
            error,
            ForeignError::Layers { .. } | ForeignError::Response { .. }
        );
        assert!(is_expected, "{name}: {error}");
    }
}

#[test]
fn rejects_numbered_layers_that_are_dense_in_the_model() {
    let line = |layer: u16| format!("{{\"t\":0,\"layer\":{layer},\"experts\":[1,5]}}\n");
    read_text_of(&line(1), &glm()).unwrap();
    let error = layer_error(read_text_of(&line(0), &glm()));
    assert_eq!(error, LayerError::Dense { layer: 0 });
    let error = layer_error(read_text_of("layer,expert\n0,1\n0,5\n", &glm()));
    assert_eq!(error, LayerError::Dense { layer: 0 });
}

/// With top-1, expert 0 is not padding unless the layer is dense.
#[test]
fn keeps_expert_0_of_moe_layers_with_top_1() {
    let options = ImportOptions {
        top_k: Some(1),
        ..model(4, 0, &[1, 3])
    };
    let (_, kept) = read_bytes(&npy(&[2, 4, 1], &[0, 0, 0, 3, 0, 1, 0, 0]), &options).unwrap();
    let expected = [((1, 0), 1), ((1, 1), 1), ((3, 0), 1), ((3, 3), 1)];
    assert_eq!(counts(&kept), expected.into());
    let (_, kept) = read_bytes(&npy(&[2, 2, 1], &[0, 3, 1, 0]), &options).unwrap();
    assert_eq!(counts(&kept), expected.into());
}

#[test]
fn coli_usage_skips_the_mtp_layer() {
    for header in ["-1 4 8\n", ""] {
        let text = format!("{header}1 5 2\n3 7 1\n4 2 9\n");
        let (summary, kept) = read_text_of(&text, &glm()).unwrap();
        assert_eq!(counts(&kept), [((1, 5), 2), ((3, 7), 1)].into());
        assert_eq!(summary.model_info.n_layer, Some(5));
        assert!(has_note(&summary, "skipped 1 count"), "{summary:?}");
    }
}

/// Base64 of a response of SGLang with `n_tokens` tokens in four layers, where layer l selects experts 2l and 2l + 1.
fn base64_of(n_tokens: usize) -> String {
    let token: Vec<u8> = (0i32..8).flat_map(i32::to_le_bytes).collect();
    STANDARD.encode(token.repeat(n_tokens))
}

fn assert_tokens(kept: &Kept, tokens: std::ops::Range<u32>) {
    let found: BTreeSet<u32> = kept.rows.iter().map(|row| row.token_id.0).collect();
    assert_eq!(found, tokens.clone().collect());
    assert_eq!(kept.rows.len(), tokens.len() * 4 * 2);
    for row in &kept.rows {
        assert_eq!(row.expert_id.0, u32::from(2 * row.layer_id.0 + row.slot));
        let phase = if row.token_id.0 < 16 {
            Phase::Prompt
        } else {
            Phase::Generate
        };
        assert_eq!(row.phase, Some(phase));
        assert_eq!(row.sequence_id, Some(0));
    }
}

#[test]
fn responses_may_omit_the_first_tokens() {
    let path = dumps().join("from10.json");
    let (_, kept) = read(&path, &all_moe()).unwrap();
    assert_tokens(&kept, 10..20);
    // Without the model it is read as two layers that start with the first token.
    let (summary, kept) = read(&path, &options()).unwrap();
    assert_eq!(layers(&kept), [0, 1].into());
    assert!(has_note(&summary, "assumed 2"), "{summary:?}");
    assert_eq!(summary.missing, [Missing::Layers].into());
    // With routed_experts_start_len, the number of layers is determined.
    let text = fs::read_to_string(&path).unwrap();
    let started = |start: u32| {
        let key = format!("\"meta_info\": {{\"routed_experts_start_len\": {start}, ");
        text.replace("\"meta_info\": {", &key)
    };
    let (summary, kept) = read_text(&started(10)).unwrap();
    assert_tokens(&kept, 10..20);
    assert!(!has_note(&summary, "assumed"), "{summary:?}");
    let error = read_text_of(&started(9), &all_moe()).unwrap_err();
    assert!(
        matches!(
            error,
            ForeignError::Response {
                source: ResponseError::Shape { .. },
                ..
            }
        ),
        "{error}"
    );
    // The array has more tokens than were evaluated.
    let text = text.replace("\"completion_tokens\": 5", "\"completion_tokens\": 0");
    let text = text.replace("\"prompt_tokens\": 16", "\"prompt_tokens\": 5");
    assert!(read_text_of(&text, &all_moe()).is_err());
}

/// A number of integers that fits both layouts of the model.
#[test]
fn empty_rows_of_dense_layers_determine_the_layout() {
    let response = |token: &[i32], n_tokens: usize| {
        let token: Vec<u8> = token.iter().flat_map(|id| id.to_le_bytes()).collect();
        let routed = STANDARD.encode(token.repeat(n_tokens));
        format!(
            r#"{{"meta_info": {{"prompt_tokens": 10, "completion_tokens": 3, "routed_experts": "{routed}"}}}}"#
        )
    };
    let first = |kept: &Kept| kept.rows.iter().map(|row| row.token_id.0).min();
    // 72 integers: 12 tokens of three layers, or 9 tokens of four.
    let (_, kept) = read_text_of(&response(&[1, 5, 2, 6, 3, 7], 12), &glm()).unwrap();
    assert_eq!((counts(&kept), first(&kept)), (glm_counts(12), Some(0)));
    let (_, kept) = read_text_of(&response(&[0, 0, 1, 5, 2, 6, 3, 7], 9), &glm()).unwrap();
    assert_eq!((counts(&kept), first(&kept)), (glm_counts(9), Some(3)));
}

#[test]
fn finds_the_extension_of_sglang_in_all_places() {
    let chat = fs::read_to_string(dumps().join("chat.json")).unwrap();
    let routed = base64_of(20);
    let usage = r#""usage": {"prompt_tokens": 16, "completion_tokens": 5}"#;
    let texts = [
        chat,
        format!(r#"{{"choices": [{{"sglext": {{"routed_experts": "{routed}"}}}}], {usage}}}"#),
        format!(
            r#"{{"choices": [{{"index": 0}}], {usage}, "sglext": {{"routed_experts": "{routed}"}}}}"#
        ),
        format!(
            r#"{{"choices": [{{"index": 0}}], {usage}, "sgl_ext": {{"routed_experts": "{routed}"}}}}"#
        ),
        format!(
            r#"{{"choices": [{{"meta_info": {{"prompt_tokens": 16, "completion_tokens": 5, "routed_experts": "{routed}"}}}}]}}"#
        ),
        format!(r#"{{"sglext": {{"routed_experts": "{routed}"}}, {usage}}}"#),
        // Chunks of a streamed response, as server-sent events and as JSONL.
        format!(
            ": comment\ndata: {{\"id\": \"a\", \"choices\": [{{\"index\": 0, \"delta\": {{\"content\": \"x\"}}}}]}}\n\n\
             data: {{\"id\": \"a\", \"choices\": [], \"sglext\": {{\"routed_experts\": \"{routed}\"}}}}\n\n\
             data: {{\"id\": \"a\", \"choices\": [], {usage}}}\n\ndata: [DONE]\n\n"
        ),
        format!(
            "{{\"id\": 1, \"object\": \"chat.completion.chunk\", \"choices\": [{{\"index\": 0, \"sgl_ext\": {{\"routed_experts\": \"{routed}\"}}}}]}}\n\
             {{\"id\": 1, \"object\": \"chat.completion.chunk\", \"choices\": [], {usage}}}\n"
        ),
    ];
    for text in texts {
        let (summary, kept) = read_text_of(&text, &all_moe()).expect(&text);
        assert_eq!(summary.format, "sglang-response", "{text}");
        assert_tokens(&kept, 0..20);
    }
}

#[test]
fn choices_with_an_extension_are_sequences() {
    let choice = |n| format!(r#"{{"sglext": {{"routed_experts": "{}"}}}}"#, base64_of(n));
    let text = format!(
        r#"{{"choices": [{}, {}], "usage": {{"prompt_tokens": 16, "completion_tokens": 9}}}}"#,
        choice(18),
        choice(21)
    );
    let (_, kept) = read_text_of(&text, &all_moe()).unwrap();
    let mut tokens: BTreeMap<Option<u32>, BTreeSet<u32>> = BTreeMap::new();
    for row in &kept.rows {
        tokens
            .entry(row.sequence_id)
            .or_default()
            .insert(row.token_id.0);
    }
    let expected = [(Some(0), (0..18).collect()), (Some(1), (0..21).collect())];
    assert_eq!(tokens, expected.into());
}

/// Prompts of 3 and 4 tokens, 3 generated tokens each. `usage` sums the tokens of both prompts.
#[test]
fn does_not_use_the_summed_usage_of_several_prompts() {
    let usage = r#""usage": {"prompt_tokens": 7, "completion_tokens": 6}"#;
    let lists = |n: usize| format!("[{}]", vec!["[[0,1],[2,3],[4,5],[6,7]]"; n].join(","));
    let choice = |n: usize| {
        let (prompt, generated) = (lists(n), lists(2));
        format!(r#"{{"prompt_routed_experts": {prompt}, "routed_experts": {generated}}}"#)
    };
    let text = format!(r#"{{"choices": [{}, {}], {usage}}}"#, choice(3), choice(4));
    let (_, kept) = read_text_of(&text, &all_moe()).unwrap();
    let generated: BTreeSet<_> = kept
        .rows
        .iter()
        .filter(|row| row.phase == Some(Phase::Generate))
        .map(|row| (row.sequence_id, row.token_id.0))
        .collect();
    let expected = [(Some(0), 3), (Some(0), 4), (Some(1), 4), (Some(1), 5)];
    assert_eq!(generated, expected.into());
    // If prompt and generated tokens are one array, phases are unknown.
    let choice = |n| format!(r#"{{"sgl_ext": {{"routed_experts": "{}"}}}}"#, base64_of(n));
    let text = format!(r#"{{"choices": [{}, {}], {usage}}}"#, choice(5), choice(6));
    let (_, kept) = read_text_of(&text, &all_moe()).unwrap();
    assert!(kept.rows.iter().all(|row| row.phase.is_none()));
}

/// The output and the notes of the exporter `name` for the trace at `path`.
fn export(path: &Path, options: &ImportOptions, name: &str) -> (Vec<u8>, Vec<String>) {
    let exporter = EXPORTERS.iter().find(|exporter| exporter.name() == name);
    let input = Input::Foreign(moe_foreign::detect(path).unwrap().unwrap());
    let mut bytes = Vec::new();
    let losses = exporter
        .unwrap()
        .export(&Export::new(&input, options).unwrap(), &mut bytes)
        .unwrap();
    (bytes, losses)
}

#[test]
fn exports_for_servers_have_one_row_per_hidden_layer() {
    let path = dumps().join("routed.npy");
    let (bytes, _) = export(&path, &glm(), "eplb");
    let matrix = "[[0, 0, 0, 0, 0, 0, 0, 0], [0, 6, 0, 0, 0, 6, 0, 0], [0, 0, 6, 0, 0, 0, 6, 0], [0, 0, 0, 6, 0, 0, 0, 6]]\n";
    assert_eq!(String::from_utf8(bytes).unwrap(), matrix);
    for name in [
        "npy",
        "npy-counts",
        "sglang",
        "eplb",
        "coli-usage",
        "ds4-hotlist",
    ] {
        let (bytes, losses) = export(&path, &glm(), name);
        assert!(
            !losses.iter().any(|loss| loss.contains("MTP")),
            "{losses:?}"
        );
        for options in [glm(), options()] {
            let (_, kept) = read_bytes(&bytes, &options).unwrap();
            assert_eq!(counts(&kept), glm_counts(6), "{name}");
        }
    }
}

#[test]
fn exports_for_servers_skip_the_mtp_head() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace.jsonl");
    let line = |layer: u16| format!("{{\"t\":0,\"layer\":{layer},\"experts\":[1,5]}}\n");
    fs::write(&path, line(1) + &line(4)).unwrap();
    for name in ["npy", "npy-counts", "sglang", "eplb"] {
        let (bytes, losses) = export(&path, &glm(), name);
        let expected = "skipped 1 layer of the MTP head: servers count only hidden layers";
        assert!(
            losses.iter().any(|loss| loss == expected),
            "{name}: {losses:?}"
        );
        let (_, kept) = read_bytes(&bytes, &glm()).unwrap();
        assert_eq!(counts(&kept), [((1, 1), 1), ((1, 5), 1)].into(), "{name}");
    }
}
