//! `moe-analyze`: traces of mixture-of-experts models in GGUF files, and what can be learnt from them.

mod advice;
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

use std::process::ExitCode;

use output::message;

fn main() -> ExitCode {
    let outcome = match cli::Cli::read() {
        Ok(Some(cli)) => cli.run(),
        Ok(None) => Ok(cli::ExitStatus::Done),
        Err(error) => Err(error),
    };
    match outcome {
        Ok(status) => status.into(),
        Err(error) => {
            let text = output::one_line(&error);
            match advice::advice(&error) {
                Some(advice) => message::print(format_args!("moe-analyze: {text}; {advice}")),
                None => message::print(format_args!("moe-analyze: {text}")),
            }
            ExitCode::from(2)
        }
    }
}
