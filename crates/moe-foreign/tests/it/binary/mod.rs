//! Binary formats of other tools, and those of servers, as their own libraries wrote them (`fixtures/foreign/make/binary.py`).

use std::fs;
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use moe_foreign::{ForeignError, ImportOptions, LayerError, Missing, Summary};
use moe_trace::{CountRow, ExpertId, Facts, LayerId, Phase, RoutingRow, Sink, SinkError};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/foreign")
}

/// The files that `make/binary.py` makes; the directory is the importer that must recognise them.
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

/// Keeps what it is given.
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

/// The top-k that two of the formats do not tell.
fn options() -> ImportOptions {
    ImportOptions {
        top_k: Some(2),
        ..ImportOptions::default()
    }
}

fn read(path: &Path, options: &ImportOptions) -> Result<(Summary, Kept), ForeignError> {
    let detected = moe_foreign::detect(path)?.expect("a format that is known");
    let mut kept = Kept::default();
    let summary = moe_foreign::import(detected.importer, &detected.source, options, &mut kept)?;
    Ok((summary, kept))
}

/// The rows as `make/binary.py` writes those that it expects.
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
fn each_file_says_what_its_library_put_in() {
    for name in FILES {
        let (summary, kept) = read(&fixtures().join(name), &options()).expect(name);
        assert_eq!(Some(summary.format), name.split('/').next(), "{name}");
        let expected = fixtures().join("expected").join(format!("{name}.csv"));
        assert_eq!(
            as_csv(&kept),
            fs::read_to_string(expected).unwrap(),
            "{name}"
        );
        // None of these formats tells them.
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
    // Behind the header of 12 bytes records of 36 (three tokens), 20, 20, 20 and 20 bytes, then the one that is cut.
    let mbolt = notes("mbolt/small.bin");
    assert!(
        mbolt.contains("record, 5 at byte 128, is cut off"),
        "{mbolt}"
    );
    assert!(notes("sglang-pt/stat.pt").contains("2 steps were summed"));
    assert!(notes("sglang-pt/per-pass.pt").contains("2 passes were summed"));
    assert!(notes("imatrix/small.gguf").contains("prompt"));
}

#[test]
fn a_top_k_that_is_not_in_the_file_is_asked_for() {
    for name in ["rtrace/small.rtrace", "sglang-response/small.json"] {
        let error = read(&fixtures().join(name), &ImportOptions::default()).unwrap_err();
        let ForeignError::Missing { missing, .. } = error else {
            panic!("{error}");
        };
        assert_eq!(missing, Missing::TopK);
    }
    // The model tells it too.
    let options = ImportOptions {
        model: Some(Facts {
            n_expert_used: Some(2),
            ..Facts::default()
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

/// A model of `n_block` blocks, the last `n_nextn` of the MTP head, with two experts for a token in the blocks `moe`.
fn model(n_block: u32, n_nextn: u32, moe: &[u16]) -> ImportOptions {
    ImportOptions {
        model: Some(Facts {
            n_layer: Some(n_block),
            n_nextn_layer: n_nextn,
            n_expert_used: Some(2),
            moe_layers: moe.iter().copied().map(LayerId).collect(),
            ..Facts::default()
        }),
        ..ImportOptions::default()
    }
}

fn has_note(summary: &Summary, part: &str) -> bool {
    summary.notes.iter().any(|note| note.contains(part))
}

#[test]
fn choices_of_a_response_are_sequences() {
    // Two answers to a prompt of one token: one layer, two experts.
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

/// Several prompts in a request: each choice has its own.
#[test]
fn a_choice_may_have_a_prompt_of_its_own() {
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

/// Without one of the counts the model's layers determine how many tokens the numbers are of.
#[test]
fn a_response_needs_not_both_counts() {
    let whole = fs::read_to_string(fixtures().join("sglang-response/small.json")).unwrap();
    let (_, expected) = read_text(&whole).unwrap();
    let options = ImportOptions {
        top_k: Some(2),
        ..model(2, 0, &[0, 1])
    };
    for missing in [r#""prompt_tokens": 3, "#, r#""completion_tokens": 3, "#] {
        let text = whole.replace(missing, "");
        assert!(text.len() < whole.len());
        let (summary, kept) = read_text_of(&text, &options).unwrap();
        let place = |row: &RoutingRow| (row.token_id.0, row.layer_id.0, row.slot, row.expert_id.0);
        let places = |kept: &Kept| kept.rows.iter().map(place).collect::<Vec<_>>();
        assert_eq!(places(&kept), places(&expected));
        assert!(has_note(&summary, "is not recorded"), "{summary:?}");
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

/// No router names an expert twice for a token: it counts once, and the place is told.
#[test]
fn an_expert_that_a_token_names_again_is_left_out() {
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
    let note_start =
        "left out: 2 experts that a token names again, which no router does (the first at line 2)";
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
fn what_servers_fill_is_no_routing() {
    // A layer without experts, and slots that are not used.
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
fn a_list_of_responses_is_read() {
    let one = fs::read_to_string(fixtures().join("sglang-response/small.json")).unwrap();
    let (_, kept) = read_text(&format!("[{one}, {one}]")).unwrap();
    assert_eq!(kept.rows.len(), 40);
    assert_eq!(kept.rows[20].sequence_id, Some(1));
}

#[test]
fn faults_have_a_place() {
    for (text, place) in [
        (
            r#"{"logical_count": [[1, 2], [3, -4]]}"#,
            "element logical_count[1, 1]",
        ),
        (r#"{"logical_count": [1, 2]}"#, "shape [2]"),
        (r#"{"logical_count": [[1, 2], [3]]}"#, "line 1"),
        (r#"{"logical_count": [[0.5, 2]]}"#, "0.5 is not a count"),
        (
            r#"{"physical_to_logical_map": [[0, 1]]}"#,
            "placement without counts",
        ),
        (
            r#"{"physical_to_logical_map": [[0, 2]], "global_physical_count": [[1, 1]]}"#,
            "element global_physical_count[0, 1]",
        ),
        (
            r#"{"choices": [{"routed_experts": [[[3, 4]], [[5, 9999]]]}]}"#,
            "element choices[0].routed_experts[1, 0]",
        ),
        (
            r#"{"choices": [{"routed_experts": "TlVNUFk="}]}"#,
            "choices[0].routed_experts[]",
        ),
        (r#"{"choices": [{"routed_experts": "?"}]}"#, "line 1"),
        (
            r#"{"meta_info": {"prompt_tokens": 2, "completion_tokens": 2, "routed_experts": "AAAAAA=="}}"#,
            "are not 32-bit integers",
        ),
    ] {
        let message = read_text(text).unwrap_err().to_string();
        assert!(message.contains(place), "{text}: {message}");
    }
}

#[test]
fn rows_of_layers_with_experts_are_mapped_to_their_blocks() {
    // A model of four layers, the first two without experts.
    let (_, kept) = read(
        &fixtures().join("npy/vllm-routed.npy"),
        &model(4, 0, &[2, 3]),
    )
    .unwrap();
    let layers: Vec<u16> = kept.rows.iter().map(|row| row.layer_id.0).collect();
    assert_eq!(layers[..6], [2, 2, 3, 3, 2, 2]);
}

/// A damaged file is read, or refused on one line that names the file and a place in it.
fn must_not_panic(path: &Path) {
    let Some(detected) = moe_foreign::detect(path).unwrap() else {
        return;
    };
    let mut kept = Kept::default();
    if let Err(error) =
        moe_foreign::import(detected.importer, &detected.source, &options(), &mut kept)
    {
        let message = error.to_string();
        assert!(message.contains(path.to_str().unwrap()), "{message}");
        assert_eq!(message.lines().count(), 1, "{message}");
        let places = [
            "byte",
            "line",
            "record",
            "element",
            "holds no routing",
            "more than any model has",
            "tensor",
        ];
        assert!(
            places.iter().any(|place| message.contains(place)),
            "{message}"
        );
    }
}

#[test]
fn cut_files_are_refused_or_read() {
    let dir = tempfile::tempdir().unwrap();
    for name in FILES {
        let path = dir.path().join("trace");
        let size = fs::copy(fixtures().join(name), &path).unwrap();
        let file = fs::File::options().write(true).open(&path).unwrap();
        for end in (0..size).rev() {
            file.set_len(end).unwrap();
            must_not_panic(&path);
        }
    }
}

#[test]
fn changed_bytes_are_refused_or_read() {
    let dir = tempfile::tempdir().unwrap();
    for name in FILES {
        let whole = fs::read(fixtures().join(name)).unwrap();
        let path = dir.path().join("trace");
        fs::write(&path, &whole).unwrap();
        let mut file = fs::File::options().write(true).open(&path).unwrap();
        let mut write = |at: usize, byte: u8| {
            file.seek(SeekFrom::Start(at as u64)).unwrap();
            file.write_all(&[byte]).unwrap();
        };
        for (at, &byte) in whole.iter().enumerate() {
            for change in [0x01, 0x80, 0xff] {
                write(at, byte ^ change);
                must_not_panic(&path);
            }
            write(at, byte);
        }
    }
}

/// The dump with another name for its map: which experts of the model were counted is unknown.
#[test]
fn physical_counts_without_their_map_are_refused() {
    let mut bytes = fs::read(fixtures().join("sglang-pt/per-pass.pt")).unwrap();
    let key = b"last_physical_to_logical_map";
    let at = bytes.windows(key.len()).position(|b| b == key).unwrap();
    bytes[at..at + 4].copy_from_slice(b"lost");
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("dump.pt");
    fs::write(&path, bytes).unwrap();
    let error = read(&path, &ImportOptions::default())
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("records[0].global_physical_count")
            && error.contains("unknown which experts"),
        "{error}"
    );
}

mod dumps;
/// Where servers put routing, and how they number layers.
mod servers;
mod shapes;
