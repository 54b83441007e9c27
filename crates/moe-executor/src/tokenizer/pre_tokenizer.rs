//! Pre-tokenizers (`tokenizer.ggml.pre`): they split a text into words, and merges do not cross words.
//!
//! llama.cpp's character classes are those of Unicode 15.1, so the classes here are limited to that version.

use fancy_regex::Regex;

use super::Error;
use super::rules::{Alphabet, RULES};

/// The compiled pre-tokenizer of a vocabulary.
pub(super) struct PreTokenizer {
    steps: Vec<Step>,
    pub(super) ignore_merges: bool,
    pub(super) add_bos: bool,
    pub(super) alphabet: Alphabet,
}

/// A division of each word of the previous step.
enum Step {
    /// The matches, and the text between them.
    Matches(Regex),
    /// Groups of three digits in the runs of digits that the expression matches.
    DigitGroups(Regex),
}

/// The supported values of `tokenizer.ggml.pre`. Values in the same list have the same words and defaults.
pub fn pre_tokenizers() -> impl Iterator<Item = &'static [&'static str]> {
    RULES.iter().map(|rule| rule.names)
}

impl PreTokenizer {
    /// The pre-tokenizer `name` of `tokenizer.ggml.pre`.
    pub(super) fn new(name: &str) -> Result<PreTokenizer, Error> {
        let rule = RULES
            .iter()
            .find(|rule| rule.names.contains(&name))
            .ok_or_else(|| Error::PreTokenizer {
                found: name.to_owned(),
                supported: pre_tokenizers()
                    .map(|names| names.join(", "))
                    .collect::<Vec<_>>()
                    .join(", "),
            })?;
        let mut steps = Vec::with_capacity(1 + rule.regexes.len());
        if rule.groups_digits {
            steps.push(Step::DigitGroups(compile(r"\p{N}+")?));
        }
        for regex in rule.regexes {
            steps.push(Step::Matches(compile(regex)?));
        }
        Ok(PreTokenizer {
            steps,
            ignore_merges: rule.ignore_merges,
            add_bos: rule.add_bos,
            alphabet: rule.alphabet,
        })
    }

    /// The words of `text`, in order. Their concatenation is `text`.
    pub(super) fn split<'t>(&self, text: &'t str) -> Result<Vec<&'t str>, Error> {
        let mut words = vec![text];
        for step in &self.steps {
            let mut parts = Vec::with_capacity(words.len());
            for word in words {
                match step {
                    Step::Matches(regex) => split_word(regex, word, &mut parts)?,
                    Step::DigitGroups(runs) => split_digits(runs, word, &mut parts)?,
                }
            }
            words = parts;
        }
        Ok(words)
    }
}

fn compile(regex: &str) -> Result<Regex, Error> {
    Regex::new(&pin_unicode(regex)).map_err(|error| Error::split(error, ""))
}

/// Appends the matches in `word` and the text between them.
///
/// # Errors
/// The matcher exceeds its limit of steps or stack.
fn split_word<'t>(regex: &Regex, word: &'t str, parts: &mut Vec<&'t str>) -> Result<(), Error> {
    let mut done = 0;
    for found in regex.find_iter(word) {
        let found = found.map_err(|error| Error::split(error, &word[done..]))?;
        let between = &word[done..found.start()];
        parts.extend(
            [between, found.as_str()]
                .iter()
                .filter(|part| !part.is_empty()),
        );
        done = found.end();
    }
    parts.extend(Some(&word[done..]).filter(|rest| !rest.is_empty()));
    Ok(())
}

/// Appends the groups of three digits, counted from the end of each run in `word`. The first group of a run has one to three
/// digits, and starts with the text before the run.
///
/// # Errors
/// The matcher exceeds its limit of steps or stack.
fn split_digits<'t>(runs: &Regex, word: &'t str, parts: &mut Vec<&'t str>) -> Result<(), Error> {
    let mut done = 0;
    for found in runs.find_iter(word) {
        let found = found.map_err(|error| Error::split(error, &word[done..]))?;
        let digits = found.as_str().char_indices();
        let ends: Vec<usize> = digits
            .map(|(at, digit)| found.start() + at + digit.len_utf8())
            .collect();
        let first = (ends.len() - 1) % 3;
        for &end in ends.iter().skip(first).step_by(3) {
            parts.push(&word[done..end]);
            done = end;
        }
    }
    parts.extend(Some(&word[done..]).filter(|rest| !rest.is_empty()));
    Ok(())
}

/// Limits the general categories in `regex` to the characters of Unicode 15.1.
fn pin_unicode(regex: &str) -> String {
    ["L", "M", "N", "P", "S"]
        .iter()
        .fold(regex.to_owned(), |regex, category| {
            regex.replace(
                &format!(r"\p{{{category}}}"),
                &format!(r"[\p{{{category}}}&&\p{{Age:15.1}}]"),
            )
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words<'t>(name: &str, text: &'t str) -> Vec<&'t str> {
        PreTokenizer::new(name).unwrap().split(text).unwrap()
    }

    #[test]
    fn all_rules_compile_and_keep_the_text() {
        let text = "It's 12345 kilo\u{301}s,\r\n\n  of\tÄÖ中文 'LL ٣٤ \u{1C89}\u{85}x//\n ";
        for rule in RULES {
            for name in rule.names {
                let words = words(name, text);
                assert_eq!(words.concat(), text, "{name}");
                assert!(words.iter().all(|word| !word.is_empty()), "{name}");
            }
        }
    }

    #[test]
    fn qwen2_splits_digits_and_contractions() {
        assert_eq!(
            words("qwen2", "We'LL  see 42\n\n end "),
            ["We", "'LL", " ", " see", " ", "4", "2", "\n\n", " end", " "]
        );
    }

    #[test]
    fn gpt_4o_splits_at_case_changes_of_ascii_only() {
        assert_eq!(
            words("gpt-4o", "HTTPServer'S äÄa 1234 a//\nb"),
            ["HTTPServer'S", " äÄa", " ", "123", "4", " a", "//\n", "b"]
        );
        assert_eq!(words("gpt-4o", "camelCase"), ["camel", "Case"]);
    }

    #[test]
    fn groups_digits_from_the_right() {
        assert_eq!(
            words("cohere2moe", "1234567 in 1,000 of 12 or 123456"),
            [
                "1", "234", "567", " in", " ", "1", ",", "000", " of", " ", "12", " or", " ",
                "123", "456"
            ]
        );
        // The text before digits is in their first group when whitespace is split.
        assert_eq!(words("afmoe", "a  1234"), ["a", " ", " ", "1", "234"]);
        assert_eq!(words("afmoe", "٣٤٥٦x"), ["٣", "٤٥٦", "x"]);
    }

    #[test]
    fn kimi_k2_splits_between_han_and_other_letters() {
        assert_eq!(
            words("kimi-k2", "Kimi’中文 Ж語's 1234"),
            ["Kimi", "’", "中文", " Ж", "語", "'s", " ", "123", "4"]
        );
    }

    #[test]
    fn exaone_moe_keeps_words_separated_by_one_space() {
        assert_eq!(
            words("exaone-moe", "one two  three\n\n4 five"),
            ["one two", " ", " three", "\n\n", "4", " five"]
        );
    }

    #[test]
    fn deepseek_llm_splits_scripts_and_punctuation() {
        assert_eq!(
            words("deepseek-llm", "An  int8, 中文\u{3000}。 x\n "),
            [
                "An", " ", " int", "8", ",", " ", "中文", "\u{3000}", "。", " x", "\n", " "
            ]
        );
    }

    #[test]
    fn gemma4_splits_at_line_feeds() {
        assert_eq!(
            words("gemma4", "a b\n\nc\r\n"),
            ["a b", "\n\n", "c\r", "\n"]
        );
    }

    #[test]
    fn characters_newer_than_unicode_15_1_are_not_letters() {
        // U+1C89 is a letter since Unicode 16. U+10D0 is a letter in Unicode 15.1, too.
        assert_eq!(words("qwen2", "a\u{1C89}b"), ["a", "\u{1C89}b"]);
        assert_eq!(words("qwen2", "a\u{1C89}\u{1C89}b").len(), 3);
        assert_eq!(words("qwen2", "a\u{10D0}b").len(), 1);
    }

    #[test]
    fn rejects_too_long_a_run() {
        let rule = PreTokenizer::new("qwen2").unwrap();
        let run = |n| " ".repeat(n) + "a";
        assert_eq!(rule.split(&run(900_000)).unwrap().len(), 2);
        for (text, expected) in [
            (run(1_100_000), "longest run of whitespace"),
            (
                "b ".to_owned() + &"a".repeat(1_100_000),
                "longest run of characters without whitespace",
            ),
        ] {
            let error = rule.split(&text).unwrap_err();
            assert!(matches!(error, Error::Split { .. }), "{error}");
            assert!(error.to_string().ends_with(expected), "{error}");
        }
    }

    #[test]
    fn words_agree_with_llama_cpp() {
        let cases = moe_testkit::reference::read("pre-tokenizers");
        let cases: serde_json::Value = serde_json::from_slice(&cases).unwrap();
        let cases = cases.as_object().unwrap();
        assert_eq!(cases.len(), RULES.len());
        for (name, texts) in cases {
            let rule = PreTokenizer::new(name).unwrap();
            for words in texts.as_array().unwrap() {
                let words: Vec<&str> = words
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|word| word.as_str().unwrap())
                    .collect();
                let text = words.concat();
                assert_eq!(rule.split(&text).unwrap(), words, "{name}");
            }
        }
    }

    #[test]
    fn rejects_an_unknown_name() {
        let error = PreTokenizer::new("unknown").err().unwrap();
        assert!(
            matches!(&error, Error::PreTokenizer { found, supported }
                if found == "unknown" && supported.contains("qwen2") && supported.contains("gpt-4o")),
            "{error}"
        );
    }
}
