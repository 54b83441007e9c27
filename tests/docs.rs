//! Runs the commands that `README.md` and the pages of `docs/` show, and compares their output with the output shown.
//!
//! A block fenced as `console` contains commands and their output:
//!
//! - `$ COMMAND` is run with `sh`; lines that start with `> ` continue it. It must exit with 0. The lines after it are its stdout and stderr. Without such
//!   lines the output is not compared.
//! - A line `...` stands for any number of lines, `[..]` in a line for any text.
//! - After `console numbers`, numbers and spaces are not compared: they depend on the machine.
//! - `console gpu`, `data`, `install`, `llama-cpp` and `model` name something that the commands need ([`MARKS`]). Without it the block is not run, and
//!   [`lists_commands_that_are_not_run`] prints it.
//!
//! A page has a temporary directory of its own with links to the directories of the repository that the commands read. `MOE_BLESS=1` renews output that
//! differs, and the plots that the commands draw; `MOE_BLESS=all` renews numbers, too.

mod align;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use align::align;

use crate::support::{moe_analyze, repository, run};

/// Marks of blocks, and what the commands need. Blocks with the first three are never run.
const MARKS: [(&str, &str); 5] = [
    ("gpu", "needs an NVIDIA GPU and a model"),
    ("install", "compiles the program, or runs the tests"),
    ("model", "needs a model that is not in the repository"),
    ("data", "needs data that is not in the repository (MOE_DATA)"),
    ("llama-cpp", "needs a build with the feature llama-cpp"),
];

/// A trace in `MOE_DATA` that blocks with the mark `data` read, by its file name.
const TRACE: &str = "bigmoeonedge/qwen.route.csv";

/// Directories of the repository that commands may read.
const LINKED: [&str; 4] = ["docs", "fixtures", "schemas", "scripts"];

/// Options of other programs that the pages name.
const OTHER_OPTIONS: [&str; 27] = [
    "--allow-run-as-root", "--doc", "--exact", "--features", "--fit", "--flash-attn",
    "--hot-cache", "--hot-cache-mib", "--hot-cache-weighting", "--init-expert-location", "--lib",
    "--locked", "--moe-hot-cache", "--moe-hot-cache-max-mib", "--moe-hot-cache-weighting",
    "--no-default-features", "--nocapture", "--package", "--path", "--release",
    "--strip-components", "--test", "--test-threads", "--workspace", "--write", "--check",
    "--speed",
];

macro_rules! pages {
    ($($test:ident: $page:literal),* $(,)?) => {
        const PAGES: &[&str] = &[$($page),*];
        $(#[test]
        fn $test() {
            check_page($page);
        })*
    };
}

pages! {
    readme: "README.md",
    page_accuracy: "docs/accuracy.md",
    page_adding_an_architecture: "docs/adding-an-architecture.md",
    page_cache_policies: "docs/cache-policies.md",
    page_comparing_runs: "docs/comparing-runs.md",
    page_durability: "docs/durability.md",
    page_foreign_formats: "docs/foreign-formats.md",
    page_foreign_traces: "docs/foreign-traces.md",
    page_getting_started: "docs/getting-started.md",
    page_gpu_and_post_fetch: "docs/gpu-and-post-fetch.md",
    page_hot_cache: "docs/hot-cache.md",
    page_hotness_and_stability: "docs/hotness-and-stability.md",
    page_http_api: "docs/http-api.md",
    page_llama_cpp_engine: "docs/llama-cpp-engine.md",
    page_measurements: "docs/measurements.md",
    page_offset_map: "docs/offset-map.md",
    page_planning: "docs/planning.md",
    page_python: "docs/python.md",
    page_recording: "docs/recording.md",
    page_report: "docs/report.md",
    page_simulating_caches: "docs/simulating-caches.md",
    page_sql: "docs/sql.md",
}

/// A fenced block of a page.
struct Block {
    /// Number of the first line after the fence, from 1.
    line: usize,
    /// Words after the opening fence: language, then marks.
    info: Vec<String>,
    lines: Vec<String>,
}

impl Block {
    fn is_console(&self) -> bool {
        self.info.first().is_some_and(|word| word == "console")
    }

    fn has_mark(&self, mark: &str) -> bool {
        self.info[1..].iter().any(|word| word == mark)
    }

    /// The reason not to run the block.
    fn not_run(&self) -> Option<&'static str> {
        let is_missing = |mark: &str| match mark {
            "data" => trace().is_none(),
            "llama-cpp" => !cfg!(feature = "llama-cpp"),
            _ => true,
        };
        let mut marks = MARKS.iter().filter(|(mark, _)| self.has_mark(mark));
        let mark = marks.find(|(mark, _)| is_missing(mark));
        mark.map(|(_, reason)| *reason)
    }
}

/// The path of [`TRACE`], if it exists.
fn trace() -> Option<PathBuf> {
    let data = std::env::var_os("MOE_DATA").map(PathBuf::from);
    let path = data
        .unwrap_or_else(|| repository("../shared/data"))
        .join(TRACE);
    path.is_file().then_some(path)
}

/// A command with the output that the page shows.
struct Step {
    line: usize,
    /// The lines of the command as the page shows them, prompts included.
    shown: Vec<String>,
    output: Vec<String>,
}

impl Step {
    fn script(&self) -> String {
        let lines = self.shown.iter().map(|line| &line[2..]);
        lines.collect::<Vec<_>>().join("\n")
    }
}

/// The page in parts: text, block, text, block, ..., text.
fn parse(page: &str) -> (Vec<String>, Vec<Block>) {
    let text = fs::read_to_string(repository(page)).unwrap();
    let (mut texts, mut blocks) = (vec![String::new()], Vec::<Block>::new());
    let mut open = false;
    for (number, line) in (1..).zip(text.lines()) {
        match line.strip_prefix("```") {
            Some(info) if !open => {
                open = true;
                blocks.push(Block {
                    line: number + 1,
                    info: info.split_whitespace().map(str::to_owned).collect(),
                    lines: Vec::new(),
                });
            }
            Some(_) => {
                open = false;
                texts.push(String::new());
            }
            None if open => blocks.last_mut().unwrap().lines.push(line.to_owned()),
            None => writeln!(texts.last_mut().unwrap(), "{line}").unwrap(),
        }
    }
    assert!(!open, "{page}: the last block is not closed");
    (texts, blocks)
}

fn steps(page: &str, block: &Block) -> Vec<Step> {
    let mut steps = Vec::<Step>::new();
    for (number, line) in (block.line..).zip(&block.lines) {
        if line.starts_with("$ ") {
            steps.push(Step {
                line: number,
                shown: vec![line.clone()],
                output: Vec::new(),
            });
            continue;
        }
        let step = steps.last_mut();
        let step = step.unwrap_or_else(|| panic!("{page}:{number}: a block starts with `$ `"));
        if line.starts_with("> ") && step.output.is_empty() {
            step.shown.push(line.clone());
        } else {
            step.output.push(line.clone());
        }
    }
    steps
}

/// Runs the commands of a page, and compares or renews their output.
fn check_page(page: &str) {
    let bless = std::env::var("MOE_BLESS").unwrap_or_default();
    let dir = tempfile::tempdir().unwrap();
    for name in LINKED {
        let target = fs::canonicalize(repository(name)).unwrap();
        std::os::unix::fs::symlink(target, dir.path().join(name)).unwrap();
    }
    if let Some(trace) = trace() {
        let link = dir.path().join(trace.file_name().unwrap());
        std::os::unix::fs::symlink(fs::canonicalize(trace).unwrap(), link).unwrap();
    }
    let (texts, mut blocks) = parse(page);
    let mut differences = String::new();
    for block in blocks.iter_mut().filter(|block| block.is_console()) {
        if block.not_run().is_some() {
            continue;
        }
        let ignore_numbers = block.has_mark("numbers");
        let mut lines = Vec::new();
        for step in steps(page, block) {
            let printed = execute(page, &step, dir.path());
            lines.extend(step.shown.iter().cloned());
            if step.output.is_empty() {
                continue;
            }
            let (same, aligned) = align(&step.output, &printed, ignore_numbers, bless == "all");
            if !same {
                let (shown, printed) = (step.output.join("\n"), printed.join("\n"));
                let place = format!("{page}:{}: {}", step.line, step.script());
                writeln!(differences, "{place}\n--- shown\n{shown}\n--- printed\n{printed}\n")
                    .unwrap();
            }
            lines.extend(aligned);
        }
        block.lines = lines;
    }
    if bless == "1" || bless == "all" {
        fs::write(repository(page), join(&texts, &blocks)).unwrap();
        copy_plots(&texts, dir.path());
    } else {
        assert!(differences.is_empty(), "MOE_BLESS=1 renews the output shown\n\n{differences}");
    }
}

/// Copies the plots that the page links and that its commands have drawn to `docs/plots`.
fn copy_plots(texts: &[String], dir: &Path) {
    for link in texts.iter().flat_map(|text| text.split("plots/").skip(1)) {
        let name = link.split(')').next().unwrap();
        if name.ends_with(".png") && dir.join(name).exists() {
            fs::copy(dir.join(name), repository("docs/plots").join(name)).unwrap();
        }
    }
}

fn join(texts: &[String], blocks: &[Block]) -> String {
    let mut page = texts[0].clone();
    for (block, text) in blocks.iter().zip(&texts[1..]) {
        writeln!(page, "```{}", block.info.join(" ")).unwrap();
        block
            .lines
            .iter()
            .for_each(|line| writeln!(page, "{line}").unwrap());
        writeln!(page, "```").unwrap();
        page += text;
    }
    page
}

/// The lines that a command prints to stdout and stderr, in the order of printing.
fn execute(page: &str, step: &Step, dir: &Path) -> Vec<String> {
    let binary = assert_cmd::cargo::cargo_bin!("moe-analyze");
    let path = std::env::var_os("PATH").unwrap_or_default();
    let paths = [binary.parent().unwrap().to_owned()]
        .into_iter()
        .chain(std::env::split_paths(&path));
    let mut command = Command::new("sh");
    command
        .args(["-c", &format!("exec 2>&1\n{}", step.script())])
        .current_dir(dir)
        .env("PATH", std::env::join_paths(paths).unwrap())
        .env_remove("MOE_BLESS");
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let place = format!("{page}:{}: {}", step.line, step.script());
    assert!(output.status.success(), "{place}: {}\n{text}", output.status);
    let lines = text.trim_end().lines();
    lines.map(|line| line.trim_end().to_owned()).collect()
}

/// Prints every command that is not run, past the capture of the test harness.
#[test]
fn lists_commands_that_are_not_run() {
    let mut list = String::new();
    for page in PAGES {
        let (_, blocks) = parse(page);
        for block in blocks.iter().filter(|block| block.is_console()) {
            for mark in &block.info[1..] {
                let known = mark == "numbers" || MARKS.iter().any(|(name, _)| name == mark);
                assert!(known, "{page}:{}: unknown mark {mark}", block.line);
            }
            let Some(reason) = block.not_run() else {
                continue;
            };
            for step in steps(page, block) {
                writeln!(list, "not run: {page}:{}: {reason}: {}", step.line, step.script())
                    .unwrap();
            }
        }
    }
    std::io::stderr().write_all(list.as_bytes()).unwrap();
}

/// Commands stand in blocks fenced as `console`, which the tests above run, and every page with such a block has a test.
#[test]
fn commands_stand_in_console_blocks() {
    let mut wrong = Vec::new();
    for page in all_pages() {
        let (texts, blocks) = parse(&page);
        for block in &blocks {
            let shell = block
                .info
                .first()
                .is_some_and(|word| ["sh", "bash", "shell"].contains(&&**word));
            if shell || block.is_console() && !PAGES.contains(&&*page) {
                wrong.push(format!("{page}:{}", block.line));
            }
        }
        for line in texts.iter().flat_map(|text| text.lines()) {
            if line.starts_with("    $ ") || line.starts_with("    moe-analyze ") {
                wrong.push(format!("{page}: {line}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// README and the pages of `docs/`, relative to the repository.
fn all_pages() -> Vec<String> {
    let mut pages = vec!["README.md".to_owned()];
    for entry in fs::read_dir(repository("docs")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        if name.ends_with(".md") {
            pages.push(format!("docs/{name}"));
        }
    }
    pages.sort();
    pages
}

#[test]
fn links_lead_to_files_and_headings() {
    let mut broken = Vec::new();
    for page in all_pages() {
        let text = fs::read_to_string(repository(&page)).unwrap();
        for link in text.split("](").skip(1) {
            let target = link.split(')').next().unwrap();
            if target.contains("://") {
                continue;
            }
            let (file, heading) = target.split_once('#').unwrap_or((target, ""));
            let path = match file {
                "" => repository(&page),
                file => repository(&page).parent().unwrap().join(file),
            };
            let has_heading =
                || fs::read_to_string(&path).is_ok_and(|text| has_heading(&text, heading));
            if !path.exists() || !heading.is_empty() && !has_heading() {
                broken.push(format!("{page}: {target}"));
            }
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

/// Whether a Markdown text has a heading with this anchor.
fn has_heading(text: &str, anchor: &str) -> bool {
    let headings = text.lines().filter(|line| line.starts_with('#'));
    let mut anchors = headings.map(|line| {
        let title = line.trim_start_matches('#').trim().to_lowercase();
        let kept = title
            .chars()
            .filter(|c| c.is_alphanumeric() || [' ', '-', '_'].contains(c));
        kept.collect::<String>().replace(' ', "-")
    });
    anchors.any(|heading| heading == anchor)
}

/// The options that the pages name exist.
#[test]
fn options_on_pages_exist() {
    let completions = run!["completions", "bash"];
    let known: BTreeSet<&str> = options(&completions).collect();
    let mut unknown = Vec::new();
    for page in all_pages() {
        let text = fs::read_to_string(repository(&page)).unwrap();
        let named: BTreeSet<&str> = options(&text).collect();
        let others = named
            .iter()
            .filter(|option| !known.contains(*option) && !OTHER_OPTIONS.contains(option));
        unknown.extend(others.map(|option| format!("{page}: {option}")));
    }
    assert!(unknown.is_empty(), "{}", unknown.join("\n"));
}

/// Long options in a text.
fn options(text: &str) -> impl Iterator<Item = &str> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '-'));
    words.filter(|word| {
        word.starts_with("--") && !word.ends_with('-') && word.as_bytes()[2].is_ascii_lowercase()
    })
}

/// The table of commands in README contains every subcommand.
#[test]
fn readme_lists_every_subcommand() {
    let help = String::from_utf8(moe_analyze().arg("--help").output().unwrap().stdout).unwrap();
    let readme = fs::read_to_string(repository("README.md")).unwrap();
    let (_, commands) = help.split_once("Commands:\n").unwrap();
    let names = commands
        .lines()
        .map_while(|line| line.strip_prefix("  "))
        .filter(|line| !line.starts_with(' '))
        .filter_map(|line| line.split_whitespace().next());
    for name in names.filter(|name| *name != "help") {
        assert!(readme.contains(&format!("`{name}`")), "README.md does not list {name}");
    }
}
