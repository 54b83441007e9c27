//! `man`: the manual pages on stdout, in roff.

use anyhow::Context as _;
use clap::Command;
use clap_mangen::Man;

use crate::exit_status::ExitStatus;
use crate::output;

/// Print the manual page of the program or of a subcommand, in roff
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  moe-analyze man | man -l -\n  moe-analyze man record > moe-analyze-record.1"
)]
pub struct Args {
    /// Subcommand whose manual page to print [default: the page of the program]
    subcommand: Option<String>,
}

/// Prints the page of `command`, the entire program, or of a subcommand.
pub fn run(args: Args, command: Command) -> anyhow::Result<ExitStatus> {
    // Otherwise the page refers to a page of `help`.
    let mut command = command.disable_help_subcommand(true);
    command.build();
    let command = match args.subcommand {
        None => command,
        Some(name) => command
            .find_subcommand(&name)
            .with_context(|| {
                format!("unknown subcommand {name:?}; `moe-analyze --help` lists the subcommands")
            })?
            .clone(),
    };
    let mut page = Vec::new();
    Man::new(command).render(&mut page)?;
    output::data_to_stdout(|stdout| stdout.write_all(&page))?;
    Ok(ExitStatus::Done)
}
