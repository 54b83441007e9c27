//! `hotness`: counts that are known beforehand, from traces and from tables, and every output.

mod counts;
mod domains;
mod hold;
mod inputs;
mod matrices;
mod measures;
mod outputs;
mod several;

use std::path::PathBuf;

use crate::support::{known_run, run};

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
        run!["--quiet", "parquet", fixture.path("run"), "--out", fixture.path("tables")];
        fixture
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}
