//! Totals over the sequences of a recording, and its summary.

use std::path::Path;
use std::time::Duration;

use moe_engine::{Generated, Stop};
use moe_files::text::counted;
use moe_trace::manifest::{Sequence, Tokens};
use moe_trace::record::RECORD_SIZE;

use crate::output::{human_bytes, message};

/// Totals over all sequences.
#[derive(Default)]
pub struct Totals {
    /// Tokens evaluated.
    pub tokens: Tokens,
    prompt_time: Duration,
    generation_time: Duration,
    /// Why the last sequence ended.
    pub stop: Option<Stop>,
    /// The sequences that were run.
    pub sequences: Vec<Sequence>,
}

impl Totals {
    /// Adds a sequence. `time` contains the passes over the prompt and the generation.
    pub fn add(&mut self, generated: Generated, time: Duration) {
        self.tokens.prompt += generated.n_prompt as u64;
        self.tokens.generated += generated.n_generated as u64;
        self.tokens.sequences += 1;
        self.prompt_time += generated.prompt_time;
        self.generation_time += time.saturating_sub(generated.prompt_time);
        self.stop = Some(generated.stop);
        self.sequences.push(Sequence {
            prompt: generated.n_prompt as u64,
            generated: generated.n_generated as u64,
            stopped: name(generated.stop).to_owned(),
        });
    }

    /// Returns the number of sequences that ended for this reason.
    fn n_stopped(&self, stop: Stop) -> usize {
        let stopped = name(stop);
        let sequences = self.sequences.iter();
        sequences.filter(|s| s.stopped == stopped).count()
    }

    /// Returns whether the recording stops before the remaining sequences.
    pub fn ended_early(&self) -> bool {
        matches!(self.stop, Some(Stop::Interrupted | Stop::TraceFull))
    }

    /// Returns the summary to print. `recorded` contains the number of records and the run directory, or is `None` without a trace.
    pub fn summary(&self, recorded: Option<(u64, &Path)>) -> String {
        let Tokens {
            prompt,
            generated,
            sequences,
        } = self.tokens;
        let mut text = format!(
            "{} ({}) and {} ({}) in {}",
            counted(prompt, "prompt token"),
            rate(prompt, self.prompt_time),
            counted(generated, "generated token"),
            rate(generated, self.generation_time),
            counted(sequences, "sequence"),
        );
        if let Some((records, out)) = recorded {
            let size = human_bytes(records * RECORD_SIZE as u64);
            text += &format!(
                "; {}, {size}, in {}",
                counted(records, "record"),
                message::line(&out.display().to_string())
            );
        }
        for (n, why) in [
            (
                self.n_stopped(Stop::ContextFull),
                "because the context was full",
            ),
            (
                self.n_stopped(Stop::EndOfGeneration),
                "with an end-of-generation token",
            ),
        ] {
            if n > 0 {
                text += &format!(
                    "\n{n} of {} ended early {why}",
                    counted(sequences, "sequence")
                );
            }
        }
        if self.stop == Some(Stop::TraceFull) {
            text += "\nstopped at the limit of --max-trace-mib; the records written until then are complete";
        }
        text
    }
}

/// Returns a rate with at least three digits, such as `41.8 tokens/s`.
fn rate(n_tokens: u64, time: Duration) -> String {
    let rate = n_tokens as f64 / time.as_secs_f64().max(1e-9);
    let digits = match rate {
        ..10.0 => 2,
        ..100.0 => 1,
        _ => 0,
    };
    format!("{rate:.digits$} tokens/s")
}

/// Returns the manifest's name for the end of a sequence.
fn name(stop: Stop) -> &'static str {
    match stop {
        Stop::Length => "limit",
        Stop::EndOfGeneration => "eos",
        Stop::ContextFull => "context",
        Stop::TraceFull => "trace",
        Stop::Interrupted => "interrupted",
    }
}

/// Returns the manifest's reason for a run that ended early.
pub fn reason(stop: Stop) -> Option<&'static str> {
    match stop {
        Stop::Interrupted => Some("interrupted"),
        Stop::TraceFull => Some("trace limit reached"),
        Stop::Length | Stop::EndOfGeneration | Stop::ContextFull => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summary_contains_the_path_on_one_line() {
        let summary = Totals::default().summary(Some((1, Path::new("a\nb\u{1b}c"))));
        assert!(
            summary.ends_with("; 1 record, 1.0 KiB, in a b\\u{1b}c"),
            "{summary}"
        );
    }

    #[test]
    fn summary_counts_one_token() {
        let mut totals = Totals::default();
        let generated = Generated {
            n_prompt: 1,
            n_generated: 1,
            prompt_time: Duration::from_millis(10),
            stop: Stop::Length,
        };
        totals.add(generated, Duration::from_millis(20));
        let summary = totals.summary(None);
        let expected =
            "1 prompt token (100 tokens/s) and 1 generated token (100 tokens/s) in 1 sequence";
        assert_eq!(summary, expected);
    }

    #[test]
    fn reports_why_sequences_ended_early() {
        let mut totals = Totals::default();
        for (n_generated, stop) in [
            (3, Stop::EndOfGeneration),
            (9, Stop::Length),
            (1, Stop::EndOfGeneration),
        ] {
            let generated = Generated {
                n_prompt: 2,
                n_generated,
                prompt_time: Duration::from_millis(20),
                stop,
            };
            totals.add(generated, Duration::from_millis(120));
        }
        let stopped: Vec<&str> = totals
            .sequences
            .iter()
            .map(|s| s.stopped.as_str())
            .collect();
        assert_eq!(stopped, ["eos", "limit", "eos"]);
        assert_eq!(totals.sequences[2].generated, 1);
        let summary = totals.summary(None);
        assert!(
            summary.starts_with("6 prompt tokens (100 tokens/s) and 13 generated tokens (43.3 tokens/s) in 3 sequences\n"),
            "{summary}"
        );
        assert!(
            summary.ends_with("2 of 3 sequences ended early with an end-of-generation token"),
            "{summary}"
        );
    }
}
