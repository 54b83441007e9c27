//! Helpers for the tests of this workspace: paths, skipped tests, and hand-built GGUF files. Not published.
//!
//! | variable | meaning | default |
//! |---|---|---|
//! | `MOE_FIXTURES` | directory of the fixtures, for test binaries on another machine | `fixtures` of the repository |
//! | `MOE_DATA` | directory of data outside the repository | `../shared/data`, relative to the repository |
//! | `MOE_PYTHON` | Python interpreter | `.venv/bin/python` of the repository, or `python3` |
//! | `MOE_REQUIRE` | comma-separated list of [`Need`]s; a test that needs one of them fails instead of being skipped | empty |

#![forbid(unsafe_code)]

pub mod gguf;
pub mod reference;
mod report;

use std::env;
use std::fmt::{self, Display};
use std::io::Write;
use std::panic::Location;
use std::path::{Path, PathBuf};
use std::process::Command;

pub use report::Report;

/// A requirement of a test that a machine may not satisfy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// A Python interpreter with the packages that the test imports.
    Python,
    /// A file under [`data`].
    Data,
    /// A CUDA device.
    Gpu,
    /// Two CUDA devices.
    TwoGpus,
    /// A build with llama.cpp.
    LlamaCpp,
    /// A C or C++ compiler.
    CCompiler,
    /// A file system that stores sparse files of several GiB.
    SparseFiles,
    /// A machine without a CUDA device, for tests of the behavior without one.
    NoGpu,
    /// The program `trace_processor_shell` of Perfetto.
    TraceProcessor,
}

impl Need {
    const ALL: [Need; 9] = [
        Need::Python,
        Need::Data,
        Need::Gpu,
        Need::TwoGpus,
        Need::LlamaCpp,
        Need::CCompiler,
        Need::SparseFiles,
        Need::NoGpu,
        Need::TraceProcessor,
    ];

    /// The name in `MOE_REQUIRE`.
    pub fn name(self) -> &'static str {
        match self {
            Need::Python => "python",
            Need::Data => "data",
            Need::Gpu => "gpu",
            Need::TwoGpus => "two-gpus",
            Need::LlamaCpp => "llama-cpp",
            Need::CCompiler => "cc",
            Need::SparseFiles => "sparse-files",
            Need::NoGpu => "no-gpu",
            Need::TraceProcessor => "trace-processor",
        }
    }
}

impl Display for Need {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Reports in one line on stderr that the current test is skipped. The test harness does not capture the line.
///
/// The caller must return after this call.
///
/// # Panics
///
/// If `MOE_REQUIRE` contains `need`, or a name that does not exist.
#[track_caller]
pub fn skip(need: Need, reason: impl Display) {
    let required = env::var("MOE_REQUIRE").unwrap_or_default();
    let line = line(need, &reason.to_string(), Location::caller());
    if let Some(failure) = failure(need, &required) {
        panic!("{line}: {failure}");
    }
    // The test harness captures `eprintln!`, but not `writeln!`.
    let _ = writeln!(std::io::stderr(), "skipped: {line}");
}

fn line(need: Need, reason: &str, location: &Location<'_>) -> String {
    let thread = std::thread::current();
    // The harness gives the thread the name of the test, except with `--test-threads=1`.
    let test = match thread.name() {
        None | Some("main") => "a test",
        Some(name) => name,
    };
    let reason = reason.lines().map(str::trim).collect::<Vec<_>>().join("; ");
    let (file, line) = (location.file(), location.line());
    format!("{test} ({file}:{line}) needs {need}: {reason}")
}

/// Returns why a test that lacks `need` fails with `required` as `MOE_REQUIRE`, or `None` if it is skipped.
fn failure(need: Need, required: &str) -> Option<String> {
    let mut names = required
        .split(',')
        .map(str::trim)
        .filter(|name| !name.is_empty());
    if let Some(unknown) = names
        .clone()
        .find(|name| !Need::ALL.iter().any(|need| need.name() == *name))
    {
        let known = Need::ALL.map(Need::name).join(", ");
        return Some(format!(
            "MOE_REQUIRE contains {unknown}, which is not one of {known}"
        ));
    }
    names
        .any(|name| name == need.name())
        .then(|| format!("MOE_REQUIRE contains {need}"))
}

/// Returns a path in the repository.
pub fn repository(path: impl AsRef<Path>) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(path)
}

/// Returns a path in `fixtures`, or in the directory of `MOE_FIXTURES`.
pub fn fixture(path: impl AsRef<Path>) -> PathBuf {
    match env::var_os("MOE_FIXTURES") {
        Some(fixtures) => PathBuf::from(fixtures).join(path),
        None => repository("fixtures").join(path),
    }
}

/// Returns a path in the directory of external data. Skips the current test if it does not exist.
///
/// # Panics
///
/// See [`skip`].
#[track_caller]
pub fn data(path: impl AsRef<Path>) -> Option<PathBuf> {
    let directory = match env::var_os("MOE_DATA") {
        Some(data) => PathBuf::from(data),
        None => repository("../shared/data"),
    };
    let path = directory.join(path);
    if path.exists() {
        return Some(path);
    }
    let reason = "does not exist; set MOE_DATA to the directory of the data";
    skip(Need::Data, format_args!("{} {reason}", path.display()));
    None
}

/// Returns a Python interpreter that can import `modules` (comma-separated). Skips the current test if there is none.
///
/// # Panics
///
/// See [`skip`].
#[track_caller]
pub fn python(modules: &str) -> Option<PathBuf> {
    let local = repository(".venv/bin/python");
    let python = match env::var_os("MOE_PYTHON") {
        Some(python) => PathBuf::from(python),
        None if local.exists() => local,
        None => PathBuf::from("python3"),
    };
    let probe = format!("import {modules}");
    let reason = match Command::new(&python).args(["-c", &probe]).output() {
        Ok(output) if output.status.success() => return Some(python),
        Ok(output) => {
            let stderr = String::from_utf8_lossy(&output.stderr);
            let last = stderr.lines().last();
            last.unwrap_or("the import failed").to_owned()
        }
        Err(error) => format!("cannot be run: {error}"),
    };
    let advice = "install notebooks/requirements.txt and tests/requirements.txt into .venv, \
                  or set MOE_PYTHON to a Python interpreter with these packages";
    skip(
        Need::Python,
        format_args!("{}: {reason}; {advice}", python.display()),
    );
    None
}

/// Whether `program` (a C or C++ compiler) can be run. Skips the current test if not.
///
/// # Panics
///
/// See [`skip`].
#[track_caller]
pub fn has_compiler(program: &str) -> bool {
    match Command::new(program).arg("--version").output() {
        Ok(output) if output.status.success() => return true,
        Ok(output) => skip(
            Need::CCompiler,
            format_args!("{program} --version: {}", output.status),
        ),
        Err(error) => skip(
            Need::CCompiler,
            format_args!("{program} cannot be run: {error}"),
        ),
    }
    false
}

/// Returns the width and height of a PNG file in pixels.
///
/// # Panics
///
/// If the file is not a complete PNG: signature, chunks with valid checksums, and end chunk.
pub fn png_size(path: &Path) -> (u32, u32) {
    let shown = path.display();
    let bytes = std::fs::read(path).unwrap_or_else(|error| panic!("{shown}: {error}"));
    let mut rest = bytes
        .strip_prefix(b"\x89PNG\r\n\x1a\n")
        .unwrap_or_else(|| panic!("{shown}: no PNG signature"));
    let number = |bytes: &[u8]| u32::from_be_bytes(bytes[..4].try_into().expect("four bytes"));
    let mut size = None;
    loop {
        assert!(rest.len() >= 12, "{shown}: truncated chunk");
        let end = 8 + number(rest) as usize;
        assert!(rest.len() >= end + 4, "{shown}: truncated chunk");
        let (name, data) = (&rest[4..8], &rest[8..end]);
        assert_eq!(
            number(&rest[end..]),
            crc32(&rest[4..end]),
            "{shown}: checksum"
        );
        match name {
            b"IHDR" => size = Some((number(data), number(&data[4..]))),
            b"IEND" => break,
            _ => {}
        }
        rest = &rest[end + 4..];
    }
    size.unwrap_or_else(|| panic!("{shown}: no header"))
}

/// Returns the CRC-32 of PNG (ISO 3309).
fn crc32(bytes: &[u8]) -> u32 {
    let crc = bytes.iter().fold(u32::MAX, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| {
            (crc >> 1) ^ (0xedb8_8320 & (crc & 1).wrapping_neg())
        })
    });
    !crc
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn png_checksum_matches_test_vectors() {
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
        assert_eq!(crc32(b"IEND"), 0xae42_6082);
    }

    #[test]
    fn fails_only_for_required_and_unknown_names() {
        assert_eq!(failure(Need::Gpu, ""), None);
        assert_eq!(failure(Need::Gpu, "python, data,"), None);
        let required = failure(Need::Gpu, "python, gpu").unwrap();
        assert_eq!(required, "MOE_REQUIRE contains gpu");
        assert!(failure(Need::Gpu, "no-gpu").is_none());
        let unknown = failure(Need::Gpu, "python,gqu").unwrap();
        assert!(
            unknown.starts_with("MOE_REQUIRE contains gqu, which is not one of python, data,"),
            "{unknown}"
        );
    }

    #[test]
    fn names_of_needs_are_unique() {
        for (i, need) in Need::ALL.iter().enumerate() {
            let same = |other: &Need| other.name() == need.name();
            assert_eq!(Need::ALL.iter().position(same), Some(i));
        }
    }

    #[test]
    fn joins_the_lines_of_a_reason() {
        let line = line(Need::Data, "a\n  b", Location::caller());
        assert!(line.contains("joins_the_lines_of_a_reason ("), "{line}");
        assert!(line.ends_with(") needs data: a; b"), "{line}");
    }
}
