//! `hotness`: counts that are known beforehand, from traces and from tables, and every output.

#[path = "hotness/counts.rs"]
mod counts;
#[path = "hotness/domains.rs"]
mod domains;
#[path = "hotness/hold.rs"]
mod hold;
#[path = "hotness/inputs.rs"]
mod inputs;
#[path = "hotness/matrices.rs"]
mod matrices;
#[path = "hotness/measures.rs"]
mod measures;
#[path = "hotness/outputs.rs"]
mod outputs;
#[path = "hotness/several.rs"]
mod several;
mod support;

use std::path::PathBuf;

use support::{arg, known_run, stdout_of};

struct Fixture {
    dir: tempfile::TempDir,
}

impl Fixture {
    /// The known run in `run`, its tables in `tables`.
    fn new() -> Fixture {
        let fixture = Fixture {
            dir: tempfile::tempdir().unwrap(),
        };
        known_run(&fixture.path("run"));
        stdout_of(&[
            "--quiet",
            "parquet",
            arg(&fixture.path("run")),
            "--out",
            arg(&fixture.path("tables")),
        ]);
        fixture
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}
