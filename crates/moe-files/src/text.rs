//! Numbers in messages, byte order marks of text files, and characters that a terminal does not show.

use std::fmt::Display;

/// Returns a number with a noun in singular or plural: `1 layer`, `2 layers`, `2 passes`. `thing` is the singular.
pub fn counted<N: PartialEq + From<u8> + Display>(n: N, thing: &str) -> String {
    let plural = if n == N::from(1) {
        ""
    } else if thing.ends_with('s') {
        "es"
    } else {
        "s"
    };
    format!("{n} {thing}{plural}")
}

/// Whether a terminal interprets the character instead of showing it.
///
/// These are control characters (C0, DEL, C1), and Unicode characters that reorder text, separate lines or are invisible.
pub fn is_hidden(c: char) -> bool {
    c.is_control()
        || matches!(c,
            '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

/// Appends `text` to `escaped`. Hidden characters are written like `\u{1b}`.
pub fn escape_hidden(text: &str, escaped: &mut String) {
    for c in text.chars() {
        if is_hidden(c) {
            escaped.extend(c.escape_unicode());
        } else {
            escaped.push(c);
        }
    }
}

/// The byte order mark in UTF-8, which some programs write at the start of a text file. It is not part of the text.
const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

/// Returns a text in UTF-8 without the byte order mark at its start, if it has one.
pub fn without_byte_order_mark(text: &[u8]) -> &[u8] {
    text.strip_prefix(BYTE_ORDER_MARK).unwrap_or(text)
}

/// Like [`without_byte_order_mark`], for a string.
pub fn strip_byte_order_mark(text: &str) -> &str {
    let n_mark = text.len() - without_byte_order_mark(text.as_bytes()).len();
    &text[n_mark..]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn appends_plural_endings() {
        assert_eq!(
            [0, 1, 2u64].map(|n| counted(n, "gap")),
            ["0 gaps", "1 gap", "2 gaps"]
        );
        assert_eq!(
            [1, 2usize].map(|n| counted(n, "pass")),
            ["1 pass", "2 passes"]
        );
    }

    #[test]
    fn removes_exactly_one_byte_order_mark() {
        let text = |text: &'static str| without_byte_order_mark(text.as_bytes());
        assert_eq!(text("\u{feff}a"), b"a");
        assert_eq!(text("\u{feff}\u{feff}a"), "\u{feff}a".as_bytes());
        assert_eq!(text("a\u{feff}"), "a\u{feff}".as_bytes());
        assert_eq!(without_byte_order_mark(b"\xef\xbb"), b"\xef\xbb");
        assert_eq!(strip_byte_order_mark("\u{feff}ä"), "ä");
        assert_eq!(strip_byte_order_mark("ä"), "ä");
    }
}
