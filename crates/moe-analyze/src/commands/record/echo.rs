//! The generated text, printed as the model generates it.

use std::io::{self, Write};

use moe_engine::Engine;

use super::prompts::Prompt;

/// Prints the generated text of a single sequence token by token.
pub struct Echo<'a> {
    engine: Option<&'a dyn Engine>,
    wrote: bool,
    failed: Option<io::Error>,
}

impl<'a> Echo<'a> {
    /// With several prompts, nothing is printed.
    pub fn new(prompts: &[Prompt], engine: &'a dyn Engine) -> Echo<'a> {
        Echo {
            engine: (prompts.len() == 1).then_some(engine),
            wrote: false,
            failed: None,
        }
    }

    /// Prints a token.
    pub fn token(&mut self, token: u32) {
        if let Some(engine) = self.engine {
            self.wrote = true;
            self.write(&engine.piece(token));
        }
    }

    /// Ends the sequence. Returns the first write error; a closed pipe is not an error.
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
