//! Pre-tokenizers (`tokenizer.ggml.pre`): they split a text into words, and merges do not cross words.
//!
//! The regular expressions are those of llama.cpp, which differ from the original ones in places: for example, the upper and
//! lower case of gpt-4o cover ASCII only. llama.cpp's character classes are those of Unicode 15.1, so the classes here are
//! limited to that version.

use fancy_regex::Regex;

use super::Error;

/// The definition of a pre-tokenizer.
struct Rule {
    /// Values of `tokenizer.ggml.pre`.
    names: &'static [&'static str],
    /// Each expression splits the words of the previous one. Matches and the text between them are words.
    regexes: &'static [&'static str],
    /// Whether a word that is a token becomes this token without merges.
    ignore_merges: bool,
    /// The default of `add_bos_token`.
    add_bos: bool,
}

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const RULES: [Rule; 12] = [
    Rule {
        names: &[
            "qwen2",
            "deepseek-r1-qwen",
            "megrez",
            "stablelm2",
            "hunyuan",
            "solar-open",
            "grok-2",
        ],
        regexes: &[
            r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        ignore_merges: false,
        add_bos: false,
    },
    Rule {
        names: &["qwen35"],
        regexes: &[
            r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        ignore_merges: false,
        add_bos: false,
    },
    Rule {
        names: &["gpt-4o", "llama4", "kanana2", "minimax-m2"],
        regexes: &[
            r"[^\r\n\p{L}\p{N}]?[\p{L}--[a-z]]*[\p{L}--[A-Z]]+(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?|[^\r\n\p{L}\p{N}]?[\p{L}--[a-z]]+[\p{L}--[A-Z]]*(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        ignore_merges: false,
        add_bos: false,
    },
    Rule {
        names: &["tekken"],
        regexes: &[
            r"[^\r\n\p{L}\p{N}]?[\p{L}--[a-z]]*[\p{L}--[A-Z]]+|[^\r\n\p{L}\p{N}]?[\p{L}--[a-z]]+[\p{L}--[A-Z]]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        ignore_merges: true,
        add_bos: true,
    },
    Rule {
        names: &[
            "llama-bpe",
            "llama3",
            "llama-v3",
            "falcon3",
            "falcon-h1",
            "pixtral",
            "midm-2.0",
            "lfm2",
        ],
        regexes: &[LLAMA3],
        ignore_merges: true,
        add_bos: true,
    },
    Rule {
        names: &["glm4", "glm5"],
        regexes: &[LLAMA3],
        ignore_merges: true,
        add_bos: false,
    },
    Rule {
        names: &["dbrx", "smaug-bpe", "chatglm-bpe"],
        regexes: &[LLAMA3],
        ignore_merges: false,
        add_bos: false,
    },
    Rule {
        names: &[
            "gpt-2",
            "phi-2",
            "mpt",
            "olmo",
            "jais",
            "trillion",
            "granite-docling",
            "exaone4",
        ],
        regexes: &[GPT2],
        ignore_merges: false,
        add_bos: false,
    },
    Rule {
        names: &[
            "starcoder",
            "refact",
            "command-r",
            "smollm",
            "codeshell",
            "exaone",
            "minerva-7b",
        ],
        regexes: &[r"\p{N}", GPT2],
        ignore_merges: false,
        add_bos: false,
    },
    Rule {
        names: &["deepseek-v3", "hunyuan-dense", "joyai-llm"],
        regexes: &[
            r"\p{N}{1,3}",
            r"[一-龥぀-ゟ゠-ヿ]+",
            r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##,
        ],
        ignore_merges: false,
        add_bos: false,
    },
    Rule {
        names: &["default"],
        regexes: &[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"],
        ignore_merges: false,
        add_bos: false,
    },
    Rule {
        names: &["bailingmoe", "bailingmoe2", "llada-moe"],
        regexes: &[
            r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        ],
        ignore_merges: false,
        add_bos: false,
    },
];

/// The compiled pre-tokenizer of a vocabulary.
pub(super) struct PreTokenizer {
    regexes: Vec<Regex>,
    pub(super) ignore_merges: bool,
    pub(super) add_bos: bool,
}

impl PreTokenizer {
    /// The pre-tokenizer `name` of `tokenizer.ggml.pre`.
    pub(super) fn new(name: &str) -> Result<PreTokenizer, Error> {
        let rule = RULES
            .iter()
            .find(|rule| rule.names.contains(&name))
            .ok_or_else(|| Error::PreTokenizer {
                found: name.to_owned(),
                supported: RULES
                    .each_ref()
                    .map(|rule| rule.names.join(", "))
                    .join(", "),
            })?;
        let compile =
            |regex: &&str| Regex::new(&pin_unicode(regex)).map_err(|error| Error::split(error, ""));
        Ok(PreTokenizer {
            regexes: rule.regexes.iter().map(compile).collect::<Result<_, _>>()?,
            ignore_merges: rule.ignore_merges,
            add_bos: rule.add_bos,
        })
    }

    /// The words of `text`, in order. Their concatenation is `text`.
    pub(super) fn split<'t>(&self, text: &'t str) -> Result<Vec<&'t str>, Error> {
        let mut words = vec![text];
        for regex in &self.regexes {
            let mut parts = Vec::with_capacity(words.len());
            for word in words {
                split_word(regex, word, &mut parts)?;
            }
            words = parts;
        }
        Ok(words)
    }
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
        for rule in &RULES {
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
