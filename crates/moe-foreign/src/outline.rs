//! The outline of a JSON document: its keys, and the start of its strings and lists.
//!
//! The keys by which a format is recognized may follow a list or a text that is longer than a sample.

use std::io::BufRead;
use std::path::Path;

use crate::ForeignError;
use crate::source::{MAX_DOCUMENT, SAMPLE_SIZE, text_reader};

/// Number of elements of a list that an outline contains.
const MAX_ELEMENTS: usize = 4;
/// Maximum length of a string in an outline in bytes.
const MAX_STRING: usize = 128;
/// Maximum length of an outline in bytes. It is not taken for the start of a longer file.
const MAX_OUTLINE: usize = SAMPLE_SIZE / 2;
/// Maximum depth of nested lists and objects.
const MAX_DEPTH: usize = 128;

/// Returns the outline of the first object or list in a file, on one line; `None` if the file starts with something else.
pub(crate) fn read(path: &Path) -> Result<Option<Vec<u8>>, ForeignError> {
    let mut reader = text_reader(path)?;
    let mut outline = Outline::default();
    let mut n_read = 0;
    while !outline.is_complete && n_read < MAX_DOCUMENT {
        let bytes = reader.fill_buf().map_err(ForeignError::io("read", path))?;
        if bytes.is_empty() {
            break;
        }
        for &byte in bytes {
            outline.add(byte);
        }
        let n_bytes = bytes.len();
        reader.consume(n_bytes);
        n_read += n_bytes as u64;
    }
    Ok(Some(outline.text).filter(|text| !text.is_empty()))
}

/// A list or an object that is not complete.
enum Open {
    Object,
    /// A list with this number of complete elements.
    List(usize),
}

#[derive(Default)]
struct Outline {
    text: Vec<u8>,
    open: Vec<Open>,
    /// Number of open lists whose current element is omitted.
    n_omitted: usize,
    /// Number of bytes of the current string, which has not ended.
    string: Option<usize>,
    is_escaped: bool,
    is_complete: bool,
}

impl Outline {
    fn add(&mut self, byte: u8) {
        if self.is_complete {
            return;
        }
        if let Some(length) = self.string {
            self.add_to_string(byte, length);
            return;
        }
        match byte {
            b' ' | b'\t' | b'\r' | b'\n' => {}
            b'{' | b'[' => {
                self.push(byte);
                self.open.push(match byte {
                    b'{' => Open::Object,
                    _ => Open::List(0),
                });
                self.is_complete |= self.open.len() > MAX_DEPTH;
            }
            // Not a list or an object.
            _ if self.open.is_empty() => self.is_complete = true,
            b'}' | b']' => {
                if let Some(Open::List(MAX_ELEMENTS..)) = self.open.pop() {
                    self.n_omitted -= 1;
                }
                self.push(byte);
                self.is_complete |= self.open.is_empty();
            }
            b',' => self.add_comma(),
            _ => {
                self.push(byte);
                self.string = (byte == b'"').then_some(0);
            }
        }
    }

    fn add_comma(&mut self) {
        if let Some(Open::List(n_elements)) = self.open.last_mut() {
            *n_elements += 1;
            if *n_elements == MAX_ELEMENTS {
                self.n_omitted += 1;
            }
        }
        self.push(b',');
    }

    /// Adds a byte of a string that has `length` bytes so far. Escape sequences are omitted.
    fn add_to_string(&mut self, byte: u8, length: usize) {
        self.string = Some(length + 1);
        if self.is_escaped {
            self.is_escaped = false;
        } else if byte == b'\\' {
            self.is_escaped = true;
        } else if byte == b'"' {
            self.string = None;
            self.push(byte);
        } else if length < MAX_STRING {
            self.push(byte);
        }
    }

    fn push(&mut self, byte: u8) {
        if self.n_omitted == 0 {
            self.text.push(byte);
            self.is_complete |= self.text.len() >= MAX_OUTLINE;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outline(text: &str) -> String {
        let mut outline = Outline::default();
        for byte in text.bytes() {
            outline.add(byte);
        }
        String::from_utf8(outline.text).unwrap()
    }

    #[test]
    fn keeps_keys_and_the_start_of_lists() {
        for (text, expected) in [
            (
                "{ \"a\": [1, 2, 3, 4, 5, [6, {\"x\": 7}]],\n \"b\": {\"c\": \"d,]}\"}} rest",
                "{\"a\":[1,2,3,4],\"b\":{\"c\":\"d,]}\"}}",
            ),
            (
                "[[1,2],[3,4,5,6,7,8],[],[],[],[]]",
                "[[1,2],[3,4,5,6],[],[]]",
            ),
            ("{\"a\\\"]\": \"\\\\\", \"b\": 1}", "{\"a]\":\"\",\"b\":1}"),
            ("{\"a\":1}\n{\"b\":1}", "{\"a\":1}"),
            ("layer,expert", ""),
            ("", ""),
        ] {
            assert_eq!(outline(text), expected, "{text}");
        }
        let long = format!("{{\"text\":\"{}\",\"key\":1}}", "x".repeat(1 << 20));
        let expected = format!("{{\"text\":\"{}\",\"key\":1}}", "x".repeat(MAX_STRING));
        assert_eq!(outline(&long), expected);
    }

    #[test]
    fn has_a_maximum_size() {
        let keys: Vec<String> = (0..20_000).map(|i| format!("\"{i}\":0")).collect();
        let text = format!("{{{}}}", keys.join(","));
        assert_eq!(outline(&text).len(), MAX_OUTLINE);
        assert_eq!(outline(&"[".repeat(1 << 20)).len(), MAX_DEPTH + 1);
    }
}
