//! Text from tokens: UTF-8 and stop sequences.

/// Joins the bytes of tokens to text and ends it before the first stop sequence.
///
/// Text is held back while it may still change: bytes of an incomplete character, and text that may be the start of a stop
/// sequence. Invalid UTF-8 becomes U+FFFD.
#[derive(Debug, Default)]
pub(super) struct TextStream {
    stops: Vec<String>,
    /// Bytes of an incomplete character.
    bytes: Vec<u8>,
    /// Complete characters that may be the start of a stop sequence.
    held: String,
}

impl TextStream {
    /// A stream that ends before the first of `stops`. Empty strings are ignored.
    pub(super) fn new(mut stops: Vec<String>) -> TextStream {
        stops.retain(|stop| !stop.is_empty());
        TextStream {
            stops,
            ..TextStream::default()
        }
    }

    /// Adds the bytes of a token. Returns the text that cannot change any more, and the stop sequence that the text has
    /// reached. After a stop sequence the stream is complete.
    pub(super) fn push(&mut self, piece: &[u8]) -> (String, Option<String>) {
        self.bytes.extend_from_slice(piece);
        self.decode();
        if let Some((start, stop)) = self.first_stop() {
            self.held.truncate(start);
            self.bytes.clear();
            return (std::mem::take(&mut self.held), Some(stop));
        }
        let rest = self.held.split_off(self.held.len() - self.held_len());
        (std::mem::replace(&mut self.held, rest), None)
    }

    /// The text that was held back, when no token follows.
    pub(super) fn finish(&mut self) -> String {
        let mut text = std::mem::take(&mut self.held);
        text.push_str(&String::from_utf8_lossy(&self.bytes));
        self.bytes.clear();
        text
    }

    /// Number of characters that are held back, without an incomplete one.
    pub(super) fn n_held(&self) -> usize {
        self.held.chars().count()
    }

    /// Moves all complete characters from `bytes` to `held`.
    fn decode(&mut self) {
        let mut n_decoded = 0;
        for chunk in self.bytes.utf8_chunks() {
            self.held.push_str(chunk.valid());
            n_decoded += chunk.valid().len();
            let invalid = chunk.invalid();
            let is_last = n_decoded + invalid.len() == self.bytes.len();
            if is_last && is_incomplete(invalid) {
                break;
            }
            if !invalid.is_empty() {
                self.held.push(char::REPLACEMENT_CHARACTER);
                n_decoded += invalid.len();
            }
        }
        self.bytes.drain(..n_decoded);
    }

    /// Position and text of the stop sequence that starts first.
    fn first_stop(&self) -> Option<(usize, String)> {
        let found = self
            .stops
            .iter()
            .filter_map(|stop| Some((self.held.find(stop)?, stop)));
        let (start, stop) = found.min_by_key(|(start, _)| *start)?;
        Some((start, stop.clone()))
    }

    /// Length in bytes of the longest end of `held` that is the start of a stop sequence.
    fn held_len(&self) -> usize {
        let starts = self
            .held
            .char_indices()
            .map(|(start, _)| &self.held[start..]);
        let mut ends = starts.filter(|end| self.stops.iter().any(|stop| stop.starts_with(end)));
        ends.next().map_or(0, str::len)
    }
}

/// Whether bytes that are not valid UTF-8 are the start of a character.
fn is_incomplete(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}

#[cfg(test)]
mod tests {
    use super::TextStream;

    /// Pushes pieces until a stop sequence. Returns the text after each piece, and the stop sequence.
    fn run(stops: &[&str], pieces: &[&[u8]]) -> (Vec<String>, Option<String>) {
        let stops = stops.iter().map(|&stop| stop.to_owned()).collect();
        let mut stream = TextStream::new(stops);
        let mut texts = Vec::new();
        for piece in pieces {
            let (text, stop) = stream.push(piece);
            texts.push(text);
            if stop.is_some() {
                assert_eq!(stream.finish(), "");
                return (texts, stop);
            }
        }
        texts.push(stream.finish());
        (texts, None)
    }

    #[test]
    fn passes_text_without_stop_sequences() {
        let (texts, stop) = run(&[], &[b"one", b" two"]);
        assert_eq!(
            (texts, stop),
            (vec!["one".into(), " two".into(), "".into()], None)
        );
    }

    #[test]
    fn finds_a_stop_sequence_across_tokens() {
        let (texts, stop) = run(&["<end>"], &[b"a<", b"en", b"d>b"]);
        assert_eq!(texts, ["a", "", ""]);
        assert_eq!(stop.as_deref(), Some("<end>"));
    }

    #[test]
    fn releases_text_that_is_not_a_stop_sequence() {
        let (texts, stop) = run(&["<end>"], &[b"a<", b"en", b"<e", b"x"]);
        assert_eq!(texts, ["a", "", "<en", "<ex", ""]);
        assert_eq!(stop, None);
    }

    #[test]
    fn finishes_with_a_partial_stop_sequence() {
        let (texts, _) = run(&["stop"], &[b"st", b"o"]);
        assert_eq!(texts, ["", "", "sto"]);
    }

    #[test]
    fn selects_the_stop_sequence_that_starts_first() {
        let (texts, stop) = run(&["d", "bc"], &[b"abcd"]);
        assert_eq!((texts, stop.as_deref()), (vec!["a".into()], Some("bc")));
        let (texts, stop) = run(&["aab", "zz"], &[b"aa", b"ab"]);
        assert_eq!(
            (texts, stop.as_deref()),
            (vec!["".into(), "a".into()], Some("aab"))
        );
    }

    #[test]
    fn ignores_empty_stop_sequences() {
        let (texts, stop) = run(&[""], &[b"ab"]);
        assert_eq!((texts, stop), (vec!["ab".into(), "".into()], None));
    }

    #[test]
    fn holds_back_incomplete_characters() {
        let (texts, _) = run(&[], &[b"\xf0\x9f", b"\x8c", b"\x8d!"]);
        assert_eq!(texts, ["", "", "🌍!", ""]);
        let (texts, stop) = run(&["é"], &[b"caf\xc3", b"\xa9s"]);
        assert_eq!(
            (texts, stop.as_deref()),
            (vec!["caf".into(), "".into()], Some("é"))
        );
    }

    #[test]
    fn replaces_invalid_bytes() {
        let (texts, _) = run(&[], &[b"a\xffb", b"\xc3", b"c", b"\xe2\x82"]);
        assert_eq!(texts, ["a\u{fffd}b", "", "\u{fffd}c", "", "\u{fffd}"]);
    }

    /// The text does not depend on how it is divided into tokens.
    #[test]
    fn text_does_not_depend_on_tokens() {
        let bytes = "añ🌍 <e<end> b".as_bytes();
        for size in 1..=bytes.len() {
            let pieces: Vec<&[u8]> = bytes.chunks(size).collect();
            let (texts, stop) = run(&["<end>"], &pieces);
            assert_eq!(
                (&*texts.concat(), stop.as_deref()),
                ("añ🌍 <e", Some("<end>")),
                "{size}"
            );
        }
    }
}
