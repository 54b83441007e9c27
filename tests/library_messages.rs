//! Messages of library crates contain no command-line options. `moe-analyze` adds advice with options
//! (`src/advice.rs`).

use std::fs;
use std::path::{Path, PathBuf};

/// Options of other programs, which messages may contain.
const OTHER_PROGRAMS: [&str; 1] = ["--init-expert-location"];

fn sources(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// Returns the options in a line of code, except in comments.
fn options(line: &str) -> Vec<&str> {
    let code = line.trim_start();
    // Comments of Rust, and of HTML.
    if code.starts_with("//") || code.contains("<!--") {
        return Vec::new();
    }
    let words = code.split(|c: char| !(c.is_ascii_alphanumeric() || c == '-'));
    words
        .filter(|word| word.starts_with("--") && word.len() > 3)
        .filter(|word| word[2..].starts_with(|c: char| c.is_ascii_lowercase()))
        .filter(|word| !OTHER_PROGRAMS.contains(word))
        .collect()
}

#[test]
fn library_messages_contain_no_options() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut files = Vec::new();
    for entry in fs::read_dir(&crates).unwrap() {
        let source = entry.unwrap().path().join("src");
        let of_program = source.starts_with(crates.join("moe-analyze"))
            || source.starts_with(crates.join("moe-testkit"));
        if source.is_dir() && !of_program {
            sources(&source, &mut files);
        }
    }
    assert!(files.len() > 300, "{} files", files.len());
    let mut named = Vec::new();
    for file in files {
        let name = file.strip_prefix(&crates).unwrap().display().to_string();
        let text = fs::read_to_string(&file).unwrap();
        // Tests of a module can run the program.
        let code = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
        for (number, line) in (1..).zip(code.lines()) {
            for option in options(line) {
                named.push(format!("{name}:{number}: {option}"));
            }
        }
    }
    assert!(named.is_empty(), "{}", named.join("\n"));
}
