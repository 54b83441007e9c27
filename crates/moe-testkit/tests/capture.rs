//! The output of skipped tests under the test harness. The tests run this binary again with one ignored test.

#![allow(clippy::unwrap_used)]

use std::process::{Command, Output};

use moe_testkit::{Need, data, skip};

#[test]
#[ignore = "run by the other tests of this file"]
fn needs_a_gpu() {
    println!("captured");
    skip(Need::Gpu, "there is no driver");
}

#[test]
#[ignore = "run by the other tests of this file"]
fn needs_data() {
    assert_eq!(data("no/such/file"), None);
}

fn run(test: &str, require: &str) -> Output {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--ignored", "--test-threads=2"])
        .env("MOE_REQUIRE", require)
        .env("MOE_DATA", "elsewhere")
        .env_remove("RUST_TEST_NOCAPTURE")
        .output()
        .unwrap()
}

#[test]
fn skips_are_not_captured() {
    let output = run("needs_a_gpu", "python,data");
    let (stdout, stderr) = text(&output);
    assert!(output.status.success(), "{stdout}{stderr}");
    assert!(!stdout.contains("captured"), "{stdout}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    assert!(
        stderr.starts_with("skipped: needs_a_gpu (crates/moe-testkit/tests/capture.rs:"),
        "{stderr}"
    );
    assert!(
        stderr.ends_with(") needs gpu: there is no driver\n"),
        "{stderr}"
    );
}

#[test]
fn missing_requirements_are_failures() {
    let output = run("needs_a_gpu", "gpu");
    let (stdout, stderr) = text(&output);
    assert!(!output.status.success(), "{stdout}{stderr}");
    assert!(
        stdout.contains("there is no driver: MOE_REQUIRE contains gpu"),
        "{stdout}"
    );
}

#[test]
fn reports_path_and_caller_of_missing_data() {
    let output = run("needs_data", "");
    let (stdout, stderr) = text(&output);
    assert!(output.status.success(), "{stdout}{stderr}");
    assert!(
        stderr.starts_with("skipped: needs_data (crates/moe-testkit/tests/capture.rs:"),
        "{stderr}"
    );
    assert!(
        stderr.contains(") needs data: elsewhere/no/such/file does not exist; "),
        "{stderr}"
    );
}

fn text(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr))
}
