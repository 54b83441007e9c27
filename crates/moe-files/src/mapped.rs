//! Memory-mapped input files.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use memmap2::Mmap;

/// The bytes of a file, mapped read-only. The system reads a page at its first access.
///
/// If another program truncates the file, an access to the missing bytes raises SIGBUS, which ends the process. After
/// [`signals::install`](crate::signals::install) the process ends with a message that names the file.
#[derive(Debug)]
pub struct MappedFile {
    /// `None` for an empty file, which cannot be mapped.
    map: Option<Mmap>,
}

impl MappedFile {
    /// Maps an open file. `path` is its name in error messages.
    ///
    /// # Errors
    /// The file cannot be mapped.
    pub fn new(file: &File, path: &Path) -> io::Result<Self> {
        let metadata = file.metadata()?;
        if metadata.len() == 0 {
            return Ok(Self { map: None });
        }
        // SAFETY: the mapping is read-only and used as bytes, for which every value is valid. As with every mapped file, another
        // process that writes to the file changes bytes under the caller; truncation raises SIGBUS, see above.
        let map = unsafe { Mmap::map(file)? };
        let range = Range {
            #[cfg(unix)]
            end: map.as_ptr() as usize + map.len(),
            path: path.to_owned(),
            size: map.len() as u64,
            #[cfg(unix)]
            inode: std::os::unix::fs::MetadataExt::ino(&metadata),
        };
        ranges().insert(map.as_ptr() as usize, range);
        Ok(Self { map: Some(map) })
    }
}

impl Deref for MappedFile {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.map.as_deref().unwrap_or_default()
    }
}

impl Drop for MappedFile {
    fn drop(&mut self) {
        if let Some(map) = &self.map
            && let Some(range) = ranges().remove(&(map.as_ptr() as usize))
            && range.is_truncated()
        {
            truncated().get_or_insert(range.path);
        }
    }
}

/// A mapped file. The key in [`RANGES`] is its first address.
struct Range {
    /// Address of the byte after the last.
    #[cfg(unix)]
    end: usize,
    path: PathBuf,
    size: u64,
    #[cfg(unix)]
    inode: u64,
}

static RANGES: LazyLock<Mutex<BTreeMap<usize, Range>>> = LazyLock::new(Mutex::default);

fn ranges() -> MutexGuard<'static, BTreeMap<usize, Range>> {
    RANGES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the truncated file whose mapping contains `address`, where SIGBUS was raised.
#[cfg(unix)]
pub(crate) fn file_at(address: usize) -> Option<PathBuf> {
    let ranges = ranges();
    let range = ranges.range(..=address).next_back();
    match range.filter(|(_, range)| address < range.end) {
        Some((_, range)) => Some(range.path.clone()),
        None => truncated_mapping(address),
    }
}

/// Like [`file_at`] for mappings by other code of this process, such as a C library.
///
/// Returns the file only if `address` is after the current end of the file.
#[cfg(target_os = "linux")]
fn truncated_mapping(address: usize) -> Option<PathBuf> {
    use std::os::unix::fs::MetadataExt;
    let maps = fs::read("/proc/self/maps").ok()?;
    let maps = String::from_utf8_lossy(&maps);
    // START-END PERMISSIONS OFFSET DEVICE INODE PATH. The inode is decimal, other numbers are hexadecimal.
    let of_line = |line: &str| {
        let path = Path::new(&line[line.find('/')?..]);
        let fields: Vec<&str> = line.split_ascii_whitespace().take(5).collect();
        let hex = |text: &str| u64::from_str_radix(text, 16).ok();
        let (start, end) = fields.first()?.split_once('-')?;
        let within = (address as u64).checked_sub(hex(start)?)?;
        if address as u64 >= hex(end)? {
            return None;
        }
        let offset = hex(fields.get(2)?)?;
        let found = fs::metadata(path).ok()?;
        let is_same = found.is_file() && fields.get(4)?.parse() == Ok(found.ino());
        (is_same && found.len() <= offset + within).then(|| path.to_owned())
    };
    maps.lines().find_map(of_line)
}

#[cfg(all(unix, not(target_os = "linux")))]
fn truncated_mapping(_: usize) -> Option<PathBuf> {
    None
}

/// The first file that was found truncated when its mapping was dropped.
static TRUNCATED: Mutex<Option<PathBuf>> = Mutex::new(None);

fn truncated() -> MutexGuard<'static, Option<PathBuf>> {
    TRUNCATED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns a file that became smaller while it was mapped, if there is one.
///
/// SIGBUS does not report every truncation: bytes between the new end and the end of its page read as zeros, and system
/// calls with missing bytes fail with "bad address".
pub fn truncated_file() -> Option<PathBuf> {
    if let Some(path) = &*truncated() {
        return Some(path.clone());
    }
    let ranges = ranges();
    let mut live = ranges.values().filter(|range| range.is_truncated());
    live.next().map(|range| range.path.clone())
}

impl Range {
    fn is_truncated(&self) -> bool {
        // The mapping of a renamed or removed file stays valid.
        let Ok(found) = fs::metadata(&self.path) else {
            return false;
        };
        #[cfg(unix)]
        if std::os::unix::fs::MetadataExt::ino(&found) != self.inode {
            return false;
        }
        found.len() < self.size
    }
}
