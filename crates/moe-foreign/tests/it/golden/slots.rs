//! Tokens with empty slots, including slot 0.

use moe_testkit::fixture;

use super::*;

/// Imports a file with the importer that recognizes it.
pub fn read(path: &Path) -> (Collected, Summary) {
    let detected = moe_foreign::detect(path).unwrap().unwrap();
    let mut rows = Collected::default();
    let options = ImportOptions::default();
    let summary =
        moe_foreign::import(detected.importer, &detected.source, &options, &mut rows).unwrap();
    (rows, summary)
}

/// The dump has -1 in any slot; NumPy's `(array >= 0).any(2).sum(0)` is 191 in each layer.
#[test]
fn counts_tokens_with_an_empty_slot_0() {
    let path = fixture("foreign/npy/expert-parallel-rank.npy");
    let (rows, summary) = read(&path);
    assert_eq!(summary.model_info.n_expert_used, None);
    assert!(
        !summary.notes.iter().any(|note| note.contains("repeated")),
        "{:?}",
        summary.notes
    );
    let mut counts = Counts::default();
    for row in &rows.routing {
        Sink::routing(&mut counts, row).unwrap();
    }
    let layers = counts.layers();
    assert_eq!(layers.len(), 4);
    for (layer, counts) in layers {
        assert_eq!(counts.n_tokens, Some(191), "layer {layer}");
    }
}

/// The export has one line per token and layer, so tokens are neither merged nor split.
#[test]
fn exports_tokens_with_an_empty_slot_0() {
    let path = fixture("foreign/npy/expert-parallel-rank.npy");
    let detected = moe_foreign::detect(&path).unwrap().unwrap();
    let (input, options) = (Input::Foreign(detected), ImportOptions::default());
    let export = Export::new(&input, &options).unwrap();
    let jsonl = moe_foreign::EXPORTERS
        .iter()
        .find(|exporter| exporter.name() == "jsonl");
    let mut text = Vec::new();
    jsonl.unwrap().export(&export, &mut text).unwrap();
    assert_eq!(String::from_utf8(text).unwrap().lines().count(), 4 * 191);
}

/// An array `[3 tokens, 1 layer, 4 slots]` whose last two slots are unused.
fn padded(dir: &Path) -> PathBuf {
    let path = dir.join("padded.npy");
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    let header = "{'descr': '<i4', 'fortran_order': False, 'shape': (3, 1, 4), }";
    let header = format!("{header:<117}\n");
    bytes.extend((header.len() as u16).to_le_bytes());
    bytes.extend(header.as_bytes());
    for id in [3, -1, -1, -1, -1, 5, -1, -1, 2, 7, -1, -1i32] {
        bytes.extend(id.to_le_bytes());
    }
    std::fs::write(&path, bytes).unwrap();
    path
}

/// SGLang pads slots to 8.
#[test]
fn padding_does_not_increase_top_k() {
    let dir = tempfile::tempdir().unwrap();
    let path = padded(dir.path());
    let (rows, summary) = read(&path);
    assert_eq!(summary.model_info.n_expert_used, None);
    let places: Vec<_> = rows
        .routing
        .iter()
        .map(|row| (row.token_id.0, row.slot, row.expert_id.0))
        .collect();
    assert_eq!(places, [(0, 0, 3), (1, 1, 5), (2, 0, 2), (2, 1, 7)]);
}

/// A rank of an expert-parallel run may use no expert in the last slots, so the top-k is that of the model or the user.
#[test]
fn unused_slots_do_not_decrease_top_k() {
    let dir = tempfile::tempdir().unwrap();
    let path = padded(dir.path());
    let model = ModelInfo {
        n_expert: Some(8),
        n_expert_used: Some(4),
        ..ModelInfo::default()
    };
    let of_model = ImportOptions {
        model: Some(model),
        ..ImportOptions::default()
    };
    let of_user = ImportOptions {
        top_k: Some(4),
        ..ImportOptions::default()
    };
    for options in [of_model, of_user] {
        let input = Input::Foreign(moe_foreign::detect(&path).unwrap().unwrap());
        let export = Export::new(&input, &options).unwrap();
        assert_eq!(export.model_info().n_expert_used, Some(4));
        let notes = &export.summary.notes;
        assert!(
            !notes.iter().any(|note| note.contains("top-k")),
            "{notes:?}"
        );
        let npy = moe_foreign::EXPORTERS
            .iter()
            .find(|exporter| exporter.name() == "npy");
        let mut bytes = Vec::new();
        npy.unwrap().export(&export, &mut bytes).unwrap();
        let header = String::from_utf8_lossy(&bytes[..128]);
        assert!(header.contains("(3, 1, 4)"), "{header}");
    }
}
