//! No output replaces an input.
//!
//! The test runs in a separate process: registered inputs are global, and a file system may reuse the inode of a removed input
//! for a file of another test.

use std::fs;
use std::os::unix::fs::symlink;

use moe_files::{AtomicFile, AtomicFiles, Error, inputs};

use crate::child::{assert_passed, dir, start};

#[test]
fn rejects_outputs_that_replace_inputs() {
    let dir = tempfile::tempdir().unwrap();
    let child = start("inputs::write_over_inputs", dir.path());
    assert_passed(&child.wait_with_output().unwrap());
}

#[test]
#[ignore = "part of rejects_outputs_that_replace_inputs"]
fn write_over_inputs() {
    let at = |name: &str| dir().join(name);
    fs::write(at("model"), "input").unwrap();
    fs::hard_link(at("model"), at("hard")).unwrap();
    symlink(at("model"), at("soft")).unwrap();
    fs::create_dir(at("run")).unwrap();
    fs::write(at("run/trace"), "input").unwrap();
    fs::hard_link(at("run/trace"), at("linked-trace")).unwrap();
    fs::create_dir(at("tables")).unwrap();
    fs::write(at("tables/routing"), "input").unwrap();
    symlink(at("run"), at("link-to-run")).unwrap();
    // Links from a directory to itself, which must not be followed forever.
    for link in 0..8 {
        symlink(".", at("tables").join(format!("again-{link}"))).unwrap();
    }
    fs::create_dir_all(at("dataset/routing")).unwrap();
    fs::create_dir(at("elsewhere")).unwrap();
    fs::write(at("elsewhere/part-0"), "input").unwrap();
    symlink(at("elsewhere"), at("dataset/routing/run=1")).unwrap();
    let start = std::time::Instant::now();
    inputs::protect(&at("dataset"));
    inputs::protect(&at("tables"));
    assert!(start.elapsed() < std::time::Duration::from_secs(5));
    inputs::protect(&at("model"));
    inputs::protect_directory(&at("run"));

    for output in [
        "model",
        "hard",
        "soft",
        "linked-trace",
        "tables/routing",
        "run/../model",
        "elsewhere/part-0",
    ] {
        let error = AtomicFile::create(&at(output), true).unwrap_err();
        assert!(matches!(error, Error::IsInput { .. }), "{output}: {error}");
    }
    for output in ["run/new", "run/trace", "link-to-run/new", "run/sub/new"] {
        let error = inputs::check_output(&at(output)).unwrap_err();
        assert!(
            matches!(error, Error::IsInput { .. } | Error::InsideInput { .. }),
            "{output}: {error}"
        );
    }
    assert!(matches!(
        AtomicFiles::create(&at("run/sub"), true),
        Err(Error::InsideInput { .. })
    ));
    assert!(!at("run/sub").exists());
    for output in ["tables/new", "other", "run-2"] {
        assert!(AtomicFile::create(&at(output), true).is_ok(), "{output}");
    }
}
