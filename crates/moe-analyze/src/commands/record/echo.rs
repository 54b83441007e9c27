//! The generated text, printed as the model generates it.

use std::io::{self, Write};

use moe_engine::Engine;

use super::prompts::Prompt;

/// Shows the generated text of a single sequence as it comes.
pub struct Echo<'a> {
    engine: Option<&'a dyn Engine>,
    wrote: bool,
    failed: Option<io::Error>,
}

impl<'a> Echo<'a> {
    /// Shows nothing where there are several sequences.
    pub fn new(prompts: &[Prompt], engine: &'a dyn Engine) -> Echo<'a> {
        Echo {
            engine: (prompts.len() == 1).then_some(engine),
            wrote: false,
            failed: None,
        }
    }

    /// One more token.
    pub fn token(&mut self, token: u32) {
        if let Some(engine) = self.engine {
            self.wrote = true;
            self.write(&engine.piece(token));
        }
    }

    /// The end of the sequence; gives what kept the text from being written. A reader who has gone away is no error.
    pub fn end(mut self) -> Option<io::Error> {
        if self.wrote {
            self.write(b"\n");
        }
        self.failed
            .filter(|error| error.kind() != io::ErrorKind::BrokenPipe)
    }

    /// A failed write does not end the recording.
    fn write(&mut self, bytes: &[u8]) {
        if self.failed.is_none() {
            let mut stdout = io::stdout().lock();
            let written = stdout.write_all(bytes).and_then(|()| stdout.flush());
            self.failed = written.err();
        }
    }
}
