//! What `record` tells while it runs and at its end.

use std::io::{self, Write};
use std::path::Path;
use std::time::Duration;

use moe_executor::Model;
use moe_executor::generate::{Generated, Stop};
use moe_trace::manifest::Tokens;
use moe_trace::record::RECORD_SIZE;

use super::prompts::Prompt;
use crate::output::human_bytes;

/// Shows the generated text of a single sequence as it comes.
pub struct Echo<'a> {
    model: Option<&'a Model<'a>>,
    wrote: bool,
}

impl<'a> Echo<'a> {
    /// Shows nothing where there are several sequences.
    pub fn new(prompts: &[Prompt], model: &'a Model<'a>) -> Echo<'a> {
        Echo {
            model: (prompts.len() == 1).then_some(model),
            wrote: false,
        }
    }

    /// One more token.
    pub fn token(&mut self, token: u32) {
        if let Some(model) = self.model {
            // A reader who has gone away does not end the recording.
            let mut stdout = io::stdout().lock();
            let _ = stdout.write_all(model.tokenizer().piece(token));
            let _ = stdout.flush();
            self.wrote = true;
        }
    }

    /// The end of the sequence.
    pub fn end(&self) {
        if self.wrote {
            let _ = io::stdout().lock().write_all(b"\n");
        }
    }
}

/// What all sequences came to.
#[derive(Default)]
pub struct Totals {
    /// Tokens evaluated.
    pub tokens: Tokens,
    time: Duration,
    /// Why the last sequence ended.
    pub stop: Option<Stop>,
    contexts_full: usize,
}

impl Totals {
    /// One more sequence.
    pub fn add(&mut self, generated: Generated, time: Duration) {
        self.tokens.prompt += generated.n_prompt as u64;
        self.tokens.generated += generated.n_generated as u64;
        self.tokens.sequences += 1;
        self.time += time;
        self.stop = Some(generated.stop);
        self.contexts_full += usize::from(generated.stop == Stop::ContextFull);
    }

    /// Whether no further sequence is to be run.
    pub fn ended_early(&self) -> bool {
        matches!(self.stop, Some(Stop::Interrupted | Stop::TraceFull))
    }

    /// What came of the run, for the person at the terminal; `records` is absent where nothing was recorded.
    pub fn summary(&self, records: Option<u64>, out: &Path) -> String {
        let Tokens {
            prompt,
            generated,
            sequences,
        } = self.tokens;
        let n = prompt + generated;
        let mut text = format!(
            "{prompt} prompt and {generated} generated tokens in {sequences} sequence{}, {:.0} tokens/s",
            if sequences == 1 { "" } else { "s" },
            n as f64 / self.time.as_secs_f64().max(1e-9),
        );
        if let Some(records) = records {
            let size = human_bytes(records * RECORD_SIZE as u64);
            text += &format!("; {records} records, {size}, in {}", out.display());
        }
        if self.contexts_full > 0 {
            text += &format!(
                "\nthe context was full before all tokens were generated, {} times",
                self.contexts_full
            );
        }
        if self.stop == Some(Stop::TraceFull) {
            text += "\nstopped at --max-trace-mib; the run is whole up to there";
        }
        text
    }
}

/// What the manifest says of a run that ended before its time.
pub fn reason(stop: Stop) -> Option<&'static str> {
    match stop {
        Stop::Interrupted => Some("interrupted"),
        Stop::TraceFull => Some("trace limit reached"),
        Stop::Length | Stop::EndOfGeneration | Stop::ContextFull => None,
    }
}
