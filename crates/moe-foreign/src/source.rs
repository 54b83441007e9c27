//! Access to the files of a foreign trace: sample, complete text, or line by line with size limits.

use std::error::Error as StdError;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use moe_files::text::without_byte_order_mark;
use moe_trace::bounded;

use crate::error::{ForeignError, Location};
use crate::output::Output;

/// Number of bytes at the start of a file by which its format is recognized (64 KiB).
pub const SAMPLE_SIZE: usize = 64 * 1024;
/// Maximum length of a line in bytes.
const MAX_LINE: u64 = 64 << 20;
/// Maximum size in bytes of a file that is read into memory.
pub(crate) const MAX_DOCUMENT: u64 = 256 << 20;

/// The files of a trace: one file, or the files of one format in a directory.
#[derive(Clone, Debug)]
pub struct Source {
    path: PathBuf,
    files: Vec<PathBuf>,
    n_skipped: usize,
}

impl Source {
    /// One file.
    pub fn file(path: &Path) -> Self {
        Self::directory(path, vec![path.to_owned()], 0)
    }

    /// The `files` of a directory, which contains `n_skipped` files of other formats.
    pub fn directory(path: &Path, files: Vec<PathBuf>, n_skipped: usize) -> Self {
        Self {
            path: path.to_owned(),
            files,
            n_skipped,
        }
    }

    /// Path of the file or directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The files to read, sorted by name.
    pub fn files(&self) -> &[PathBuf] {
        &self.files
    }

    /// Number of files in the directory that have another format or an unknown format.
    pub fn n_skipped(&self) -> usize {
        self.n_skipped
    }
}

/// The first [`SAMPLE_SIZE`] bytes of a file.
pub(crate) fn sample(path: &Path) -> Result<Vec<u8>, ForeignError> {
    let mut sample = Vec::new();
    open(path)?
        .take(SAMPLE_SIZE as u64)
        .read_to_end(&mut sample)
        .map_err(ForeignError::io("read", path))?;
    Ok(sample)
}

/// Size of a file in bytes.
pub(crate) fn size(path: &Path) -> Result<u64, ForeignError> {
    let metadata = fs::metadata(path).map_err(ForeignError::io("read the size of", path))?;
    Ok(metadata.len())
}

/// The regular files of a directory, sorted by name, without hidden files.
pub(crate) fn files(dir: &Path) -> Result<Vec<PathBuf>, ForeignError> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir).map_err(ForeignError::io("list", dir))? {
        let entry = entry.map_err(ForeignError::io("list", dir))?;
        let is_hidden = entry.file_name().as_encoded_bytes().starts_with(b".");
        if !is_hidden && entry.path().is_file() {
            files.push(entry.path());
        }
    }
    files.sort();
    Ok(files)
}

/// Opens a regular file. Other kinds, such as pipes, could block forever.
pub(crate) fn open(path: &Path) -> Result<File, ForeignError> {
    Ok(bounded::open(path)?)
}

/// Reads a complete text file, without its byte order mark.
///
/// # Errors
/// The file cannot be read, or is larger than 256 MiB.
pub(crate) fn read_text(path: &Path) -> Result<Vec<u8>, ForeignError> {
    Ok(bounded::read(path, MAX_DOCUMENT)?)
}

/// Opens a text file and skips its byte order mark.
pub(crate) fn text_reader(path: &Path) -> Result<BufReader<File>, ForeignError> {
    let mut reader = BufReader::with_capacity(128 * 1024, open(path)?);
    let start = reader.fill_buf().map_err(ForeignError::io("read", path))?;
    let n_mark = start.len() - without_byte_order_mark(start).len();
    reader.consume(n_mark);
    Ok(reader)
}

/// The lines of a text file, read one at a time into the same buffer.
pub(crate) struct Lines {
    path: PathBuf,
    lines: bounded::Lines,
}

impl Lines {
    /// Opens a text file and skips its byte order mark.
    pub(crate) fn open(path: &Path) -> Result<Self, ForeignError> {
        Ok(Self {
            path: path.to_owned(),
            lines: bounded::Lines::open(path, MAX_LINE)?,
        })
    }

    /// The number and the trimmed text of the next line that is not blank; `None` at the end of the file.
    ///
    /// # Errors
    /// The line is not UTF-8, or longer than 64 MiB.
    pub(crate) fn next_line(&mut self) -> Result<Option<(u64, &str)>, ForeignError> {
        loop {
            match self.lines.next_line()? {
                None => return Ok(None),
                Some(line) if line.trim_ascii().is_empty() => {}
                Some(_) => break,
            }
        }
        let number = self.lines.number();
        match std::str::from_utf8(self.lines.current().trim_ascii()) {
            Ok(text) => Ok(Some((number, text))),
            Err(_) => Err(self.invalid("the line is not UTF-8; the file is damaged")),
        }
    }

    /// An error in the current line.
    pub(crate) fn invalid(
        &self,
        source: impl Into<Box<dyn StdError + Send + Sync>>,
    ) -> ForeignError {
        ForeignError::invalid(&self.path, Location::Line(self.lines.number()), source)
    }

    /// Skips the current line with a note if it is truncated: the last line of the file, without a line feed, because its
    /// writer was interrupted.
    ///
    /// # Errors
    /// `error` for any other line. It is also returned for the only line of a file, which is probably not of the format.
    pub(crate) fn skip_truncated(
        &self,
        error: ForeignError,
        output: &mut Output<'_>,
    ) -> Result<(), ForeignError> {
        if self.lines.number() == 1 || self.lines.current().ends_with(b"\n") {
            return Err(error);
        }
        output.note(format!(
            "{} is truncated; skipped its incomplete last line {}",
            self.path.display(),
            self.lines.number()
        ));
        Ok(())
    }
}

/// Whether a sample may be shorter than its file. Allows for a byte order mark that was removed.
pub(crate) fn is_partial(sample: &[u8]) -> bool {
    sample.len() >= SAMPLE_SIZE - 16
}

/// The complete lines of a sample: all lines of the complete file, otherwise those that end with a line feed.
pub(crate) fn sample_lines(sample: &[u8]) -> impl Iterator<Item = &str> {
    let complete = if is_partial(sample) {
        let end = sample.iter().rposition(|&byte| byte == b'\n');
        &sample[..end.unwrap_or(sample.len())]
    } else {
        sample
    };
    complete
        .split(|&byte| byte == b'\n')
        .map_while(|line| std::str::from_utf8(line).ok())
        .map(str::trim)
        .filter(|line| !line.is_empty())
}
