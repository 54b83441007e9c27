//! Names of temporary files, and removal of stale temporary files.
//!
//! A temporary file has the name `.NAME.RANDOM.moe-tmp`. Its writer holds an exclusive lock on it, which the system releases
//! when the process ends. A file with such a name and without a lock is therefore stale.

use std::ffi::OsStr;
use std::fs;
use std::path::Path;

/// Suffix of every temporary name.
const SUFFIX: &str = ".moe-tmp";
/// Number of random characters in a temporary name.
const N_RANDOM: usize = 12;
/// Maximum number of bytes of an output's name in its temporary name; file systems limit a name to 255 bytes.
const MAX_NAME: usize = 200;

/// Calls `make` with a builder of temporary names for `path`.
pub(crate) fn temporary_names<T>(
    path: &Path,
    make: impl FnOnce(&tempfile::Builder<'_, '_>) -> T,
) -> T {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let is_boundary = |&end: &usize| name.is_char_boundary(end);
    let end = (0..=MAX_NAME.min(name.len()))
        .rev()
        .find(is_boundary)
        .unwrap_or(0);
    let prefix = format!(".{}.", &name[..end]);
    let mut builder = tempfile::Builder::new();
    builder.prefix(&prefix).suffix(SUFFIX).rand_bytes(N_RANDOM);
    make(&builder)
}

/// Whether `name` is a temporary name of this crate; with `output`, whether it belongs to that output.
pub fn is_temporary_name(name: &OsStr, output: Option<&str>) -> bool {
    let Some(stem) = name.to_str().and_then(|name| name.strip_suffix(SUFFIX)) else {
        return false;
    };
    let Some((prefix, random)) = stem.rsplit_once('.') else {
        return false;
    };
    let is_random = random.len() == N_RANDOM && random.bytes().all(|b| b.is_ascii_alphanumeric());
    let named = prefix.strip_prefix('.').filter(|name| !name.is_empty());
    is_random && named.is_some_and(|name| output.is_none_or(|output| output == name))
}

/// Removes the temporary files and directories in `dir` whose writers have ended.
///
/// Removes only files with a name of this crate whose lock is free. Does not remove links. Does nothing on systems other than
/// Unix.
#[cfg(unix)]
pub(crate) fn remove(dir: &Path) {
    let Ok(entries) = fs::read_dir(dir) else {
        return; // Creating the output reports the reason.
    };
    for entry in entries.flatten() {
        if is_temporary_name(&entry.file_name(), None) {
            remove_unlocked(&entry.path());
        }
    }
}

#[cfg(not(unix))]
pub(crate) fn remove(_: &Path) {}

#[cfg(unix)]
fn remove_unlocked(path: &Path) {
    use std::os::unix::fs::OpenOptionsExt;
    let mut options = fs::OpenOptions::new();
    // O_NOFOLLOW: links are not followed. O_NONBLOCK: opening a pipe does not wait for a writer.
    options
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    let Ok(file) = options.open(path) else { return };
    let Ok(found) = file.metadata() else { return };
    if !(found.is_file() || found.is_dir()) || file.try_lock().is_err() {
        return;
    }
    // An error is ignored: a stale file does no harm.
    let _ = if found.is_dir() {
        fs::remove_dir_all(path)
    } else {
        fs::remove_file(path)
    };
}

/// Locks a new temporary file or directory. Returns false if [`remove`] of another process has locked or removed it.
#[cfg(unix)]
pub(crate) fn lock(file: &fs::File) -> std::io::Result<bool> {
    use std::os::unix::fs::MetadataExt;
    match file.try_lock() {
        Err(fs::TryLockError::WouldBlock) => return Ok(false),
        // On a file system without locks, `try_lock` also fails in `remove_unlocked`, so the file is never removed as stale.
        Err(fs::TryLockError::Error(_)) | Ok(()) => {}
    }
    Ok(file.metadata()?.nlink() > 0)
}

#[cfg(not(unix))]
pub(crate) fn lock(_: &fs::File) -> std::io::Result<bool> {
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recognizes_only_temporary_names_of_this_crate() {
        let is_ours = |name: &str| is_temporary_name(OsStr::new(name), None);
        assert!(is_ours(".trace.bin.abcDEF012345.moe-tmp"));
        for other in [
            "trace.bin.abcDEF012345.moe-tmp",
            ".trace.bin.abcDEF01234.moe-tmp",
            ".trace.bin.abcDEF0123456.moe-tmp",
            ".trace.bin.abcDEF01234_.moe-tmp",
            ".trace.bin.abcDEF012345.tmp",
            ".abcDEF012345.moe-tmp",
            "..abcDEF012345.moe-tmp",
        ] {
            assert!(!is_ours(other), "{other}");
        }
        let name = OsStr::new(".a.json.abcDEF012345.moe-tmp");
        assert!(is_temporary_name(name, Some("a.json")));
        assert!(!is_temporary_name(name, Some("b.json")));
    }
}
