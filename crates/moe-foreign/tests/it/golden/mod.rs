//! Importers on golden files. The expected values are those of `fixtures/foreign/make/text.py`, repeated here by hand: two layers of
//! eight experts, top-2, a prompt of three tokens and two generated tokens.

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
    Input, JsonError, LineError, Location, Missing, Source, Summary, WeightError,
};
use moe_trace::record::lane;
use moe_trace::{Error, ExpertId, LayerId, ModelInfo, Phase, RoutingRow, Sink, TokenId};

/// `[layer][token]`: selected experts, best first.
const EXPERTS: [[[u32; 2]; 5]; 2] = [
    [[5, 1], [3, 5], [5, 7], [1, 5], [0, 3]],
    [[2, 6], [6, 2], [4, 6], [6, 0], [6, 4]],
];
/// `[layer]`: pairs of expert and count.
const COUNTS: [&[(u32, u64)]; 2] = [
    &[(0, 1), (1, 2), (3, 2), (5, 4), (7, 1)],
    &[(0, 1), (2, 2), (4, 2), (6, 5)],
];
const WEIGHTS: [[f32; 2]; 2] = [[0.75, 0.25], [0.625, 0.375]];

/// The expected rows in the order of the passes: the prompt of three tokens layer by layer, then two passes of one token.
fn expected_rows(of: impl Fn(usize, usize) -> RoutingRow) -> Vec<RoutingRow> {
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
    *found.expect("an importer with this name")
}

/// Imports a golden file with the importer that recognizes it, whose name must be that of the directory.
fn import(name: &str, options: &ImportOptions) -> (Collected, Summary) {
    let path = fixture(name);
    let detected = moe_foreign::detect(&path).unwrap();
    let detected = detected.unwrap_or_else(|| panic!("{name} is not recognized"));
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

/// The error of importing `text` with the importer `name`. Its message is one line that starts with the path.
fn error_of(name: &str, text: impl AsRef<[u8]>, options: &ImportOptions) -> ForeignError {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace");
    std::fs::write(&path, text).unwrap();
    let mut rows = Collected::default();
    let source = Source::file(&path);
    let error = moe_foreign::import(importer(name), &source, options, &mut rows).unwrap_err();
    let text = error.to_string();
    assert!(!text.contains('\n'), "{text}");
    assert!(text.starts_with(path.to_str().unwrap()), "{text}");
    error
}

/// Asserts that `error` is at a line and has a cause that matches.
#[track_caller]
fn assert_line_error(error: &ForeignError, line: u64, is_cause: impl Fn(&LineError) -> bool) {
    assert_eq!(error.location(), Some(&Location::Line(line)), "{error}");
    assert!(error.cause::<LineError>().is_some_and(is_cause), "{error}");
}

#[test]
fn rejects_a_trace_that_contradicts_the_model_of_the_user() {
    let options = ImportOptions {
        model: Some(ModelInfo {
            n_expert: Some(64),
            ..ModelInfo::default()
        }),
        ..ImportOptions::default()
    };
    let source = Source::file(&fixture("bigmoeonedge/small.route.csv"));
    let mut rows = Collected::default();
    let error =
        moe_foreign::import(importer("bigmoeonedge"), &source, &options, &mut rows).unwrap_err();
    assert!(matches!(error, ForeignError::OtherModel { .. }), "{error}");
}

#[test]
fn rejects_weights_that_no_router_applies() {
    let options = ImportOptions::default();
    let line = "{\"t\":0,\"layer\":0,\"experts\":[3,1],\"weights\":[0.75,-0.5]}\n";
    let rows = "step,layer,slot,expert,weight\n0,0,0,3,0.75\n0,0,1,1,inf\n";
    for (name, text, line, weight) in [
        ("jsonl", line, 1, -0.5),
        ("bigmoeonedge", rows, 3, f32::INFINITY),
    ] {
        let error = error_of(name, text, &options);
        assert_eq!(error.location(), Some(&Location::Line(line)), "{error}");
        assert_eq!(error.cause(), Some(&WeightError { weight }), "{error}");
    }
}

#[test]
fn the_given_model_completes_the_model_info_of_the_trace() {
    let options = ImportOptions {
        model: Some(ModelInfo {
            n_expert: Some(8),
            n_expert_used: Some(4),
            expert_bytes: [(LayerId(0), 7), (LayerId(9), 9)].into(),
            ..ModelInfo::default()
        }),
        ..ImportOptions::default()
    };
    let (_, summary) = import("bigmoeonedge/small.route.csv", &options);
    assert_eq!(summary.model_info.n_expert_used, Some(2));
    assert_eq!(
        summary.model_info.expert_bytes,
        [(LayerId(0), 1000), (LayerId(1), 1200), (LayerId(9), 9)].into()
    );
}

#[test]
fn counts_of_routing_include_tokens_and_router_mass() {
    let mut counts = Counts::default();
    let options = ImportOptions::default();
    let source = Source::file(&fixture("bigmoeonedge/small.route.csv"));
    moe_foreign::import(importer("bigmoeonedge"), &source, &options, &mut counts).unwrap();
    let prompt = counts.iter().next().unwrap();
    assert_eq!((prompt.0, prompt.1), (LayerId(0), Some(Phase::Prompt)));
    assert_eq!(prompt.2.n_tokens, Some(3));
    // Without timestamps, passes are unknown.
    assert_eq!(prompt.2.calls, None);
    let layer = &counts.layers()[&LayerId(0)];
    assert_eq!(layer.n_tokens, Some(5));
    // Expert 5 of layer 0: slots 0, 1, 0, 1 of tokens 0 to 3.
    assert_eq!(layer.experts[&ExpertId(5)].mass, Some(2.0));
    assert_eq!(layer.experts[&ExpertId(5)].count, 4);
}

#[test]
fn recognizes_no_format_in_other_files() {
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
