//! Property tests: invariants of all traces.

use moe_trace::{ExpertId, LayerId, Phase, TokenId};
use proptest::prelude::*;

use super::Hotness;
use super::counting::Counter;
use super::origin::Origin;
use crate::measures::{LoadBalance, hottest};
use crate::phases::Phases;
use crate::survey::{GroupBy, SelectedExpert, Survey, SurveyOptions};

const N_LAYER: u16 = 3;
const N_EXPERT: u32 = 12;
const K: usize = 3;

/// A token in a layer.
#[derive(Debug, Clone)]
struct Token {
    layer: LayerId,
    phase: Phase,
    sequence: u32,
    experts: Vec<ExpertId>,
}

/// Tokens with K distinct experts. The first token selects the last expert, so that every part has the same number of
/// experts.
fn tokens() -> impl Strategy<Value = Vec<Token>> {
    let ids: Vec<ExpertId> = (0..N_EXPERT).map(ExpertId).collect();
    let experts = prop::sample::subsequence(ids, K).prop_shuffle();
    let token = (
        0..N_LAYER,
        prop::sample::select(&Phase::ALL),
        0..4u32,
        experts,
    );
    let token = token.prop_map(|(layer, phase, sequence, experts)| Token {
        layer: LayerId(layer),
        phase,
        sequence,
        experts,
    });
    prop::collection::vec(token, 1..300).prop_map(|mut tokens| {
        tokens[0].experts = [N_EXPERT - 1, 0, 1].map(ExpertId).into();
        tokens
    })
}

fn counter() -> Counter {
    Counter::without_shape(Origin::of_foreign("".as_ref(), &Default::default()))
}

fn selections(tokens: &[Token]) -> Vec<SelectedExpert> {
    let tokens = (0u32..).zip(tokens);
    let selections = tokens.flat_map(|(token_id, token)| {
        let experts = (0..).zip(&token.experts);
        experts.map(move |(slot, &expert)| SelectedExpert {
            layer: token.layer,
            phase: Some(token.phase),
            // Passes of up to three tokens.
            timestamp_ns: u64::from(token_id / 3) + 1,
            token_id: TokenId(token_id),
            sequence_id: Some(token.sequence),
            slot,
            expert,
            // Sums of eighths are exact in any order.
            weight: Some(f64::from(1 + expert.0 % 8) / 8.0),
        })
    });
    selections.collect()
}

fn read(tokens: &[Token], options: SurveyOptions) -> (Hotness, Survey) {
    let mut counter = counter();
    let mut survey = Survey::new(options);
    survey.begin_input();
    survey.begin_run();
    for selected in selections(tokens) {
        counter.add(&selected, String::new).unwrap();
        survey.add_selection(&selected);
    }
    survey.finish().unwrap();
    let mut hotness = counter.finish().unwrap();
    // Parts of one synthetic run are merged like different runs.
    hotness.origins.clear();
    (hotness, survey)
}

fn hotness(tokens: &[Token]) -> Hotness {
    read(tokens, SurveyOptions::default()).0
}

fn tokens_of(tokens: &[Token], layer: LayerId) -> u64 {
    tokens.iter().filter(|token| token.layer == layer).count() as u64
}

proptest! {
    #[test]
    fn counts_of_a_layer_are_tokens_times_k(tokens in tokens()) {
        let (hotness, survey) = read(&tokens, SurveyOptions::default());
        prop_assert_eq!(hotness.n_repeated(), 0);
        for layer in hotness.layers(Phases::All) {
            let n_tokens = tokens_of(&tokens, layer);
            prop_assert_eq!(hotness.routed_tokens(layer, Phases::All), n_tokens);
            prop_assert_eq!(hotness.selections(layer, Phases::All), n_tokens * K as u64);
            prop_assert_eq!(survey.routed_tokens(layer), n_tokens);
            let parts = Phase::ALL.map(|phase| hotness.selections(layer, Phases::Only(phase)));
            prop_assert_eq!(parts.iter().sum::<u64>(), n_tokens * K as u64);
        }
    }

    /// A part may end within a pass or a token.
    #[test]
    fn appended_parts_equal_complete_trace(
        tokens in tokens(),
        cuts in prop::collection::vec(0.0..=1.0f64, 0..6),
    ) {
        let selections = selections(&tokens);
        let mut cuts: Vec<usize> =
            cuts.into_iter().map(|cut| (cut * selections.len() as f64) as usize).collect();
        cuts.extend([0, selections.len()]);
        cuts.sort();
        let mut total = counter();
        for cut in cuts.windows(2) {
            let mut part = counter();
            for selected in &selections[cut[0]..cut[1]] {
                part.add(selected, String::new).unwrap();
            }
            total.append(part);
        }
        let mut complete = counter();
        for selected in &selections {
            complete.add(selected, String::new).unwrap();
        }
        prop_assert_eq!(total.finish(), complete.finish());
    }

    #[test]
    fn merging_is_associative_and_keeps_all_counts(
        (tokens, cuts) in tokens().prop_flat_map(|tokens| {
            let n = tokens.len();
            (Just(tokens), [0..=n, 0..=n])
        })
    ) {
        let (a, b) = (cuts[0].min(cuts[1]), cuts[0].max(cuts[1]));
        // Each part contains all expert ids, like parts of runs with a manifest.
        let first = &tokens[..1];
        let part = |range: std::ops::Range<usize>| {
            hotness(&[first, &tokens[range]].concat())
        };
        let (one, two, three) = (part(0..a), part(a..b), part(b..tokens.len()));
        let mut left = one.clone();
        left.merge(&two).unwrap();
        left.merge(&three).unwrap();
        let mut right = two.clone();
        right.merge(&three).unwrap();
        let mut outer = one.clone();
        outer.merge(&right).unwrap();
        prop_assert_eq!(&left, &outer);
        let mut whole = hotness(&[first, first, first, &tokens[..]].concat());
        for layer in whole.layers(Phases::All) {
            prop_assert_eq!(left.experts(layer, Phases::All), whole.experts(layer, Phases::All));
        }
        whole.merge(&one).unwrap();
        prop_assert!(whole.tokens(Phases::All) >= left.tokens(Phases::All));
    }

    #[test]
    fn groups_sum_to_complete_trace(tokens in tokens(), size in 1..40u64, by in 0..3usize) {
        let by = [GroupBy::Phase, GroupBy::Sequence, GroupBy::Window(size)][by];
        let options = SurveyOptions { group_by: Some(by), folds: true, ..SurveyOptions::default() };
        let (hotness, survey) = read(&tokens, options);
        for layer in hotness.layers(Phases::All) {
            let whole = hotness.counts(layer, Phases::All);
            for groups in [survey.groups(), survey.folds()] {
                let mut sums = vec![0; whole.len()];
                let mut n_tokens = 0;
                for group in 0..groups.names().len() {
                    n_tokens += groups.routed_tokens(group, layer);
                    let counts = groups.counts(group, layer).into_iter();
                    sums.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
                }
                prop_assert_eq!(&sums, &whole);
                prop_assert_eq!(n_tokens, tokens_of(&tokens, layer));
            }
            let windows = survey.windows();
            let mut counts = windows.counts(layer, &(0..windows.len(layer)));
            counts.resize(whole.len(), 0);
            prop_assert_eq!(counts, whole);
        }
    }

    #[test]
    fn measures_are_within_their_ranges(counts in prop::collection::vec(0..1000u64, 1..64)) {
        let load_balance = LoadBalance::of(&counts);
        let n = counts.len() as f64;
        prop_assert!((-1e-12..=1.0 - 1.0 / n + 1e-12).contains(&load_balance.gini));
        prop_assert!((0.0..=1.0 + 1e-12).contains(&load_balance.entropy));
        prop_assert!(load_balance.share_top.is_sorted());
        prop_assert!(load_balance.effective <= load_balance.n_active as f64 + 1e-9);
        prop_assert_eq!(hottest(&counts, counts.len()).len(), load_balance.n_active);
        let mut other = counts.clone();
        other.reverse();
        let reversed = LoadBalance::of(&other);
        prop_assert_eq!(load_balance, reversed);
        // Multiplying all counts by five does not change the Gini coefficient.
        let more: Vec<u64> = counts.iter().map(|count| count * 5).collect();
        prop_assert!((LoadBalance::of(&more).gini - load_balance.gini).abs() < 1e-9);
    }
}
