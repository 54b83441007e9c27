//! Transactions of renames and removals.

use std::fs;
use std::io::Write;
use std::path::Path;

use moe_files::{
    AtomicFile, AtomicFiles, Error, Transaction, commit_all, commit_and_remove, is_temporary_name,
};

fn written(path: &Path, text: &str) -> AtomicFile {
    let mut file = AtomicFile::create(path, true).unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file
}

/// Names and contents of the files of a directory.
fn contents(dir: &Path) -> Vec<(String, String)> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    let read = |entry: fs::DirEntry| {
        let text = fs::read_to_string(entry.path()).unwrap_or("a directory".into());
        (entry.file_name().into_string().unwrap(), text)
    };
    let mut contents: Vec<_> = entries.map(read).collect();
    contents.sort();
    contents
}

fn change(dir: &Path) -> Transaction {
    let at = |name: &str| dir.join(name);
    let mut transaction = Transaction::default();
    transaction.rename(written(&at("a"), "first")).unwrap();
    transaction.sync().unwrap();
    transaction.remove(&at("b")).unwrap();
    transaction.remove(&at("absent")).unwrap();
    transaction.rename(written(&at("c"), "new")).unwrap();
    transaction.rename(written(&at("a"), "second")).unwrap();
    transaction
}

#[test]
fn undoes_an_unfinished_transaction() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["a", "b"] {
        fs::write(dir.path().join(name), "old").unwrap();
    }
    let before = contents(dir.path());
    drop(change(dir.path()));
    assert_eq!(contents(dir.path()), before);
    change(dir.path()).finish().unwrap();
    let after = [("a", "second"), ("c", "new")].map(|(name, text)| (name.into(), text.into()));
    assert_eq!(contents(dir.path()), after);
}

#[test]
fn undo_keeps_files_that_another_process_has_written_since() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    for name in ["a", "b"] {
        fs::write(at(name), "old").unwrap();
    }
    let transaction = change(dir.path());
    for name in ["a", "b", "c"] {
        fs::write(at("theirs"), "theirs").unwrap();
        fs::rename(at("theirs"), at(name)).unwrap();
    }
    drop(transaction);
    let after = ["a", "b", "c"].map(|name| (name.into(), "theirs".into()));
    assert_eq!(contents(dir.path()), after);
}

#[test]
fn failed_rename_undoes_replacements() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::write(at("a"), "old").unwrap();
    let files = ["a", "b", "c"].map(|name| written(&at(name), "new"));
    // A directory is not replaced by a file.
    fs::create_dir(at("c")).unwrap();
    let before =
        [("a", "old"), ("c", "a directory")].map(|(name, text)| (name.into(), text.into()));
    let error = commit_all(files.into()).unwrap_err();
    assert!(matches!(error, Error::Io { .. }), "{error}");
    assert_eq!(contents(dir.path()), before);
}

#[test]
fn failed_removal_undoes_renames_and_removals() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    for name in ["a", "b"] {
        fs::write(at(name), "old").unwrap();
    }
    fs::create_dir(at("c")).unwrap();
    let before = contents(dir.path());
    let removed = [at("b"), at("c")];
    let error = commit_and_remove(vec![written(&at("a"), "new")], &removed).unwrap_err();
    assert!(matches!(error, Error::Io { .. }), "{error}");
    assert_eq!(contents(dir.path()), before);
    commit_and_remove(vec![written(&at("a"), "new")], &[at("b"), at("d")]).unwrap();
    let after = [("a", "new"), ("c", "a directory")].map(|(name, text)| (name.into(), text.into()));
    assert_eq!(contents(dir.path()), after);
}

#[test]
fn group_removes_other_files_of_an_earlier_output_only_if_it_may_replace() {
    for replace in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        for name in ["part-1", "part-2", "notes"] {
            fs::write(dir.path().join(name), "old").unwrap();
        }
        fs::create_dir(dir.path().join("part-3")).unwrap();
        let mut group = AtomicFiles::create(dir.path(), replace).unwrap();
        let name = if replace { "part-1" } else { "part-0" };
        group.file(name).unwrap().write_all(b"new").unwrap();
        let is_part = |path: &Path| {
            let name = path.file_name().unwrap().to_str().unwrap();
            Ok::<_, Error>(name.starts_with("part-"))
        };
        let n_removed = group.remove_others(is_part).unwrap();
        assert_eq!(n_removed, usize::from(replace));
        group.commit().unwrap();
        let names: Vec<String> = contents(dir.path())
            .into_iter()
            .map(|(name, _)| name)
            .collect();
        let expected: &[&str] = if replace {
            &["notes", "part-1", "part-3"]
        } else {
            &["notes", "part-0", "part-1", "part-2", "part-3"]
        };
        assert_eq!(names, expected);
    }
}

/// Otherwise, two processes that replace the same group could leave files of both.
#[cfg(unix)]
#[test]
fn group_waits_until_another_process_has_renamed_its_group() {
    let dir = tempfile::tempdir().unwrap();
    let mut group = AtomicFiles::create(dir.path(), true).unwrap();
    for name in ["a", "b"] {
        group.file(name).unwrap().write_all(b"new").unwrap();
    }
    let lock = fs::File::open(dir.path()).unwrap();
    lock.lock().unwrap();
    let committed = std::thread::spawn(move || group.commit());
    std::thread::sleep(std::time::Duration::from_millis(100));
    assert!(!dir.path().join("a").exists());
    drop(lock);
    committed.join().unwrap().unwrap();
    let after = ["a", "b"].map(|name| (name.into(), "new".into()));
    assert_eq!(contents(dir.path()), after);
}

/// Without a lock, another process would remove the directory as stale.
#[cfg(unix)]
#[test]
fn locks_the_directory_of_kept_files() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a");
    fs::write(&path, "old").unwrap();
    let mut transaction = Transaction::default();
    transaction.rename(written(&path, "new")).unwrap();
    let entries = fs::read_dir(dir.path())
        .unwrap()
        .map(|entry| entry.unwrap());
    let temporary: Vec<_> = entries
        .filter(|entry| is_temporary_name(&entry.file_name(), None))
        .collect();
    assert_eq!(temporary.len(), 1);
    let kept = fs::File::open(temporary[0].path()).unwrap();
    assert!(kept.try_lock().is_err());
    drop(transaction);
    assert_eq!(contents(dir.path()), [("a".into(), "old".into())]);
}
