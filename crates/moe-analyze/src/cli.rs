//! The command line: the list of subcommands, and checks that apply to all of them.

use std::any::TypeId;
use std::error::Error as _;
use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow};
use clap::builder::Resettable;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{ArgMatches, CommandFactory, FromArgMatches, Parser, Subcommand};

#[cfg(feature = "serve")]
use crate::commands::serve;
#[cfg(feature = "sql")]
use crate::commands::sql;
use crate::commands::{
    accesses, bench, buffers, completions, convert, diff, gguf_map, graph, hotness, info, man,
    overlap, parquet, plan, record, relayout, replay, report, simulate, stability, synth,
};
use crate::context::Context;
use crate::engine::lora::LoraArg;
use crate::exit_status::ExitStatus;
use crate::files::{self, OutputPath};
use crate::option_values;

/// Offline trace analysis for mixture-of-experts models in GGUF files.
///
/// Record which experts each token uses, or read traces of other tools, and analyze hot experts, expert caches, file access and
/// transfers. Data goes to stdout; progress, notes and errors go to stderr.
#[derive(Debug, Parser)]
#[command(
    name = "moe-analyze",
    version,
    max_term_width = 100,
    propagate_version = true,
    after_help = "Exit codes:\n  \
        0  success\n  \
        1  a check found a problem or a difference\n  \
        2  error or interruption\n\n\
        Examples:\n  \
        moe-analyze record --out runs/first\n  \
        moe-analyze hotness runs/first"
)]
pub struct Cli {
    /// Print only errors on stderr: no progress, notes or warnings
    #[arg(long, global = true)]
    quiet: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Record(record::Args),
    Replay(replay::Args),
    GgufMap(gguf_map::Args),
    Relayout(relayout::Args),
    Synth(synth::Args),
    Parquet(parquet::Args),
    Convert(convert::Args),
    Hotness(hotness::Args),
    Stability(stability::Args),
    #[cfg(feature = "sql")]
    Sql(sql::Args),
    Plan(plan::Args),
    Simulate(simulate::Args),
    Diff(diff::Args),
    Accesses(accesses::Args),
    Overlap(overlap::Args),
    Graph(graph::Args),
    Buffers(buffers::Args),
    Report(report::Args),
    Info(info::Args),
    Bench(bench::Args),
    #[cfg(feature = "serve")]
    Serve(serve::Args),
    Completions(completions::Args),
    Man(man::Args),
}

/// llama.cpp's short names. clap would read each letter after the dash as an option.
const LLAMA_CPP: [(&str, &str); 8] = [
    ("-ngl", "--n-gpu-layers"),
    ("-cmoe", "--cpu-moe"),
    ("-ncmoe", "--n-cpu-moe"),
    ("-ot", "--override-tensor"),
    ("-ts", "--tensor-split"),
    ("-ctk", "--cache-type-k"),
    ("-ctv", "--cache-type-v"),
    ("-np", "--parallel"),
];

/// Replaces llama.cpp's short names with the long names. Arguments after `--` are not options.
fn expand_short_names(args: impl Iterator<Item = OsString>) -> impl Iterator<Item = OsString> {
    let mut are_options = true;
    args.map(move |arg| {
        are_options &= arg != "--";
        let known = LLAMA_CPP
            .iter()
            .find(|(short, _)| are_options && arg == *short);
        known.map_or(arg, |(_, long)| long.into())
    })
}

impl Cli {
    /// Parses the command line. Returns `None` after printing the help or the version.
    pub fn read() -> anyhow::Result<Option<Cli>> {
        // The argument after an option that takes a value is the value. So `-n -1` is a number that is too small.
        let mut command = Cli::command().mut_subcommands(|subcommand| {
            subcommand.mut_args(|arg| {
                let takes_value = !arg.is_positional() && arg.get_action().takes_values();
                let is_list = takes_value && arg.get_value_delimiter().is_some();
                let arg = arg.allow_negative_numbers(takes_value);
                // A list such as `-1,2` is not a number.
                let arg = if is_list {
                    arg.allow_hyphen_values(true)
                } else {
                    arg
                };
                // An empty variable is treated as unset.
                let value = arg.get_env().and_then(std::env::var_os);
                if value.is_some_and(|value| value.is_empty()) {
                    arg.env(Resettable::Reset)
                } else {
                    arg
                }
            })
        });
        let parsed = command
            .try_get_matches_from_mut(expand_short_names(std::env::args_os()))
            .and_then(|matches| Ok((Cli::from_arg_matches(&matches)?, matches)))
            .map_err(|error| error.format(&mut command));
        match parsed {
            Ok((cli, matches)) => {
                check_paths(&command, &matches)?;
                Ok(Some(cli))
            }
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::DisplayHelp | ErrorKind::DisplayVersion
                ) =>
            {
                match error.print().and_then(|()| std::io::stdout().flush()) {
                    Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(None),
                    printed => printed.context("writing to stdout").map(|()| None),
                }
            }
            Err(error) => {
                let advice = match only_command_with(&command, &error) {
                    Some(other) => format!("`{other}` has this option"),
                    None => "see --help".into(),
                };
                Err(anyhow!("{}; {advice}", usage_error(&error)))
            }
        }
    }

    /// Runs the subcommand.
    pub fn run(self) -> anyhow::Result<ExitStatus> {
        let ctx = Context { quiet: self.quiet };
        match self.command {
            Command::Record(args) => record::run(args, &ctx),
            Command::Replay(args) => replay::run(args, &ctx),
            Command::GgufMap(args) => gguf_map::run(args, &ctx),
            Command::Relayout(args) => relayout::run(args, &ctx),
            Command::Synth(args) => synth::run(args, &ctx),
            Command::Parquet(args) => parquet::run(args, &ctx),
            Command::Convert(args) => convert::run(args, &ctx),
            Command::Hotness(args) => hotness::run(args, &ctx),
            Command::Stability(args) => stability::run(args, &ctx),
            #[cfg(feature = "sql")]
            Command::Sql(args) => sql::run(args, &ctx),
            Command::Plan(args) => plan::run(args, &ctx),
            Command::Simulate(args) => simulate::run(args, &ctx),
            Command::Diff(args) => diff::run(args, &ctx),
            Command::Accesses(args) => accesses::run(args, &ctx),
            Command::Overlap(args) => overlap::run(args, &ctx),
            Command::Graph(args) => graph::run(args, &ctx),
            Command::Buffers(args) => buffers::run(args, &ctx),
            Command::Report(args) => report::run(args, &ctx),
            Command::Info(args) => info::run(args, &ctx),
            Command::Bench(args) => bench::run(args, &ctx),
            #[cfg(feature = "serve")]
            Command::Serve(args) => serve::run(args, &ctx),
            Command::Completions(args) => completions::run(args, Cli::command()),
            Command::Man(args) => man::run(args, Cli::command()),
        }
    }
}

/// Rejects outputs that would replace an input or another output.
///
/// Arguments of type [`OutputPath`] are outputs; those of types [`PathBuf`] and [`LoraArg`] are inputs.
fn check_paths(command: &clap::Command, matches: &ArgMatches) -> anyhow::Result<()> {
    let Some((name, matches)) = matches.subcommand() else {
        return Ok(());
    };
    let subcommand = command.find_subcommand(name);
    let args = || {
        subcommand
            .into_iter()
            .flat_map(clap::Command::get_arguments)
    };
    let files = values_of::<PathBuf>(args(), matches).map(PathBuf::as_path);
    let adapters = values_of::<LoraArg>(args(), matches).map(LoraArg::path);
    let inputs: Vec<&Path> = files.chain(adapters).collect();
    let outputs: Vec<&OutputPath> = values_of::<OutputPath>(args(), matches).collect();
    files::check_command_line(&inputs, &outputs)
}

/// Returns the values of all arguments of one type.
fn values_of<'m, T: Clone + Send + Sync + 'static>(
    args: impl Iterator<Item = &'m clap::Arg>,
    matches: &'m ArgMatches,
) -> impl Iterator<Item = &'m T> {
    args.filter(|arg| arg.get_value_parser().type_id() == TypeId::of::<T>())
        .filter_map(|arg| matches.get_many::<T>(arg.get_id().as_str()))
        .flatten()
}

/// Returns the first paragraph of clap's message, which ends at an empty line, on one line.
fn usage_error(error: &clap::Error) -> String {
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        return "a subcommand is missing".into();
    }
    let text = error.to_string();
    let paragraph: Vec<&str> = text
        .lines()
        .map(str::trim)
        .take_while(|line| !line.is_empty())
        .collect();
    let line = paragraph.join(" ");
    let line = line.strip_prefix("error: ").unwrap_or(&line);
    let number = error.source().and_then(|number| {
        let expected = option_values::expected_number(number)?;
        Some(format!(
            "{}{expected}",
            line.strip_suffix(&number.to_string())?
        ))
    });
    number.unwrap_or_else(|| line.to_owned())
}

/// Returns the only subcommand that has the unknown option, if there is exactly one.
fn only_command_with<'c>(command: &'c clap::Command, error: &clap::Error) -> Option<&'c str> {
    if error.kind() != ErrorKind::UnknownArgument {
        return None;
    }
    let Some(ContextValue::String(option)) = error.get(ContextKind::InvalidArg) else {
        return None;
    };
    let long = option.strip_prefix("--")?;
    let has_option = |command: &&clap::Command| {
        let mut args = command.get_arguments();
        args.any(|arg| arg.get_long() == Some(long))
    };
    let mut commands = command.get_subcommands().filter(has_option);
    let first = commands.next()?;
    commands.next().is_none().then(|| first.get_name())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_to_replace_an_adapter() {
        let dir = tempfile::tempdir().unwrap();
        let adapter = dir.path().join("a.json");
        std::fs::write(&adapter, "adapter").unwrap();
        let adapter = adapter.to_str().unwrap();
        for lora in [adapter.to_owned(), format!("{adapter}:2")] {
            let command = Cli::command();
            let args = ["moe-analyze", "record", "--lora", &lora];
            let output = ["--expert-trace-output", adapter, "--force"];
            let required = ["--model", "m.gguf", "--prompt", "hi", "--out", "run"];
            let args = args.into_iter().chain(output).chain(required);
            let matches = command.clone().try_get_matches_from(args).unwrap();
            let error = check_paths(&command, &matches).unwrap_err();
            assert!(error.to_string().contains("is an input"), "{error}");
        }
    }

    /// Every path argument is an input or an output. This is the list of outputs.
    #[test]
    fn lists_all_outputs() {
        let command = Cli::command();
        let mut outputs = Vec::new();
        for subcommand in command.get_subcommands() {
            for arg in subcommand.get_arguments() {
                if arg.get_value_parser().type_id() == TypeId::of::<OutputPath>() {
                    outputs.push(format!("{} {}", subcommand.get_name(), arg.get_id()));
                }
            }
        }
        outputs.sort();
        assert_eq!(
            outputs,
            [
                "accesses out",
                "buffers out",
                "buffers plot",
                "convert out",
                "gguf-map manifest_out",
                "gguf-map out",
                "graph out",
                "hotness matrix",
                "hotness out",
                "hotness plot",
                "overlap plot",
                "parquet dataset",
                "parquet out",
                "plan out",
                "record expert_trace_output",
                "record out",
                "relayout out",
                "replay out",
                "report out",
                #[cfg(feature = "serve")]
                "serve record",
                "simulate plot",
                #[cfg(feature = "sql")]
                "sql out",
                "stability plot",
                "synth out",
            ]
        );
    }
}
