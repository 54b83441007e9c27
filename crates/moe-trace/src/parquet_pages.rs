//! Checks the page sizes of a Parquet file before the decoder allocates memory for them.
//!
//! The Parquet library allocates the size in a page header, up to 2 GiB for a page (apache/arrow-rs#10734), and the sizes in
//! the footer may differ from those of the pages. Therefore this module first reads all page headers (Thrift compact
//! protocol) and skips the data.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};

use parquet::arrow::ProjectionMask;
use parquet::basic::{Compression, Type};
use parquet::file::metadata::{ColumnChunkMetaData, ParquetMetaData};

use crate::table_fault::TableFault;

/// Maximum size of a page of numbers, in bytes after decompression. Usual pages have about 1 MiB.
const MAX_PAGE: u64 = 256 << 20;
/// Maximum size of a page of strings, in bytes after decompression.
const MAX_STRING_PAGE: u64 = 64 << 20;
/// Maximum total size of the largest pages of all columns that are read together (a dictionary page and a data page for each
/// column), in bytes.
const MAX_PAGES: u64 = 1 << 30;
/// Maximum size of the strings of a batch, in bytes.
const MAX_BATCH_STRINGS: u64 = 256 << 20;
/// Maximum size of a page header, in bytes. It contains the minimum and maximum of the page.
const MAX_HEADER: u64 = 1 << 20;
/// Size that is sufficient for most headers, in bytes.
const USUAL_HEADER: u64 = 256;
/// Maximum nesting depth of structures in a header. Valid headers have 2.
const MAX_DEPTH: u32 = 8;

/// Encodings of strings with shared prefixes or a claimed number of lengths, for which a page can claim any amount of
/// memory; with their numbers in `parquet.thrift`.
const UNBOUNDED: [(i64, &str); 2] = [(6, "DELTA_LENGTH_BYTE_ARRAY"), (7, "DELTA_BYTE_ARRAY")];

/// Checks the pages of the columns in `mask`. Returns the maximum number of rows of a batch whose strings fit in memory.
///
/// # Errors
/// [`TableFault::Codec`], [`TableFault::Pages`], [`TableFault::PageHeader`], [`TableFault::Encoding`], [`TableFault::Nested`].
pub(crate) fn check(
    file: &mut File,
    metadata: &ParquetMetaData,
    mask: &ProjectionMask,
    row_groups: &[usize],
) -> Result<usize, TableFault> {
    let mut rows = u64::MAX;
    for &row_group in row_groups {
        let mut pages = 0u64;
        let mut strings = 0u64;
        let columns = metadata.row_group(row_group).columns().iter().enumerate();
        for (_, column) in columns.filter(|&(leaf, _)| mask.leaf_included(leaf)) {
            check_compression(column)?;
            let largest = Column::new(column)?.largest_pages(file)?;
            pages = pages.saturating_add(largest.dictionary + largest.data);
            if pages > MAX_PAGES {
                return Err(too_large(column, pages, MAX_PAGES));
            }
            if is_string(column) {
                // All rows of a batch may have the longest string, which is at most as long as its page.
                strings = strings.saturating_add(largest.dictionary.max(largest.data));
            }
        }
        rows = rows.min(MAX_BATCH_STRINGS / strings.max(1));
    }
    Ok(usize::try_from(rows.max(1)).unwrap_or(usize::MAX))
}

/// Returns an error for a compression that the Parquet library was built without.
fn check_compression(column: &ColumnChunkMetaData) -> Result<(), TableFault> {
    match column.compression() {
        Compression::UNCOMPRESSED | Compression::SNAPPY | Compression::ZSTD(_) => Ok(()),
        other => {
            let codec = format!("{other:?}");
            let codec = codec.split('(').next().unwrap_or_default().to_lowercase();
            let column = name(column);
            Err(TableFault::Codec { column, codec })
        }
    }
}

fn is_string(column: &ColumnChunkMetaData) -> bool {
    matches!(
        column.column_type(),
        Type::BYTE_ARRAY | Type::FIXED_LEN_BYTE_ARRAY
    )
}

fn name(column: &ColumnChunkMetaData) -> String {
    column.column_path().string()
}

fn too_large(column: &ColumnChunkMetaData, bytes: u64, limit: u64) -> TableFault {
    TableFault::Pages {
        column: name(column),
        bytes,
        limit,
    }
}

/// Sizes of a column's largest dictionary and data pages, in bytes after decompression.
#[derive(Default)]
struct Largest {
    dictionary: u64,
    data: u64,
}

/// A column of a row group and the byte range of its pages.
struct Column<'a> {
    metadata: &'a ColumnChunkMetaData,
    start: u64,
    end: u64,
}

impl<'a> Column<'a> {
    fn new(metadata: &'a ColumnChunkMetaData) -> Result<Self, TableFault> {
        if metadata.column_descr().max_rep_level() > 0
            || metadata.column_descr().path().parts().len() > 1
        {
            return Err(TableFault::Nested {
                column: name(metadata),
            });
        }
        let start = metadata.dictionary_page_offset();
        let start = u64::try_from(start.unwrap_or(metadata.data_page_offset()));
        let size = u64::try_from(metadata.compressed_size());
        let end = match (start, size) {
            (Ok(start), Ok(size)) => start.checked_add(size).map(|end| (start, end)),
            _ => None,
        };
        let (start, end) = end.ok_or_else(|| TableFault::PageHeader {
            column: name(metadata),
            offset: 0,
        })?;
        Ok(Self {
            metadata,
            start,
            end,
        })
    }

    fn largest_pages(&self, file: &mut File) -> Result<Largest, TableFault> {
        let limit = if is_string(self.metadata) {
            MAX_STRING_PAGE
        } else {
            MAX_PAGE
        };
        let n_values = self.metadata.num_values();
        let mut largest = Largest::default();
        let (mut at, mut seen) = (self.start, 0);
        while at < self.end {
            let header = match self.header(file, at) {
                Some(header) => header,
                // A column may be padded with zeros after its last value.
                None if seen >= n_values && n_values > 0 && is_zero(file, at) => break,
                None => return Err(self.no_header(at)),
            };
            let [compressed, uncompressed] = [header.compressed, header.uncompressed];
            if compressed.max(uncompressed) > limit {
                let bytes = compressed.max(uncompressed);
                return Err(too_large(self.metadata, bytes, limit));
            }
            if is_string(self.metadata)
                && let Some((_, encoding)) = UNBOUNDED
                    .iter()
                    .find(|&&(number, _)| header.encoding == Some(number))
            {
                return Err(TableFault::Encoding {
                    column: name(self.metadata),
                    encoding,
                });
            }
            if header.is_dictionary {
                largest.dictionary = largest.dictionary.max(uncompressed);
            } else {
                largest.data = largest.data.max(uncompressed);
                seen += header.n_values.unwrap_or(0);
            }
            at += header.size + compressed;
        }
        Ok(largest)
    }

    /// The page header at a file offset; `None` if there is none.
    fn header(&self, file: &mut File, at: u64) -> Option<Header> {
        let mut bytes = Vec::new();
        for size in [USUAL_HEADER, MAX_HEADER] {
            bytes.clear();
            file.seek(SeekFrom::Start(at)).ok()?;
            let size = size.min(self.end - at);
            file.take(size).read_to_end(&mut bytes).ok()?;
            if let Some(header) = Header::read(&bytes) {
                return Some(header);
            }
        }
        None
    }

    fn no_header(&self, offset: u64) -> TableFault {
        TableFault::PageHeader {
            column: name(self.metadata),
            offset,
        }
    }
}

/// Whether the byte at a file offset is zero.
fn is_zero(file: &mut File, at: u64) -> bool {
    let mut byte = [1];
    let read = file
        .seek(SeekFrom::Start(at))
        .and_then(|_| file.read_exact(&mut byte));
    read.is_ok() && byte == [0]
}

/// The needed fields of a page header.
#[derive(Debug, Default, PartialEq)]
struct Header {
    /// Size of the header in bytes.
    size: u64,
    is_dictionary: bool,
    uncompressed: u64,
    compressed: u64,
    n_values: Option<i64>,
    encoding: Option<i64>,
}

impl Header {
    /// Reads the structure `PageHeader` of `parquet.thrift`.
    fn read(bytes: &[u8]) -> Option<Self> {
        const DICTIONARY_PAGE: i64 = 2;
        let mut thrift = Thrift { bytes, at: 0 };
        let mut header = Header::default();
        let (mut page_type, mut uncompressed, mut compressed) = (None, None, None);
        let mut id = 0;
        while let Some(ty) = thrift.field(&mut id)? {
            match (id, ty) {
                (1, Thrift::I32) => page_type = Some(thrift.integer()?),
                (2, Thrift::I32) => uncompressed = Some(thrift.integer()?),
                (3, Thrift::I32) => compressed = Some(thrift.integer()?),
                (4, Thrift::I32) | (6, Thrift::STRUCT) => thrift.skip(ty, 0)?,
                // The headers of a data page, a dictionary page, and a data page of version 2.
                (5 | 7 | 8, Thrift::STRUCT) => {
                    let encoding_id = if id == 8 { 4 } else { 2 };
                    let mut inner = 0;
                    while let Some(ty) = thrift.field(&mut inner)? {
                        match (inner, ty) {
                            (1, Thrift::I32) => header.n_values = Some(thrift.integer()?),
                            (n, Thrift::I32) if n == encoding_id => {
                                header.encoding = Some(thrift.integer()?);
                            }
                            _ if !is_type_of_field(id, inner, ty) => return None,
                            _ => thrift.skip(ty, 0)?,
                        }
                    }
                }
                // The Parquet library identifies a known field by its number and does not check its type.
                (1..=8, _) => return None,
                _ => thrift.skip(ty, 0)?,
            }
        }
        header.is_dictionary = page_type? == DICTIONARY_PAGE;
        header.uncompressed = u64::try_from(uncompressed?).ok()?;
        header.compressed = u64::try_from(compressed?).ok()?;
        header.size = thrift.at as u64;
        Some(header)
    }
}

/// Whether a field of the header of a data page (5), a dictionary page (7) or a data page of version 2 (8) has the type in
/// `parquet.thrift`.
fn is_type_of_field(header: i64, field: i64, ty: u8) -> bool {
    match (header, field) {
        (5, 1..=4) | (7, 1..=2) | (8, 1..=6) => ty == Thrift::I32,
        (7, 3) | (8, 7) => ty == Thrift::TRUE || ty == Thrift::FALSE,
        (5, 5) | (8, 8) => ty == Thrift::STRUCT,
        _ => true,
    }
}

/// A reader of the Thrift compact protocol. Its methods return `None` if the bytes end or are invalid.
struct Thrift<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Thrift<'_> {
    const TRUE: u8 = 1;
    const FALSE: u8 = 2;
    const BYTE: u8 = 3;
    const I16: u8 = 4;
    const I32: u8 = 5;
    const I64: u8 = 6;
    const DOUBLE: u8 = 7;
    const BINARY: u8 = 8;
    const STRUCT: u8 = 12;

    fn byte(&mut self) -> Option<u8> {
        let byte = *self.bytes.get(self.at)?;
        self.at += 1;
        Some(byte)
    }

    /// An unsigned LEB128 integer.
    fn varint(&mut self) -> Option<u64> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            number |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Some(number);
            }
        }
        None
    }

    /// A zigzag-encoded signed integer.
    fn integer(&mut self) -> Option<i64> {
        let number = self.varint()?;
        Some((number >> 1) as i64 ^ -((number & 1) as i64))
    }

    /// The type of the next field; `Some(None)` at the end of the structure. `id` changes from the number of the previous field
    /// to that of this field.
    fn field(&mut self, id: &mut i64) -> Option<Option<u8>> {
        let byte = self.byte()?;
        let (delta, ty) = (byte >> 4, byte & 0xf);
        if ty == 0 {
            return Some(None);
        }
        *id = match delta {
            0 => self.integer()?,
            delta => id.checked_add(delta.into())?,
        };
        Some(Some(ty))
    }

    /// Skips a value. Lists, sets and maps are invalid: page headers have none, and the Parquet library would skip as many
    /// elements as they claim, even after the end of the file.
    fn skip(&mut self, ty: u8, depth: u32) -> Option<()> {
        if depth > MAX_DEPTH {
            return None;
        }
        match ty {
            Self::TRUE | Self::FALSE => {}
            Self::BYTE => self.advance(1)?,
            Self::I16 | Self::I32 | Self::I64 => {
                self.varint()?;
            }
            Self::DOUBLE => self.advance(8)?,
            Self::BINARY => {
                let n = self.varint()?;
                self.advance(n)?;
            }
            Self::STRUCT => {
                let mut id = 0;
                while let Some(ty) = self.field(&mut id)? {
                    self.skip(ty, depth + 1)?;
                }
            }
            _ => return None,
        }
        Some(())
    }

    fn advance(&mut self, n: u64) -> Option<()> {
        let at = self.at.checked_add(usize::try_from(n).ok()?)?;
        self.at = (at <= self.bytes.len()).then_some(at)?;
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{ArrayRef, RecordBatch, StringArray};
    use parquet::arrow::ArrowWriter;
    use parquet::arrow::arrow_reader::ArrowReaderMetadata;

    use super::*;

    /// All rows of a batch may have the longest string of a page.
    #[test]
    fn limits_batches_of_long_strings() {
        for (bytes, rows) in [(1 << 20, 255), (100 << 20, 0)] {
            let strings: ArrayRef = Arc::new(StringArray::from(vec!["x".repeat(bytes)]));
            let batch = RecordBatch::try_from_iter([("name", strings)]).unwrap();
            let mut file = tempfile::tempfile().unwrap();
            let mut writer = ArrowWriter::try_new(&mut file, batch.schema(), None).unwrap();
            writer.write(&batch).unwrap();
            writer.close().unwrap();
            let footer = ArrowReaderMetadata::load(&file, Default::default()).unwrap();
            let checked = check(&mut file, footer.metadata(), &ProjectionMask::all(), &[0]);
            match (rows, checked) {
                (0, Err(TableFault::Pages { .. })) => {}
                (rows, Ok(found)) => assert_eq!(found, rows),
                (_, Err(fault)) => panic!("{fault}"),
            }
        }
    }

    #[test]
    fn reads_a_page_header() {
        // type DATA_PAGE, 300 and 200 bytes, 1000 values, RLE_DICTIONARY, statistics with a minimum.
        let bytes = [
            0x15, 0x00, 0x15, 0xd8, 0x04, 0x15, 0x90, 0x03, 0x2c, 0x15, 0xd0, 0x0f, 0x15, 0x10,
            0x15, 0x06, 0x15, 0x06, 0x1c, 0x18, 0x02, b'a', b'b', 0x00, 0x00, 0x00,
        ];
        let header = Header::read(&bytes).unwrap();
        assert_eq!(
            header,
            Header {
                size: bytes.len() as u64,
                is_dictionary: false,
                uncompressed: 300,
                compressed: 200,
                n_values: Some(1000),
                encoding: Some(8),
            }
        );
        for n in 0..bytes.len() {
            assert_eq!(Header::read(&bytes[..n]), None, "{n} bytes");
        }
        // A negative size.
        assert_eq!(
            Header::read(&[0x15, 0x00, 0x15, 0x01, 0x15, 0x02, 0x00]),
            None
        );
    }
}
