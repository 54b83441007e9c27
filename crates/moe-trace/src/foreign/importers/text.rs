//! Numbers in texts.

use std::str::FromStr;

/// Reads `text` as the number `name`; the error says what is wrong.
pub(super) fn number<T: FromStr>(name: &str, text: &str) -> Result<T, String> {
    let text = text.trim();
    text.parse().map_err(|_| {
        let shown: String = text.chars().take(32).collect();
        format!("{name} {shown:?} is not a number that fits there; the line is damaged")
    })
}

/// Whether every one of `words` is an integer; false if there are none.
pub(super) fn are_integers<'a>(words: impl IntoIterator<Item = &'a str>) -> bool {
    let mut any = false;
    words.into_iter().all(|word| {
        any = true;
        word.trim().parse::<i64>().is_ok()
    }) && any
}
