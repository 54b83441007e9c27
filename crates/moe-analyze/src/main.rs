//! `moe-analyze`: records and analyzes traces of mixture-of-experts models in GGUF files.

#![forbid(unsafe_code)]

mod advice;
mod chat;
mod cli;
mod commands;
mod context;
mod counting;
mod engine;
mod env_option;
mod exit_status;
mod expert_usage;
mod experts;
mod files;
mod inputs;
mod interrupt;
mod json_input;
mod lane_budget;
mod large_output;
mod layout;
mod learn_files;
mod model;
mod model_memory;
mod op_table;
mod option_values;
mod output;
mod phase_choice;
mod plan_file;
mod plan_warnings;
// Without `plot/render.rs`, figures are never read.
#[cfg_attr(not(feature = "plot"), allow(dead_code))]
mod plot;
mod progress;
mod recording;
mod trace_mode;
mod traces;

use std::process::ExitCode;

use output::message;

fn main() -> ExitCode {
    let outcome = interrupt::install().and_then(|()| match cli::Cli::read()? {
        Some(cli) => cli.run(),
        None => Ok(exit_status::ExitStatus::Done),
    });
    // If a mapped input changed while it was read, other errors are consequences.
    match moe_files::check_inputs().map_err(Into::into).and(outcome) {
        Ok(status) => status.into(),
        Err(error) => {
            let text = output::one_line(&error);
            // Errors of libraries can contain the same advice.
            match advice::advice(&error).filter(|advice| !text.contains(*advice)) {
                Some(advice) if advice.starts_with("or ") => {
                    message::print(format_args!("moe-analyze: {text}, {advice}"));
                }
                Some(advice) => message::print(format_args!("moe-analyze: {text}; {advice}")),
                None => message::print(format_args!("moe-analyze: {text}")),
            }
            ExitCode::from(2)
        }
    }
}
