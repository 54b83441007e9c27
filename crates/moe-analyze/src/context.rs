//! The context that every subcommand gets in addition to its arguments.

use crate::output::message;

/// Options of all subcommands.
#[derive(Debug, Clone, Copy)]
pub struct Context {
    /// Whether to print only errors on stderr.
    pub quiet: bool,
}

impl Context {
    /// Prints a note or warning on stderr, unless `--quiet` is set.
    pub fn note(&self, text: impl std::fmt::Display) {
        if !self.quiet {
            message::print(text);
        }
    }
}
