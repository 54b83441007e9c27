//! `transfers.jsonl`: it is written and read, conforms to its schema, and damage is reported.

use std::fs;

use moe_trace::transfers::{self, FILE_NAME, Span, Transfer};
use moe_trace::{Error, LayerId, LineFault, Phase, RunOptions, RunWriter, TokenId, TransferFault};
use serde_json::json;

use super::common::{gpt_oss, manifest};

fn span(start_ns: u64, end_ns: u64) -> Span {
    Span { start_ns, end_ns }
}

/// A layer whose four experts were copied, and one without copies.
fn examples() -> [Transfer; 2] {
    let fetched = Transfer {
        sequence_id: 1,
        token_id: TokenId(17),
        phase: Phase::Generate,
        layer_id: LayerId(3),
        n_tokens: 1,
        n_experts: 4,
        n_fetched: 4,
        bytes: 4096,
        transfer: Some(span(1_000, 1_400)),
        window: span(1_010, 1_500),
        product: Some(span(1_510, 1_530)),
    };
    let on_host = Transfer {
        layer_id: LayerId(4),
        n_fetched: 0,
        bytes: 0,
        transfer: None,
        product: None,
        ..fetched.clone()
    };
    [fetched, on_host]
}

fn read(text: &str) -> Result<Vec<Transfer>, Error> {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join(FILE_NAME);
    fs::write(&path, text).unwrap();
    transfers::read(&path)
}

fn lines(transfers: &[Transfer]) -> String {
    let line = |transfer| serde_json::to_string(transfer).unwrap() + "\n";
    transfers.iter().map(line).collect()
}

#[test]
fn creates_the_file_with_the_first_transfer() {
    let tmp = tempfile::tempdir().unwrap();
    let (_, map) = gpt_oss();
    let dir = tmp.path().join("run");
    let path = dir.join(FILE_NAME);
    let mut writer = RunWriter::create(&dir, manifest(), &map, RunOptions::default()).unwrap();
    assert!(!path.exists());
    let [first, second] = examples();
    writer
        .write_transfers(std::slice::from_ref(&first))
        .unwrap();
    // Lines are written immediately, because a recorder may be killed.
    assert_eq!(
        transfers::read(&path).unwrap(),
        std::slice::from_ref(&first)
    );
    writer
        .write_transfers(std::slice::from_ref(&second))
        .unwrap();
    writer.finish().unwrap();
    assert_eq!(transfers::read(&path).unwrap(), [first, second]);

    let options = RunOptions {
        force: true,
        ..RunOptions::default()
    };
    let writer = RunWriter::create(&dir, manifest(), &map, options).unwrap();
    assert!(!path.exists(), "the file of the replaced run still exists");
    writer.finish().unwrap();
}

#[test]
fn lines_follow_their_schema() {
    let schema = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../schemas/transfers.schema.json"
    );
    let schema = serde_json::from_str(&fs::read_to_string(schema).unwrap()).unwrap();
    let schema = jsonschema::validator_for(&schema).unwrap();
    for transfer in examples() {
        let json = serde_json::to_value(&transfer).unwrap();
        assert!(schema.is_valid(&json), "{json}");
        assert_eq!(
            serde_json::from_value::<Transfer>(json.clone()).unwrap(),
            transfer
        );
        for required in ["layer_id", "window", "n_fetched"] {
            let mut json = json.clone();
            json.as_object_mut().unwrap().remove(required);
            assert!(!schema.is_valid(&json), "{required}");
            assert!(serde_json::from_value::<Transfer>(json).is_err());
        }
    }
    let [_, on_host] = examples();
    let json = serde_json::to_value(&on_host).unwrap();
    assert_eq!(json.get("transfer"), None);
    assert_eq!(json["window"], json!({"start_ns": 1010, "end_ns": 1500}));
}

#[test]
fn ignores_unknown_keys_and_byte_order_mark() {
    let text = lines(&examples());
    let more = text
        .replace("{\"sequence_id\"", "{\"later\":[1,{}],\"sequence_id\"")
        .replace("\"start_ns\"", "\"later\":null,\"start_ns\"");
    assert!(more.len() > text.len());
    assert_eq!(read(&more).unwrap(), examples());
    assert_eq!(read(&format!("\u{feff}{text}")).unwrap(), examples());
}

#[test]
fn reports_invalid_lines_and_omits_a_truncated_one() {
    let good = lines(&examples());
    assert_eq!(read(&good).unwrap(), examples());
    assert_eq!(read(&good[..good.len() - 9]).unwrap(), examples()[..1]);
    assert_eq!(read("").unwrap(), []);
    let [fetched, on_host] = examples();
    let late = Transfer {
        n_fetched: 0,
        product: None,
        ..fetched.clone()
    };
    let read_back = read(&lines(std::slice::from_ref(&late)));
    assert_eq!(read_back.unwrap(), [late], "all copies were missed");
    let ends_early = |span| TransferFault::Span {
        span,
        start_ns: 9,
        end_ns: 8,
    };
    for (wrong, expected) in [
        (
            Transfer {
                n_fetched: 5,
                ..fetched.clone()
            },
            TransferFault::Fetched {
                n_fetched: 5,
                n_experts: fetched.n_experts,
            },
        ),
        (
            Transfer {
                window: span(9, 8),
                ..fetched.clone()
            },
            ends_early("window"),
        ),
        (
            Transfer {
                transfer: Some(span(9, 8)),
                ..fetched.clone()
            },
            ends_early("transfer"),
        ),
        (
            Transfer {
                product: Some(span(9, 8)),
                ..fetched.clone()
            },
            ends_early("product"),
        ),
        (
            Transfer {
                n_experts: 0,
                n_fetched: 0,
                ..fetched.clone()
            },
            TransferFault::NoExperts,
        ),
        (
            Transfer {
                bytes: 0,
                transfer: None,
                ..fetched.clone()
            },
            TransferFault::FetchedNothing { n_fetched: 4 },
        ),
        (
            Transfer {
                bytes: 0,
                ..fetched.clone()
            },
            TransferFault::EmptyTransfer,
        ),
        (
            Transfer {
                transfer: None,
                ..fetched.clone()
            },
            TransferFault::NoTransfer { bytes: 4096 },
        ),
        (
            Transfer {
                bytes: (1 << 63) + 1,
                ..fetched.clone()
            },
            TransferFault::Bytes {
                bytes: (1 << 63) + 1,
                limit: 1 << 48,
            },
        ),
    ] {
        match read(&lines(&[on_host.clone(), wrong, on_host.clone()])) {
            Err(Error::Line {
                line: 2,
                fault: LineFault::Transfer(fault),
                ..
            }) => assert_eq!(fault, expected),
            other => panic!("{other:?}"),
        }
    }
    let other_phase = good.replace("\"phase\":1", "\"phase\":2");
    assert_ne!(other_phase, good);
    let error = read(&other_phase).unwrap_err().to_string();
    assert!(error.contains("phase 2 is out of range"), "{error}");
    let cut = &good[..good.find("layer_id").unwrap()];
    assert!(matches!(
        read(&format!("{cut}\n{good}")),
        Err(Error::Line { line: 1, .. })
    ));
}
