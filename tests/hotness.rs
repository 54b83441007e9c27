//! `hotness`: known counts, from traces and from tables, in every output.

mod counts;
mod inputs;
mod matrices;
mod measures;
mod outputs;
mod several;

use std::path::PathBuf;

use serde_json::Value;

use crate::support::{known_run, run};

pub struct Fixture {
    dir: tempfile::TempDir,
}

impl Fixture {
    /// Writes the known run to `run` and its tables to `tables`.
    pub fn new() -> Fixture {
        let fixture = Fixture {
            dir: tempfile::tempdir().unwrap(),
        };
        known_run(&fixture.path("run"));
        run!["--quiet", "parquet", fixture.path("run"), "--out", fixture.path("tables")];
        fixture
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

pub fn number(row: &Value, column: &str) -> f64 {
    row[column]
        .as_f64()
        .unwrap_or_else(|| panic!("{column} of {row}"))
}

#[track_caller]
pub fn close(row: &Value, column: &str, expected: f64) {
    let found = number(row, column);
    assert!((found - expected).abs() < 1e-9, "{column}: {found}, not {expected}");
}
