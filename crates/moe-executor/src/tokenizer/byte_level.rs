//! GPT-2's byte alphabet: each byte is a printable character, so that merges are pairs of strings.

/// The character of a byte. Printable Latin-1 characters represent themselves; the other 68 bytes are the characters from
/// U+0100 on, in order.
pub(super) fn char_of(byte: u8) -> char {
    let code = match byte {
        0x00..=0x20 => 0x100 + u32::from(byte),
        0x7F..=0xA0 => 0x121 + u32::from(byte - 0x7F),
        0xAD => 0x143,
        _ => u32::from(byte),
    };
    char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)
}

/// The byte of a character; `None` for characters outside the alphabet.
pub(super) fn byte_of(c: char) -> Option<u8> {
    let byte = match u32::from(c) {
        code @ 0x100..=0x120 => code - 0x100,
        code @ 0x121..=0x142 => code - 0x121 + 0x7F,
        0x143 => 0xAD,
        code @ (0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF) => code,
        _ => return None,
    };
    u8::try_from(byte).ok()
}

/// The bytes of a token in decoded text. Characters outside the alphabet represent themselves in UTF-8.
pub(super) fn decode(text: &str) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(text.len());
    for c in text.chars() {
        match byte_of(c) {
            Some(byte) => bytes.push(byte),
            None => bytes.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_each_byte_to_a_distinct_character() {
        for byte in 0..=255 {
            assert_eq!(byte_of(char_of(byte)), Some(byte));
        }
        let spelled: String = b" \n\x7F\xA0\xADa\xFF"
            .iter()
            .map(|&b| char_of(b))
            .collect();
        assert_eq!(spelled, "ĠĊġłŃaÿ");
        assert_eq!(byte_of(' '), None);
        assert_eq!(byte_of('\u{144}'), None);
    }

    #[test]
    fn decodes_characters_outside_the_alphabet_to_themselves() {
        assert_eq!(decode("Ġa▁"), " a▁".as_bytes());
    }
}
