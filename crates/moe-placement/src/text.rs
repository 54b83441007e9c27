//! Text files.

/// A text without the byte order mark that some programs write in front of UTF-8.
pub(crate) fn without_byte_order_mark(text: &str) -> &str {
    text.strip_prefix('\u{feff}').unwrap_or(text)
}
