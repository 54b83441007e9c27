//! `moe-analyze`: traces of mixture-of-experts models in GGUF files, and what can be learnt from them.

mod bulk;
mod cli;
mod commands;
mod engine;
mod expert_usage;
mod files;
mod inputs;
mod interrupt;
mod output;
mod plot;
mod traces;
mod values;

use std::io::Write;
use std::process::ExitCode;

fn main() -> ExitCode {
    inputs::silence_decoders();
    let outcome = match cli::Cli::read() {
        Ok(Some(cli)) => cli.run(),
        Ok(None) => Ok(cli::ExitStatus::Done),
        Err(error) => Err(error),
    };
    match outcome.map_err(inputs::tell_damage) {
        Ok(status) => status.into(),
        Err(error) => {
            let _ = writeln!(
                std::io::stderr(),
                "moe-analyze: {}",
                output::one_line(&error)
            );
            ExitCode::from(2)
        }
    }
}
