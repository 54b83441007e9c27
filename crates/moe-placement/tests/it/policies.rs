//! Names and inputs of cache policies.

use std::sync::Arc;

use moe_placement::cache::{
    BuildError, Experts, MissingInput, OnlinePolicy, PolicyInputs, PolicyName,
};
use moe_placement::{ExpertId, LayerId};

#[test]
fn names_are_parsed_as_displayed() {
    let layered = OnlinePolicy::ALL.map(PolicyName::Layered);
    for policy in PolicyName::all().into_iter().chain(layered) {
        assert_eq!(policy.to_string().parse::<PolicyName>().unwrap(), policy);
    }
    let layer_lru = PolicyName::Layered(OnlinePolicy::Lru);
    assert_eq!("layerlru".parse::<PolicyName>().unwrap(), layer_lru);
    for name in ["", "best", "LRU", "layerbelady"] {
        let error = name.parse::<PolicyName>().unwrap_err();
        assert!(matches!(error, BuildError::Name { .. }), "{error}");
    }
}

#[test]
fn rejects_settings_without_required_input() {
    let sizes = [(LayerId(0), ExpertId(0), 1)].into_iter().collect();
    let experts = Arc::new(Experts::new(&sizes));
    for policy in PolicyName::all() {
        let required = match policy {
            PolicyName::Belady | PolicyName::BeladySize => Some(MissingInput::Future),
            PolicyName::StaticOracle => Some(MissingInput::Counts),
            PolicyName::StaticLearn | PolicyName::HotCache => Some(MissingInput::LearnFile),
            _ => None,
        };
        let missing = match PolicyInputs::default().policy(policy, &experts, 1) {
            Ok(_) => None,
            Err(BuildError::Needs { what, .. }) => Some(what),
            Err(error) => panic!("{policy}: {error}"),
        };
        assert_eq!(missing, required, "{policy}");
    }
}
