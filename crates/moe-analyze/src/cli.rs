//! The command line: which subcommands there are, and what is common to them.

use std::io::Write;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::commands::{
    bench, completions, gguf_map, hotness, info, man, parquet, record, relayout, synth,
};

/// Offline trace analysis for mixture-of-experts models in GGUF files.
///
/// stdout carries data, stderr carries progress and messages. Exit codes: 0 done; 1 done, and a check found something; 2
/// could not be done.
#[derive(Debug, Parser)]
#[command(
    name = "moe-analyze",
    version,
    max_term_width = 100,
    propagate_version = true
)]
pub struct Cli {
    /// No progress and no remarks on stderr, only errors
    #[arg(long, global = true)]
    quiet: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Record(record::Args),
    GgufMap(gguf_map::Args),
    Relayout(relayout::Args),
    Synth(synth::Args),
    Parquet(parquet::Args),
    Hotness(hotness::Args),
    Info(info::Args),
    Bench(bench::Args),
    Completions(completions::Args),
    Man(man::Args),
}

/// What every subcommand is told beside its own arguments.
#[derive(Debug, Clone, Copy)]
pub struct Context {
    /// No progress and no remarks on stderr.
    pub quiet: bool,
}

impl Context {
    /// A remark for the person at the terminal: on stderr, unless `--quiet`.
    pub fn remark(&self, text: impl std::fmt::Display) {
        if !self.quiet {
            // A closed stderr is no reason to stop.
            let _ = writeln!(std::io::stderr(), "{text}");
        }
    }
}

/// How a subcommand ended that could be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExitStatus {
    /// Done: exit 0.
    Done,
    /// Done, and a check found something: exit 1.
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

impl Cli {
    /// Runs the subcommand.
    pub fn run(self) -> anyhow::Result<ExitStatus> {
        let ctx = Context { quiet: self.quiet };
        match self.command {
            Command::Record(args) => record::run(args, &ctx),
            Command::GgufMap(args) => gguf_map::run(args, &ctx),
            Command::Relayout(args) => relayout::run(args, &ctx),
            Command::Synth(args) => synth::run(args, &ctx),
            Command::Parquet(args) => parquet::run(args, &ctx),
            Command::Hotness(args) => hotness::run(args, &ctx),
            Command::Info(args) => info::run(args, &ctx),
            Command::Bench(args) => bench::run(args, &ctx),
            Command::Completions(args) => completions::run(args),
            Command::Man(args) => man::run(args),
        }
    }
}
