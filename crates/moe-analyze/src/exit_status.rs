//! Exit codes of subcommands.

use std::process::ExitCode;

/// Result of a subcommand that did not fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExitStatus {
    /// Done: exit 0.
    Done,
    /// Done, and a check found a problem: exit 1.
    Found,
}

impl From<ExitStatus> for ExitCode {
    fn from(status: ExitStatus) -> ExitCode {
        match status {
            ExitStatus::Done => ExitCode::SUCCESS,
            ExitStatus::Found => ExitCode::from(1),
        }
    }
}
