//! Compares every plot as SVG with `tests/golden/plots`, and draws it as PNG.

use std::fs;
use std::path::Path;

use crate::overlap;
use crate::support::{Arg, args, expect_golden, file_of, known_run, run};
use moe_trace::Phase;

/// A growing KV cache, and buffers of results that are allocated and freed.
const BUFFERS: &str = r#"{"timestamp_ms":0.5,"event":"alloc","buffer_id":9,"buffer_ptr":4096,"size":90000000,"name":"model.gguf","backend":"mmap","usage":1,"layer":65535}
{"timestamp_ms":0.5,"event":"alloc","buffer_id":1,"buffer_ptr":8192,"size":1000000,"name":"cache_k_l0","backend":"CPU","usage":0,"layer":0}
{"timestamp_ms":1.0,"event":"alloc","buffer_id":2,"buffer_ptr":1,"size":500000,"name":"logits","backend":"CPU","usage":2,"layer":65535}
{"timestamp_ms":3.0,"event":"dealloc","buffer_id":1}
{"timestamp_ms":3.0,"event":"alloc","buffer_id":1,"buffer_ptr":8192,"size":3000000,"name":"cache_k_l0","backend":"CPU","usage":0,"layer":0}
{"timestamp_ms":4.25,"event":"dealloc","buffer_id":2}
{"timestamp_ms":6.0,"event":"dealloc","buffer_id":1}
"#;

/// Draws a plot in both formats, and compares the SVG.
#[track_caller]
fn expect_plot(name: &str, dir: &Path, command: impl Arg) {
    let [svg, png] = ["svg", "png"].map(|extension| dir.join(name).with_extension(extension));
    for plot in [&svg, &png] {
        run![command, "--plot", plot];
    }
    let svg = fs::read_to_string(svg).unwrap();
    let (width, height) = moe_testkit::png_size(&png);
    assert!(svg.contains(&format!("width=\"{width}\" height=\"{height}\"")));
    expect_golden(&format!("plots/{name}.svg.zst"), &svg);
}

#[test]
fn hotness_plots() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    known_run(&run);
    for (name, more) in [
        ("heat-map", args![]),
        ("heat-map-sorted", args!["--sorted", "--value", "bytes"]),
        ("entropy", args!["--plot-kind", "entropy"]),
    ] {
        expect_plot(name, dir.path(), args!["hotness", run, more]);
    }
}

#[test]
fn stability_plot() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    known_run(&run);
    expect_plot("coverage", dir.path(), args!["stability", run]);
}

/// Many layers and experts: cells of a few pixels, without gaps.
#[test]
fn hotness_plot_of_a_large_model() {
    let dir = tempfile::tempdir().unwrap();
    let rows = (0..60u64).flat_map(|layer| {
        let choices = (0..8u64).map(move |n| (layer, n * n * 7 % (256 - layer)));
        choices.map(|(layer, expert)| format!("{layer},{expert}\n"))
    });
    let csv = format!("layer,expert\n{}", rows.collect::<String>());
    let trace = file_of(dir.path(), "large.csv", csv);
    expect_plot("heat-map-large", dir.path(), args!["--quiet", "hotness", trace]);
}

#[test]
fn simulate_plot() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    known_run(&run);
    let command = args!["--quiet", "simulate", run, "--policy", "all", "--learn", run];
    expect_plot("hit-rates", dir.path(), command);
}

#[test]
fn buffers_plot() {
    let dir = tempfile::tempdir().unwrap();
    let buffers = file_of(dir.path(), "buffers.jsonl", BUFFERS);
    expect_plot("buffers", dir.path(), args!["buffers", buffers]);
}

#[test]
fn overlap_plot() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    overlap::recorded(&run, &overlap::example());
    expect_plot("overlap", dir.path(), args!["overlap", run]);
    // A pass of more layers has a magnified panel.
    let long = dir.path().join("long");
    let layers = (0..40).map(|layer| {
        overlap::layer(
            Phase::Generate,
            7,
            layer,
            10_000_000 + u64::from(layer) * 500_000,
            60_000 + 7_000 * u64::from(layer),
        )
    });
    overlap::recorded(&long, &layers.collect::<Vec<_>>());
    expect_plot("overlap-long", dir.path(), args!["overlap", long]);
}
