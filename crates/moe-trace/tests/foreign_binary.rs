//! Binary formats of other tools, as their own libraries wrote them (`fixtures/foreign/make/binary.py`).

use std::fs;
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use moe_trace::foreign::{
    self, CountRow, Facts, ForeignError, IMPORTERS, Options, Phase, RoutingRow, Sink, SinkError,
    Summary,
};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/foreign")
}

/// What the fixtures are, by the importer that must recognise them.
const FILES: [(&str, &str); 17] = [
    ("counts-fortran.npy", "npy"),
    ("counts.npy", "npy"),
    ("eplb.json", "eplb"),
    ("fitz-tec.rtrace", "rtrace"),
    ("imatrix.gguf", "imatrix"),
    ("inkling.iku1", "iku1"),
    ("ktransformers.pt", "sglang-pt"),
    ("mbolt.bin", "mbolt"),
    ("moe-infinity.npy", "npy"),
    ("sglang-counts.json", "sglang"),
    ("sglang-per-pass.pt", "sglang-pt"),
    ("sglang-per-token.pt", "sglang-pt"),
    ("sglang-physical.json", "sglang"),
    ("sglang-response.json", "sglang-response"),
    ("sglang-stat-protocol4.pt", "sglang-pt"),
    ("sglang-stat.pt", "sglang-pt"),
    ("vllm-routed.npy", "npy"),
];
const LINES: [(&str, &str); 2] = [("vllm-base64.jsonl", "vllm"), ("vllm-lists.json", "vllm")];

fn files() -> impl Iterator<Item = (&'static str, &'static str)> {
    FILES.into_iter().chain(LINES)
}

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
fn options() -> Options {
    Options {
        top_k: Some(2),
        ..Options::default()
    }
}

fn read(path: &Path, options: &Options) -> Result<(Summary, Kept), ForeignError> {
    let detected = foreign::detect(path, IMPORTERS)?.expect("a format that is known");
    let mut kept = Kept::default();
    let summary = foreign::import(detected.importer, &detected.source, options, &mut kept)?;
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
        let (token, layer, slot, expert) = (row.token_id, row.layer_id, row.slot, row.expert_id);
        text += &format!("{token},{sequence},{phase},{layer},{slot},{expert}\n");
    }
    if !kept.counts.is_empty() {
        text.push_str("layer_id,expert_id,count\n");
    }
    for row in &kept.counts {
        text += &format!("{},{},{}\n", row.layer_id, row.expert_id, row.count);
    }
    text
}

#[test]
fn each_file_says_what_its_library_put_in() {
    for (name, format) in files() {
        let (summary, kept) = read(&fixtures().join(name), &options()).expect(name);
        assert_eq!(summary.format, format, "{name}");
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
fn every_binary_fixture_is_tested() {
    let tested: Vec<&str> = files().map(|(name, _)| name).collect();
    for entry in fs::read_dir(fixtures().join("expected")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(tested.contains(&name.trim_end_matches(".csv")), "{name}");
    }
}

#[test]
fn what_is_lost_or_cut_is_told() {
    let notes = |name: &str| {
        let (summary, _) = read(&fixtures().join(name), &options()).unwrap();
        summary.notes.join("\n")
    };
    // The header has 12 bytes; prompt records of 36, 36 and 20 bytes, five of 20; byte 204 is the ninth.
    assert!(
        notes("mbolt.bin").contains("record, 8 at byte 204, is cut off"),
        "{}",
        notes("mbolt.bin")
    );
    assert!(notes("sglang-stat.pt").contains("2 steps were summed"));
    assert!(notes("sglang-per-pass.pt").contains("2 passes were summed"));
    assert!(notes("imatrix.gguf").contains("prompt"));
}

#[test]
fn a_top_k_that_is_not_in_the_file_is_asked_for() {
    for name in ["fitz-tec.rtrace", "sglang-response.json"] {
        let error = read(&fixtures().join(name), &Options::default()).unwrap_err();
        let message = error.to_string();
        assert!(
            message.contains("--top-k") && message.contains("--model"),
            "{message}"
        );
    }
    // The model tells it too.
    let options = Options {
        model: Some(Facts {
            n_expert_used: Some(2),
            ..Facts::default()
        }),
        ..Options::default()
    };
    assert_eq!(
        read(&fixtures().join("fitz-tec.rtrace"), &options)
            .unwrap()
            .0
            .rows,
        28
    );
}

#[test]
fn servers_count_the_layers_that_have_experts() {
    // A model of five layers, the first two without experts.
    let options = Options {
        model: Some(Facts {
            n_layer: Some(5),
            expert_bytes: [(2, 1), (3, 1), (4, 1)].into(),
            ..Facts::default()
        }),
        ..Options::default()
    };
    let (_, kept) = read(&fixtures().join("vllm-routed.npy"), &options).unwrap();
    let layers: Vec<u16> = kept.rows.iter().map(|row| row.layer_id).collect();
    assert_eq!(layers[..8], [2, 2, 3, 3, 4, 4, 2, 2]);
}

/// A damaged file is read, or refused on one line that names the file and a place in it.
fn must_not_panic(path: &Path) {
    let Some(detected) = foreign::detect(path, IMPORTERS).unwrap() else {
        return;
    };
    let mut kept = Kept::default();
    if let Err(error) = foreign::import(detected.importer, &detected.source, &options(), &mut kept)
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
    for (name, _) in files() {
        let path = dir.path().join(name);
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
    for (name, _) in files() {
        let whole = fs::read(fixtures().join(name)).unwrap();
        let path = dir.path().join(name);
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
