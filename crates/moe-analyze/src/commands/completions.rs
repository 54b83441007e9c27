//! `completions`: shell completions on stdout.

use clap::Command;
use clap_complete::Shell;

use crate::exit_status::ExitStatus;
use crate::output;

/// Print the completion script for a shell
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  moe-analyze completions bash > ~/.local/share/bash-completion/completions/moe-analyze"
)]
pub struct Args {
    /// Shell to print the script for
    shell: Shell,
}

/// Prints the script for `command`, the entire program.
pub fn run(args: Args, mut command: Command) -> anyhow::Result<ExitStatus> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "moe-analyze", &mut script);
    output::data_to_stdout(|stdout| stdout.write_all(&script))?;
    Ok(ExitStatus::Done)
}
