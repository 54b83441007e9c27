//! What every subcommand gets in addition to its own arguments.

use crate::output::message;

/// The options that all subcommands have.
#[derive(Debug, Clone, Copy)]
pub struct Context {
    /// No progress and no remarks on stderr.
    pub quiet: bool,
}

impl Context {
    /// A remark for the person at the terminal: on stderr, unless `--quiet`.
    pub fn remark(&self, text: impl std::fmt::Display) {
        if !self.quiet {
            message::print(text);
        }
    }
}
