//! The table of pre-tokenizers.
//!
//! The names and expressions are those of llama.cpp (`llama-vocab.cpp` and `unicode.cpp` in `src/`), which differ from the
//! original ones in places: for example, the upper and lower case of gpt-4o cover ASCII only.

/// The definition of a pre-tokenizer.
pub(super) struct Rule {
    /// Values of `tokenizer.ggml.pre`.
    pub(super) names: &'static [&'static str],
    /// Whether runs of digits are first split into groups of three from the right. Text before a run is part of the same word
    /// as the run's first group, as in llama.cpp.
    pub(super) groups_digits: bool,
    /// Each expression splits the words of the previous one. Matches and the text between them are words.
    pub(super) regexes: &'static [&'static str],
    /// Whether a word that is a token becomes this token without merges.
    pub(super) ignore_merges: bool,
    /// The default of `add_bos_token`.
    pub(super) add_bos: bool,
    /// What the merges are made of.
    pub(super) alphabet: Alphabet,
}

/// What the tokens and merges of a vocabulary are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Alphabet {
    /// Bytes, each as a character of GPT-2's alphabet.
    Bytes,
    /// Characters, with ▁ for a space. A part without a token is encoded as byte tokens (`<0x2A>`), and a run of line feeds that
    /// is a token becomes this token without merges. Texts always start with BOS.
    Characters,
}

/// A rule with default values, for struct update syntax.
const RULE: Rule = Rule {
    names: &[],
    groups_digits: false,
    regexes: &[],
    ignore_merges: false,
    add_bos: false,
    alphabet: Alphabet::Bytes,
};

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The last expression of `deepseek-v3`: words without numbers.
const DEEPSEEK3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;
/// Han, kana and Hangul, and other characters in the same ranges. llama.cpp replaces other whitespace than that of ASCII before
/// it applies such an expression.
const CJK: &str = r"[[一-龥ࠀ-一가-퟿]--[\s]]+";
/// Runs of line feeds, and the text between them.
const LINES: &str = r"[^\n]+|\n+";

pub(super) static RULES: &[Rule] = &[
    Rule {
        names: &[
            "qwen2",
            "deepseek-r1-qwen",
            "megrez",
            "stablelm2",
            "hunyuan",
            "solar-open",
            "grok-2",
            "kormo",
            "f2llmv2",
        ],
        regexes: &[QWEN2],
        ..RULE
    },
    Rule {
        names: &["qwen35"],
        regexes: &[
            r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        ..RULE
    },
    Rule {
        names: &["gpt-4o", "llama4", "kanana2", "minimax-m2", "talkie"],
        regexes: &[
            r"[^\r\n\p{L}\p{N}]?[\p{L}--[a-z]]*[\p{L}--[A-Z]]+(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?|[^\r\n\p{L}\p{N}]?[\p{L}--[a-z]]+[\p{L}--[A-Z]]*(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        ..RULE
    },
    Rule {
        names: &["tekken"],
        regexes: &[
            r"[^\r\n\p{L}\p{N}]?[\p{L}--[a-z]]*[\p{L}--[A-Z]]+|[^\r\n\p{L}\p{N}]?[\p{L}--[a-z]]+[\p{L}--[A-Z]]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        ignore_merges: true,
        add_bos: true,
        ..RULE
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
        ..RULE
    },
    Rule {
        names: &["glm4", "glm5"],
        regexes: &[LLAMA3],
        ignore_merges: true,
        ..RULE
    },
    Rule {
        names: &["dbrx", "smaug-bpe", "chatglm-bpe"],
        regexes: &[LLAMA3],
        ..RULE
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
            "mellum",
            "gigachat",
            "a.x-4.0",
        ],
        regexes: &[GPT2],
        ..RULE
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
            "mellum2",
        ],
        regexes: &[r"\p{N}", GPT2],
        ..RULE
    },
    Rule {
        names: &["deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"],
        regexes: &[r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK3],
        ..RULE
    },
    Rule {
        names: &["deepseek-llm"],
        regexes: &[
            r"[\r\n]",
            r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+",
            r"\s?[!-/:-~！-／：-～‘-‟、-。]+",
            r"\s+$",
            CJK,
            r"\p{N}+",
        ],
        ..RULE
    },
    Rule {
        names: &["deepseek-coder"],
        regexes: &[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK, r"\p{N}"],
        ..RULE
    },
    Rule {
        names: &["default"],
        regexes: &[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"],
        ..RULE
    },
    Rule {
        names: &["bailingmoe", "bailingmoe2", "llada-moe"],
        regexes: &[
            r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        ],
        ..RULE
    },
    Rule {
        names: &["kimi-k2"],
        regexes: &[
            r"[\u{3400}-\u{4DBF}\u{4E00}-\u{9FFF}\u{F900}-\u{FAFF}\u{20000}-\u{2A6DF}\u{2A700}-\u{2EBEF}\u{2F800}-\u{2FA1F}]+|[^\r\n\p{L}\p{N}]?[\p{L}--[\u{3400}-\u{4DBF}\u{4E00}-\u{9FFF}\u{F900}-\u{FAFF}\u{20000}-\u{2A6DF}\u{2A700}-\u{2EBEF}\u{2F800}-\u{2FA1F}]]+(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        ..RULE
    },
    Rule {
        names: &["exaone-moe"],
        regexes: &[
            r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]|[^\r\n\p{L}\p{N}]?\p{L}\p{M}*(?: ?\p{L}\p{M}*)*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        ],
        ..RULE
    },
    Rule {
        names: &["afmoe"],
        groups_digits: true,
        regexes: &[
            r"[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+",
            DEEPSEEK3,
        ],
        ..RULE
    },
    Rule {
        names: &["cohere2moe", "tiny_aya"],
        groups_digits: true,
        regexes: &[
            r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        ..RULE
    },
    Rule {
        names: &["youtu"],
        regexes: &[
            r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
            r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        ignore_merges: true,
        ..RULE
    },
    Rule {
        names: &["laguna"],
        regexes: &[LINES, QWEN2],
        ..RULE
    },
    Rule {
        names: &["gemma4"],
        regexes: &[LINES],
        add_bos: true,
        alphabet: Alphabet::Characters,
        ..RULE
    },
];
