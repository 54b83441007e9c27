//! What the importers make of the golden files; the expected values are the story that `fixtures/foreign/make/text.py` tells,
//! written down again by hand.

use std::path::{Path, PathBuf};

use moe_trace::foreign::{
    self, Collected, Counts, Export, FILES_EXPORTERS, Facts, ForeignError, IMPORTERS, Importer,
    Input, Options, Phase, RoutingRow, Source, Summary,
};
use moe_trace::record::lane;

/// `[layer][token]`: the experts of the story, best first.
const EXPERTS: [[[u32; 2]; 5]; 2] = [
    [[5, 1], [3, 5], [5, 7], [1, 5], [0, 3]],
    [[2, 6], [6, 2], [4, 6], [6, 0], [6, 4]],
];
/// `[layer]`: expert and count, counted by hand.
const COUNTS: [&[(u32, u64)]; 2] = [
    &[(0, 1), (1, 2), (3, 2), (5, 4), (7, 1)],
    &[(0, 1), (2, 2), (4, 2), (6, 5)],
];
const WEIGHTS: [[f32; 2]; 2] = [[0.75, 0.25], [0.625, 0.375]];

/// The rows in the order of computing: the prompt of three tokens layer by layer, then two tokens.
fn story(of: impl Fn(usize, usize) -> RoutingRow) -> Vec<RoutingRow> {
    let mut rows = Vec::new();
    for tokens in [0..3, 3..4, 4..5] {
        for (layer, experts) in EXPERTS.iter().enumerate() {
            for token in tokens.clone() {
                for (slot, &expert_id) in experts[token].iter().enumerate() {
                    let row = of(layer, token);
                    rows.push(RoutingRow {
                        slot: slot as u16,
                        expert_id,
                        weight: row.weight.map(|_| WEIGHTS[layer][slot]),
                        ..row
                    });
                }
            }
        }
    }
    rows
}

fn plain(layer: usize, token: usize) -> RoutingRow {
    RoutingRow {
        token_id: token as u32,
        ..RoutingRow::at_layer(layer as u16)
    }
}

fn weighted(layer: usize, token: usize) -> RoutingRow {
    RoutingRow {
        weight: Some(0.0),
        ..plain(layer, token)
    }
}

fn phase(token: usize) -> Option<Phase> {
    Some(if token < 3 {
        Phase::Prompt
    } else {
        Phase::Generate
    })
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../fixtures/foreign")
        .join(name)
}

fn importer(name: &str) -> &'static dyn Importer {
    let found = IMPORTERS.iter().find(|importer| importer.name() == name);
    *found.expect("there is such an importer")
}

/// Imports a golden file with the importer that recognises it, which must be the one that the directory names.
fn import(name: &str, options: &Options) -> (Collected, Summary) {
    let path = fixture(name);
    let detected = foreign::detect(&path, IMPORTERS).unwrap();
    let detected = detected.unwrap_or_else(|| panic!("{name} is not recognised"));
    assert_eq!(
        Some(detected.importer.name()),
        name.split('/').next(),
        "{name}"
    );
    let mut rows = Collected::default();
    let summary = foreign::import(detected.importer, &detected.source, options, &mut rows).unwrap();
    assert_eq!(summary.rows, rows.routing.len() as u64);
    assert_eq!(summary.counts, rows.counts.len() as u64);
    (rows, summary)
}

fn routing(name: &str) -> Vec<RoutingRow> {
    import(name, &Options::default()).0.routing
}

/// The error of importing `text` as the format `name`.
fn refused(name: &str, text: impl AsRef<[u8]>, options: &Options) -> String {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace");
    std::fs::write(&path, text).unwrap();
    let mut rows = Collected::default();
    let source = Source::file(&path);
    let error = foreign::import(importer(name), &source, options, &mut rows).unwrap_err();
    let text = error.to_string();
    assert!(!text.contains('\n'), "{text}");
    text.replace(&path.display().to_string(), "trace")
}

fn assert_counts(name: &str) -> Summary {
    let (rows, summary) = import(name, &Options::default());
    assert!(!summary.is_ordered(), "{name}");
    for (layer, expected) in (0u16..).zip(COUNTS) {
        let mut counts: Vec<(u32, u64)> = rows
            .counts
            .iter()
            .filter(|row| row.layer_id == layer)
            .map(|row| (row.expert_id, row.count))
            .collect();
        counts.sort_unstable();
        assert_eq!(counts, expected, "{name}, layer {layer}");
    }
    summary
}

#[test]
fn bigmoeonedge() {
    let (rows, summary) = import("bigmoeonedge/small.route.csv", &Options::default());
    let mut expected = story(|layer, token| RoutingRow {
        sequence_id: Some(0),
        phase: phase(token),
        ..weighted(layer, token)
    });
    // What is used for the first time was read; what another token of the prompt has read is not told.
    let (miss, hit) = (Some(lane::CACHE_MISS), Some(lane::CACHE_HIT));
    let lanes = [
        miss, miss, miss, None, None, miss, miss, miss, None, None, miss, None, // prompt
        hit, hit, hit, miss, miss, hit, hit, hit, // two tokens
    ];
    for (row, lane) in expected.iter_mut().zip(lanes) {
        row.lane = lane;
    }
    assert_eq!(rows.routing, expected);
    assert_eq!(
        summary.facts,
        Facts {
            model: Some("/models/small.gguf".into()),
            arch: Some("qwen3moe".into()),
            n_layer: Some(2),
            n_expert: Some(8),
            n_expert_used: Some(2),
            expert_bytes: [(0, 1000), (1, 1200)].into(),
        }
    );

    let header = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes\n";
    let refused = |row: &str| {
        refused(
            "bigmoeonedge",
            format!("{header}{row}\n"),
            &Options::default(),
        )
    };
    assert_eq!(
        refused("0,0,0,0,0,83,0.5,0"),
        "trace: line 2: no expert_bytes; the line is damaged"
    );
    assert_eq!(
        refused("0,0,0,0,0,4096,0.5,0,1"),
        "trace: line 2: expert 4096 is out of range (below 4096); the file is damaged"
    );
    assert_eq!(
        refused("0,2,0,0,0,1,0.5,0,1"),
        "trace: line 2: phase is neither 0 (prompt) nor 1 (decode); the line is damaged"
    );
}

/// The published traces; rows and hits as `awk` counts them in the files.
#[test]
fn published_bigmoeonedge_traces() {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data/bigmoeonedge");
    for (file, n_rows, n_prompt, n_hits, n_expert_used, bytes) in [
        ("gptoss.route.csv", 10_560, 5_952, 2_066, 2, 13_219_200),
        ("qwen.route.csv", 44_766, 7_902, 29_597, 6, 3_059_712),
    ] {
        let path = data.join(file);
        if !path.exists() {
            eprintln!("{} is not there: not tested", path.display());
            continue;
        }
        let detected = foreign::detect(&path, IMPORTERS).unwrap().unwrap();
        assert_eq!(detected.importer.name(), "bigmoeonedge");
        let mut rows = Collected::default();
        let options = Options::default();
        let summary =
            foreign::import(detected.importer, &detected.source, &options, &mut rows).unwrap();
        assert_eq!(summary.rows, n_rows);
        assert_eq!(rows.routing.len() as u64, n_rows);
        let of = |f: fn(&&RoutingRow) -> bool| rows.routing.iter().filter(f).count();
        assert_eq!(of(|row| row.phase == Some(Phase::Prompt)), n_prompt);
        assert_eq!(of(|row| row.lane == Some(lane::CACHE_HIT)), n_hits);
        assert_eq!(summary.facts.n_expert, Some(128));
        assert_eq!(summary.facts.n_expert_used, Some(n_expert_used));
        assert_eq!(summary.facts.expert_bytes[&0], bytes);
        assert_eq!(
            summary.facts.expert_bytes.len() as u32,
            summary.facts.n_layer.unwrap()
        );
    }
}

#[test]
fn jsonl_per_token_and_layer() {
    let expected = story(|layer, token| RoutingRow {
        phase: phase(token),
        ..plain(layer, token)
    });
    assert_eq!(routing("jsonl/small.jsonl"), expected);
    let expected = story(|layer, token| RoutingRow {
        sequence_id: Some(4),
        ..weighted(layer, token)
    });
    assert_eq!(routing("jsonl/with-weights.jsonl"), expected);

    let options = Options::default();
    let text = "{\"t\":0,\"layer\":0,\"experts\":[1]}\n\n{\"t\":1,\"layer\":\n";
    assert_eq!(
        refused("jsonl", text, &options),
        "trace: line 3: EOF while parsing a value (column 15); the file is damaged, or of another format"
    );
    let text = "{\"t\":0,\"layer\":0,\"experts\":[1,2],\"weights\":[0.5]}\n";
    assert_eq!(
        refused("jsonl", text, &options),
        "trace: line 1: 1 weights for 2 experts; the line is damaged"
    );
}

#[test]
fn empty_slots_and_unknown_phases() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace");
    std::fs::write(
        &path,
        "{\"t\":7,\"layer\":1,\"experts\":[3,-1,2],\"phase\":\"warm\"}\n",
    )
    .unwrap();
    let mut rows = Collected::default();
    let options = Options::default();
    let source = Source::file(&path);
    let summary = foreign::import(importer("jsonl"), &source, &options, &mut rows).unwrap();
    let slots: Vec<(u16, u32)> = rows
        .routing
        .iter()
        .map(|row| (row.slot, row.expert_id))
        .collect();
    assert_eq!(slots, [(0, 3), (2, 2)]);
    assert_eq!(rows.routing[0].phase, None);
    assert_eq!(
        summary.notes,
        ["phase \"warm\" is not known and was taken as not told"]
    );
}

#[test]
fn lattice() {
    assert_eq!(routing("lattice/small.jsonl"), story(weighted));
}

#[test]
fn moe_balance() {
    // Its lines are whole layers.
    let mut expected = story(|layer, token| RoutingRow {
        sequence_id: Some(12),
        ..weighted(layer, token)
    });
    expected.sort_by_key(|row| (row.layer_id, row.token_id));
    assert_eq!(routing("moe-balance/small.jsonl"), expected);
}

#[test]
fn megatron() {
    let expected = story(|layer, token| RoutingRow {
        sequence_id: Some(0),
        ..plain(layer, token)
    });
    let (rows, summary) = import("megatron/router_trace_rank0.jsonl", &Options::default());
    assert_eq!(rows.routing, expected);
    assert_eq!(
        summary.notes[0],
        "left out: 1 line of blocks other than the decoder"
    );
    // The directory of all ranks is one trace.
    let (rows, _) = import("megatron", &Options::default());
    assert_eq!(rows.routing, expected);
}

#[test]
fn colibri_trace() {
    assert_eq!(routing("colibri-trace/small.txt"), story(weighted));
    let options = Options::default();
    assert_eq!(
        refused("colibri-trace", "0 0 0 5:0.75\n0 1 0 3\n", &options),
        "trace: line 2: an expert is not id:gate; the line is damaged"
    );
}

#[test]
fn layer_expert() {
    let summary = assert_counts_of_choices();
    assert!(summary.notes[0].contains("pass --top-k"));
    let two = Options {
        top_k: Some(2),
        ..Options::default()
    };
    let (rows, _) = import("layer-expert/small.csv", &two);
    assert_eq!(rows.routing, story(plain));
    // The model tells it as well.
    let model = Options {
        model: Some(Facts {
            n_expert_used: Some(2),
            ..Facts::default()
        }),
        ..Options::default()
    };
    let (rows, _) = import("layer-expert/small.csv", &model);
    assert_eq!(rows.routing, story(plain));

    let four = Options {
        top_k: Some(4),
        ..Options::default()
    };
    assert_eq!(
        refused("layer-expert", "layer,expert\n0,1\n0,2\n1,3\n", &four),
        "trace: line 2: layer 0 has 2 choices in a row from here, which is no multiple of the 4 experts for a token; pass the \
         --top-k of the trace"
    );
}

/// Every line is a choice, so counts are of single lines.
fn assert_counts_of_choices() -> Summary {
    let path = fixture("layer-expert/small.csv");
    let mut counts = Counts::default();
    let options = Options::default();
    let source = Source::file(&path);
    let summary =
        foreign::import(importer("layer-expert"), &source, &options, &mut counts).unwrap();
    for (layer, expected) in COUNTS.iter().enumerate() {
        let layer = &counts.layers()[&(layer as u16)];
        let found: Vec<(u32, u64)> = layer.experts.iter().map(|(&e, t)| (e, t.count)).collect();
        assert_eq!(found, *expected);
        assert_eq!(layer.total(), 10);
    }
    summary
}

#[test]
fn coli_usage() {
    let summary = assert_counts("coli-usage/small.coli_usage");
    assert_eq!(summary.facts.n_expert, Some(8));
    assert_eq!(summary.facts.n_layer, Some(2));
    // Layer 2 of two layers is the predictor's.
    assert!(summary.notes[0].starts_with("left out: 1 count of the multi-token predictor"));
    let summary = assert_counts("coli-usage/old.coli_usage");
    assert_eq!(summary.facts, Facts::default());

    let options = Options::default();
    assert_eq!(
        refused("coli-usage", "-1 2 8\n0 8 1\n", &options),
        "trace: line 2: expert 8 is out of range (below 8); the file is damaged, or belongs to another model"
    );
    assert_eq!(
        refused("coli-usage", "-2 2 77\n0 1 1\n", &options),
        "trace: line 1: format version 2 is not known, 1 is read; read it with a newer moe-analyze"
    );
}

#[test]
fn ds4_hotlist() {
    let summary = assert_counts("ds4-hotlist/small.hotlist");
    assert_eq!(summary.facts.model.as_deref(), Some("small"));
    assert_eq!(
        (summary.facts.n_layer, summary.facts.n_expert),
        (Some(2), Some(8))
    );
}

#[test]
fn mesh_llm() {
    // A file a layer; the directory is one trace.
    let (rows, summary) = import("mesh-llm", &Options::default());
    assert_eq!((summary.rows, summary.counts), (0, 9));
    // Expert 5 of layer 0 is first twice and second twice, expert 6 of layer 1 as well and once more first.
    let five = rows.counts.iter().find(|row| row.layer_id == 0);
    assert_eq!(
        five.map(|row| (row.expert_id, row.count, row.mass)),
        Some((5, 4, Some(2.0)))
    );
    let six = rows.counts.iter().find(|row| row.layer_id == 1);
    assert_eq!(
        six.map(|row| (row.expert_id, row.count, row.mass)),
        Some((6, 5, Some(2.625)))
    );
}

#[test]
fn expert_tracer() {
    assert_counts("expert-tracer/written.json");
    let summary = assert_counts("expert-tracer/planned.json");
    assert!(summary.notes[0].contains("three times"));
    let options = Options::default();
    assert_eq!(
        refused(
            "expert-tracer",
            "{\"total_tokens\":1,\"expert_activations\":{\"9\":2}}",
            &options
        ),
        "trace: counts of experts without their layers; trace with per-layer counts switched on"
    );
}

/// What a thesis trace tells of the story: of each pass the first token, which is 0, 3 and 4.
fn thesis_story() -> Vec<(u32, u16, u16, u32)> {
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
    let short = |row: &RoutingRow| (row.token_id, row.layer_id, row.slot, row.expert_id);
    rows.routing.iter().map(short).collect()
}

#[test]
fn thesis_trace() {
    let (rows, summary) = import("thesis/small.bin", &Options::default());
    assert_eq!(short(&rows), thesis_story());
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
    // A pass is 17 operations, a microsecond each. The prompt's first expert operation is the fourth of the second pass.
    assert_eq!(
        rows.routing[0].timestamp_ns,
        Some(1_000_000_000 + 1000 * (17 + 4))
    );
    assert!(
        rows.routing
            .iter()
            .all(|row| row.weight.is_none() && row.sequence_id.is_none())
    );
    let told = |text: &str| summary.notes.iter().any(|note| note.contains(text));
    assert!(
        told("4 records behind the first one without a time"),
        "{:?}",
        summary.notes
    );
    assert!(
        told("1 of 4 passes, llama.cpp's warm-up"),
        "{:?}",
        summary.notes
    );
    assert!(told("in 1 pass of several tokens"), "{:?}", summary.notes);
}

#[test]
fn thesis_json() {
    let (rows, summary) = import("thesis-json", &Options::default());
    assert_eq!(short(&rows), thesis_story());
    assert_eq!(
        rows.routing,
        import("thesis/small.bin", &Options::default()).0.routing
    );
    assert!(
        summary
            .notes
            .iter()
            .any(|note| note.contains("1 of 4 passes"))
    );
    let options = Options::default();
    let text = r#"{"token_id":0,"entries":[
        {"timestamp_ns":5,"token_id":0,"phase":"PROMPT","operation_type":"ADD","dst_name":"a"},
        {"timestamp_ns":0,"token_id":0,"phase":"PROMPT","operation_type":"ADD","dst_name":"a"}]}"#;
    assert_eq!(
        refused("thesis-json", text, &options),
        "trace: element entries[1]: its time is 0, which no operation has; the file is damaged"
    );
    let cut = &text[..text.len() - 3];
    assert!(
        refused(
            "thesis-json",
            cut.replace("\"timestamp_ns\":0", "\"timestamp_ns\":6"),
            &options
        )
        .contains("line 3")
    );
}

/// The exporter writes what the thesis's own script, as `make/thesis.py` knows it, writes of the same records.
#[test]
fn thesis_json_of_a_thesis_trace() {
    let path = fixture("thesis/small.bin");
    let input = Input::Foreign(foreign::detect(&path, IMPORTERS).unwrap().unwrap());
    let options = Options::default();
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

/// The published sample is nothing but a warm-up: all 32 experts, of which a record holds sixteen. The router's operations, or the
/// model, tell it from a router that chooses sixteen and more.
#[test]
fn a_warm_up_alone() {
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
            record[856] = 16;
            put(record, 2, 4 * 32 * 2);
        } else if op == 68 {
            put(record, 0, 4 * 32 * 2);
        }
    }
    let all = records.concat();
    let options = Options::default();
    let error = refused("thesis", &all, &options);
    assert!(
        error.starts_with("trace holds no routing (thesis: left out of the routing: 1 of 1 pass,"),
        "{error}"
    );
    // Expert operations alone: now only the model tells.
    let experts: Vec<u8> = records
        .iter()
        .filter(|record| record[16] == 30)
        .flatten()
        .copied()
        .collect();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace");
    std::fs::write(&path, &experts).unwrap();
    let import = |options: &Options| {
        let mut rows = Collected::default();
        foreign::import(importer("thesis"), &Source::file(&path), options, &mut rows)
    };
    let summary = import(&options).unwrap();
    assert_eq!(summary.rows, 2 * 16);
    assert!(
        summary
            .notes
            .iter()
            .any(|note| note.contains("--model or --top-k")),
        "{:?}",
        summary.notes
    );
    let four = Options {
        top_k: Some(4),
        ..Options::default()
    };
    assert!(matches!(import(&four), Err(ForeignError::Nothing { .. })));
}

/// Numbers of operations move between llama.cpp versions.
#[test]
fn other_numbers_of_operations() {
    let mut bytes = std::fs::read(fixture("thesis/small.bin")).unwrap();
    for record in bytes.as_chunks_mut::<1024>().0 {
        if record[16] == 30 {
            record[16] = 31;
        }
    }
    let error = refused("thesis", &bytes, &Options::default());
    assert!(
        error.contains("operation 3") && error.contains("--ops"),
        "{error}"
    );
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace");
    std::fs::write(&path, &bytes).unwrap();
    let options = Options {
        ops: Some([(31, "MUL_MAT_ID".to_owned())].into_iter().collect()),
        ..Options::default()
    };
    let mut rows = Collected::default();
    foreign::import(
        importer("thesis"),
        &Source::file(&path),
        &options,
        &mut rows,
    )
    .unwrap();
    assert_eq!(short(&rows), thesis_story());
}

#[test]
fn the_model_of_the_user_is_held_against_the_trace() {
    let options = Options {
        model: Some(Facts {
            n_expert: Some(64),
            ..Facts::default()
        }),
        ..Options::default()
    };
    let source = Source::file(&fixture("bigmoeonedge/small.route.csv"));
    let mut rows = Collected::default();
    let error =
        foreign::import(importer("bigmoeonedge"), &source, &options, &mut rows).unwrap_err();
    assert!(
        matches!(
            error,
            ForeignError::OtherModel {
                trace: 8,
                model: 64,
                ..
            }
        ),
        "{error}"
    );
    // It fills in what the trace does not tell, and goes before nothing that it does.
    let options = Options {
        model: Some(Facts {
            n_expert: Some(8),
            n_expert_used: Some(4),
            expert_bytes: [(0, 7), (9, 9)].into(),
            ..Facts::default()
        }),
        ..Options::default()
    };
    let (_, summary) = import("bigmoeonedge/small.route.csv", &options);
    assert_eq!(summary.facts.n_expert_used, Some(2));
    assert_eq!(
        summary.facts.expert_bytes,
        [(0, 1000), (1, 1200), (9, 9)].into()
    );
}

#[test]
fn counts_of_rows_know_tokens_and_router_mass() {
    let mut counts = Counts::default();
    let options = Options::default();
    let source = Source::file(&fixture("bigmoeonedge/small.route.csv"));
    foreign::import(importer("bigmoeonedge"), &source, &options, &mut counts).unwrap();
    let prompt = counts.iter().next().unwrap();
    assert_eq!((prompt.0, prompt.1), (0, Some(Phase::Prompt)));
    assert_eq!(prompt.2.rows, Some(3));
    // Passes are not told without times.
    assert_eq!(prompt.2.calls, None);
    let layer = &counts.layers()[&0];
    assert_eq!(layer.rows, Some(5));
    // Expert 5 of layer 0: slots 0, 1, 0, 1 of tokens 0 to 3.
    assert_eq!(layer.experts[&5].mass, Some(2.0));
    assert_eq!(layer.experts[&5].count, 4);
}

#[test]
fn nothing_is_recognised_in_what_is_not_a_trace() {
    let dir = tempfile::tempdir().unwrap();
    for (name, bytes) in [
        ("empty", b"".as_slice()),
        ("text", b"hello\nworld\n"),
        ("json", b"{\"a\":1}"),
        ("csv", b"a,b\n1,2\n"),
        ("binary", &[0xff; 5000]),
    ] {
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        assert!(
            foreign::detect(&path, IMPORTERS).unwrap().is_none(),
            "{name}"
        );
    }
    assert!(foreign::detect(dir.path(), IMPORTERS).unwrap().is_none());
    let missing = dir.path().join("missing");
    assert!(matches!(
        foreign::detect(&missing, IMPORTERS),
        Err(ForeignError::Io { .. })
    ));
}
