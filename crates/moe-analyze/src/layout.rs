//! The layout of a model's tensors in its files: descriptions and the Parquet table.

use std::path::Path;

use moe_files::AtomicFile;
use moe_files::text::counted;
use moe_gguf::check::LayoutReport;
use moe_gguf::layers::LayerOrder;
use moe_gguf::map::OffsetMap;
use moe_gguf::{Gguf, LayerId};
use moe_trace::manifest::ModelFile;
use moe_trace::map_table;

use crate::output::human_bytes;

/// Maximum number of layer ranges to print. A file in random order has as many ranges as layers.
const MAX_RUNS: usize = 32;

/// Describes the order of the layers in the file and the seeks of a sequential pass. Returns `None` for a model without layers.
pub fn layers(layers: &LayerOrder) -> Option<String> {
    if layers.order.is_empty() {
        return None;
    }
    let order = runs(&layers.order);
    let reading = match layers.seeks {
        0 => "read without a seek".to_owned(),
        n => format!(
            "read with {} over {}",
            counted(n, "seek"),
            human_bytes(layers.seek_bytes)
        ),
    };
    Some(if layers.is_sequential() {
        format!("{order}, in order of execution, {reading}")
    } else if layers.string_sorted {
        format!("{order}, sorted as strings; in order of execution {reading}")
    } else {
        format!("{order}; in order of execution {reading}")
    })
}

/// Formats `0, 1, 10, 11, 12, 2` as `0-1, 10-12, 2`.
fn runs(order: &[LayerId]) -> String {
    let runs = order.chunk_by(|&a, &b| a.0.checked_add(1) == Some(b.0));
    let n_runs = runs.clone().count();
    let mut texts: Vec<String> = runs
        .take(MAX_RUNS)
        .map(|run| match run {
            [first, .., last] => format!("{first}-{last}"),
            run => run.iter().map(LayerId::to_string).collect(),
        })
        .collect();
    if n_runs > MAX_RUNS {
        texts.push(format!("and {} more", counted(n_runs - MAX_RUNS, "range")));
    }
    texts.join(", ")
}

/// Describes on one line whether the tensors fit the file.
pub fn verdict(report: &LayoutReport) -> String {
    format!(
        "{}: {}, {}, {} past the end of the file; {} of padding, {} after the last tensor",
        if report.is_sound() { "sound" } else { "FAULTY" },
        counted(report.overlaps.len(), "overlap"),
        counted(report.gaps.len(), "gap"),
        counted(report.past_end.len(), "tensor"),
        counted(report.padding_bytes, "byte"),
        counted(report.trailing_bytes, "byte"),
    )
}

/// Writes the map as a Parquet table, which appears at its path on commit.
pub fn prepare_map_table(
    gguf: &Gguf,
    map: &OffsetMap,
    out: &Path,
    force: bool,
) -> anyhow::Result<AtomicFile> {
    let files = gguf.files().iter();
    let files: Vec<ModelFile> = files
        .map(|file| ModelFile {
            name: file.name.clone(),
            size_bytes: file.size_bytes,
        })
        .collect();
    Ok(map_table::prepare(out, map, &files, force)?)
}

#[cfg(test)]
mod tests {
    use moe_gguf::check::Overlap;

    use super::*;

    #[test]
    fn uses_singular_for_one() {
        let counts = [0_u64, 1, 2].map(|n| counted(n, "gap"));
        assert_eq!(counts, ["0 gaps", "1 gap", "2 gaps"]);
        let report = LayoutReport {
            overlaps: vec![Overlap {
                file: 0,
                first: 0,
                second: 1,
                offset: 0,
                size_bytes: 1,
            }],
            trailing_bytes: 1,
            ..LayoutReport::default()
        };
        assert_eq!(
            verdict(&report),
            "FAULTY: 1 overlap, 0 gaps, 0 tensors past the end of the file; 0 bytes of padding, 1 byte after the last tensor"
        );
    }

    #[test]
    fn prints_layers_as_ranges() {
        assert_eq!(runs(&[LayerId(3)]), "3");
        assert_eq!(runs(&[0, 1, 10, 11, 12, 2].map(LayerId)), "0-1, 10-12, 2");
        assert_eq!(runs(&[65535, 0].map(LayerId)), "65535, 0");
        let backwards: Vec<LayerId> = (0..40).rev().map(LayerId).collect();
        let text = runs(&backwards);
        assert!(
            text.starts_with("39, 38, ") && text.ends_with(", 8, and 8 ranges more"),
            "{text}"
        );
    }
}
