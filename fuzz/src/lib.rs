//! Shared code of the fuzz targets: files for readers that need a path, importers, and the layout of inputs.

use std::fmt::Display;
use std::fs;
use std::path::PathBuf;
use std::sync::LazyLock;

use moe_foreign::{
    Collected, Counts, ForeignError, IMPORTERS, ImportOptions, Importer, SAMPLE_SIZE, Source,
    detect,
};
use moe_trace::{CountRow, LayerRow, ModelInfo, Phase, RoutingRow, Sink, SinkError};

/// The temporary directory of this process. `scripts/fuzz.sh` removes it.
static DIRECTORY: LazyLock<PathBuf> = LazyLock::new(|| {
    let directory = std::env::temp_dir().join(format!("moe-fuzz-{}", std::process::id()));
    fs::create_dir_all(&directory).expect("the temporary directory is writable");
    directory
});

/// Writes `bytes` to a file of the temporary directory and returns its path.
pub fn file(name: &str, bytes: &[u8]) -> PathBuf {
    let path = DIRECTORY.join(name);
    fs::write(&path, bytes).expect("the temporary directory is writable");
    path
}

/// Checks that an error message is one line of reasonable length.
pub fn check_error(error: &impl Display) {
    let text = error.to_string();
    assert!(!text.contains('\n') && text.len() < 4096, "{text:?}");
}

/// Returns the importers of binary files or of text files, sorted by name.
pub fn importers(binary: bool) -> Vec<&'static dyn Importer> {
    let mut importers = IMPORTERS.to_vec();
    importers.retain(|importer| importer.is_binary() == binary);
    importers.sort_by_key(|importer| importer.name());
    importers
}

/// Selector of an input whose importer is detected from its content.
pub const DETECT: u8 = 255;

/// Imports `input`: a byte that selects the importer (or [`DETECT`]), a byte that selects the options, and the file.
pub fn import(importers: &[&'static dyn Importer], input: &[u8]) {
    let Some((&[selector, options], bytes)) = input.split_first_chunk() else {
        return;
    };
    let path = file("trace", bytes);
    for importer in importers {
        importer.is_applicable(&bytes[..bytes.len().min(SAMPLE_SIZE)]);
    }
    let importer = match selector {
        DETECT => match detect(&path) {
            Ok(Some(detected)) => {
                detected.run_id().expect("the file is readable");
                detected.importer
            }
            _ => return,
        },
        _ => importers[usize::from(selector) % importers.len()],
    };
    let options = options_of(options);
    let source = Source::file(&path);
    match importer.records(&source, &options) {
        Ok(None) => {}
        Ok(Some(records)) => walk(&records.run),
        Err(error) => check_error(&error),
    }
    let mut sink = Both::default();
    match moe_foreign::import(importer, &source, &options, &mut sink) {
        Ok(summary) => assert_eq!(
            summary.rows + summary.counts,
            (sink.rows.routing.len() + sink.rows.counts.len()) as u64
        ),
        Err(error) => {
            check_error(&error);
            let is_expected = !matches!(
                error,
                ForeignError::Io { .. } | ForeignError::NoOrder { .. }
            );
            assert!(is_expected, "{error}");
        }
    }
}

/// Returns one of three sets of options: defaults, the number of experts per token, or the model.
fn options_of(selector: u8) -> ImportOptions {
    match selector % 3 {
        0 => ImportOptions::default(),
        1 => ImportOptions {
            top_k: Some(2),
            ..ImportOptions::default()
        },
        _ => ImportOptions {
            model: Some(ModelInfo {
                n_layer: Some(2),
                n_expert: Some(8),
                n_expert_used: Some(2),
                ..ModelInfo::default()
            }),
            ..ImportOptions::default()
        },
    }
}

/// Collects the rows, and counts them like the commands of the program.
#[derive(Default)]
struct Both {
    rows: Collected,
    counts: Counts,
}

impl Sink for Both {
    fn model_info(&mut self, model_info: &ModelInfo) -> Result<(), SinkError> {
        self.counts.model_info(model_info)
    }

    fn routing(&mut self, row: &RoutingRow) -> Result<(), SinkError> {
        self.counts.routing(row)?;
        self.rows.routing(row)
    }

    fn count(&mut self, row: &CountRow) -> Result<(), SinkError> {
        self.counts.count(row)?;
        self.rows.count(row)
    }

    fn layer(&mut self, row: &LayerRow) -> Result<(), SinkError> {
        self.counts.layer(row)?;
        self.rows.layer(row)
    }
}

/// Calls everything that reads the records of a run.
pub fn walk(run: &moe_trace::Run) {
    let mut n = 0;
    for operation in run.trace.operations() {
        for token in operation.tokens() {
            n += token.records().len();
            for expert in token.experts() {
                assert!(expert.expert_id.0 <= i32::MAX as u32);
            }
        }
        let head = operation.head();
        for i in 0..=head.sources().len() {
            head.source_size(i);
        }
        head.sources().iter().for_each(|source| drop(source.name()));
    }
    assert_eq!(n, run.trace.records().len());
    let in_routing: usize = run
        .routing()
        .map(|operation| operation.records().len())
        .sum();
    assert!(in_routing <= n);
    for phase in Phase::ALL {
        if let Some(graph) = moe_trace::graph::reconstruct(run, phase) {
            graph
                .write_dot(&mut std::io::sink())
                .expect("writing to a sink cannot fail");
        }
    }
    moe_trace::correlation::unresolved(run);
    for fault in moe_trace::check::check(run) {
        check_error(&fault);
    }
    match run.warnings() {
        Ok(warnings) => warnings.iter().for_each(check_error),
        Err(error) => check_error(&error),
    }
}
