//! Importers of binary formats and of server responses, on files that `fixtures/foreign/make/binary.py` writes with NumPy, PyTorch and
//! the `gguf` package.

use std::fs;
use std::path::{Path, PathBuf};

use moe_foreign::{
    CountError, ForeignError, ImportOptions, LayerError, Location, Missing, Summary,
};
use moe_trace::{CountRow, ExpertId, LayerId, ModelInfo, Phase, RoutingRow, Sink, SinkError};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/foreign")
}

/// The files that `make/binary.py` writes. The directory is the name of the importer that must recognize them.
const FILES: [&str; 19] = [
    "eplb/small.json",
    "iku1/small.iku1",
    "imatrix/small.gguf",
    "mbolt/small.bin",
    "npy/counts-fortran.npy",
    "npy/counts.npy",
    "npy/moe-infinity.npy",
    "npy/vllm-routed.npy",
    "rtrace/small.rtrace",
    "sglang-pt/ktransformers.pt",
    "sglang-pt/per-pass.pt",
    "sglang-pt/per-token.pt",
    "sglang-pt/stat-protocol4.pt",
    "sglang-pt/stat.pt",
    "sglang-response/small.json",
    "sglang/logical.json",
    "sglang/physical.json",
    "vllm/base64.jsonl",
    "vllm/lists.json",
];

/// Keeps all rows.
#[derive(Debug, Default)]
struct Kept {
    rows: Vec<RoutingRow>,
    counts: Vec<CountRow>,
}

impl Sink for Kept {
    fn routing(&mut self, row: &RoutingRow) -> Result<(), SinkError> {
        self.rows.push(*row);
        Ok(())
    }

    fn count(&mut self, row: &CountRow) -> Result<(), SinkError> {
        self.counts.push(*row);
        Ok(())
    }
}

/// Options with the top-k, which two of the formats need.
fn options() -> ImportOptions {
    ImportOptions {
        top_k: Some(2),
        ..ImportOptions::default()
    }
}

fn read(path: &Path, options: &ImportOptions) -> Result<(Summary, Kept), ForeignError> {
    let detected = moe_foreign::detect(path)?.expect("a known format");
    let mut kept = Kept::default();
    let summary = moe_foreign::import(detected.importer, &detected.source, options, &mut kept)?;
    Ok((summary, kept))
}

/// The rows in the CSV format of the expected values of `make/binary.py`.
fn as_csv(kept: &Kept) -> String {
    let number = |n: Option<u32>| n.map(|n| n.to_string()).unwrap_or_default();
    let mut text = String::new();
    if !kept.rows.is_empty() {
        text.push_str("token_id,sequence_id,phase,layer_id,slot,expert_id\n");
    }
    for row in &kept.rows {
        let phase = match row.phase {
            Some(Phase::Prompt) => "PROMPT",
            Some(Phase::Generate) => "GENERATE",
            None => "",
        };
        let sequence = number(row.sequence_id);
        let (token, layer, slot, expert) =
            (row.token_id.0, row.layer_id.0, row.slot, row.expert_id.0);
        text += &format!("{token},{sequence},{phase},{layer},{slot},{expert}\n");
    }
    if !kept.counts.is_empty() {
        text.push_str("layer_id,expert_id,count\n");
    }
    for row in &kept.counts {
        text += &format!("{},{},{}\n", row.layer_id.0, row.expert_id.0, row.count);
    }
    text
}

#[test]
fn reads_the_values_that_the_library_wrote() {
    for name in FILES {
        let (summary, kept) = read(&fixtures().join(name), &options()).expect(name);
        assert_eq!(Some(summary.format), name.split('/').next(), "{name}");
        let expected = fixtures().join("expected").join(format!("{name}.csv"));
        assert_eq!(
            as_csv(&kept),
            fs::read_to_string(expected).unwrap(),
            "{name}"
        );
        // None of these formats contains them.
        assert!(
            kept.rows.iter().all(|row| row.weight.is_none()
                && row.lane.is_none()
                && row.timestamp_ns.is_none())
        );
        assert!(
            kept.counts
                .iter()
                .all(|row| row.mass.is_none() && row.phase.is_none())
        );
    }
}

#[test]
fn every_expectation_is_tested() {
    for format in fs::read_dir(fixtures().join("expected")).unwrap() {
        let format = format.unwrap();
        for entry in fs::read_dir(format.path()).unwrap() {
            let name = Path::new(&format.file_name()).join(entry.unwrap().file_name());
            let tested = FILES
                .iter()
                .any(|file| name == Path::new(&format!("{file}.csv")));
            assert!(tested, "{}", name.display());
        }
    }
}

#[test]
fn reports_lost_columns_and_truncated_lines() {
    let notes = |name: &str| {
        let (summary, _) = read(&fixtures().join(name), &options()).unwrap();
        summary.notes.join("\n")
    };
    // A header of 12 bytes, records of 36 (three tokens), 20, 20, 20 and 20 bytes, and a truncated one.
    let mbolt = notes("mbolt/small.bin");
    assert!(
        mbolt.contains("incomplete last record 5 at byte 128"),
        "{mbolt}"
    );
    assert!(notes("sglang-pt/stat.pt").contains("2 steps are summed"));
    assert!(notes("sglang-pt/per-pass.pt").contains("2 passes are summed"));
    assert!(notes("imatrix/small.gguf").contains("prompt"));
}

#[test]
fn reports_a_missing_top_k() {
    for name in ["rtrace/small.rtrace", "sglang-response/small.json"] {
        let error = read(&fixtures().join(name), &ImportOptions::default()).unwrap_err();
        let ForeignError::Missing { missing, .. } = error else {
            panic!("{error}");
        };
        assert_eq!(missing, Missing::TopK);
    }
    // The top-k may also be that of the model.
    let options = ImportOptions {
        model: Some(ModelInfo {
            n_expert_used: Some(2),
            ..ModelInfo::default()
        }),
        ..ImportOptions::default()
    };
    assert_eq!(
        read(&fixtures().join("rtrace/small.rtrace"), &options)
            .unwrap()
            .0
            .rows,
        18
    );
}

/// Reads a text as a foreign trace.
fn read_text(text: &str) -> Result<(Summary, Kept), ForeignError> {
    read_text_of(text, &options())
}

fn read_text_of(text: &str, options: &ImportOptions) -> Result<(Summary, Kept), ForeignError> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace");
    fs::write(&path, text).unwrap();
    read(&path, options)
}

/// A model of `n_block` blocks, the last `n_nextn` of which are the MTP head, with experts (top-2) in the blocks `moe`.
fn model(n_block: u32, n_nextn: u32, moe: &[u16]) -> ImportOptions {
    ImportOptions {
        model: Some(ModelInfo {
            n_layer: Some(n_block),
            n_nextn_layer: n_nextn,
            n_expert_used: Some(2),
            moe_layers: moe.iter().copied().map(LayerId).collect(),
            ..ModelInfo::default()
        }),
        ..ImportOptions::default()
    }
}

fn has_note(summary: &Summary, part: &str) -> bool {
    summary.notes.iter().any(|note| note.contains(part))
}

#[test]
fn choices_of_a_response_are_sequences() {
    // Two choices for a prompt of one token; one layer, top-2.
    let text = r#"{"choices": [{"routed_experts": [[[3, 4]], [[5, 6]]]}, {"routed_experts": [[[1, 2]]]},
        {"routed_experts": null}], "prompt_routed_experts": [[[7, 0]]], "usage": {"prompt_tokens": 1}}"#;
    let (_, kept) = read_text(text).unwrap();
    assert_eq!(
        as_csv(&kept),
        "token_id,sequence_id,phase,layer_id,slot,expert_id\n\
         0,0,PROMPT,0,0,7\n0,0,PROMPT,0,1,0\n1,0,GENERATE,0,0,3\n1,0,GENERATE,0,1,4\n2,0,GENERATE,0,0,5\n\
         2,0,GENERATE,0,1,6\n1,1,GENERATE,0,0,1\n1,1,GENERATE,0,1,2\n"
    );
}

/// In a request with several prompts, each choice has its own prompt.
#[test]
fn choices_may_have_different_prompts() {
    let text = r#"{"choices": [{"prompt_routed_experts": [[[7, 0]]], "routed_experts": [[[3, 4]]]},
        {"prompt_routed_experts": [[[1, 2]], [[2, 1]]], "routed_experts": [[[5, 6]]]}]}"#;
    let (_, kept) = read_text(text).unwrap();
    assert_eq!(
        as_csv(&kept),
        "token_id,sequence_id,phase,layer_id,slot,expert_id\n\
         0,0,PROMPT,0,0,7\n0,0,PROMPT,0,1,0\n1,0,GENERATE,0,0,3\n1,0,GENERATE,0,1,4\n\
         0,1,PROMPT,0,0,1\n0,1,PROMPT,0,1,2\n1,1,PROMPT,0,0,2\n1,1,PROMPT,0,1,1\n\
         2,1,GENERATE,0,0,5\n2,1,GENERATE,0,1,6\n"
    );
}

/// With one of the token counts, the number of layers of the model determines the number of tokens.
#[test]
fn a_response_with_one_token_count_needs_the_model() {
    let complete = fs::read_to_string(fixtures().join("sglang-response/small.json")).unwrap();
    let (_, expected) = read_text(&complete).unwrap();
    let options = ImportOptions {
        top_k: Some(2),
        ..model(2, 0, &[0, 1])
    };
    for missing in [r#""prompt_tokens": 3, "#, r#""completion_tokens": 3, "#] {
        let text = complete.replace(missing, "");
        assert!(text.len() < complete.len());
        let (summary, kept) = read_text_of(&text, &options).unwrap();
        let place = |row: &RoutingRow| (row.token_id.0, row.layer_id.0, row.slot, row.expert_id.0);
        let places = |kept: &Kept| kept.rows.iter().map(place).collect::<Vec<_>>();
        assert_eq!(places(&kept), places(&expected));
        assert!(
            has_note(&summary, "has no prompt_tokens or completion_tokens"),
            "{summary:?}"
        );
        let error = read_text(&text).unwrap_err();
        assert!(
            matches!(
                error,
                ForeignError::Missing {
                    missing: Missing::Layers,
                    ..
                }
            ),
            "{error}"
        );
    }
}

/// A router selects an expert at most once per token.
#[test]
fn skips_and_reports_repeated_experts() {
    let text = r#"{"t":0,"layer":0,"experts":[3,4]}
{"t":1,"layer":0,"experts":[3,3,4,3],"weights":[0.5,0.25,0.125,0.125]}
{"t":2,"layer":0,"experts":[4,3]}
"#;
    let (summary, kept) = read_text(text).unwrap();
    let rows: Vec<_> = kept
        .rows
        .iter()
        .map(|r| (r.token_id.0, r.slot, r.expert_id.0))
        .collect();
    let expected = [
        (0, 0, 3),
        (0, 1, 4),
        (1, 0, 3),
        (1, 2, 4),
        (2, 0, 4),
        (2, 1, 3),
    ];
    assert_eq!(rows, expected);
    let note_start = "warning: skipped 2 repeated experts (the first at line 2)";
    assert!(
        summary
            .notes
            .iter()
            .any(|note| note.starts_with(note_start)),
        "{:?}",
        summary.notes
    );
}

#[test]
fn skips_padding_of_servers() {
    // A layer with 0 in every slot, and an empty slot.
    let text = r#"{"choices": [{"routed_experts": [[[0, 0], [3, -1]]]}]}"#;
    let (summary, kept) = read_text(text).unwrap();
    assert_eq!(kept.rows.len(), 1);
    assert_eq!(
        (kept.rows[0].layer_id, kept.rows[0].expert_id),
        (LayerId(1), ExpertId(3))
    );
    assert!(summary.notes.iter().any(|note| note.contains("every slot")));
}

#[test]
fn reads_a_list_of_responses() {
    let one = fs::read_to_string(fixtures().join("sglang-response/small.json")).unwrap();
    let (_, kept) = read_text(&format!("[{one}, {one}]")).unwrap();
    assert_eq!(kept.rows.len(), 40);
    assert_eq!(kept.rows[20].sequence_id, Some(1));
}

#[test]
fn errors_of_counts_have_a_location_and_a_cause() {
    let cases = [
        (
            r#"{"logical_count": [[1, 2], [3, -4]]}"#,
            "logical_count[1, 1]",
            CountError::NotCount {
                found: "-4".into(),
                max: 1 << 53,
            },
        ),
        (
            r#"{"logical_count": [1, 2]}"#,
            "logical_count",
            CountError::Shape { shape: vec![2] },
        ),
        (
            r#"{"logical_count": [[0.5, 2]]}"#,
            "logical_count[0, 0]",
            CountError::NotCount {
                found: "0.5".into(),
                max: 1 << 53,
            },
        ),
        (
            r#"{"physical_to_logical_map": [[0, 1]]}"#,
            "physical_to_logical_map",
            CountError::NoCounts,
        ),
        (
            r#"{"physical_to_logical_map": [[0, 2]], "global_physical_count": [[1, 1]]}"#,
            "global_physical_count[0, 1]",
            CountError::Unmapped {
                physical: 1,
                layer: 0,
            },
        ),
    ];
    for (text, element, cause) in cases {
        let error = read_text(text).unwrap_err();
        assert_eq!(
            error.location(),
            Some(&Location::Element(element.into())),
            "{text}"
        );
        assert_eq!(error.cause(), Some(&cause), "{text}");
    }
}

#[test]
fn errors_of_arrays_name_the_array_and_the_number() {
    for (text, expected) in [
        (
            "[[18446744073709551616, 1], [1, 1]]",
            "element [0, 0]: 1.8446744073709552e19 is not a count (0..=9007199254740992); the array does not contain expert counts",
        ),
        (
            "[[1, -2]]",
            "element [0, 1]: -2 is not a count (0..=9007199254740992); the array does not contain expert counts",
        ),
        ("[[[1]]]", "the array: the lists are three or more deep"),
        (
            r#"{"logical_count": [1, 2]}"#,
            "element logical_count: the array has shape [2]",
        ),
        (
            r#"{"physical_to_logical_map": [0], "global_physical_count": [[1]]}"#,
            "element physical_to_logical_map: physical_to_logical_map has shape [1]",
        ),
    ] {
        let error = read_text(text).unwrap_err().to_string();
        assert!(error.contains(&format!(": {expected}")), "{error}");
    }
}

#[test]
fn errors_of_responses_have_a_location() {
    let element = |name: &str| Location::Element(name.into());
    for (text, at) in [
        (r#"{"logical_count": [[1, 2], [3]]}"#, Location::Line(1)),
        (
            r#"{"choices": [{"routed_experts": [[[3, 4]], [[5, 9999]]]}]}"#,
            element("choices[0].routed_experts[1, 0]"),
        ),
        (
            r#"{"choices": [{"routed_experts": "TlVNUFk="}]}"#,
            element("choices[0].routed_experts"),
        ),
        (
            r#"{"choices": [{"routed_experts": "?"}]}"#,
            Location::Line(1),
        ),
        (
            r#"{"meta_info": {"prompt_tokens": 2, "completion_tokens": 2, "routed_experts": "AAAAAA=="}}"#,
            element("meta_info.routed_experts"),
        ),
    ] {
        let error = read_text(text).unwrap_err();
        assert_eq!(error.location(), Some(&at), "{text}: {error}");
    }
}

#[test]
fn maps_rows_of_moe_layers_to_their_blocks() {
    // A model of four layers, of which the first two are dense.
    let (_, kept) = read(
        &fixtures().join("npy/vllm-routed.npy"),
        &model(4, 0, &[2, 3]),
    )
    .unwrap();
    let layers: Vec<u16> = kept.rows.iter().map(|row| row.layer_id.0).collect();
    assert_eq!(layers[..6], [2, 2, 3, 3, 2, 2]);
}

/// The dump with its map renamed, so that physical experts cannot be mapped to experts of the model.
#[test]
fn rejects_physical_counts_without_a_map() {
    let mut bytes = fs::read(fixtures().join("sglang-pt/per-pass.pt")).unwrap();
    let key = b"last_physical_to_logical_map";
    let at = bytes.windows(key.len()).position(|b| b == key).unwrap();
    bytes[at..at + 4].copy_from_slice(b"lost");
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("dump.pt");
    fs::write(&path, bytes).unwrap();
    let error = read(&path, &ImportOptions::default()).unwrap_err();
    let at = Location::Element("records[0].global_physical_count".into());
    assert_eq!(error.location(), Some(&at), "{error}");
    assert_eq!(
        error.cause::<CountError>(),
        Some(&CountError::NoMap),
        "{error}"
    );
}

mod damage;
mod dumps;
mod servers;
mod shapes;
