//! Synthetic traces with known measures.

use super::*;
use crate::survey::{Error, SelectedExpert, Survey, SurveyOptions};
use moe_trace::{ExpertId, LayerId, Phase, TokenId};

/// A survey of one layer. Each token is a sequence number and its experts.
fn survey(options: SurveyOptions, tokens: impl IntoIterator<Item = (u32, Vec<u32>)>) -> Survey {
    let mut survey = Survey::new(options);
    survey.begin_input();
    survey.begin_run();
    for (token, (sequence, experts)) in (0..).zip(tokens) {
        for (slot, expert) in (0..).zip(experts) {
            survey.add_selection(&SelectedExpert {
                layer: LayerId(0),
                phase: Some(Phase::Generate),
                timestamp_ns: 0,
                token_id: TokenId(token),
                sequence_id: Some(sequence),
                slot,
                expert: ExpertId(expert),
                weight: None,
            });
        }
    }
    survey.finish().unwrap();
    survey
}

fn one_sequence(tokens: impl IntoIterator<Item = Vec<u32>>) -> Survey {
    survey(
        SurveyOptions::default(),
        tokens.into_iter().map(|experts| (0, experts)),
    )
}

fn folds() -> SurveyOptions {
    SurveyOptions {
        folds: true,
        ..SurveyOptions::default()
    }
}

/// Tokens with two of eight experts: 0 and 1 alternate, and so do 2, 3 and 4.
fn steady(n: u32) -> impl Iterator<Item = Vec<u32>> {
    (0..n).map(|token| vec![token % 2, 2 + token % 3])
}

#[test]
fn stationary_trace_generalizes() {
    let survey = one_sequence(steady(120));
    let split = split_by_time(&survey, 8, 0.5).unwrap();
    assert_eq!((split.train_tokens, split.held_out_tokens), (60, 60));
    // Two of eight experts (25 %): 0 and 1, with half of all selections in both splits.
    let hot = split.of_percent(25).unwrap();
    assert_eq!(
        (hot.in_sample, hot.out_of_sample, hot.uniform),
        (0.5, 0.5, 0.25)
    );
    let assessment = assess(&survey, 8);
    assert_eq!(
        (assessment.verdict, assessment.unconverged),
        (Stability::Generalizes, 0)
    );
    // Expert 1 appears with the second token. From then on, 0 and 1 are the hottest.
    assert_eq!(convergence(&survey, 8)[0].converged, 2);
}

#[test]
fn changed_second_half_does_not_generalize() {
    let later = steady(120).map(|experts| experts.iter().map(|e| e + 8).collect());
    let survey = one_sequence(steady(120).chain(later));
    let split = split_by_time(&survey, 16, 0.5).unwrap();
    for coverage in &split.coverage {
        assert_eq!(coverage.out_of_sample, 0.0);
    }
    // Four of sixteen experts: 0, 1, and two of the three that share the other half of the selections.
    let in_sample = split.of_percent(25).unwrap().in_sample;
    assert!((in_sample - (0.5 + 2.0 / 6.0)).abs() < 1e-12, "{in_sample}");
    assert_eq!(assess(&survey, 16).verdict, Stability::DoesNotGeneralize);

    let drifts = drift(&survey, 16);
    let between = |from, to| {
        let mut found = drifts.iter().filter(|d| (d.from, d.to) == (from, to));
        found
            .find(|d| d.layer == Some(LayerId(0)))
            .copied()
            .unwrap()
    };
    assert_eq!(between(0, 1).total_variation, 0.0);
    assert_eq!(
        (between(3, 4).total_variation, between(3, 4).jaccard),
        (1.0, 0.0)
    );
    assert_eq!(between(0, 7).total_variation, 1.0);
    assert_eq!(between(0, 1).tokens, 30);
}

/// 60 tokens on experts 0 and 1, then 60 tokens of which some are on 2 and 3. Two of eight experts are 25 %, so the
/// in-sample gain is ¾. With every second token elsewhere, the out-of-sample gain is ½ − ¼, a third of it. With every fourth
/// token elsewhere, it is ¾ − ¼, two thirds of it.
#[test]
fn verdict_depends_on_gain_over_uniform_router() {
    let survey = one_sequence((0..120).map(|token| {
        if token >= 60 && token % 2 == 1 {
            vec![2, 3]
        } else {
            vec![0, 1]
        }
    }));
    let split = split_by_time(&survey, 8, 0.5).unwrap();
    let hot = split.of_percent(25).unwrap();
    assert_eq!((hot.in_sample, hot.out_of_sample), (1.0, 0.5));
    assert_eq!(assess(&survey, 8).verdict, Stability::DoesNotGeneralize);
    let survey = one_sequence((0..120).map(|token| {
        if token >= 60 && token % 4 == 1 {
            vec![2, 3]
        } else {
            vec![0, 1]
        }
    }));
    assert_eq!(assess(&survey, 8).verdict, Stability::GeneralizesInPart);
}

#[test]
fn reports_short_traces_and_uniform_routers() {
    let few = one_sequence(steady(38));
    assert_eq!(
        assess(&few, 8).verdict,
        Stability::TooShort,
        "19 · 2 / 8 < 5"
    );
    assert_eq!(
        assess(&one_sequence(steady(40)), 8).verdict,
        Stability::Generalizes
    );
    assert_eq!(
        assess(&one_sequence(steady(1)), 8).verdict,
        Stability::TooShort
    );

    let even = one_sequence((0..80).map(|token| vec![token % 8, (token + 4) % 8]));
    assert_eq!(assess(&even, 8).verdict, Stability::Uniform);
    assert_eq!(assess(&one_sequence([]), 8).verdict, Stability::Unordered);
}

/// Three sequences, each with one expert of its own and expert 7 in common. Hot sets of two sequences cover the common half
/// of the third.
#[test]
fn sequences_are_evaluated_on_hot_sets_of_the_others() {
    let tokens = (0..30u32).map(|token| (token / 10, vec![7, token / 10]));
    let survey = survey(folds(), tokens);
    let splits = split_by_group(survey.folds(), &[LayerId(0)], 8, "sequence").unwrap();
    let names: Vec<&str> = splits.iter().map(|split| split.held_out.as_str()).collect();
    assert_eq!(names, ["0", "1", "2", "all"]);
    for split in &splits[..3] {
        assert_eq!((split.train_tokens, split.held_out_tokens), (20, 10));
        let half = split.of_percent(50).unwrap();
        // Expert 7 and those of the two other sequences: all of their selections, and half of the third's.
        assert_eq!((half.in_sample, half.out_of_sample), (1.0, 0.5));
    }
    assert_eq!(splits[3].of_percent(50).unwrap().out_of_sample, 0.5);
}

#[test]
fn rejects_split_of_one_sequence() {
    let survey = survey(folds(), [(3, vec![0]), (3, vec![1])]);
    let error = split_by_group(survey.folds(), &[LayerId(0)], 8, "sequence").unwrap_err();
    assert!(matches!(error, Error::OnePart { part: "sequence" }));
}

#[test]
fn hot_set_that_changes_at_the_end_has_not_converged() {
    // Expert 5 overtakes expert 0 in the last tokens.
    let tokens = (0..64).map(|token| vec![if token < 31 { 0 } else { 5 }]);
    let survey = one_sequence(tokens);
    // One of four experts is hot: expert 0 up to the 62nd token, where both have 31 selections and the lower id wins.
    let convergence = convergence(&survey, 4)[0];
    assert_eq!((convergence.tokens, convergence.converged), (64, 63));
    assert_eq!(assess(&survey, 4).unconverged, 1);
}

#[test]
fn coverage_curves_start_at_0_and_end_at_1() {
    let survey = one_sequence(steady(120));
    let curve = curves(&survey, 8, 0.5).unwrap();
    for shares in [&curve.in_sample, &curve.out_of_sample] {
        assert_eq!((shares.len(), shares[0], shares[8]), (9, 0.0, 1.0));
        assert_eq!((shares[1], shares[2]), (0.25, 0.5));
        assert!(shares.is_sorted());
    }
    assert_eq!(curves(&one_sequence(steady(1)), 8, 0.5), None);
}

#[test]
fn intervals_depend_on_seed_and_contain_value() {
    let survey = one_sequence((0..320).map(|token| vec![token * token % 7, 7 + token % 5]));
    let intervals = bootstrap(&survey, 12, 200, 1);
    assert_eq!(intervals, bootstrap(&survey, 12, 200, 1));
    assert_ne!(intervals, bootstrap(&survey, 12, 200, 2));
    for interval in &intervals {
        assert!(interval.low <= interval.high, "{interval:?}");
    }
    let gini = intervals.iter().find(|i| i.measure == "gini").unwrap();
    assert!(gini.low < gini.high);

    // All blocks are equal, so the intervals have no width.
    let survey = one_sequence((0..64).map(|token| vec![token % 2]));
    for interval in bootstrap(&survey, 4, 50, 3) {
        assert_eq!(
            (interval.low, interval.high),
            (interval.value, interval.value)
        );
    }
    assert!(bootstrap(&one_sequence(steady(1)), 8, 10, 0).is_empty());
}
