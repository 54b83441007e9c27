//! `completions`: shell completions on stdout.

use clap::Command;
use clap_complete::Shell;

use crate::exit_status::ExitStatus;
use crate::output;

/// Print completions for a shell
///
/// For bash: moe-analyze completions bash > ~/.local/share/bash-completion/completions/moe-analyze
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The shell to complete in
    shell: Shell,
}

/// `command` is the program's.
pub fn run(args: Args, mut command: Command) -> anyhow::Result<ExitStatus> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "moe-analyze", &mut script);
    output::data_to_stdout(|stdout| stdout.write_all(&script))?;
    Ok(ExitStatus::Done)
}
