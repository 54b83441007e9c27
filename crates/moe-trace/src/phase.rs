//! The phases: prompt and generation.

use serde::{Deserialize, Serialize};

use crate::record::{PHASE_GENERATE, PHASE_PROMPT};

/// The phase of a token. An unknown phase is `None` of `Option<Phase>`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "u8", try_from = "u8")]
pub enum Phase {
    /// A token of the prompt.
    Prompt,
    /// A generated token, evaluated to predict the next one.
    Generate,
}

/// A number that is not a phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("phase {0} is out of range (0 is prompt, 1 is generate)")]
pub struct UnknownPhase(pub u8);

impl Phase {
    /// Both phases, in the order of their numbers.
    pub const ALL: [Self; 2] = [Self::Prompt, Self::Generate];

    /// The number in records.
    pub const fn number(self) -> u8 {
        match self {
            Self::Prompt => PHASE_PROMPT,
            Self::Generate => PHASE_GENERATE,
        }
    }

    /// The phase with this number in records.
    pub const fn from_number(number: u8) -> Option<Self> {
        match number {
            PHASE_PROMPT => Some(Self::Prompt),
            PHASE_GENERATE => Some(Self::Generate),
            _ => None,
        }
    }

    /// The name in tables and graphs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Prompt => "PROMPT",
            Self::Generate => "GENERATE",
        }
    }

    /// The phase with this name in tables.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|phase| phase.name() == name)
    }
}

impl From<Phase> for u8 {
    fn from(phase: Phase) -> Self {
        phase.number()
    }
}

impl TryFrom<u8> for Phase {
    type Error = UnknownPhase;

    fn try_from(number: u8) -> Result<Self, UnknownPhase> {
        Self::from_number(number).ok_or(UnknownPhase(number))
    }
}
