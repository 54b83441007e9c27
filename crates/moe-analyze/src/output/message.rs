//! Makes text safe for a terminal: escapes control characters and shortens long values.
//!
//! Messages on stderr use [`print()`], text on stdout uses [`Visible`], cells of tables and text in plots use [`visible`]. CSV and JSON
//! contain the original text.

use std::borrow::Cow;
use std::fmt::Display;
use std::io::{self, Write};

use moe_files::text::{escape_hidden, is_hidden};

use crate::progress;

/// Maximum length of a value between double quotes in a message, in characters.
const MAX_QUOTED: usize = 100;
/// Maximum length of a message, in characters.
const MAX_MESSAGE: usize = 1200;
/// Maximum length of a cell of a table, in characters.
const MAX_CELL: usize = 400;

/// Prints a message as one line on stderr. Write errors are ignored, because the exit code reports the outcome.
pub fn print(message: impl Display) {
    let line = line(&message.to_string());
    progress::without_bar(|| {
        let _ = writeln!(io::stderr(), "{line}");
    });
}

/// Returns a message on one line, with control characters escaped and long values shortened.
pub fn line(message: &str) -> String {
    let message = shorten_quoted(message);
    let message = message.replace(['\n', '\r', '\t'], " ");
    shorten(&visible(&message), MAX_MESSAGE).into_owned()
}

/// Returns the text of a table's cell on one line, escaped and shortened.
pub fn cell(text: &str) -> Cow<'_, str> {
    if text.len() <= MAX_CELL && !text.contains(is_hidden) {
        return Cow::Borrowed(text);
    }
    let text = text.replace(['\n', '\r', '\t'], " ");
    shorten(&visible(&text), MAX_CELL).into_owned().into()
}

/// Escapes control characters, bidirectional characters and invisible formatting characters as `\u{1b}`.
pub fn visible(text: &str) -> Cow<'_, str> {
    if !text.contains(is_hidden) {
        return Cow::Borrowed(text);
    }
    let mut escaped = String::with_capacity(text.len() + 16);
    escape_hidden(text, &mut escaped);
    escaped.into()
}

/// Returns the text, or its start and end with the number of omitted characters.
fn shorten(text: &str, most: usize) -> Cow<'_, str> {
    // A text has at most as many characters as bytes.
    let n = if text.len() <= most {
        return Cow::Borrowed(text);
    } else {
        text.chars().count()
    };
    if n <= most {
        return Cow::Borrowed(text);
    }
    let place = |n: usize| text.char_indices().nth(n).map_or(text.len(), |(at, _)| at);
    let (head, tail) = (most * 2 / 3, most - most * 2 / 3);
    let (head, tail) = (&text[..place(head)], &text[place(n - tail)..]);
    format!("{head}… ({} characters) …{tail}", n - most).into()
}

/// Shortens the values between double quotes in a message. A quote without a closing quote starts no value.
fn shorten_quoted(message: &str) -> Cow<'_, str> {
    if message.len() <= MAX_QUOTED {
        return Cow::Borrowed(message);
    }
    let mut shortened = String::new();
    let mut rest = message;
    while let Some((before, value)) = rest.split_once('"') {
        let Some(end) = closing_quote(value) else {
            break;
        };
        shortened.push_str(before);
        shortened.push('"');
        shortened.push_str(&shorten(&value[..end], MAX_QUOTED));
        shortened.push('"');
        rest = &value[end + 1..];
    }
    shortened.push_str(rest);
    shortened.into()
}

/// Returns the position of the closing quote of a value that can contain escaped quotes.
fn closing_quote(value: &str) -> Option<usize> {
    let mut is_escaped = false;
    value.bytes().position(|byte| {
        let closes = byte == b'"' && !is_escaped;
        is_escaped = byte == b'\\' && !is_escaped;
        closes
    })
}

/// A writer that escapes what [`visible`] escapes, except for line ends and tabs.
pub struct Visible<W>(pub W);

impl<W: Write> Write for Visible<W> {
    /// Writes all of `bytes`. Invalid UTF-8 is replaced by U+FFFD.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(bytes);
        for part in text.split_inclusive(['\n', '\t']) {
            let (part, end) = match part.strip_suffix(['\n', '\t']) {
                Some(stripped) => part.split_at(stripped.len()),
                None => (part, ""),
            };
            self.0.write_all(visible(part).as_bytes())?;
            self.0.write_all(end.as_bytes())?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_control_and_bidirectional_characters() {
        let text = "a\u{1b}[31mb\u{7}c\u{9b}d\u{7f}e\u{202e}f\u{2066}g\u{200f}h\u{feff}";
        assert_eq!(
            visible(text),
            r"a\u{1b}[31mb\u{7}c\u{9b}d\u{7f}e\u{202e}f\u{2066}g\u{200f}h\u{feff}"
        );
        assert_eq!(visible("Grüße, 模型 🦙"), "Grüße, 模型 🦙");
    }

    #[test]
    fn message_is_one_line() {
        assert_eq!(line("  a\nb\r\tc\u{1b}"), r"  a b  c\u{1b}");
    }

    #[test]
    fn shortens_quoted_values() {
        let long = "x".repeat(70_000);
        let message = line(&format!("a: {long:?} is not {:?}; b", "y\"z"));
        assert!(message.ends_with(r#"" is not "y\"z"; b"#), "{message}");
        assert!(message.contains("… (69900 characters) …"), "{message}");
        assert!(message.len() < 250, "{}", message.len());
        // An apostrophe and an unclosed quote start no value.
        let plain = format!("it's 3\" wide, {}", "word ".repeat(50));
        assert_eq!(line(&plain), plain);
    }

    #[test]
    fn shortens_messages_and_cells() {
        let long = "é".repeat(70_000);
        let message = line(&format!("a {long} b"));
        assert!(message.starts_with("a é") && message.ends_with("é b"));
        assert!(message.chars().count() < MAX_MESSAGE + 40);
        assert!(cell(&long).chars().count() < MAX_CELL + 40);
        assert_eq!(cell("a\nb"), "a b");
    }

    #[test]
    fn text_on_stdout_keeps_its_lines() {
        let mut out = Visible(Vec::new());
        write!(out, "a\u{1b}\n\tb\u{202e}c\n").unwrap();
        assert_eq!(out.0, b"a\\u{1b}\n\tb\\u{202e}c\n");
    }
}
