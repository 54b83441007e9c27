//! Special tokens: their roles, and splitting a text at them.
//!
//! Many files mark special tokens incorrectly, so llama.cpp also recognizes well-known texts. The rules here are the same,
//! because they determine whether `<|fim_prefix|>` in a prompt is one token or six.

use std::collections::{HashMap, HashSet};

/// The role of a special token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Start of a text.
    Bos,
    /// End of a text.
    Eos,
    /// End of a turn.
    Eot,
    /// End of a message.
    Eom,
    /// Fill in the middle: the text before the gap.
    FimPrefix,
    /// Fill in the middle: the text after the gap.
    FimSuffix,
    /// Fill in the middle: the gap.
    FimMiddle,
    /// Fill in the middle: padding.
    FimPad,
    /// Fill in the middle: name of the repository.
    FimRepository,
    /// Fill in the middle: name of a file.
    FimFile,
}

impl Role {
    pub(super) const ALL: [Role; 10] = [
        Role::Bos,
        Role::Eos,
        Role::Eot,
        Role::Eom,
        Role::FimPrefix,
        Role::FimSuffix,
        Role::FimMiddle,
        Role::FimPad,
        Role::FimRepository,
        Role::FimFile,
    ];

    /// The GGUF keys of the id. If a file has both of two keys, the second takes precedence.
    pub(super) fn keys(self) -> &'static [&'static str] {
        match self {
            Role::Bos => &["tokenizer.ggml.bos_token_id"],
            Role::Eos => &["tokenizer.ggml.eos_token_id"],
            Role::Eot => &["tokenizer.ggml.eot_token_id"],
            Role::Eom => &["tokenizer.ggml.eom_token_id"],
            Role::FimPrefix => &[
                "tokenizer.ggml.fim_pre_token_id",
                "tokenizer.ggml.prefix_token_id",
            ],
            Role::FimSuffix => &[
                "tokenizer.ggml.fim_suf_token_id",
                "tokenizer.ggml.suffix_token_id",
            ],
            Role::FimMiddle => &[
                "tokenizer.ggml.fim_mid_token_id",
                "tokenizer.ggml.middle_token_id",
            ],
            Role::FimPad => &["tokenizer.ggml.fim_pad_token_id"],
            Role::FimRepository => &["tokenizer.ggml.fim_rep_token_id"],
            Role::FimFile => &["tokenizer.ggml.fim_sep_token_id"],
        }
    }

    /// Texts that identify the token if the file does not define the role. The ends of turns and messages are in
    /// [`END_TEXTS`] instead.
    fn texts(self) -> &'static [&'static str] {
        match self {
            Role::Bos | Role::Eos | Role::Eot | Role::Eom => &[],
            Role::FimPrefix => &[
                "<|fim_prefix|>",
                "<fim-prefix>",
                "<fim_prefix>",
                "<｜fim▁begin｜>",
                "<PRE>",
                "▁<PRE>",
                "<|code_prefix|>",
                "<|prefix|>",
            ],
            Role::FimSuffix => &[
                "<|fim_suffix|>",
                "<fim-suffix>",
                "<fim_suffix>",
                "<｜fim▁hole｜>",
                "<SUF>",
                "▁<SUF>",
                "<|code_suffix|>",
                "<|suffix|>",
            ],
            Role::FimMiddle => &[
                "<|fim_middle|>",
                "<fim-middle>",
                "<fim_middle>",
                "<｜fim▁end｜>",
                "<MID>",
                "▁<MID>",
                "<|code_middle|>",
                "<|middle|>",
            ],
            Role::FimPad => &["<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"],
            Role::FimRepository => &[
                "<|fim_repo|>",
                "<|repo_name|>",
                "<fim-repo>",
                "<REPO>",
                "<reponame>",
            ],
            Role::FimFile => &["<|file_sep|>"],
        }
    }

    /// Whether the token ends generation.
    fn ends_generation(self) -> bool {
        matches!(
            self,
            Role::Eos | Role::Eot | Role::Eom | Role::FimPad | Role::FimRepository | Role::FimFile
        )
    }
}

/// Texts of tokens that end generation in every vocabulary.
const END_TEXTS: [&str; 22] = [
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
];

/// Texts of tokens of the harmony format, which are user-defined for any type in the file.
const HARMONY_TEXTS: [&str; 4] = ["<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"];

/// How a token is handled in encoding and decoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A piece of text.
    Normal,
    /// Control or unknown: recognized in a text only with `parse_special`.
    Special,
    /// Always recognized in a text, before it is split into words.
    UserDefined,
    /// One byte with a text like `<0x2A>`.
    Byte,
    /// Decodes to nothing.
    Unused,
}

impl Kind {
    /// The kind of GGUF's token type.
    fn from_type(number: i64) -> Kind {
        match number {
            1 => Kind::Normal,
            2 | 3 => Kind::Special,
            4 => Kind::UserDefined,
            6 => Kind::Byte,
            _ => Kind::Unused,
        }
    }
}

/// The kinds of all tokens, and the tokens that end generation.
///
/// `types` are GGUF's token types, one per token or empty. `id_of` returns the token with a text.
pub(super) fn classify(
    n_vocab: usize,
    types: &[i64],
    roles: &HashMap<Role, u32>,
    id_of: impl Fn(&str) -> Option<u32>,
) -> (Vec<Kind>, HashSet<u32>) {
    let mut kinds: Vec<Kind> = types
        .iter()
        .map(|&number| Kind::from_type(number))
        .collect();
    kinds.resize(n_vocab, Kind::Normal);
    let mut set_kind = |id: u32, kind| {
        if let Some(slot) = kinds.get_mut(id as usize) {
            *slot = kind;
        }
    };
    let mut ends = HashSet::new();
    for role in Role::ALL {
        let found = roles.get(&role).copied().or_else(|| {
            let id = role.texts().iter().find_map(|text| id_of(text))?;
            set_kind(id, Kind::Special);
            Some(id)
        });
        ends.extend(found.filter(|_| role.ends_generation()));
    }
    for id in END_TEXTS.iter().filter_map(|text| id_of(text)) {
        set_kind(id, Kind::Special);
        ends.insert(id);
    }
    for id in HARMONY_TEXTS.iter().filter_map(|text| id_of(text)) {
        set_kind(id, Kind::UserDefined);
    }
    // In the formats of harmony and solar-open, `<|end|>` ends a message but not generation.
    let stops = |text| id_of(text).is_some_and(|id| ends.contains(&id));
    let harmony = stops("<|return|>") && (stops("<|call|>") || stops("<|calls|>"));
    let solar = stops("<|flush|>") && (stops("<|call|>") || stops("<|calls|>"));
    if let Some(id) = id_of("<|end|>").filter(|_| harmony || solar) {
        ends.remove(&id);
        set_kind(id, Kind::UserDefined);
    }
    // In Gemma 4 and PLaMo, `</s>` is part of the text.
    let stops = |text| id_of(text).is_some_and(|id| ends.contains(&id));
    let has_text = stops("<|tool_response>") || stops("<|plamo:eos|>");
    if let Some(id) = id_of("</s>").filter(|_| has_text) {
        ends.remove(&id);
        set_kind(id, Kind::Normal);
    }
    (kinds, ends)
}

/// A part of a text: a special token, or text between such tokens.
#[derive(Debug, PartialEq)]
pub(super) enum Fragment<'t> {
    Token(u32),
    Text(&'t str),
}

/// Texts of special tokens after which whitespace remains in models that remove it after others.
pub(super) const KEEP_AFTER: [&str; 3] = ["<unk>", "<s>", "<|endoftext|>"];

/// Splits `text` at the tokens of `specials`: id, text, and whether ASCII whitespace after the token is removed. Each token is
/// searched for in the complete text before the next.
pub(super) fn partition<'t, 's>(
    text: &'t str,
    specials: impl Iterator<Item = (u32, &'s str, bool)>,
) -> Vec<Fragment<'t>> {
    let mut fragments = Vec::new();
    fragments.extend((!text.is_empty()).then_some(Fragment::Text(text)));
    let is_space = |c: char| matches!(c, '\t'..='\r' | ' ');
    for (id, special, strip) in specials.filter(|(_, special, _)| text.contains(special)) {
        let mut parts = Vec::with_capacity(fragments.len() + 2);
        for fragment in fragments {
            let Fragment::Text(mut rest) = fragment else {
                parts.push(fragment);
                continue;
            };
            while let Some((before, after)) = rest.split_once(special) {
                if !before.is_empty() {
                    parts.push(Fragment::Text(before));
                }
                parts.push(Fragment::Token(id));
                rest = if strip {
                    after.trim_start_matches(is_space)
                } else {
                    after
                };
            }
            if !rest.is_empty() {
                parts.push(Fragment::Text(rest));
            }
        }
        fragments = parts;
    }
    fragments
}
