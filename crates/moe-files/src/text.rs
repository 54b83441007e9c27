//! Text of files and file names that is shown on a terminal.

/// Whether a terminal obeys the character instead of showing it: control characters (C0, DEL, C1), and the characters of
/// Unicode that reorder text, separate lines or show nothing.
pub fn is_hidden(c: char) -> bool {
    c.is_control()
        || matches!(c,
            '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

/// Adds the text to `escaped`, its hidden characters as `\u{1b}`.
pub fn escape_hidden(text: &str, escaped: &mut String) {
    for c in text.chars() {
        if is_hidden(c) {
            escaped.extend(c.escape_unicode());
        } else {
            escaped.push(c);
        }
    }
}
