//! Temporary names, and temporary files of processes that were killed.
//!
//! A temporary file is `.NAME.RANDOM.moe-tmp`. Its writer holds an exclusive lock on it, which the
//! system drops when the process ends. A file of that name without a lock is therefore stale.

use std::ffi::OsStr;
use std::fs;
use std::path::Path;

/// End of every temporary name.
pub(crate) const SUFFIX: &str = ".moe-tmp";
/// Random characters of a temporary name.
pub(crate) const N_RANDOM: usize = 12;

/// Whether `name` is a temporary name of this crate, for the output `output` if given.
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
/// Only what this crate's names and a free lock identify is removed; links are left alone, and so is everything on
/// systems without such locks.
#[cfg(unix)]
pub(crate) fn remove(dir: &Path) {
    let Ok(entries) = fs::read_dir(dir) else {
        return; // creating a file there reports why
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
    // A link is not followed, and a pipe is not waited for.
    options
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    let Ok(file) = options.open(path) else { return };
    let Ok(found) = file.metadata() else { return };
    if !(found.is_file() || found.is_dir()) || file.try_lock().is_err() {
        return;
    }
    // A failure leaves a file that is in nobody's way.
    let _ = if found.is_dir() {
        fs::remove_dir_all(path)
    } else {
        fs::remove_file(path)
    };
}

/// Locks a temporary file or directory of this process; false where [`remove`] of another process was faster.
#[cfg(unix)]
pub(crate) fn lock(file: &fs::File) -> std::io::Result<bool> {
    use std::os::unix::fs::MetadataExt;
    match file.try_lock() {
        Err(fs::TryLockError::WouldBlock) => return Ok(false),
        // File systems without locks: the file is never taken for a stale one either.
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
    fn recognizes_its_own_names_only() {
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
