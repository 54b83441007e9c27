//! The block `{% generation %}` of `transformers`, which marks the text of the assistant.
//!
//! The block changes no text. Like a macro, it has variables of its own. Therefore it becomes `{% with %}`, with spaces so that
//! all lines and columns are unchanged.

/// Tags and their replacement of the same length.
const TAGS: [(&str, &str); 2] = [
    ("endgeneration", "endwith      "),
    ("generation", "with      "),
];

/// Replaces the tags of `generation` blocks in a template.
pub(super) fn replace(source: &str) -> String {
    if !source.contains("generation") {
        return source.to_owned();
    }
    let mut replaced = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find('{') {
        let (before, from) = rest.split_at(at);
        replaced += before;
        let (construct, after) = from.split_at(construct_length(from));
        match tag(construct) {
            Some((at, name, new)) => {
                replaced += &construct[..at];
                replaced += new;
                replaced += &construct[at + name.len()..];
            }
            None => replaced += construct,
        }
        rest = after;
    }
    replaced + rest
}

/// Line of the first tag or expression with more than `max` bytes of code, not counting spaces and the contents of strings.
pub(super) fn first_long_tag(source: &str, max: usize) -> Option<usize> {
    let mut rest = source;
    while let Some(at) = rest.find('{') {
        let from = &rest[at..];
        let (construct, after) = from.split_at(construct_length(from));
        let is_code = construct.starts_with("{{") || construct.starts_with("{%");
        // The text of a raw block is not code.
        let is_raw = word(construct).is_some_and(|(_, word)| word == "raw");
        if is_code && !is_raw && n_code_bytes(construct) > max {
            let before = &source[..source.len() - from.len()];
            return Some(before.matches('\n').count() + 1);
        }
        rest = after;
    }
    None
}

/// Number of bytes of code, without spaces and the contents of strings.
fn n_code_bytes(code: &str) -> usize {
    let mut n = 0;
    let mut quote = None;
    let mut bytes = code.bytes();
    while let Some(byte) = bytes.next() {
        match (quote, byte) {
            (Some(_), b'\\') => {
                bytes.next();
            }
            (Some(open), _) if open == byte => quote = None,
            (Some(_), _) => {}
            (None, b'"' | b'\'') => quote = Some(byte),
            (None, _) => n += usize::from(!byte.is_ascii_whitespace()),
        }
    }
    n
}

/// Length of the comment, expression, raw block or tag at the start of `text`; 1 for another brace.
fn construct_length(text: &str) -> usize {
    let length = match text.as_bytes().get(1) {
        Some(b'#') => text.find("#}").map(|at| at + 2),
        Some(b'{') => code_length(text, "}}"),
        Some(b'%') => code_length(text, "%}").map(|length| match word(&text[..length]) {
            Some((_, "raw")) => length + raw_length(&text[length..]),
            _ => length,
        }),
        _ => Some(1),
    };
    // The template engine reports a construct without an end.
    length.unwrap_or(text.len())
}

/// Length of an expression or a tag up to and including `end`, which may also be part of a string in it.
fn code_length(text: &str, end: &str) -> Option<usize> {
    let mut quote = None;
    let mut chars = text.char_indices().skip(2);
    while let Some((at, c)) = chars.next() {
        match (quote, c) {
            (Some(_), '\\') => {
                chars.next();
            }
            (Some(open), _) if open == c => quote = None,
            (None, '"' | '\'') => quote = Some(c),
            (None, _) if text[at..].starts_with(end) => return Some(at + end.len()),
            _ => {}
        }
    }
    None
}

/// Length of the text up to and including `{% endraw %}`.
fn raw_length(text: &str) -> usize {
    let mut from = 0;
    while let Some(at) = text[from..].find("{%") {
        let start = from + at;
        let length = text[start..].find("%}").map(|at| at + 2);
        match length {
            Some(length)
                if word(&text[start..start + length]).is_some_and(|(_, w)| w == "endraw") =>
            {
                return start + length;
            }
            _ => from = start + 2,
        }
    }
    text.len()
}

/// The first word of a tag, and its position.
fn word(tag: &str) -> Option<(usize, &str)> {
    let code = tag.strip_prefix("{%")?;
    let trimmed = code.trim_start_matches(['-', '+']).trim_start();
    let length = trimmed.find(|c: char| !c.is_alphanumeric() && c != '_');
    let at = tag.len() - trimmed.len();
    Some((at, &trimmed[..length.unwrap_or(trimmed.len())]))
}

/// The position of the name, the name and its replacement, if `construct` is a tag of a generation block.
fn tag(construct: &str) -> Option<(usize, &'static str, &'static str)> {
    let (at, word) = word(construct)?;
    let (name, new) = TAGS.into_iter().find(|(name, _)| *name == word)?;
    Some((at, name, new))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replaces_only_tags() {
        for (source, expected) in [
            (
                "{% generation %}a{% endgeneration %}",
                "{% with       %}a{% endwith       %}",
            ),
            ("{%- generation -%}", "{%- with       -%}"),
            ("{%generation%}", "{%with      %}"),
            ("{# {% generation %} #}", "{# {% generation %} #}"),
            ("{{ '{% generation %}' }}", "{{ '{% generation %}' }}"),
            (
                "{{ 'a\\'{% generation %}' }}",
                "{{ 'a\\'{% generation %}' }}",
            ),
            ("{% set generation = 1 %}", "{% set generation = 1 %}"),
            ("{% generations %}", "{% generations %}"),
            (
                "{% raw %}{% generation %}{%- endraw %}{% generation %}",
                "{% raw %}{% generation %}{%- endraw %}{% with       %}",
            ),
            ("{ {% generation %}", "{ {% with       %}"),
            ("{% generation", "{% with      "),
            ("generation {", "generation {"),
            ("{{ generation", "{{ generation"),
        ] {
            assert_eq!(replace(source), expected);
        }
    }

    #[test]
    fn counts_code_of_tags_without_spaces_and_strings() {
        for (source, expected) in [
            ("abcdefgh\n{{ abcd }}", None),
            ("abc\n\n{{ abcde }}", Some(3)),
            ("{% if a %}\n{%- if abc -%}", Some(2)),
            ("{{ 'long \\' text' }}", None),
            ("{# a long comment #}", None),
            ("{% raw %} a long text {% endraw %}", None),
            ("{{ abcdefgh", Some(1)),
        ] {
            assert_eq!(first_long_tag(source, 8), expected, "{source}");
        }
    }
}
