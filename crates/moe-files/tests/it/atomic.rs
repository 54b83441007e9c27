//! Atomic files and groups of them.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::sync::Barrier;

use moe_files::{AtomicFile, AtomicFiles, Error, commit_all};

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn written(path: &Path, replace: bool, text: &str) -> AtomicFile {
    let mut file = AtomicFile::create(path, replace).unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file
}

#[test]
fn appears_on_commit_and_not_before() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.json");
    let file = written(&path, false, "new");
    assert!(!path.exists());
    file.commit().unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap(), "new");
    drop(written(&path, true, "dropped"));
    assert_eq!(names(dir.path()), ["a.json"]);
    assert_eq!(fs::read_to_string(&path).unwrap(), "new");
    written(&path, true, "newer").commit().unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap(), "newer");
    assert_eq!(names(dir.path()), ["a.json"]);
}

#[test]
fn does_not_replace_a_file_that_appeared_meanwhile() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.json");
    let file = written(&path, false, "mine");
    fs::write(&path, "theirs").unwrap();
    assert!(matches!(file.commit(), Err(Error::Exists { .. })));
    assert_eq!(fs::read_to_string(&path).unwrap(), "theirs");
    assert!(matches!(
        AtomicFile::create(&path, false),
        Err(Error::Exists { .. })
    ));
    assert_eq!(names(dir.path()), ["a.json"]);
}

#[test]
fn exactly_one_of_two_writers_wins() {
    let dir = tempfile::tempdir().unwrap();
    for round in 0..50 {
        let path = dir.path().join(format!("{round}.json"));
        let barrier = Barrier::new(2);
        let outcomes = std::thread::scope(|scope| {
            ["a", "b"]
                .map(|text| {
                    let (path, barrier) = (&path, &barrier);
                    scope.spawn(move || {
                        let file = written(path, false, text);
                        barrier.wait();
                        file.commit().is_ok().then_some(text)
                    })
                })
                .map(|thread| thread.join().unwrap())
        });
        let winners: Vec<&str> = outcomes.into_iter().flatten().collect();
        assert_eq!(winners.len(), 1);
        assert_eq!(fs::read_to_string(&path).unwrap(), winners[0]);
    }
}

#[test]
fn commits_all_files_or_none() {
    let dir = tempfile::tempdir().unwrap();
    let [a, b] = ["a", "b"].map(|name| dir.path().join(name));
    let files = vec![written(&a, false, "1"), written(&b, false, "2")];
    fs::write(&b, "theirs").unwrap();
    assert!(matches!(commit_all(files), Err(Error::Exists { .. })));
    assert_eq!(names(dir.path()), ["b"]);

    let out = dir.path().join("new/out");
    let mut group = AtomicFiles::create(&out, false).unwrap();
    for name in ["x", "y"] {
        group.file(name).unwrap().write_all(b"text").unwrap();
    }
    for invalid in ["x", "../z"] {
        assert!(matches!(group.file(invalid), Err(Error::Io { .. })));
    }
    fs::write(out.join("y"), "theirs").unwrap();
    assert!(matches!(group.commit(), Err(Error::Exists { .. })));
    assert_eq!(names(&out), ["y"]);

    let mut group = AtomicFiles::create(&out, true).unwrap();
    for name in ["x", "y"] {
        group.file(name).unwrap().write_all(b"text").unwrap();
    }
    group.commit().unwrap();
    assert_eq!(names(&out), ["x", "y"]);

    let gone = dir.path().join("gone");
    drop(AtomicFiles::create(&gone, false).unwrap());
    assert!(!gone.exists());
}

#[cfg(unix)]
#[test]
fn refuses_a_symlink_wherever_it_points() {
    use std::os::unix::fs::symlink;
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::write(at("target"), "precious").unwrap();
    fs::create_dir(at("d")).unwrap();
    for target in ["target", "nowhere", "d", "/proc/self/fd/1", "/dev/null"] {
        let link = at("link.json");
        symlink(target, &link).unwrap();
        for replace in [false, true] {
            let error = AtomicFile::create(&link, replace).unwrap_err();
            assert_eq!(
                error.to_string(),
                format!(
                    "{} is a symbolic link; pass the path of its target",
                    link.display()
                )
            );
            let mut group = AtomicFiles::create(dir.path(), replace).unwrap();
            let error = group.file("link.json").unwrap_err();
            assert!(matches!(error, Error::IsLink { .. }), "{error}");
        }
        assert!(link.is_symlink());
        fs::remove_file(link).unwrap();
    }
    // A link that appears meanwhile.
    let file = written(&at("late.json"), true, "mine");
    symlink("target", at("late.json")).unwrap();
    assert!(matches!(file.commit(), Err(Error::IsLink { .. })));
    assert!(at("late.json").is_symlink());
    assert_eq!(fs::read_to_string(at("target")).unwrap(), "precious");

    // A link in a parent directory is followed.
    symlink("d", at("e")).unwrap();
    written(&at("e/a.json"), true, "new").commit().unwrap();
    assert_eq!(fs::read_to_string(at("d/a.json")).unwrap(), "new");
    assert_eq!(names(dir.path()), ["d", "e", "late.json", "target"]);
}

#[cfg(unix)]
#[test]
fn removes_only_stale_temporary_files() {
    use std::os::unix::fs::symlink;
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let stale = at(".old.json.abcDEF012345.moe-tmp");
    fs::write(&stale, "left").unwrap();
    let group = at(".files.abcDEF012345.moe-tmp");
    fs::create_dir(&group).unwrap();
    fs::write(group.join("left"), "left").unwrap();
    fs::write(at("victim"), "precious").unwrap();
    symlink(at("victim"), at(".link.abcDEF012345.moe-tmp")).unwrap();
    fs::write(at(".a.json.1.tmp"), "of another program").unwrap();
    let live = at(".live.json.abcDEF012345.moe-tmp");
    fs::write(&live, "being written").unwrap();
    let lock = fs::File::open(&live).unwrap();
    lock.lock().unwrap();

    written(&at("a.json"), false, "new").commit().unwrap();
    assert!(!stale.exists() && !group.exists());
    assert!(live.exists() && at(".a.json.1.tmp").exists());
    assert_eq!(fs::read_to_string(at("victim")).unwrap(), "precious");
}

#[cfg(unix)]
#[test]
fn creates_files_with_default_permissions() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let [plain, atomic] = ["plain", "atomic"].map(|name| dir.path().join(name));
    fs::write(&plain, "").unwrap();
    written(&atomic, false, "").commit().unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode();
    assert_eq!(mode(&plain), mode(&atomic));
}
