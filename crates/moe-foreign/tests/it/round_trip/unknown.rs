//! Exports of empty slots, of blocks of the MTP head, and of unknown numbers.

use super::*;
use moe_trace::LayerId;

fn exported(input: &Input, name: &str, options: &ImportOptions) -> (String, Vec<String>) {
    let mut bytes = Vec::new();
    let export = Export::new(input, options).unwrap();
    let losses = exporter(name).export(&export, &mut bytes).unwrap();
    (String::from_utf8(bytes).unwrap(), losses)
}

/// The best expert of the second token is on another rank, so its slot is empty.
#[test]
fn jsonl_keeps_empty_slots() {
    let dir = tempfile::tempdir().unwrap();
    let text = "{\"t\":0,\"layer\":0,\"experts\":[3,1],\"weights\":[0.75,0.25]}\n{\"t\":1,\"layer\":0,\"experts\":[-1,3],\"weights\":[null,0.5]}\n";
    let input = input(dir.path(), text);
    let (written, losses) = exported(&input, "jsonl", &ImportOptions::default());
    assert_eq!(written, text);
    assert!(losses.iter().any(|loss| loss.contains("-1")), "{losses:?}");
    let path = dir.path().join("again.jsonl");
    fs::write(&path, &written).unwrap();
    let again = read_again(&path, "jsonl", &ImportOptions::default());
    assert_eq!(again.rows, read(&input, &ImportOptions::default()).rows);
}

/// A model of 4 hidden layers and 2 blocks of the MTP head.
fn with_mtp() -> ImportOptions {
    ImportOptions {
        model: Some(ModelInfo {
            n_layer: Some(6),
            n_nextn_layer: 2,
            n_expert: Some(8),
            n_expert_used: Some(1),
            moe_layers: (0..6).map(LayerId).collect(),
            ..ModelInfo::default()
        }),
        ..ImportOptions::default()
    }
}

#[test]
fn formats_of_hidden_layers_skip_the_mtp_head() {
    let dir = tempfile::tempdir().unwrap();
    let line = |layer: u16| format!("{{\"t\":0,\"layer\":{layer},\"experts\":[{layer}]}}\n");
    let text: String = [0, 3, 4, 5].into_iter().map(line).collect();
    let input = input(dir.path(), &text);
    let hidden = [(0, 0, 1, None), (3, 3, 1, None)];
    for (name, header, skipped) in [
        (
            "ds4-hotlist",
            "# layers 4\n",
            "skipped 2 layers of the MTP head",
        ),
        ("coli-usage", "-1 4 8\n", "skipped 1 layer of the MTP head"),
    ] {
        let (written, losses) = exported(&input, name, &with_mtp());
        assert!(written.contains(header), "{written}");
        assert!(
            losses.iter().any(|loss| loss.starts_with(skipped)),
            "{losses:?}"
        );
        let path = dir.path().join(name);
        fs::write(&path, &written).unwrap();
        for options in [ImportOptions::default(), with_mtp()] {
            let again = read_again(&path, name, &options);
            assert_eq!(totals(&again, false), hidden, "{name}");
        }
    }
}

#[test]
fn coli_usage_importer_skips_all_blocks_of_the_mtp_head() {
    let dir = tempfile::tempdir().unwrap();
    let input = input(dir.path(), "-1 4 8\n0 0 1\n3 3 1\n4 4 1\n5 5 1\n");
    let kept = read(&input, &with_mtp());
    assert_eq!(totals(&kept, false), [(0, 0, 1, None), (3, 3, 1, None)]);
}

#[test]
fn reports_an_assumed_number_of_experts() {
    let dir = tempfile::tempdir().unwrap();
    let input = input(
        dir.path(),
        "{\"t\":0,\"layer\":0,\"experts\":[3,1],\"phase\":\"decode\"}\n",
    );
    let note =
        "the number of experts per layer is unknown: assumed 4, the highest selected expert + 1";
    for name in [
        "bigmoeonedge",
        "ds4-hotlist",
        "eplb",
        "eplb-csv",
        "learn",
        "npy-counts",
        "sglang",
    ] {
        let path = dir.path().join("out");
        let losses = export(&input, exporter(name), &ImportOptions::default(), &path).unwrap();
        assert!(losses.iter().any(|loss| loss == note), "{name}: {losses:?}");
        let losses = export(&input, exporter(name), &with_mtp(), &path).unwrap();
        assert!(
            !losses.iter().any(|loss| loss == note),
            "{name}: {losses:?}"
        );
    }
}

/// Routing contains the number of tokens. From counts with top-k 2, 5 activations are at least 3 tokens.
#[test]
fn calls_of_a_learn_file_count_tokens_without_passes() {
    let dir = tempfile::tempdir().unwrap();
    let rows = "{\"t\":0,\"layer\":0,\"experts\":[3,1]}\n{\"t\":1,\"layer\":0,\"experts\":[3,0]}\n";
    let top_k = ImportOptions {
        top_k: Some(2),
        ..ImportOptions::default()
    };
    for (text, options, used, calls) in [
        (rows, ImportOptions::default(), "2", "2"),
        ("[[2, 3, 0]]", top_k, "2", "3"),
        ("[[2, 3, 0]]", ImportOptions::default(), "1", "5"),
    ] {
        let input = input(dir.path(), text);
        let (written, losses) = exported(&input, "learn", &options);
        let value: serde_json::Value = serde_json::from_str(&written).unwrap();
        assert_eq!(value["n_expert_used"].to_string(), used, "{written}");
        assert_eq!(value["layers"][0]["calls"].to_string(), calls, "{written}");
        let is_unknown = losses
            .iter()
            .any(|loss| loss.contains("each selected expert counts as a call"));
        assert_eq!(is_unknown, used == "1", "{losses:?}");
    }
}
