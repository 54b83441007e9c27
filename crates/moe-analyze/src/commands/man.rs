//! `man`: the manual page on stdout, in roff.

use clap::CommandFactory;

use crate::cli::{Cli, ExitStatus};
use crate::output;

/// Print the manual page
///
/// To read it: moe-analyze man | man -l -
#[derive(Debug, clap::Args)]
pub struct Args {}

pub fn run(_: Args) -> anyhow::Result<ExitStatus> {
    let mut command = Cli::command();
    command.build();
    let mut page = Vec::new();
    clap_mangen::Man::new(command.clone()).render(&mut page)?;
    for subcommand in command
        .get_subcommands()
        .filter(|command| command.get_name() != "help")
    {
        let man = clap_mangen::Man::new(subcommand.clone());
        man.render_name_section(&mut page)?;
        man.render_synopsis_section(&mut page)?;
        man.render_description_section(&mut page)?;
        man.render_options_section(&mut page)?;
    }
    output::to_stdout(|stdout| stdout.write_all(&page))?;
    Ok(ExitStatus::Done)
}
