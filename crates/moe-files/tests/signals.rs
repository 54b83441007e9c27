//! Signals: temporary files are removed, and a truncated input is named.
#![cfg(unix)]

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::Ordering;
use std::time::Duration;

use moe_files::{AtomicFile, AtomicFiles, MappedFile, signals};

const DIR_VARIABLE: &str = "MOE_FILES_TEST_DIR";
const SIZE: u64 = 1 << 20;

/// Starts an ignored test of this file as a process of its own, whose work is in `dir`.
fn start(test: &str, dir: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--ignored", "--nocapture"])
        .env(DIR_VARIABLE, dir)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Runs an ignored test of this file as [`start`] does, in a process that a shell has prepared with `setup`.
fn run_after(setup: &str, test: &str, dir: &Path) -> Output {
    let script = format!("{setup} || exit 9; exec \"$0\" --exact {test} --ignored --nocapture");
    Command::new("sh")
        .args(["-c", &script])
        .arg(std::env::current_exe().unwrap())
        .env(DIR_VARIABLE, dir)
        .output()
        .unwrap()
}

/// Waits until the process prints `ready`, then sends it a signal.
fn signal_when_ready(mut child: Child, signal: &str) -> Output {
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(
        lines.any(|line| line.unwrap().contains("ready")),
        "it never was ready"
    );
    let kill = Command::new("kill")
        .args([signal, &child.id().to_string()])
        .status();
    assert!(kill.unwrap().success());
    // The pipe stays open until the process has ended.
    lines.for_each(drop);
    child.wait_with_output().unwrap()
}

fn dir() -> PathBuf {
    std::env::var_os(DIR_VARIABLE)
        .expect("run by another test")
        .into()
}

fn n_entries(dir: &Path) -> usize {
    fs::read_dir(dir).unwrap().count()
}

fn wait_forever() -> ! {
    println!("ready");
    loop {
        std::thread::sleep(Duration::from_secs(60));
    }
}

fn mapped() -> (File, MappedFile) {
    let path = dir().join("input");
    let file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(&path)
        .unwrap();
    file.set_len(SIZE).unwrap();
    let map = MappedFile::new(&file, &path).unwrap();
    (file, map)
}

#[test]
fn names_a_mapped_file_that_is_truncated_and_removes_temporary_files() {
    let dir = tempfile::tempdir().unwrap();
    let output = start("truncate_and_read", dir.path())
        .wait_with_output()
        .unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    let input = dir.path().join("input");
    assert_eq!(
        stderr,
        format!("program: {}\n", signals::truncated_message(&input))
    );
    assert_eq!(n_entries(dir.path()), 1, "only the input is left");
}

#[test]
#[ignore = "part of names_a_mapped_file_that_is_truncated_and_removes_temporary_files"]
fn truncate_and_read() {
    signals::install("program").unwrap();
    let (file, map) = mapped();
    let _output = AtomicFile::create(&dir().join("output"), false).unwrap();
    file.set_len(1).unwrap();
    // Several threads at once, as in a parallel reader.
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let map = &map;
            scope.spawn(move || map[SIZE as usize / 2 + thread]);
        }
    });
}

/// A mapping of a C library, such as a model that llama.cpp runs.
#[cfg(target_os = "linux")]
#[test]
fn names_a_truncated_file_that_other_code_mapped() {
    let dir = tempfile::tempdir().unwrap();
    let output = start("read_a_mapping_of_other_code", dir.path())
        .wait_with_output()
        .unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(
        stderr.contains("a model: the file was truncated"),
        "{stderr}"
    );
}

#[test]
#[ignore = "part of names_a_truncated_file_that_other_code_mapped"]
fn read_a_mapping_of_other_code() {
    signals::install("program").unwrap();
    let path = dir().join("a model");
    fs::write(&path, vec![1; SIZE as usize]).unwrap();
    let file = File::options().write(true).read(true).open(&path).unwrap();
    // SAFETY: the mapping is read-only; the read below is meant to fail.
    let map = unsafe { memmap2::Mmap::map(&file) }.unwrap();
    file.set_len(1).unwrap();
    println!("{}", map[SIZE as usize - 1]);
}

#[test]
fn a_bus_error_elsewhere_ends_the_process_by_its_signal() {
    let dir = tempfile::tempdir().unwrap();
    let output = start("read_past_another_mapping", dir.path())
        .wait_with_output()
        .unwrap();
    assert_eq!(output.status.signal(), Some(libc::SIGBUS));
}

#[test]
#[ignore = "part of a_bus_error_elsewhere_ends_the_process_by_its_signal"]
fn read_past_another_mapping() {
    signals::install("program").unwrap();
    let _ours = mapped();
    let file = tempfile::tempfile().unwrap();
    file.set_len(SIZE).unwrap();
    // SAFETY: the mapping is read-only; the read below is meant to fail.
    let map = unsafe { memmap2::Mmap::map(&file) }.unwrap();
    file.set_len(0).unwrap();
    println!("{}", map[0]);
}

#[test]
fn temporary_files_are_removed_on_int_term_and_hup() {
    for (signal, number) in [
        ("-INT", libc::SIGINT),
        ("-TERM", libc::SIGTERM),
        ("-HUP", libc::SIGHUP),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let output = signal_when_ready(start("write_and_wait", dir.path()), signal);
        assert_eq!(output.status.signal(), Some(number));
        assert_eq!(n_entries(dir.path()), 0, "{signal}");
    }
}

#[test]
#[ignore = "part of temporary_files_are_removed_on_int_term_and_hup"]
fn write_and_wait() {
    signals::install("program").unwrap();
    let mut file = AtomicFile::create(&dir().join("one"), false).unwrap();
    file.write_all(b"unfinished").unwrap();
    let mut group = AtomicFiles::create(&dir().join("new/group"), false).unwrap();
    for name in 0..100 {
        group.file(&name.to_string()).unwrap();
    }
    wait_forever();
}

#[test]
fn an_interrupt_sets_the_flag_where_it_is_wanted() {
    let dir = tempfile::tempdir().unwrap();
    let output = signal_when_ready(start("wait_for_the_flag", dir.path()), "-TERM");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
#[ignore = "part of an_interrupt_sets_the_flag_where_it_is_wanted"]
fn wait_for_the_flag() {
    signals::install("program").unwrap();
    let interrupted = signals::interrupted();
    println!("ready");
    while !interrupted.load(Ordering::Relaxed) {
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_hangup_that_was_ignored_stays_ignored() {
    let dir = tempfile::tempdir().unwrap();
    let output = run_after("trap '' HUP", "survive_a_hangup", dir.path());
    assert!(output.status.success(), "{:?}", output.status);
}

#[test]
#[ignore = "part of a_hangup_that_was_ignored_stays_ignored"]
fn survive_a_hangup() {
    signals::install("program").unwrap();
    // SAFETY: raising a signal has no preconditions.
    unsafe { libc::raise(libc::SIGHUP) };
    std::thread::sleep(Duration::from_millis(50));
}

#[test]
fn a_file_over_the_size_limit_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let output = run_after("ulimit -f 8", "write_too_much", dir.path());
    assert!(output.status.success(), "{:?}", output.status);
    assert_eq!(n_entries(dir.path()), 0);
}

#[test]
#[ignore = "part of a_file_over_the_size_limit_is_an_error"]
fn write_too_much() {
    signals::install("program").unwrap();
    let mut file = AtomicFile::create(&dir().join("large"), false).unwrap();
    let error = file.write_all(&[0; 1 << 16]).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::FileTooLarge);
}

#[test]
fn reports_a_truncation_that_raised_no_signal() {
    let dir = tempfile::tempdir().unwrap();
    let output = start("truncate_within_the_last_page", dir.path())
        .wait_with_output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
#[ignore = "part of reports_a_truncation_that_raised_no_signal"]
fn truncate_within_the_last_page() {
    let (file, map) = mapped();
    assert_eq!(moe_files::truncated_file(), None);
    file.set_len(SIZE - 1).unwrap();
    assert_eq!(moe_files::truncated_file(), Some(dir().join("input")));
    drop(map);
    assert_eq!(moe_files::truncated_file(), Some(dir().join("input")));
}
