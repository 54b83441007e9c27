//! Reading untrusted files with limits: the contents of a file alone never determine how much memory a reader uses.

use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind, Read};
use std::path::{Path, PathBuf};

use moe_files::text::without_byte_order_mark;
use moe_gguf::content::Content;

use crate::error::Error;

/// Maximum length of a line in the files of a recorder, in bytes. Most lines have less than a thousand.
pub const MAX_LINE: u64 = 1 << 20;
/// Maximum size of a document that is read into memory, in bytes: a manifest, a learn file, a CSV table.
pub const MAX_DOCUMENT: u64 = 32 << 20;
/// Maximum memory of a JSON document as a tree of values, in bytes. A tree takes up to 80 times the size of its text. The
/// counts of 128 layers with 1024 experts take less than half of this limit.
pub const MAX_TREE: u64 = 512 << 20;

/// Memory of serde_json's tree for each comma, bracket, brace and string, in bytes. It covers the slots of lists and maps,
/// whose capacity doubles, and the first allocation of each.
const TREE_COMMA: u64 = 208;
const TREE_LIST: u64 = 304;
const TREE_MAP: u64 = 480;
const TREE_STRING: u64 = 32;

/// Whether something exists at a path, also if it is not a regular file, or a symbolic link that cannot be followed: [`open`] reports
/// these as errors.
pub fn is_present(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}

/// Opens a regular file. Other files are refused, because opening a FIFO could block forever.
///
/// # Errors
/// [`Error::Io`], also if the file is not regular.
pub fn open(path: &Path) -> Result<File, Error> {
    let metadata = std::fs::metadata(path).map_err(Error::io("open", path))?;
    if !metadata.is_file() {
        let kind = if metadata.is_dir() {
            std::io::Error::new(ErrorKind::IsADirectory, "it is a directory")
        } else {
            std::io::Error::other("it is not a regular file")
        };
        return Err(Error::io("open", path)(kind));
    }
    File::open(path).map_err(Error::io("open", path))
}

fn size(file: &File, path: &Path) -> Result<u64, Error> {
    let metadata = file.metadata();
    Ok(metadata.map_err(Error::io("read the size of", path))?.len())
}

/// Returns [`Error::Truncated`] if the file had `size` bytes when it was opened and ended after `n_read` bytes.
fn check_size(n_read: u64, size: u64, path: &Path) -> Result<(), Error> {
    if n_read < size {
        let path = path.to_owned();
        return Err(Error::Truncated(moe_files::Error::Truncated { path }));
    }
    Ok(())
}

/// The bytes of a file, without its UTF-8 byte order mark.
///
/// # Errors
/// [`Error::TooLarge`] for more than `limit` bytes; [`Error::Truncated`], [`Error::Io`].
pub fn read(path: &Path, limit: u64) -> Result<Vec<u8>, Error> {
    read_opened(open(path)?, path, limit)
}

fn read_opened(file: File, path: &Path, limit: u64) -> Result<Vec<u8>, Error> {
    let too_large = || Error::TooLarge {
        path: path.to_owned(),
        limit,
    };
    let size = size(&file, path)?;
    if size > limit {
        return Err(too_large());
    }
    let mut bytes = Vec::new();
    // The file may grow while it is read.
    file.take(limit + 1)
        .read_to_end(&mut bytes)
        .map_err(Error::io("read", path))?;
    if bytes.len() as u64 > limit {
        return Err(too_large());
    }
    check_size(bytes.len() as u64, size, path)?;
    let n_mark = bytes.len() - without_byte_order_mark(&bytes).len();
    bytes.drain(..n_mark);
    Ok(bytes)
}

/// The text of a file of at most [`MAX_DOCUMENT`] bytes, without its byte order mark.
///
/// # Errors
/// Those of [`read`]; [`Error::NotText`] for a file that is not UTF-8, [`Error::OtherContent`] if its format is known.
pub fn read_text(path: &Path) -> Result<String, Error> {
    text(read(path, MAX_DOCUMENT)?, path)
}

/// Like [`read_text`], with another limit and also from a pipe, which the user passes instead of a file. Waits for its writer.
///
/// # Errors
/// Those of [`read_text`].
pub fn read_text_or_pipe(path: &Path, limit: u64) -> Result<String, Error> {
    let file = File::open(path).map_err(Error::io("open", path))?;
    text(read_opened(file, path, limit)?, path)
}

fn text(bytes: Vec<u8>, path: &Path) -> Result<String, Error> {
    String::from_utf8(bytes).map_err(|error| {
        let path = path.to_owned();
        match Content::of(error.as_bytes()) {
            Some(content) => Error::OtherContent {
                path,
                expected: "a text file",
                content,
            },
            None => Error::NotText {
                path,
                offset: error.utf8_error().valid_up_to() as u64,
            },
        }
    })
}

/// The text of a JSON document whose parsed form may contain a tree of values ([`serde_json::Value`]). The memory of that tree
/// is checked before parsing.
///
/// # Errors
/// Those of [`read_text`]; [`Error::TreeTooLarge`] if the tree would take more than [`MAX_TREE`] bytes.
pub fn read_json(path: &Path) -> Result<String, Error> {
    let text = read_text(path)?;
    if tree_bytes(&text) > MAX_TREE {
        return Err(Error::TreeTooLarge {
            path: path.to_owned(),
            limit: MAX_TREE,
        });
    }
    Ok(text)
}

/// Upper bound of the memory of a JSON text as a tree of values, in bytes. Text that is not JSON also has a result.
fn tree_bytes(text: &str) -> u64 {
    let mut bytes = text.len() as u64;
    let (mut is_in_string, mut is_escaped) = (false, false);
    for byte in text.bytes() {
        if is_in_string {
            is_in_string = is_escaped || byte != b'"';
            is_escaped = !is_escaped && byte == b'\\';
            continue;
        }
        bytes += match byte {
            b',' => TREE_COMMA,
            b'[' => TREE_LIST,
            b'{' => TREE_MAP,
            b'"' => {
                is_in_string = true;
                TREE_STRING
            }
            _ => 0,
        };
    }
    bytes
}

/// Reads the lines of a file one at a time into one buffer.
#[derive(Debug)]
pub struct Lines {
    path: PathBuf,
    reader: BufReader<File>,
    limit: u64,
    buffer: Vec<u8>,
    line: u64,
    /// Size of the file when it was opened, in bytes.
    size: u64,
    /// Bytes read so far.
    n_read: u64,
}

impl Lines {
    /// Opens a file and skips its byte order mark, if any. `limit` is the maximum length of a line in bytes.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn open(path: &Path, limit: u64) -> Result<Self, Error> {
        let file = open(path)?;
        let size = size(&file, path)?;
        let mut reader = BufReader::with_capacity(128 * 1024, file);
        let start = reader.fill_buf().map_err(Error::io("read", path))?;
        let n_mark = start.len() - without_byte_order_mark(start).len();
        reader.consume(n_mark);
        Ok(Self {
            path: path.to_owned(),
            reader,
            limit,
            buffer: Vec::new(),
            line: 0,
            size,
            n_read: n_mark as u64,
        })
    }

    /// The next line with its line ending, which may be missing in the last line; `None` at the end of the file.
    ///
    /// # Errors
    /// [`Error::LineTooLong`], [`Error::Truncated`], [`Error::Io`].
    pub fn next_line(&mut self) -> Result<Option<&[u8]>, Error> {
        self.buffer.clear();
        self.line += 1;
        let n = self
            .reader
            .by_ref()
            .take(self.limit + 1)
            .read_until(b'\n', &mut self.buffer)
            .map_err(Error::io("read", &self.path))?;
        if n as u64 > self.limit {
            return Err(Error::LineTooLong {
                path: self.path.clone(),
                line: self.line,
                limit: self.limit,
            });
        }
        self.n_read += n as u64;
        if n == 0 {
            check_size(self.n_read, self.size, &self.path)?;
        }
        Ok((n > 0).then_some(&*self.buffer))
    }

    /// The line that was read last.
    pub fn current(&self) -> &[u8] {
        &self.buffer
    }

    /// The number of the line that was read last, from 1.
    pub fn number(&self) -> u64 {
        self.line
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn reads_lines_up_to_the_limit() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lines");
        fs::write(&path, "\u{feff}1234\n\n123").unwrap();
        let mut lines = Lines::open(&path, 5).unwrap();
        assert_eq!(lines.next_line().unwrap(), Some(&b"1234\n"[..]));
        assert_eq!(lines.next_line().unwrap(), Some(&b"\n"[..]));
        assert_eq!(lines.next_line().unwrap(), Some(&b"123"[..]));
        assert_eq!((lines.number(), lines.current()), (3, &b"123"[..]));
        assert_eq!(lines.next_line().unwrap(), None);
        let mut lines = Lines::open(&path, 4).unwrap();
        let error = lines.next_line().unwrap_err();
        assert!(matches!(
            error,
            Error::LineTooLong {
                line: 1,
                limit: 4,
                ..
            }
        ));
    }

    #[test]
    fn refuses_file_truncated_while_reading() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lines");
        let text = format!("\u{feff}{}", "0123456789abcde\n".repeat(100_000));
        fs::write(&path, text).unwrap();
        let mut lines = Lines::open(&path, 100).unwrap();
        lines.next_line().unwrap();
        let file = File::options().write(true).open(&path).unwrap();
        file.set_len(1_000_000).unwrap();
        let end = loop {
            match lines.next_line() {
                Ok(Some(_)) => {}
                end => break end.map(|_| ()),
            }
        };
        assert!(matches!(end, Err(Error::Truncated(_))), "{end:?}");
        assert!(lines.number() > 60_000);
        // A file that was truncated before it was opened is read.
        let mut lines = Lines::open(&path, 100).unwrap();
        while lines.next_line().unwrap().is_some() {}
        // A file may grow.
        let mut lines = Lines::open(&path, 100).unwrap();
        lines.next_line().unwrap();
        file.set_len(1_000_010).unwrap();
        while lines.next_line().unwrap().is_some() {}
    }

    #[test]
    fn limits_memory_of_an_endless_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("zeros");
        // A sparse file: 5 GiB that take no space on the disk.
        File::create(&path).unwrap().set_len(5 << 30).unwrap();
        let mut lines = Lines::open(&path, MAX_LINE).unwrap();
        assert!(matches!(lines.next_line(), Err(Error::LineTooLong { .. })));
        assert!(lines.buffer.capacity() as u64 <= 4 * MAX_LINE);
        assert!(matches!(
            read(&path, MAX_DOCUMENT),
            Err(Error::TooLarge { .. })
        ));
    }

    #[test]
    fn reads_documents_up_to_the_limit() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("document");
        fs::write(&path, "\u{feff}{}").unwrap();
        assert_eq!(read(&path, 5).unwrap(), b"{}");
        assert!(matches!(
            read(&path, 4),
            Err(Error::TooLarge { limit: 4, .. })
        ));
        assert_eq!(read_text(&path).unwrap(), "{}");
        fs::write(&path, b"ab\xff").unwrap();
        assert!(matches!(
            read_text(&path),
            Err(Error::NotText { offset: 2, .. })
        ));
        assert!(matches!(read(dir.path(), 4), Err(Error::Io { .. })));
    }

    #[cfg(unix)]
    #[test]
    fn reads_pipes_up_to_the_limit() {
        use std::io::Write as _;
        use std::os::fd::AsRawFd as _;

        let read = |limit| {
            let (reader, mut writer) = std::io::pipe().unwrap();
            writer.write_all(b"12345").unwrap();
            drop(writer);
            let path = PathBuf::from(format!("/dev/fd/{}", reader.as_raw_fd()));
            read_text_or_pipe(&path, limit)
        };
        assert_eq!(read(5).unwrap(), "12345");
        assert!(matches!(read(4), Err(Error::TooLarge { limit: 4, .. })));
        let endless = read_text_or_pipe(Path::new("/dev/zero"), 1000);
        assert!(matches!(endless, Err(Error::TooLarge { .. })));
    }

    #[test]
    fn refuses_json_whose_tree_exceeds_the_limit() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tree.json");
        let json = |n: usize| format!("{{\"x\":[{}0]}}", "{\"a\":0},".repeat(n));
        let object_bytes = (TREE_MAP + TREE_STRING + TREE_COMMA) as usize + 8;
        let n_max = MAX_TREE as usize / object_bytes;
        fs::write(&path, json(n_max - 2)).unwrap();
        read_json(&path).unwrap();
        fs::write(&path, json(n_max + 1)).unwrap();
        let error = read_json(&path).unwrap_err();
        assert!(matches!(
            error,
            Error::TreeTooLarge {
                limit: MAX_TREE,
                ..
            }
        ));
        // Brackets inside strings are text.
        let text = format!("[\"\\\\\", \"\\\"{}\"]", "[{,".repeat(1000));
        assert_eq!(
            tree_bytes(&text),
            text.len() as u64 + TREE_LIST + TREE_COMMA + 2 * TREE_STRING
        );
    }

    #[test]
    fn estimate_covers_sizes_of_serde_json_values() {
        let value = size_of::<serde_json::Value>() as u64;
        // The first allocation of a list has 4 values, that of a map up to 4 entries (hash, key, value) and an index.
        assert!(4 * value <= TREE_LIST, "{value}");
        assert!(4 * (8 + 24 + value) + 48 <= TREE_MAP, "{value}");
        assert!(2 * (8 + 24 + value) <= TREE_COMMA, "{value}");
    }
}
