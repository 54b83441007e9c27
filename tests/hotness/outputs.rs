//! Learn files and plots.

use std::fs;
use std::path::PathBuf;

use serde_json::Value;

use super::Fixture;
use crate::support::{
    self, ALL, N_EXPERT, N_EXPERT_USED, N_GENERATED, N_LAYER, arg, args, expect_golden, fail,
    known_counts, moe_analyze, run,
};

#[test]
fn learn_file_has_the_format_of_the_fork() {
    let fixture = Fixture::new();
    let schema = fs::read_to_string(support::repository("schemas/learn.schema.json")).unwrap();
    let schema = jsonschema::validator_for(&serde_json::from_str(&schema).unwrap()).unwrap();

    let mut texts = Vec::new();
    for source in ["run", "tables"] {
        let out = fixture.path(&format!("{source}.json"));
        run!["hotness", fixture.path(source), "--out", out];
        texts.push(fs::read_to_string(out).unwrap());
    }
    assert_eq!(texts[0], texts[1], "a run and its tables give the same file");
    assert!(!texts[0].contains([' ', '\n']));

    let learn: Value = serde_json::from_str(&texts[0]).unwrap();
    schema.validate(&learn).unwrap();
    assert_eq!(
        (&learn["n_expert"], &learn["n_expert_used"]),
        (&N_EXPERT.into(), &N_EXPERT_USED.into())
    );
    // One prompt pass, and one pass per generated token.
    assert_eq!(learn["updates"], 1 + N_GENERATED);
    assert_eq!(learn["summary"]["layer_calls"], N_LAYER * (1 + N_GENERATED));
    let counts = known_counts(&ALL);
    let layers = learn["layers"].as_array().unwrap();
    assert_eq!(layers.len() as u32, N_LAYER);
    for (layer, entry) in (0..).zip(layers) {
        assert_eq!(entry["layer"], layer);
        assert_eq!(entry["calls"], 1 + N_GENERATED);
        let known: Vec<(u32, u64)> = counts
            .range((layer, 0)..(layer + 1, 0))
            .map(|(cell, count)| (cell.1, *count))
            .collect();
        assert_eq!(entry["experts"], serde_json::json!(known));
        assert_eq!(entry["cold_experts"], entry["experts"]);
        assert_eq!(entry["cold_slots_total"], known.iter().map(|(_, count)| count).sum::<u64>());
    }
    let observations = moe_placement::learn::parse_observations(&texts[0]).unwrap();
    assert!(moe_placement::learn::is_usable(&observations));
}

/// The traces in `fixtures/foreign`: all files of each format, or a directory that is one trace.
fn foreign_traces() -> Vec<PathBuf> {
    let mut traces = Vec::new();
    let root = support::repository("fixtures/foreign");
    for format in fs::read_dir(&root).unwrap() {
        let format = format.unwrap().path();
        let name = format.file_name().unwrap().to_str().unwrap();
        match name {
            "expected" | "make" | "refused" => {}
            "megatron" | "mesh-llm" | "thesis-json" => traces.push(format),
            _ => {
                let files = fs::read_dir(&format).unwrap();
                traces.extend(files.map(|file| file.unwrap().path()));
            }
        }
    }
    traces.sort();
    traces
}

/// Independent of whether the input contains passes, tokens and experts per token.
#[test]
fn learn_files_of_all_formats_match_the_schema() {
    let dir = tempfile::tempdir().unwrap();
    let schema = fs::read_to_string(support::repository("schemas/learn.schema.json")).unwrap();
    let schema = jsonschema::validator_for(&serde_json::from_str(&schema).unwrap()).unwrap();
    let traces = foreign_traces();
    assert!(traces.len() > 30, "{traces:?}");
    for trace in traces {
        let is_without_top_k = ["rtrace", "sglang-response"]
            .iter()
            .any(|format| trace.components().any(|part| part.as_os_str() == *format));
        let options: &[&[&str]] = if is_without_top_k {
            &[&["--top-k", "2"]]
        } else {
            &[&[], &["--top-k", "2"]]
        };
        for &more in options {
            let (out, converted) =
                (dir.path().join("hotness.json"), dir.path().join("convert.json"));
            let write: [&[&str]; 2] = [
                &["hotness", arg(&trace), "--out", arg(&out)],
                &["convert", arg(&trace), "--to", "learn", "--out", arg(&converted)],
            ];
            for command in write {
                run!["--quiet", command, "--force", more];
            }
            for file in [&out, &converted] {
                let learn: Value =
                    serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap();
                if let Err(error) = schema.validate(&learn) {
                    panic!("{} {more:?}: {error}", trace.display());
                }
            }
            // A learn file of the learn file is equal.
            let again = dir.path().join("again.json");
            run!["--quiet", "hotness", out, "--out", again, "--force"];
            assert_eq!(fs::read_to_string(&again).unwrap(), fs::read_to_string(&out).unwrap());
        }
    }
}

#[test]
fn learn_files_count_tokens_where_passes_are_not_recorded() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("learn.json");
    let learn = |trace: &str, more: &[&str]| -> (Value, String) {
        let trace = support::repository("fixtures/foreign").join(trace);
        let args = ["hotness", arg(&trace), "--out", arg(&out), "--force"];
        let output = moe_analyze().args(args![args, more]).assert().success();
        let notes = String::from_utf8_lossy(&output.get_output().stderr).into_owned();
        (serde_json::from_str(&fs::read_to_string(&out).unwrap()).unwrap(), notes)
    };
    // Five tokens with two experts each, in two layers.
    for (trace, more) in [
        ("jsonl/small.jsonl", &[][..]),
        ("npy/vllm-routed.npy", &[]),
        ("eplb/small.json", &["--top-k", "2"]),
    ] {
        let (file, notes) = learn(trace, more);
        assert_eq!((&file["updates"], &file["n_expert_used"]), (&5.into(), &2.into()), "{trace}");
        assert_eq!(file["summary"]["layer_calls"], 10);
        assert_eq!(file["layers"][1]["cold_slots_per_call"], 2.0);
        assert!(notes.contains("each token counts as one call"), "{notes}");
    }
    // For counts, each activation is a call.
    let (file, notes) = learn("eplb/small.json", &[]);
    assert_eq!((&file["updates"], &file["n_expert_used"]), (&10.into(), &1.into()));
    assert_eq!(file["layers"][0]["cold_slots_per_call"], 1.0);
    assert!(notes.contains("--top-k"), "{notes}");
}

#[test]
fn closed_stdout_does_not_prevent_files() {
    let fixture = Fixture::new();
    let run = fixture.path("run");
    for (stdout, expected) in support::bad_stdouts() {
        let out = fixture.path(&format!("{expected}.json"));
        let plot = fixture.path(&format!("{expected}.png"));
        let args = ["hotness", arg(&run), "--out", arg(&out), "--plot", arg(&plot)];
        assert_eq!(support::code_with_stdout(args, stdout), expected);
        let learn = fs::read_to_string(&out).unwrap();
        assert!(learn.starts_with('{') && learn.ends_with('}'), "{learn}");
        assert!(fs::read(&plot).unwrap().ends_with(b"IEND\xaeB`\x82"));
    }
}

#[test]
fn requires_extension_json() {
    let fixture = Fixture::new();
    for name in ["learn.txt", "learn", "learn.json.gz"] {
        let out = fixture.path(name);
        let line = fail!["hotness", fixture.path("run"), "--out", out];
        assert!(line.contains("the extension must be .json"), "{line}");
        assert!(!out.exists());
    }
}

#[test]
fn draws_plots() {
    let fixture = Fixture::new();
    let (png, svg) = (fixture.path("hotness.png"), fixture.path("hotness.svg"));
    for picture in [&png, &svg] {
        run!["hotness", fixture.path("run"), "--plot", picture];
    }
    let png = fs::read(png).unwrap();
    assert!(png.starts_with(b"\x89PNG\r\n\x1a\n") && png.ends_with(b"IEND\xaeB`\x82"));
    let svg = fs::read_to_string(svg).unwrap();
    assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
    for text in
        ["layer", "expert", "Activations of each expert", "relative to a uniform router (×)"]
    {
        assert!(svg.contains(text), "{text}");
    }
    assert!(svg.matches("<rect").count() as u32 > N_LAYER * N_EXPERT);
}

#[test]
fn keeps_existing_outputs_without_force() {
    let fixture = Fixture::new();
    let run = fixture.path("run");
    for (option, name) in [("--out", "learn.json"), ("--plot", "plot.svg"), ("--plot", "plot.png")]
    {
        let out = fixture.path(name);
        fs::write(&out, "precious").unwrap();
        let line = fail!["hotness", run, option, out];
        assert!(line.contains("--force"), "{line}");
        assert_eq!(fs::read(&out).unwrap(), b"precious");
        run!["hotness", run, option, out, "--force"];
        assert_ne!(fs::read(&out).unwrap(), b"precious");
    }
    let picture = fixture.path("plot.gif");
    assert!(fail!["hotness", run, "--plot", picture].contains(".png"));
}

/// Every token of the known run selects expert 3: 5 layers with 16 tokens and one with 7, four experts per token.
#[test]
fn prints_usage_by_expert_and_layer() {
    let fixture = Fixture::new();
    let mut texts = Vec::new();
    for source in ["run", "tables"] {
        let source = fixture.path(source);
        let text = run!["hotness", source, "--usage"];
        expect_golden("hotness/usage.txt", &text);

        let json: Value =
            serde_json::from_str(&run!["hotness", source, "--usage", "-o", "json"]).unwrap();
        let layers = json["layers"].as_array().unwrap();
        assert_eq!(layers.len() as u32, N_LAYER);
        assert_eq!(layers[0]["total_tokens"], 16 * N_EXPERT_USED);
        assert_eq!(
            layers[0]["experts"][0],
            serde_json::json!({"expert_id": 3, "activations": 16, "percentage": 25.0})
        );
        let csv = run!["hotness", source, "--usage", "-o", "csv"];
        assert_eq!(csv.lines().count(), 1 + known_counts(&ALL).len());
        assert!(csv.starts_with("layer_id,expert_id,activations,percentage\n0,3,16,25\n"));
        texts.push(text);
    }
    assert_eq!(texts[0], texts[1]);
}
