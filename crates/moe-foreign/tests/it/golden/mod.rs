//! What the importers make of the golden files; the expected values are the story that `fixtures/foreign/make/text.py` tells,
//! written down again by hand.

mod content;
mod counts;
mod growth;
mod micro_batches;
mod runs;
mod slots;
mod texts;
mod thesis;
mod tokens;

use std::path::{Path, PathBuf};

use moe_foreign::{
    Collected, Counts, Export, FILES_EXPORTERS, ForeignError, IMPORTERS, ImportOptions, Importer,
    Input, Missing, Source, Summary,
};
use moe_trace::record::lane;
use moe_trace::{Error, ExpertId, Facts, LayerId, Phase, RoutingRow, Sink, TokenId};

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
                        expert_id: ExpertId(expert_id),
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
        token_id: TokenId(token as u32),
        ..RoutingRow::at_layer(LayerId(layer as u16))
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
fn import(name: &str, options: &ImportOptions) -> (Collected, Summary) {
    let path = fixture(name);
    let detected = moe_foreign::detect(&path).unwrap();
    let detected = detected.unwrap_or_else(|| panic!("{name} is not recognised"));
    assert_eq!(
        Some(detected.importer.name()),
        name.split('/').next(),
        "{name}"
    );
    let mut rows = Collected::default();
    let summary =
        moe_foreign::import(detected.importer, &detected.source, options, &mut rows).unwrap();
    assert_eq!(summary.rows, rows.routing.len() as u64);
    assert_eq!(summary.counts, rows.counts.len() as u64);
    (rows, summary)
}

fn routing(name: &str) -> Vec<RoutingRow> {
    import(name, &ImportOptions::default()).0.routing
}

/// The error of importing `text` as the format `name`.
fn refused(name: &str, text: impl AsRef<[u8]>, options: &ImportOptions) -> String {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace");
    std::fs::write(&path, text).unwrap();
    let mut rows = Collected::default();
    let source = Source::file(&path);
    let error = moe_foreign::import(importer(name), &source, options, &mut rows).unwrap_err();
    let text = error.to_string();
    assert!(!text.contains('\n'), "{text}");
    text.replace(&path.display().to_string(), "trace")
}

#[test]
fn the_model_of_the_user_is_held_against_the_trace() {
    let options = ImportOptions {
        model: Some(Facts {
            n_expert: Some(64),
            ..Facts::default()
        }),
        ..ImportOptions::default()
    };
    let source = Source::file(&fixture("bigmoeonedge/small.route.csv"));
    let mut rows = Collected::default();
    let error =
        moe_foreign::import(importer("bigmoeonedge"), &source, &options, &mut rows).unwrap_err();
    assert!(matches!(error, ForeignError::OtherModel { .. }), "{error}");
    let expected = "it has 8 experts in a layer, but the model has 64";
    assert!(error.to_string().contains(expected), "{error}");
    // It fills in what the trace does not tell, and goes before nothing that it does.
    let options = ImportOptions {
        model: Some(Facts {
            n_expert: Some(8),
            n_expert_used: Some(4),
            expert_bytes: [(LayerId(0), 7), (LayerId(9), 9)].into(),
            ..Facts::default()
        }),
        ..ImportOptions::default()
    };
    let (_, summary) = import("bigmoeonedge/small.route.csv", &options);
    assert_eq!(summary.facts.n_expert_used, Some(2));
    assert_eq!(
        summary.facts.expert_bytes,
        [(LayerId(0), 1000), (LayerId(1), 1200), (LayerId(9), 9)].into()
    );
}

#[test]
fn counts_of_rows_know_tokens_and_router_mass() {
    let mut counts = Counts::default();
    let options = ImportOptions::default();
    let source = Source::file(&fixture("bigmoeonedge/small.route.csv"));
    moe_foreign::import(importer("bigmoeonedge"), &source, &options, &mut counts).unwrap();
    let prompt = counts.iter().next().unwrap();
    assert_eq!((prompt.0, prompt.1), (LayerId(0), Some(Phase::Prompt)));
    assert_eq!(prompt.2.rows, Some(3));
    // Passes are not told without times.
    assert_eq!(prompt.2.calls, None);
    let layer = &counts.layers()[&LayerId(0)];
    assert_eq!(layer.rows, Some(5));
    // Expert 5 of layer 0: slots 0, 1, 0, 1 of tokens 0 to 3.
    assert_eq!(layer.experts[&ExpertId(5)].mass, Some(2.0));
    assert_eq!(layer.experts[&ExpertId(5)].count, 4);
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
        assert!(moe_foreign::detect(&path).unwrap().is_none(), "{name}");
    }
    assert!(moe_foreign::detect(dir.path()).unwrap().is_none());
    let missing = dir.path().join("missing");
    assert!(matches!(
        moe_foreign::detect(&missing),
        Err(ForeignError::Read(Error::Io { .. }))
    ));
}
