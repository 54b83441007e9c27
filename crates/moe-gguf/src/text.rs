//! Text: numbers in messages, and the byte order mark of files.

use std::fmt::Display;

/// A number of things in words: `1 layer`, `2 layers`, `2 passes`.
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

/// What some programs write in front of a text in UTF-8. It is not part of the text.
const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

/// A text in UTF-8 without the byte order mark at its start. Every text file that this workspace reads may have one.
pub fn without_byte_order_mark(text: &[u8]) -> &[u8] {
    text.strip_prefix(BYTE_ORDER_MARK).unwrap_or(text)
}

/// As [`without_byte_order_mark`], of a string.
pub fn strip_byte_order_mark(text: &str) -> &str {
    let n_mark = text.len() - without_byte_order_mark(text.as_bytes()).len();
    &text[n_mark..]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_byte_order_mark_is_removed() {
        let text = |text: &'static str| without_byte_order_mark(text.as_bytes());
        assert_eq!(text("\u{feff}a"), b"a");
        assert_eq!(text("\u{feff}\u{feff}a"), "\u{feff}a".as_bytes());
        assert_eq!(text("a\u{feff}"), "a\u{feff}".as_bytes());
        assert_eq!(without_byte_order_mark(b"\xef\xbb"), b"\xef\xbb");
        assert_eq!(strip_byte_order_mark("\u{feff}ä"), "ä");
        assert_eq!(strip_byte_order_mark("ä"), "ä");
    }

    #[test]
    fn numbers_agree_with_their_nouns() {
        assert_eq!(
            [0, 1, 2u64].map(|n| counted(n, "gap")),
            ["0 gaps", "1 gap", "2 gaps"]
        );
        assert_eq!(
            [1, 2usize].map(|n| counted(n, "pass")),
            ["1 pass", "2 passes"]
        );
    }
}
