//! The BOS token in the tokens of a conversation.

use moe_engine::chat::{ChatTemplate, SpecialTokens};
use moe_engine::{Engine, EngineInfo, Mode, Result, Session, Setup};

/// An engine with the tokens `<s>` (0) and one for each byte (1 + byte).
struct Bytes {
    add_bos: bool,
    info: EngineInfo,
}

impl Engine for Bytes {
    fn info(&self) -> &EngineInfo {
        &self.info
    }

    fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let mut tokens: Vec<u32> = self.add_bos.then_some(0).into_iter().collect();
        for (i, part) in text.split("<s>").enumerate() {
            tokens.extend((i > 0).then_some(0));
            tokens.extend(part.bytes().map(|byte| 1 + u32::from(byte)));
        }
        Ok(tokens)
    }

    fn piece(&self, token: u32) -> Vec<u8> {
        match token {
            0 => b"<s>".to_vec(),
            byte => vec![(byte - 1) as u8],
        }
    }

    fn records_per_pass(&self, _: usize, _: Mode) -> u64 {
        0
    }

    fn session<'s>(&'s self, _: Setup<'s>) -> Result<Box<dyn Session + 's>> {
        unimplemented!("only tokens are used")
    }
}

#[test]
fn bos_is_not_repeated() {
    let a = 1 + u32::from(b'a');
    for (add_bos, text, expected) in [
        (true, "<s>a", &[0, a][..]),
        (false, "<s>a", &[0, a]),
        (true, "a", &[0, a]),
        (false, "a", &[a]),
        (true, "", &[0]),
        (false, "", &[]),
        (true, "<s>", &[0]),
        (false, "<s><s>a", &[0, 0, a]),
        (true, "<s><s>a", &[0, 0, a]),
        (true, "a<s>", &[0, a, 0]),
        (false, "aa", &[a, a]),
    ] {
        let info = EngineInfo::default();
        let engine = Bytes { add_bos, info };
        let special = SpecialTokens {
            bos_token: Some("<s>".to_owned()),
            ..SpecialTokens::default()
        };
        let template = ChatTemplate::new("", special).unwrap();
        let tokens = template.encode(text, &engine).unwrap();
        assert_eq!(tokens, expected, "{add_bos} {text:?}");
    }
}
