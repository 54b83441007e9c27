//! Common to all subcommands: help, version, usage errors, completions, manual pages, a closed pipe.

use std::io::Read;
use std::process::Stdio;

use crate::support::{arg, bad_stdouts, closed_pipe, code_with_stdout, fail, repository, run};

const SUBCOMMANDS: &[&str] = &[
    "record",
    "replay",
    "gguf-map",
    "relayout",
    "synth",
    "parquet",
    "convert",
    "hotness",
    "stability",
    #[cfg(feature = "sql")]
    "sql",
    "plan",
    "simulate",
    "diff",
    "accesses",
    "overlap",
    "graph",
    "buffers",
    "report",
    "info",
    "bench",
    #[cfg(feature = "serve")]
    "serve",
    "completions",
    "man",
];

#[test]
fn help_lists_exactly_the_subcommands_and_each_has_help() {
    let help = run!["--help"];
    let (_, commands) = help.split_once("Commands:\n").unwrap();
    // Wrapped descriptions are indented further.
    let listed: Vec<&str> = commands
        .lines()
        .take_while(|line| line.starts_with("  "))
        .filter(|line| !line.starts_with("   "))
        .map(|line| line.split_whitespace().next().unwrap())
        .filter(|name| *name != "help")
        .collect();
    assert_eq!(listed, SUBCOMMANDS);
    for subcommand in SUBCOMMANDS {
        let help = run![subcommand, "--help"];
        let usage = format!("Usage: moe-analyze {subcommand}");
        assert!(help.contains(&usage), "{subcommand}: {help}");
    }
    assert!(run!["--version"].starts_with("moe-analyze 0."));
}

/// The help of an option contains its range and its default.
#[test]
fn help_contains_ranges_and_defaults() {
    for (subcommand, expected) in [
        ("bench", "removed at the end [default: off]"),
        ("hotness", "Number of tokens per window, at least 1; required with --by window"),
        ("plan", "Cache size in MiB, one value per lane, each 0 or more;"),
        ("plan", "Cache size in bytes, one value per lane, each 0 or more"),
        ("record", "Cache size in MiB, 0 or more, one value per lane (GPU);"),
        ("record", "Limit the memory of each GPU to N MiB, 0 or more;"),
        ("record", "cpu, auto, or up to 16 GPUs such as cuda,"),
        ("record", "Sample from the K most likely tokens, 0 or more;"),
        ("replay", "the N-th token of the trace, at least 1 [default: entire trace]"),
        ("simulate", "Cache sizes in MiB: integers of 0 or more, A..B"),
        (
            "simulate",
            "all selects every policy, but layerNAME only as layer and layerlfu, and staticlearn and hotcache only with --learn",
        ),
        ("simulate", "layerNAME for a separate cache per layer (NAME is one of lru to random;"),
        ("simulate", "the n-th generated token in that layer; needs --pcie-gb-s"),
        ("plan", "a value outside 0 to 1 is replaced by 0.5, as in the fork"),
        ("plan", "With -o json, prints one JSON object"),
        ("info", "With -o json, prints one JSON object"),
        ("record", "including the output layer; -1 is all layers; short name: -ngl"),
        ("record", "Keep the weights of all experts in CPU memory; short name: -cmoe"),
        ("record", "in CPU memory, 0 or more; short name: -ncmoe"),
        ("record", "REGEX must not contain a comma; short name: -ot"),
        ("record", "each 0 or more; short name: -ts"),
        ("record", "keys in the KV cache: f32, f16 or q8_0; short name: -ctk"),
        ("record", "values in the KV cache: f32, f16 or q8_0; short name: -ctv"),
        ("bench", "evaluated at the same time, 1 to 256; short name: -np"),
        ("bench", "Prompt lengths in tokens, 0 or more, at most the model's training context;"),
    ] {
        let help = run![subcommand, "--help"];
        let words: Vec<&str> = help.split_whitespace().collect();
        assert!(words.join(" ").contains(expected), "{subcommand}: {help}");
    }
}

#[test]
fn usage_errors_are_one_line_and_exit_with_2() {
    for (args, expected) in [
        (&["no-such-command"][..], "unrecognized subcommand 'no-such-command'"),
        (&["gguf-map"], "arguments were not provided: <FILE>"),
        // Alternatives.
        (&["parquet", "x"], "arguments were not provided: <--out <DIR>|--dataset <DIR>>;"),
        (
            &["plan", "x"],
            "arguments were not provided: --model or --sizes, --budget-mib or --budget-bytes;",
        ),
        (&["plan", "x", "--sizes", "y"], "not provided: --budget-mib or --budget-bytes;"),
        (&["plan", "x", "--budget-bytes", "1"], "not provided: --model or --sizes;"),
        (
            &["gguf-map", "x", "-o", "xml"],
            "invalid value 'xml' for '--output <ENCODING>' [possible values: table,",
        ),
        (&["hotness", "x", "--phase", "y"], "invalid value 'y' for '--phase <PHASE>'"),
        (&["hotness", "x", "--wrong"], "unexpected argument '--wrong'"),
        (&[], "a subcommand is missing"),
        (
            &["record", "-n", "-1"],
            "invalid value '-1' for '--n-predict <N>': expected an integer of at least 0;",
        ),
        (&["record", "--threads", "-1"], "invalid value '-1' for '--threads <N>'"),
        (
            &["bench", "-r", "-2"],
            "invalid value '-2' for '--repetitions <N>': expected an integer of at least 1;",
        ),
        (
            &["plan", "x", "--layer-curve", "half"],
            "invalid value 'half' for '--layer-curve <C>': expected a number;",
        ),
        (
            &["bench", "-t", "0"],
            "invalid value '0' for '--threads <N>': 0 is out of range (1..=1024);",
        ),
        (&["bench", "-p", "x"], "\"x\" is not a number; expected an integer of at least 0;"),
        (
            &["record", "--threads", "many"],
            "invalid value 'many' for '--threads <N>': not an integer (1..=1024);",
        ),
        (
            &["record", "--threads", "1025"],
            "invalid value '1025' for '--threads <N>': out of range (1..=1024);",
        ),
        (
            &["record", "--n-predict", "1.5"],
            "invalid value '1.5' for '--n-predict <N>': expected an integer of at least 0;",
        ),
        (
            &["hotness", "x", "--window", "0"],
            "invalid value '0' for '--window <N>': expected an integer of at least 1;",
        ),
        (
            &["replay", "x", "--seed", "18446744073709551616"],
            "invalid value '18446744073709551616' for '--seed <N>': the number is too large;",
        ),
    ] {
        let line = fail![args];
        assert!(line.contains(expected), "{args:?}: {line}");
        assert!(line.ends_with("; see --help\n"), "{line}");
    }
}

#[test]
fn unwritable_help_exits_with_2() {
    for args in
        [&["--help"][..], &["--version"], &["help", "info"], &["man"], &["completions", "bash"]]
    {
        for (stdout, expected) in bad_stdouts() {
            assert_eq!(code_with_stdout(args, stdout), expected, "{args:?}");
        }
    }
}

#[test]
fn prints_completions_for_all_shells() {
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let script = run!["completions", shell];
        assert!(script.contains("gguf-map") && script.contains("check-overlaps"), "{shell}");
    }
}

/// All pages that the manual refers to can be printed.
#[test]
fn manual_is_roff_and_refers_to_existing_pages() {
    let page = run!["man"];
    assert!(page.contains(".TH moe-analyze 1"), "{page}");
    let named: Vec<String> = page
        .lines()
        .filter_map(|line| line.strip_prefix("moe\\-analyze\\-")?.strip_suffix("(1)"))
        .map(|name| name.replace('\\', ""))
        .collect();
    for subcommand in SUBCOMMANDS {
        assert!(named.iter().any(|name| name == subcommand), "{subcommand} in {named:?}");
    }
    for name in named {
        let page = run!["man", name];
        assert!(page.contains(&format!(".TH moe-analyze-{name} 1")), "{page}");
    }
    assert!(fail!["man", "nothing"].contains("unknown subcommand \"nothing\""));
}

/// `moe-analyze gguf-map … | head -1` prints no error.
#[test]
fn closed_pipe_is_not_an_error() {
    let mut child = std::process::Command::new(assert_cmd::cargo::cargo_bin!("moe-analyze"))
        .arg("--quiet")
        .arg("gguf-map")
        .arg(repository("fixtures/tiny-qwen3moe-Q4_K_M.gguf"))
        .args(["-o", "jsonl"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut first = [0; 1];
    child.stdout.take().unwrap().read_exact(&mut first).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    assert_eq!(output.status.code(), Some(0));
}

/// The exit code contains the verdict, also if no reader gets the rows.
#[test]
fn closed_pipe_does_not_change_the_exit_code() {
    let dir = tempfile::tempdir().unwrap();
    let truncated = dir.path().join("truncated.gguf");
    let whole = std::fs::read(repository("fixtures/tiny-qwen3moe-Q4_K_M.gguf")).unwrap();
    std::fs::write(&truncated, &whole[..whole.len() - 64]).unwrap();
    for format in ["table", "csv", "json", "jsonl", "md"] {
        for args in [
            &["gguf-map", arg(&truncated), "--check-overlaps", "-o", format][..],
            &["gguf-map", arg(&truncated), "--verify", "-o", format],
            &["info", arg(&truncated), "-o", format],
        ] {
            assert_eq!(code_with_stdout(args, closed_pipe()), 1, "{args:?}");
        }
    }
}
