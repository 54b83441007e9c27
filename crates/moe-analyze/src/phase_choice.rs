//! The values of `--phase`.

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use moe_analysis::Phases;
use moe_files::text::counted;
use moe_trace::Phase;

/// The tokens of one phase, or of both phases.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum PhaseChoice {
    /// Prompt and generated tokens
    All,
    /// Prompt tokens
    Prompt,
    /// Generated tokens
    #[value(alias = "decode")]
    Generate,
}

impl PhaseChoice {
    pub fn phases(self) -> Phases {
        match self {
            PhaseChoice::All => Phases::All,
            PhaseChoice::Prompt => Phases::Only(Phase::Prompt),
            PhaseChoice::Generate => Phases::Only(Phase::Generate),
        }
    }

    /// Describes `n` tokens of the phase.
    pub fn tokens(self, n: u64) -> String {
        counted(n, &format!("{} token", self.describe()))
    }

    pub fn describe(self) -> &'static str {
        match self {
            PhaseChoice::All => "prompt and generated",
            PhaseChoice::Prompt => "prompt",
            PhaseChoice::Generate => "generated",
        }
    }
}

/// Parser for a single phase.
pub fn one_phase() -> impl TypedValueParser<Value = Phase> {
    let names = [
        PossibleValue::new("prompt"),
        PossibleValue::new("generate").alias("decode"),
    ];
    PossibleValuesParser::new(names).map(|name| match name.as_str() {
        "prompt" => Phase::Prompt,
        _ => Phase::Generate,
    })
}
