//! Signal handlers: removal of temporary files, and reports of truncated inputs.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Output};
use std::sync::atomic::Ordering;
use std::time::Duration;

use moe_files::{AtomicFile, AtomicFiles, Error, MappedFile, commit_all, signals};

use crate::child::{assert_passed, dir, shell, start, start_in};

const SIZE: u64 = 1 << 20;

/// Waits until the process prints `ready`, then sends it a signal.
fn signal_when_ready(mut child: Child, signal: &str) -> Output {
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(
        lines.any(|line| line.unwrap().contains("ready")),
        "the process ended before it printed `ready`"
    );
    let kill = Command::new("kill")
        .args([signal, &child.id().to_string()])
        .status();
    assert!(kill.unwrap().success());
    // The pipe is closed when the process ends.
    lines.for_each(drop);
    child.wait_with_output().unwrap()
}

/// Whether this process, and therefore its children, ignore a signal.
fn is_ignored(signal: libc::c_int) -> bool {
    let mut action = std::mem::MaybeUninit::uninit();
    // SAFETY: without a new action the call only writes the current one to a valid pointer, if it succeeds.
    unsafe {
        libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) == 0
            && action.assume_init().sa_sigaction == libc::SIG_IGN
    }
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
fn reports_a_truncated_mapped_file_and_removes_temporary_files() {
    let dir = tempfile::tempdir().unwrap();
    let output = start("signals::truncate_and_read", dir.path())
        .wait_with_output()
        .unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    let input = dir.path().join("input");
    assert_eq!(
        stderr,
        format!("program: {}\n", signals::truncated_message(&input))
    );
    assert_eq!(n_entries(dir.path()), 1, "only the input remains");
}

#[test]
#[ignore = "part of reports_a_truncated_mapped_file_and_removes_temporary_files"]
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

/// For example a model that llama.cpp has mapped.
#[cfg(target_os = "linux")]
#[test]
fn reports_a_truncated_file_that_other_code_mapped() {
    let dir = tempfile::tempdir().unwrap();
    let output = start("signals::read_a_mapping_of_other_code", dir.path())
        .wait_with_output()
        .unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    let message = signals::truncated_message(Path::new("a model"));
    assert!(stderr.contains(&message), "{stderr}");
}

#[test]
#[ignore = "part of reports_a_truncated_file_that_other_code_mapped"]
fn read_a_mapping_of_other_code() {
    signals::install("program").unwrap();
    let path = dir().join("a model");
    fs::write(&path, vec![1; SIZE as usize]).unwrap();
    let file = File::options().write(true).read(true).open(&path).unwrap();
    // SAFETY: the mapping is read-only. The read below must raise SIGBUS.
    let map = unsafe { memmap2::Mmap::map(&file) }.unwrap();
    file.set_len(1).unwrap();
    println!("{}", map[SIZE as usize - 1]);
}

#[test]
fn other_bus_errors_end_the_process_by_sigbus() {
    let dir = tempfile::tempdir().unwrap();
    let output = start("signals::read_past_another_mapping", dir.path())
        .wait_with_output()
        .unwrap();
    assert_eq!(output.status.signal(), Some(libc::SIGBUS));
}

#[test]
#[ignore = "part of other_bus_errors_end_the_process_by_sigbus"]
fn read_past_another_mapping() {
    signals::install("program").unwrap();
    let _ours = mapped();
    let file = tempfile::tempfile().unwrap();
    file.set_len(SIZE).unwrap();
    // SAFETY: the mapping is read-only. The read below must raise SIGBUS.
    let map = unsafe { memmap2::Mmap::map(&file) }.unwrap();
    file.set_len(0).unwrap();
    println!("{}", map[0]);
}

#[test]
fn removes_temporary_files_on_int_term_and_hup() {
    for (signal, number) in [
        ("-INT", libc::SIGINT),
        ("-TERM", libc::SIGTERM),
        ("-HUP", libc::SIGHUP),
    ] {
        if is_ignored(number) {
            continue;
        }
        let dir = tempfile::tempdir().unwrap();
        let output = signal_when_ready(start("signals::write_and_wait", dir.path()), signal);
        assert_eq!(output.status.signal(), Some(number));
        assert_eq!(n_entries(dir.path()), 0, "{signal}");
    }
}

#[test]
#[ignore = "part of removes_temporary_files_on_int_term_and_hup"]
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

/// For the init process of a container, the kernel discards signals without a handler.
#[cfg(target_os = "linux")]
#[test]
fn init_process_of_a_container_ends_on_term() {
    let in_container = |program: &std::ffi::OsStr| {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--pid", "--fork"]);
        command.arg(program);
        command
    };
    let possible = in_container("true".as_ref()).output();
    if !possible.is_ok_and(|output| output.status.success()) {
        // `writeln!` is not captured by the test harness, unlike `eprintln!`.
        let _ = writeln!(std::io::stderr(), "skipped: namespaces are not available");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mut command = in_container(std::env::current_exe().unwrap().as_os_str());
    let mut child = start_in(&mut command, "signals::write_and_wait", dir.path());
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("ready")));
    let id = child.id();
    let first = fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap();
    let kill = Command::new("kill").args(["-TERM", first.trim()]).status();
    assert!(kill.unwrap().success());
    let (ended, end) = std::sync::mpsc::channel();
    std::thread::spawn(move || ended.send(child.wait().unwrap()));
    let Ok(status) = end.recv_timeout(Duration::from_secs(20)) else {
        let _ = Command::new("kill").args(["-KILL", first.trim()]).status();
        panic!("the process is still running");
    };
    assert_eq!(status.code(), Some(128 + libc::SIGTERM));
    assert_eq!(n_entries(dir.path()), 0);
}

#[test]
fn interrupt_sets_the_flag_after_it_was_requested() {
    let dir = tempfile::tempdir().unwrap();
    let output = signal_when_ready(start("signals::wait_for_the_flag", dir.path()), "-TERM");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
#[ignore = "part of interrupt_sets_the_flag_after_it_was_requested"]
fn wait_for_the_flag() {
    signals::install("program").unwrap();
    let interrupted = signals::interrupted();
    println!("ready");
    while !interrupted.load(Ordering::Relaxed) {
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn ignored_signals_stay_ignored() {
    let dir = tempfile::tempdir().unwrap();
    let ignore = "trap '' HUP INT TERM";
    let mut child = shell(ignore, "signals::survive_ignored_signals", dir.path());
    assert_passed(&child.output().unwrap());
}

#[test]
#[ignore = "part of ignored_signals_stay_ignored"]
fn survive_ignored_signals() {
    signals::install("program").unwrap();
    for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGTERM] {
        // SAFETY: raising a signal has no preconditions.
        unsafe { libc::raise(signal) };
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn escapes_control_characters_in_the_name_of_a_truncated_file() {
    let message = signals::truncated_message(Path::new("a\u{1b}[1m\n\u{202e}\u{200b}ä"));
    assert!(
        message.starts_with(r"a\u{1b}[1m\u{a}\u{202e}\u{200b}ä: "),
        "{message}"
    );
}

#[test]
fn exceeding_the_file_size_limit_is_a_write_error() {
    let dir = tempfile::tempdir().unwrap();
    let limit = "ulimit -f 8 || exit 9";
    let mut child = shell(limit, "signals::write_too_much", dir.path());
    assert_passed(&child.output().unwrap());
    assert_eq!(n_entries(dir.path()), 0);
}

#[test]
#[ignore = "part of exceeding_the_file_size_limit_is_a_write_error"]
fn write_too_much() {
    signals::install("program").unwrap();
    let mut file = AtomicFile::create(&dir().join("large"), false).unwrap();
    let error = file.write_all(&[0; 1 << 16]).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::FileTooLarge);
}

#[test]
fn reports_a_truncation_without_a_signal() {
    let dir = tempfile::tempdir().unwrap();
    let child = start("signals::truncate_within_the_last_page", dir.path());
    assert_passed(&child.wait_with_output().unwrap());
}

#[test]
#[ignore = "part of reports_a_truncation_without_a_signal"]
fn truncate_within_the_last_page() {
    let (file, map) = mapped();
    let output = |name: &str| AtomicFile::create(&dir().join(name), false).unwrap();
    let mut group = AtomicFiles::create(&dir().join("group"), false).unwrap();
    group.file("one").unwrap();
    assert_eq!(moe_files::truncated_file(), None);
    file.set_len(SIZE - 1).unwrap();
    assert_eq!(moe_files::truncated_file(), Some(dir().join("input")));
    drop(map);
    assert_eq!(moe_files::truncated_file(), Some(dir().join("input")));

    // Only a program with signal handlers ends after a truncation and must not complete its outputs.
    output("of-a-library").commit().unwrap();
    signals::install("program").unwrap();
    let error = output("file").commit().unwrap_err();
    assert!(matches!(error, Error::Truncated { .. }), "{error}");
    assert!(matches!(group.commit(), Err(Error::Truncated { .. })));
    let files = ["a", "b"].map(output);
    assert!(matches!(
        commit_all(files.into()),
        Err(Error::Truncated { .. })
    ));
    output("report").commit_unchecked().unwrap();
    let mut names: Vec<_> = fs::read_dir(dir())
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    names.sort();
    assert_eq!(names, ["input", "of-a-library", "report"]);
}
