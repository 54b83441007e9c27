//! TensorAccessLog v4 traces (BSc thesis of E. Keri).

use super::*;

/// The expected rows `(token, layer, slot, expert)`: a trace contains the first token of each pass, which is 0, 3 and 4.
fn first_tokens() -> Vec<(u32, u16, u16, u32)> {
    let mut rows = Vec::new();
    for token in [0, 3, 4] {
        for (layer, experts) in (0u16..).zip(EXPERTS) {
            for (slot, &expert) in (0u16..).zip(&experts[token as usize]) {
                rows.push((token, layer, slot, expert));
            }
        }
    }
    rows
}

fn short(rows: &Collected) -> Vec<(u32, u16, u16, u32)> {
    let short = |row: &RoutingRow| (row.token_id.0, row.layer_id.0, row.slot, row.expert_id.0);
    rows.routing.iter().map(short).collect()
}

#[test]
fn reads_the_routing_of_trace_bin() {
    let (rows, summary) = import("thesis/small.bin", &ImportOptions::default());
    assert_eq!(short(&rows), first_tokens());
    let phases: Vec<_> = rows.routing.iter().map(|row| row.phase).collect();
    assert_eq!(
        phases,
        [
            [Some(Phase::Prompt); 4],
            [Some(Phase::Generate); 4],
            [Some(Phase::Generate); 4]
        ]
        .concat()
    );
    // A pass is 17 operations of 1 µs. The first expert operation of the prompt is operation 4 (from 0) of the second pass.
    assert_eq!(
        rows.routing[0].timestamp_ns,
        Some(1_000_000_000 + 1000 * (17 + 4))
    );
    assert!(
        rows.routing
            .iter()
            .all(|row| row.weight.is_none() && row.sequence_id.is_none())
    );
    let has_note = |text: &str| summary.notes.iter().any(|note| note.contains(text));
    assert!(
        has_note("skipped 4 records from the first record without a timestamp on"),
        "{:?}",
        summary.notes
    );
    assert!(
        has_note("1 of 4 passes: the warm-up of llama.cpp"),
        "{:?}",
        summary.notes
    );
    assert!(
        has_note("in 1 pass of several tokens"),
        "{:?}",
        summary.notes
    );
}

#[test]
fn reads_token_json_like_trace_bin() {
    let (rows, summary) = import("thesis-json", &ImportOptions::default());
    assert_eq!(short(&rows), first_tokens());
    assert_eq!(
        rows.routing,
        import("thesis/small.bin", &ImportOptions::default())
            .0
            .routing
    );
    assert!(
        summary
            .notes
            .iter()
            .any(|note| note.contains("1 of 4 passes"))
    );
    let options = ImportOptions::default();
    let text = r#"{"token_id":0,"entries":[
        {"timestamp_ns":5,"token_id":0,"phase":"PROMPT","operation_type":"ADD","dst_name":"a"},
        {"timestamp_ns":0,"token_id":0,"phase":"PROMPT","operation_type":"ADD","dst_name":"a"}]}"#;
    let no_timestamp = error_of("thesis-json", text, &options);
    assert_eq!(
        no_timestamp.location(),
        Some(&Location::Element("entries[1]".into()))
    );
    let truncated = text[..text.len() - 3].replace("\"timestamp_ns\":0", "\"timestamp_ns\":6");
    let truncated = error_of("thesis-json", truncated, &options);
    assert_eq!(
        truncated.location(),
        Some(&Location::Line(3)),
        "{truncated}"
    );
}

/// `make/thesis.py` writes the expected files like the thesis's `parse_trace.py`.
#[test]
fn exports_token_json_like_the_script_of_the_thesis() {
    let path = fixture("thesis/small.bin");
    let input = Input::Foreign(moe_foreign::detect(&path).unwrap().unwrap());
    let options = ImportOptions::default();
    let export = Export::new(&input, &options).unwrap();
    let exporter = FILES_EXPORTERS
        .iter()
        .find(|exporter| exporter.name() == "thesis-json");
    let dir = tempfile::tempdir().unwrap();
    let mut create = |name: &str| -> std::io::Result<Box<dyn std::io::Write>> {
        Ok(Box::new(std::fs::File::create_new(dir.path().join(name))?))
    };
    exporter.unwrap().export(&export, &mut create).unwrap();
    for name in ["token-00000.json", "token-00001.json"] {
        let read = |path: PathBuf| -> serde_json::Value {
            serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
        };
        let written = read(dir.path().join(name));
        assert_eq!(written, read(fixture("thesis-json").join(name)), "{name}");
    }
}

/// The sample that the thesis published contains only a warm-up pass: all 32 experts, of which a record contains 16. The operations of
/// the router, or the model, distinguish it from a router that selects 16 or more experts.
#[test]
fn recognizes_a_trace_with_only_a_warm_up_pass() {
    let bytes = std::fs::read(fixture("thesis/small.bin")).unwrap();
    let mut records: Vec<[u8; 1024]> = bytes.as_chunks().0[..17].to_vec();
    for record in &mut records {
        let (op, put) = (
            record[16],
            |record: &mut [u8; 1024], source: usize, bytes: u32| {
                let at = 152 + 160 * source + 136;
                record[at..at + 4].copy_from_slice(&bytes.to_le_bytes());
            },
        );
        if op == 30 {
            for (expert, id) in record[792..856].chunks_exact_mut(4).enumerate() {
                id.copy_from_slice(&(expert as u32).to_le_bytes());
            }
            record[856] = 16;
            put(record, 2, 4 * 32 * 2);
        } else if op == 68 {
            put(record, 0, 4 * 32 * 2);
        }
    }
    let all = records.concat();
    let options = ImportOptions::default();
    let ForeignError::NoRouting { notes, .. } = error_of("thesis", &all, &options) else {
        panic!("another error");
    };
    assert!(notes[0].contains("1 of 1 pass: the warm-up"), "{notes:?}");
    // Without the operations of the router, only the model shows the warm-up.
    let experts: Vec<u8> = records
        .iter()
        .filter(|record| record[16] == 30)
        .flatten()
        .copied()
        .collect();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace");
    std::fs::write(&path, &experts).unwrap();
    let import = |options: &ImportOptions| {
        let mut rows = Collected::default();
        moe_foreign::import(importer("thesis"), &Source::file(&path), options, &mut rows)
    };
    let summary = import(&options).unwrap();
    assert_eq!(summary.rows, 2 * 16);
    assert!(
        summary
            .notes
            .iter()
            .any(|note| note.contains("may be the warm-up")),
        "{:?}",
        summary.notes
    );
    let four = ImportOptions {
        top_k: Some(4),
        ..ImportOptions::default()
    };
    assert!(matches!(import(&four), Err(ForeignError::NoRouting { .. })));
}

/// Operation numbers differ between llama.cpp versions.
#[test]
fn uses_the_table_of_operations_of_the_user() {
    let mut bytes = std::fs::read(fixture("thesis/small.bin")).unwrap();
    for record in bytes.as_chunks_mut::<1024>().0 {
        if record[16] == 30 {
            record[16] = 31;
        }
    }
    let error = error_of("thesis", &bytes, &ImportOptions::default());
    let is_expected = matches!(error, ForeignError::Operations { operation: 31, .. });
    assert!(is_expected, "{error}");
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace");
    std::fs::write(&path, &bytes).unwrap();
    let options = ImportOptions {
        ops: Some([(31, "MUL_MAT_ID".to_owned())].into_iter().collect()),
        ..ImportOptions::default()
    };
    let mut rows = Collected::default();
    moe_foreign::import(
        importer("thesis"),
        &Source::file(&path),
        &options,
        &mut rows,
    )
    .unwrap();
    assert_eq!(short(&rows), first_tokens());
}

/// `fixtures/foreign/thesis/small.bin` with other bytes in names and in the padding before them.
#[test]
fn accepts_any_bytes_in_padding_and_names() {
    let mut bytes = std::fs::read(fixture("thesis/small.bin")).unwrap();
    let is_used = |record: &[u8]| record[..8] != [0; 8];
    for record in bytes
        .chunks_exact_mut(1024)
        .filter(|record| is_used(record))
    {
        record[19..24].copy_from_slice(&[0xaa, 1, 2, 3, 0xff]);
        // Not UTF-8.
        record[24] = 0xff;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace.bin");
    std::fs::write(&path, bytes).unwrap();
    let detected = moe_foreign::detect(&path).unwrap().unwrap();
    assert_eq!(detected.importer.name(), "thesis");
    let mut rows = Collected::default();
    let options = ImportOptions::default();
    let summary =
        moe_foreign::import(detected.importer, &detected.source, &options, &mut rows).unwrap();
    assert_eq!(short(&rows), first_tokens());
    let is_warm_up = |note: &String| note.contains("1 of 4 passes: the warm-up");
    assert!(summary.notes.iter().any(is_warm_up), "{:?}", summary.notes);
}
