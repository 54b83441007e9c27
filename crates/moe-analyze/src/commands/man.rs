//! `man`: the manual pages on stdout, in roff.

use anyhow::Context as _;
use clap::Command;
use clap_mangen::Man;

use crate::exit_status::ExitStatus;
use crate::output;

/// Print the manual page, or that of a subcommand
///
/// To read it: moe-analyze man | man -l -. To install all, as moe-analyze.1, moe-analyze-record.1 and so on, print each.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The subcommand whose page is printed
    subcommand: Option<String>,
}

/// `command` is the program's.
pub fn run(args: Args, command: Command) -> anyhow::Result<ExitStatus> {
    // The page would name one for `help`.
    let mut command = command.disable_help_subcommand(true);
    command.build();
    let command = match args.subcommand {
        None => command,
        Some(name) => command
            .find_subcommand(&name)
            .with_context(|| {
                format!("there is no subcommand {name:?}; `moe-analyze --help` names all")
            })?
            .clone(),
    };
    let mut page = Vec::new();
    Man::new(command).render(&mut page)?;
    output::data_to_stdout(|stdout| stdout.write_all(&page))?;
    Ok(ExitStatus::Done)
}
