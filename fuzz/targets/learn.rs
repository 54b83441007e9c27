//! Learn files of the hot expert cache: parsed, written, truncated and merged.

#![no_main]

use libfuzzer_sys::fuzz_target;
use moe_fuzz::check_error;
use moe_placement::learn::{Error, LearnFile, parse_observations};

fuzz_target!(|bytes: &[u8]| {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    if let Err(error) = parse_observations(text) {
        check_error(&error);
    }
    let mut learned = match LearnFile::parse(text) {
        Ok(learned) => learned,
        Err(error) => return check_error(&error),
    };
    if let Err(error) = learned.observations() {
        check_error(&error);
    }
    learned.layer_slots();
    learned.n_expert();
    let json = learned.to_json();
    let again = LearnFile::parse(&json).expect("a written learn file is valid");
    assert_eq!(json, again.to_json());
    learned
        .filter(|layer, expert| (u32::from(layer.0) + expert.0) % 2 == 0)
        .to_json();
    for result in [learned.merge(&again), learned.decay(0.5)] {
        if let Err(error) = result {
            check_error(&error);
        }
    }
    match LearnFile::merge_with_decay([Ok::<_, Error>(learned), Ok(again)].into_iter(), 2.0) {
        Ok(merged) => drop(merged.map(|merged| merged.to_json())),
        Err(error) => check_error(&error),
    }
});
