//! Files of a foreign trace, read in pieces.

use std::error::Error as StdError;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use moe_files::text::without_byte_order_mark;
use moe_trace::bounded;

use crate::error::{At, ForeignError};
use crate::output::Output;

/// Bytes of a file by which its format is recognised.
pub const SAMPLE_SIZE: usize = 64 * 1024;
/// Bytes of a line, at most.
const MAX_LINE: u64 = 64 << 20;
/// Bytes of a file that is read as a whole, at most.
const MAX_DOCUMENT: u64 = 256 << 20;

/// A file, or a directory of files, of one format.
#[derive(Clone, Debug)]
pub struct Source {
    path: PathBuf,
    files: Vec<PathBuf>,
    left_out: usize,
}

impl Source {
    /// One file.
    pub fn file(path: &Path) -> Self {
        Self::directory(path, vec![path.to_owned()], 0)
    }

    /// A directory of which `files` are read and `left_out` others are not.
    pub fn directory(path: &Path, files: Vec<PathBuf>, left_out: usize) -> Self {
        Self {
            path: path.to_owned(),
            files,
            left_out,
        }
    }

    /// What the user named.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The files to read, in order of their names.
    pub fn files(&self) -> &[PathBuf] {
        &self.files
    }

    /// Files of the directory that are of no known format, or of another one.
    pub fn left_out(&self) -> usize {
        self.left_out
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

/// Bytes of a file.
pub(crate) fn size(path: &Path) -> Result<u64, ForeignError> {
    let metadata = fs::metadata(path).map_err(ForeignError::io("read the size of", path))?;
    Ok(metadata.len())
}

/// The regular files of a directory in order of their names, hidden ones left out.
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

/// Opens a regular file; anything else could be waited for without end.
pub(crate) fn open(path: &Path) -> Result<File, ForeignError> {
    Ok(bounded::open(path)?)
}

/// A whole text without its byte order mark, where its format cannot be read in pieces.
///
/// # Errors
/// It cannot be read, or is larger than 256 MiB.
pub(crate) fn read_whole(path: &Path) -> Result<Vec<u8>, ForeignError> {
    Ok(bounded::read(path, MAX_DOCUMENT)?)
}

/// Opens a text, behind its byte order mark if it has one.
pub(crate) fn text_reader(path: &Path) -> Result<BufReader<File>, ForeignError> {
    let mut reader = BufReader::with_capacity(128 * 1024, open(path)?);
    let start = reader.fill_buf().map_err(ForeignError::io("read", path))?;
    let n_mark = start.len() - without_byte_order_mark(start).len();
    reader.consume(n_mark);
    Ok(reader)
}

/// The lines of a text, one at a time in the same buffer.
pub(crate) struct Lines {
    path: PathBuf,
    lines: bounded::Lines,
}

impl Lines {
    /// Opens a text, behind its byte order mark if it has one.
    pub(crate) fn open(path: &Path) -> Result<Self, ForeignError> {
        Ok(Self {
            path: path.to_owned(),
            lines: bounded::Lines::open(path, MAX_LINE)?,
        })
    }

    /// The next line that holds anything, white space around it removed, and where it is; `None` at the end.
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
            Err(_) => Err(self.invalid("not UTF-8; the file is damaged")),
        }
    }

    /// An error in the line that was handed out last.
    pub(crate) fn invalid(
        &self,
        source: impl Into<Box<dyn StdError + Send + Sync>>,
    ) -> ForeignError {
        ForeignError::invalid(&self.path, At::Line(self.lines.number()), source)
    }

    /// What to do about `error` in the line that was handed out last: without an end it is a last line that was cut as it was
    /// written, which is noted; any other line is damaged. What is but one line was never of the format.
    ///
    /// # Errors
    /// `error`, if the line is not cut.
    pub(crate) fn cut_or(
        &self,
        error: ForeignError,
        output: &mut Output<'_>,
    ) -> Result<(), ForeignError> {
        if self.lines.number() == 1 || self.lines.current().ends_with(b"\n") {
            return Err(error);
        }
        output.note(format!(
            "{} is cut at its end; what is left of line {} was left out",
            self.path.display(),
            self.lines.number()
        ));
        Ok(())
    }
}

/// Whether a sample is probably not the complete file; it may lack the byte order mark.
pub(crate) fn is_cut(sample: &[u8]) -> bool {
    sample.len() >= SAMPLE_SIZE - 16
}

/// The whole lines of a sample; the last one only if the sample is the whole file or ends with it.
pub(crate) fn sample_lines(sample: &[u8]) -> impl Iterator<Item = &str> {
    let whole = if !is_cut(sample) {
        sample
    } else {
        let end = sample.iter().rposition(|&byte| byte == b'\n');
        &sample[..end.unwrap_or(sample.len())]
    };
    whole
        .split(|&byte| byte == b'\n')
        .map_while(|line| std::str::from_utf8(line).ok())
        .map(str::trim)
        .filter(|line| !line.is_empty())
}
