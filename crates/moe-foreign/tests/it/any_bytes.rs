//! Every importer on its golden files, unchanged, truncated and modified. The result is rows, or an error with a location; never a
//! panic, and never more memory than the limit.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use moe_foreign::{ForeignError, IMPORTERS, ImportOptions, Importer, Source};
use moe_trace::{CountRow, ModelInfo, RoutingRow, Sink, SinkError};
use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::{Config, TestRunner};

/// An allocator that counts the memory of each thread, because other tests run at the same time.
struct CountingAllocator;

thread_local! {
    /// Bytes that the thread has allocated, minus those that it has freed.
    static NOW: Cell<isize> = const { Cell::new(0) };
    /// The highest value of `NOW`.
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

// SAFETY: every call is forwarded to the system allocator unchanged.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = NOW.get() + layout.size() as isize;
        NOW.set(now);
        PEAK.set(PEAK.get().max(now));
        // SAFETY: the caller guarantees what `System` requires.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        NOW.set(NOW.get() - layout.size() as isize);
        // SAFETY: the caller guarantees what `System` requires.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Memory limit in bytes for importing a file of some kilobytes: enough for buffers, but not for sizes that the file claims.
const MAX_MEMORY: isize = 16 << 20;

/// Counts rows.
#[derive(Default)]
struct RowCounter {
    rows: u64,
}

impl Sink for RowCounter {
    fn routing(&mut self, _: &RoutingRow) -> Result<(), SinkError> {
        self.rows += 1;
        Ok(())
    }

    fn count(&mut self, _: &CountRow) -> Result<(), SinkError> {
        self.rows += 1;
        Ok(())
    }
}

/// The golden files of all formats in `fixtures/foreign`, without scripts, expected values and invalid files.
fn golden_files() -> Vec<PathBuf> {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/foreign");
    let mut files = Vec::new();
    for path in entries(&fixtures) {
        match path.file_name().and_then(|name| name.to_str()) {
            Some("make" | "expected" | "refused" | "__pycache__") => {}
            _ if path.is_dir() => files.extend(entries(&path)),
            _ => files.push(path),
        }
    }
    files.retain(|file| file.extension().is_none_or(|extension| extension != "py"));
    files
}

fn entries(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).unwrap();
    let mut entries: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    entries.sort();
    entries
}

/// Options of a user: none, the top-k, or the model.
fn options() -> [ImportOptions; 3] {
    let top_k = ImportOptions {
        top_k: Some(2),
        ..ImportOptions::default()
    };
    let model = ImportOptions {
        model: Some(ModelInfo {
            n_layer: Some(2),
            n_expert: Some(8),
            n_expert_used: Some(2),
            ..ModelInfo::default()
        }),
        ..ImportOptions::default()
    };
    [ImportOptions::default(), top_k, model]
}

/// Imports a file and checks memory, row counts and the error.
fn import(
    importer: &dyn Importer,
    path: &Path,
    options: &ImportOptions,
) -> Result<u64, ForeignError> {
    let before = NOW.get();
    PEAK.set(before);
    let mut sink = RowCounter::default();
    let result = moe_foreign::import(importer, &Source::file(path), options, &mut sink);
    let peak = PEAK.get() - before;
    assert!(
        peak < MAX_MEMORY,
        "{}: {peak} bytes of memory",
        importer.name()
    );
    match result {
        Ok(summary) => {
            assert_eq!(summary.rows + summary.counts, sink.rows);
            Ok(sink.rows)
        }
        Err(error) => {
            let text = error.to_string();
            assert!(
                !text.contains('\n') && text.len() < 1000,
                "{}: {text}",
                importer.name()
            );
            // Errors that name a location, or concern the complete file.
            let has_location = matches!(
                &error,
                ForeignError::Invalid { .. }
                    | ForeignError::File { .. }
                    | ForeignError::Layers { .. }
                    | ForeignError::Missing { .. }
                    | ForeignError::NoRouting { .. }
                    | ForeignError::Gguf(_)
                    | ForeignError::Operations { .. }
                    | ForeignError::OtherModel { .. }
                    | ForeignError::OutOfRange { .. }
                    | ForeignError::Read(_)
                    | ForeignError::Response { .. }
                    | ForeignError::TopK { .. }
                    | ForeignError::Version { .. }
            );
            assert!(has_location, "{}: {text}", importer.name());
            Err(error)
        }
    }
}

#[derive(Clone, Debug)]
enum Change {
    Truncate(Index),
    Byte(Index, u8),
    Remove(Index, Index),
    Repeat(Index, Index),
    Number(Index, u64),
}

fn change() -> impl Strategy<Value = Change> {
    let number = prop_oneof![
        Just(0),
        Just(u64::from(u16::MAX)),
        Just(u64::from(u32::MAX)),
        Just(u64::MAX),
        any::<u64>(),
    ];
    prop_oneof![
        any::<Index>().prop_map(Change::Truncate),
        (any::<Index>(), any::<u8>()).prop_map(|(at, byte)| Change::Byte(at, byte)),
        any::<(Index, Index)>().prop_map(|(a, b)| Change::Remove(a, b)),
        any::<(Index, Index)>().prop_map(|(a, b)| Change::Repeat(a, b)),
        (any::<Index>(), number).prop_map(|(at, number)| Change::Number(at, number)),
    ]
}

impl Change {
    fn apply(&self, bytes: &mut Vec<u8>) {
        if bytes.is_empty() {
            return;
        }
        let n = bytes.len();
        let range = |a: &Index, b: &Index| {
            let (a, b) = (a.index(n), b.index(n));
            a.min(b)..a.max(b)
        };
        match self {
            Self::Truncate(at) => bytes.truncate(at.index(n)),
            Self::Byte(at, byte) => bytes[at.index(n)] = *byte,
            Self::Remove(a, b) => drop(bytes.drain(range(a, b))),
            Self::Repeat(a, b) => {
                let piece = bytes[range(a, b)].to_vec();
                let end = range(a, b).end;
                bytes.splice(end..end, piece);
            }
            // Replaces the digits of a number in text, or eight bytes of a binary file.
            Self::Number(at, number) => {
                let at = at.index(n);
                let is_digit = |i: &usize| bytes.get(*i).is_some_and(u8::is_ascii_digit);
                let n_digits = (at..n).take_while(is_digit).count();
                if n_digits > 0 {
                    let digits = number.to_string().into_bytes();
                    bytes.splice(at..at + n_digits, digits);
                } else {
                    let end = n.min(at + 8);
                    bytes[at..end].copy_from_slice(&number.to_le_bytes()[..end - at]);
                }
            }
        }
    }
}

#[test]
fn any_bytes_yield_rows_or_an_error_with_a_location() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace");
    let mut tested = BTreeSet::new();
    for golden in golden_files() {
        let shown = golden.display();
        let detected = moe_foreign::detect(&golden).unwrap();
        let importer = detected
            .unwrap_or_else(|| panic!("{shown} is not recognized"))
            .importer;
        tested.insert(importer.name());
        let bytes = std::fs::read(&golden).unwrap();
        let mut runs = 0;
        for options in options() {
            // Some formats can be read only with the top-k or the model.
            runs += u32::from(import(importer, &golden, &options).is_ok());

            for n in truncated_lengths(bytes.len()) {
                std::fs::write(&path, &bytes[..n]).unwrap();
                importer.is_applicable(&bytes[..n]);
                let _ = import(importer, &path, &options);
            }
            let config = Config {
                cases: 32,
                failure_persistence: None,
                ..Config::default()
            };
            TestRunner::new(config)
                .run(&prop::collection::vec(change(), 1..4), |changes| {
                    let mut changed = bytes.clone();
                    changes.iter().for_each(|change| change.apply(&mut changed));
                    std::fs::write(&path, &changed).unwrap();
                    importer.is_applicable(&changed);
                    let _ = import(importer, &path, &options);
                    Ok(())
                })
                .unwrap();
        }
        assert!(runs > 0, "{shown} cannot be read with any options");
    }
    for importer in IMPORTERS {
        let name = importer.name();
        assert!(tested.contains(name), "{name} has no golden file");
    }
}

/// Every length below `n`, or at most 120 of them.
fn truncated_lengths(n: usize) -> impl Iterator<Item = usize> {
    (0..n).step_by(n.div_ceil(120).max(1))
}
