//! `completions`: shell completions on stdout.

use std::io::Write;

use clap::CommandFactory;
use clap_complete::Shell;

use crate::cli::{Cli, ExitStatus};

/// Print completions for a shell
///
/// For bash: moe-analyze completions bash > ~/.local/share/bash-completion/completions/moe-analyze
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The shell to complete in
    shell: Shell,
}

pub fn run(args: Args) -> anyhow::Result<ExitStatus> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "moe-analyze", &mut script);
    std::io::stdout().write_all(&script)?;
    Ok(ExitStatus::Done)
}
