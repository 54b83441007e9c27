//! Recognizes the format of a file by its first bytes: GGUF, or a common format that users confuse with a model or a trace.

use std::fmt;

/// The format of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Content {
    /// A GGUF file in either byte order.
    Gguf,
    /// A file that contains GGUF data, but not from its first byte on.
    DisplacedGguf {
        /// Offset of the magic number `GGUF`, in bytes.
        offset: usize,
    },
    /// A model in a llama.cpp format older than GGUF.
    Ggml,
    /// An importance matrix of llama.cpp in the `.dat` format.
    ImatrixDat,
    /// A Parquet file.
    Parquet,
    /// A ZIP archive. Files of `torch.save` and `.npz` files are ZIP archives.
    Zip,
    /// Another archive or compressed file, with the name of its format.
    Archive(&'static str),
    /// Another file that is neither a model nor a trace: its description, and what to do with it (empty if unknown).
    Other(&'static str, &'static str),
    /// Text in UTF-16.
    Utf16,
}

/// Magic numbers at the start of a file.
const MAGICS: [(&[u8], Content); 24] = [
    (b"GGUF", Content::Gguf),
    (b"FUGG", Content::Gguf),
    (b"lmgg", Content::Ggml),
    (b"fmgg", Content::Ggml),
    (b"tjgg", Content::Ggml),
    (b"PAR1", Content::Parquet),
    (b"PK\x03\x04", Content::Zip),
    (b"PK\x05\x06", Content::Zip),
    (b"\x1f\x8b", Content::Archive("gzip")),
    (b"\x1f\x9d", Content::Archive("compress")),
    (b"\x28\xb5\x2f\xfd", Content::Archive("zstd")),
    (b"\xfd7zXZ\0", Content::Archive("xz")),
    (b"BZh", Content::Archive("bzip2")),
    (b"\x04\x22\x4d\x18", Content::Archive("lz4")),
    (b"7z\xbc\xaf\x27\x1c", Content::Archive("7-Zip")),
    (b"Rar!\x1a\x07", Content::Archive("RAR")),
    (b"\xff\xfe", Content::Utf16),
    (b"\xfe\xff", Content::Utf16),
    (b"\x89HDF", Content::Other("an HDF5 file", "")),
    (
        b"ARROW1",
        Content::Other("an Arrow IPC file", "write it as Parquet"),
    ),
    (b"\x7fELF", Content::Other("a program", "")),
    (b"%PDF", Content::Other("a PDF document", "")),
    (
        b"version https://git-lfs",
        Content::Other(
            "a Git LFS pointer, not the file itself",
            "fetch the file with `git lfs pull`",
        ),
    ),
    (
        b"<!DOCTYPE",
        Content::Other("a web page", "download the file again"),
    ),
];

impl Content {
    /// Recognizes a file by its first bytes; 64 KiB are enough. Returns `None` for any other format.
    pub fn of(sample: &[u8]) -> Option<Content> {
        let magic = MAGICS
            .iter()
            .find(|(magic, _)| sample.starts_with(magic))
            .map(|&(_, content)| content);
        magic
            .or_else(|| is_tar(sample).then_some(Content::Archive("tar")))
            .or_else(|| is_safetensors(sample).then_some(SAFETENSORS))
            .or_else(|| is_imatrix_dat(sample).then_some(Content::ImatrixDat))
            .or_else(|| displaced_gguf(sample).map(|offset| Content::DisplacedGguf { offset }))
    }

    /// Returns what to do with the file if a GGUF model or a trace is required, or an empty string.
    pub fn advice(self) -> &'static str {
        match self {
            Content::Gguf | Content::Parquet => "",
            Content::DisplacedGguf { .. } => "remove these bytes, or download the file again",
            Content::Ggml => "convert the model to GGUF",
            Content::ImatrixDat => {
                "it has no counts per expert: compute the importance matrix in the GGUF format"
            }
            Content::Zip | Content::Archive(_) => "unpack it first",
            Content::Other(_, advice) => advice,
            Content::Utf16 => "convert it to UTF-8",
        }
    }
}

const SAFETENSORS: Content = Content::Other("a safetensors file", "convert the model to GGUF");

impl fmt::Display for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Content::Gguf => f.write_str("a GGUF file"),
            Content::DisplacedGguf { offset } => {
                write!(f, "a GGUF file with {offset} bytes before its magic number")
            }
            Content::Ggml => f.write_str("a model in a format older than GGUF"),
            Content::ImatrixDat => f.write_str("an importance matrix in the .dat format"),
            Content::Parquet => f.write_str("a Parquet file"),
            Content::Zip => f.write_str("a ZIP archive"),
            Content::Archive(name) => write!(f, "a {name} archive"),
            Content::Other(name, _) => f.write_str(name),
            Content::Utf16 => f.write_str("text in UTF-16"),
        }
    }
}

/// Whether the first 512 bytes are a tar header of any variant. The header contains the sum of its bytes.
fn is_tar(sample: &[u8]) -> bool {
    let Some(header) = sample.first_chunk::<512>() else {
        return false;
    };
    let digits = header[148..156].trim_ascii_end();
    let digits = digits.strip_suffix(b"\0").unwrap_or(digits).trim_ascii();
    let claimed = std::str::from_utf8(digits)
        .ok()
        .and_then(|digits| u32::from_str_radix(digits, 8).ok());
    let sum =
        |range: std::ops::Range<usize>| header[range].iter().map(|&b| u32::from(b)).sum::<u32>();
    let sum = sum(0..148) + 8 * u32::from(b' ') + sum(156..512);
    claimed == Some(sum) && header[0] != 0
}

/// Whether the bytes are the length of a JSON header (u64) and the start of the JSON.
fn is_safetensors(sample: &[u8]) -> bool {
    let length = sample
        .first_chunk()
        .map(|&length| u64::from_le_bytes(length));
    length.is_some_and(|length| (2..1 << 40).contains(&length)) && sample[8..].starts_with(b"{\"")
}

/// Whether the bytes are a number of entries (i32), the length of the first tensor name (i32), and that name.
fn is_imatrix_dat(sample: &[u8]) -> bool {
    let number = |at: usize| {
        let bytes = sample.get(at..)?.first_chunk()?;
        usize::try_from(i32::from_le_bytes(*bytes)).ok()
    };
    let (Some(1..=1_000_000), Some(length @ 5..=255)) = (number(0), number(4)) else {
        return false;
    };
    let name = sample[8..].get(..length);
    name.is_some_and(|name| {
        name.is_ascii() && (name.starts_with(b"blk.") || name.ends_with(b".weight"))
    })
}

/// Returns the offset of a GGUF header: the magic number and a version from 1 to 9 in either byte order.
fn displaced_gguf(sample: &[u8]) -> Option<usize> {
    let starts = sample.windows(8).enumerate();
    let mut starts = starts.filter(|(_, bytes)| bytes.starts_with(b"GGUF"));
    let is_version = |bytes: &[u8]| matches!(bytes, [1..=9, 0, 0, 0] | [0, 0, 0, 1..=9]);
    starts
        .find(|(_, bytes)| is_version(&bytes[4..]))
        .map(|(offset, _)| offset)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the tar header of a file `trace.bin` with 1024 bytes. `magic` distinguishes POSIX, GNU and V7 tar.
    fn tar_header(magic: &[u8]) -> Vec<u8> {
        let mut header = vec![0; 512];
        header[..9].copy_from_slice(b"trace.bin");
        header[100..108].copy_from_slice(b"0000644\0");
        header[124..136].copy_from_slice(b"00000002000\0");
        header[148..156].copy_from_slice(b"        ");
        header[257..257 + magic.len()].copy_from_slice(magic);
        let sum: u32 = header.iter().map(|&byte| u32::from(byte)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        header
    }

    #[test]
    fn recognizes_all_variants_of_tar() {
        for magic in [&b"ustar\x0000"[..], b"ustar  \0", b""] {
            let mut bytes = tar_header(magic);
            assert_eq!(Content::of(&bytes), Some(Content::Archive("tar")));
            bytes[3] ^= 1;
            assert_eq!(Content::of(&bytes), None);
        }
    }

    #[test]
    fn recognizes_formats_by_their_first_bytes() {
        let name = |bytes: &[u8]| Content::of(bytes).map(|content| content.to_string());
        let cases: [(&[u8], &str); 10] = [
            (b"GGUF\x03\0\0\0", "a GGUF file"),
            (b"\x1f\x8b\x08\0", "a gzip archive"),
            (b"\x28\xb5\x2f\xfd\x04", "a zstd archive"),
            (b"PK\x03\x04\x14\0", "a ZIP archive"),
            (b"BZh91AY&SY", "a bzip2 archive"),
            (b"\xfd7zXZ\0\0", "a xz archive"),
            (b"\xff\xfe{\0", "text in UTF-16"),
            (b"\x10\0\0\0\0\0\0\0{\"a\":{}}       ", "a safetensors file"),
            (
                b"\x02\0\0\0\x0a\0\0\0blk.0.attn\x01\0\0\0",
                "an importance matrix in the .dat format",
            ),
            (
                b"junkjunkGGUF\x03\0\0\0",
                "a GGUF file with 8 bytes before its magic number",
            ),
        ];
        for (bytes, expected) in cases {
            assert_eq!(name(bytes).as_deref(), Some(expected));
        }
        for bytes in [
            &b""[..],
            b"{\"a\":1}",
            b"GGU",
            b"text GGUF text",
            &[0; 4096],
        ] {
            assert_eq!(name(bytes), None);
        }
    }
}
