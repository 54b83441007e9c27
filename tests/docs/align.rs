//! Compares the output that a page shows with the output of a command: `...` stands for any lines, `[..]` for any text.

/// How the next lines of the output shown and of the output printed are paired.
#[derive(Clone, Copy)]
enum Move {
    Match,
    Replace,
    Add,
    Remove,
    /// `...` covers the printed line.
    Cover,
    /// `...` ends.
    Skip,
}

/// Cost of a line that is only shown or only printed, and of a replaced line without a common word.
const MAX_COST: u32 = 20;

/// Aligns output shown with output printed at the least cost: whether both are the same, and the output to show.
/// With `renew_numbers`, or if anything differs, lines that match are renewed, too, except the text of `[..]`.
pub fn align(
    shown: &[String],
    printed: &[String],
    ignore_numbers: bool,
    renew_numbers: bool,
) -> (bool, Vec<String>) {
    let (n, m) = (shown.len(), printed.len());
    // cost[i][j]: of the lines from i of `shown` and from j of `printed`.
    let mut cost = vec![vec![(u32::MAX, Move::Skip); m + 1]; n + 1];
    cost[n][m].0 = 0;
    for i in (0..=n).rev() {
        for j in (0..=m).rev() {
            let mut moves = Vec::new();
            if i < n && shown[i] == "..." {
                moves.push((0, Move::Skip, i + 1, j));
                if j < m {
                    moves.push((0, Move::Cover, i, j + 1));
                }
            } else {
                if i < n && j < m && is_match(&shown[i], &printed[j], ignore_numbers) {
                    moves.push((0, Move::Match, i + 1, j + 1));
                } else if i < n && j < m {
                    let cost = replacement_cost(&shown[i], &printed[j]);
                    moves.push((cost, Move::Replace, i + 1, j + 1));
                }
                if i < n {
                    moves.push((MAX_COST, Move::Remove, i + 1, j));
                }
            }
            if j < m {
                moves.push((MAX_COST, Move::Add, i, j + 1));
            }
            let moves = moves
                .into_iter()
                .map(|(more, name, i, j)| (cost[i][j].0.saturating_add(more), name));
            if let Some(best) = moves.min_by_key(|(cost, _)| *cost) {
                cost[i][j] = best;
            }
        }
    }
    let renew = renew_numbers || cost[0][0].0 > 0;
    let (mut i, mut j, mut lines) = (0, 0, Vec::new());
    while i < n || j < m {
        match cost[i][j].1 {
            Move::Match if renew && has_same_words(&shown[i], &printed[j]) => {
                lines.push(replace_words(&shown[i], &printed[j]));
            }
            Move::Match | Move::Skip => lines.push(shown[i].clone()),
            Move::Replace => lines.push(replace_words(&shown[i], &printed[j])),
            Move::Add => lines.push(printed[j].clone()),
            Move::Remove | Move::Cover => {}
        }
        let (down, right) = match cost[i][j].1 {
            Move::Match | Move::Replace => (1, 1),
            Move::Remove | Move::Skip => (1, 0),
            Move::Add | Move::Cover => (0, 1),
        };
        (i, j) = (i + down, j + right);
    }
    (cost[0][0].0 == 0, lines)
}

/// Between half of [`MAX_COST`] and all of it, the less the more words both lines have in common. Numbers are not words.
fn replacement_cost(shown: &str, printed: &str) -> u32 {
    let words = |line: &str| -> Vec<String> {
        let words = line.split(|c: char| !c.is_alphabetic());
        words
            .filter(|word| !word.is_empty())
            .map(str::to_owned)
            .collect()
    };
    let (shown, printed) = (words(shown), words(printed));
    let total = shown.len().max(printed.len()).max(1);
    let common = shown
        .iter()
        .filter(|word| printed.contains(word))
        .count()
        .min(total);
    MAX_COST - u32::try_from(common * (MAX_COST / 2) as usize / total).unwrap()
}

/// Whether the line shown has no `[..]`, or as many words as the printed line.
fn has_same_words(shown: &str, printed: &str) -> bool {
    !shown.contains("[..]")
        || shown.split_whitespace().count() == printed.split_whitespace().count()
}

/// The printed line, with those words of the line shown that contain `[..]` if both have the same number of words.
fn replace_words(shown: &str, printed: &str) -> String {
    let words: Vec<&str> = shown.split_whitespace().collect();
    let mut line = printed.to_owned();
    if words.len() == printed.split_whitespace().count() {
        for (word, printed) in words.iter().zip(printed.split_whitespace()) {
            if word.contains("[..]") {
                line = line.replacen(printed, word, 1);
            }
        }
    }
    line
}

/// Whether a line shown, in which `[..]` stands for any text, matches a line printed.
fn is_match(shown: &str, printed: &str, ignore_numbers: bool) -> bool {
    let normalize = |line: &str| {
        if ignore_numbers {
            without_numbers(line)
        } else {
            line.to_owned()
        }
    };
    let (shown, printed) = (normalize(shown), normalize(printed));
    let parts: Vec<&str> = shown.split("[..]").collect();
    let [first, middle @ .., last] = &parts[..] else {
        return shown == printed;
    };
    let Some(mut rest) = printed.strip_prefix(first) else {
        return false;
    };
    for part in middle {
        let Some(at) = rest.find(part) else {
            return false;
        };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}

/// The line without spaces, with `#` for each number or list of numbers. A verdict on coverages counts as a number: sampled text, and
/// with it the verdict, depends on the instruction set.
fn without_numbers(line: &str) -> String {
    let (verdict, numbers) = line.split_once(": the hottest ").unwrap_or(("", line));
    let is_verdict =
        ["generalizes", "generalizes_in_part", "does_not_generalize"].contains(&verdict);
    let line = match numbers.split_once("; not converged in ") {
        _ if !is_verdict => line,
        Some((coverages, _)) => coverages,
        None => numbers,
    };
    let mut out = String::new();
    let mut chars = line.chars().peekable();
    let mut in_word = false;
    while let Some(c) = chars.next() {
        if c.is_ascii_digit() && !in_word {
            while chars
                .next_if(|&c| c.is_ascii_digit() || c == '.' || c == ',')
                .is_some()
            {}
            if chars.next_if_eq(&'e').is_some() {
                while chars
                    .next_if(|&c| c.is_ascii_digit() || c == '-' || c == '+')
                    .is_some()
                {}
            }
            if !out.ends_with('#') {
                out.push('#');
            }
        } else if !c.is_whitespace() {
            out.push(c);
        }
        in_word =
            c.is_alphanumeric() && !c.is_ascii_digit() || c == '_' || in_word && c.is_ascii_digit();
    }
    out
}

#[test]
fn verdicts_on_coverages_are_numbers() {
    let verdict = |verdict: &str, end: &str| {
        format!("{verdict}: the hottest 25 % of experts cover 4.5 %{end}")
    };
    let shown = verdict("generalizes_in_part", "; not converged in 2 layers");
    assert!(is_match(&shown, &verdict("generalizes", ""), true));
    assert!(!is_match(&shown, &verdict("generalizes", ""), false));
    assert!(!is_match(&shown, &verdict("uniform", ""), true));
}

#[test]
fn alignment_keeps_elisions() {
    let lines = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
    let shown = lines("size  hits\n1 [..]\n...\nlast 9");
    assert!(align(&shown, &lines("size  hits\n1 12\n2 13\n3 14\nlast 9"), false, false).0);
    let (same, renewed) =
        align(&shown, &lines("bytes  hits\n1 12\n2 13\n3 14\nlast 8"), false, false);
    assert!(!same);
    assert_eq!(renewed, lines("bytes  hits\n1 [..]\n...\nlast 8"));
    let (same, kept) = align(&shown, &lines("size hits\n1 12\nlast 10"), true, false);
    assert!(same);
    assert_eq!(kept, shown);
    let shown = lines("layer\n0\n...\nlane 0: 6 experts and an empty one");
    let printed = lines("layers\n0\n1\n2\nlane 0: an empty expert and 7 experts");
    let (_, renewed) = align(&shown, &printed, true, false);
    assert_eq!(renewed, lines("layers\n0\n...\nlane 0: an empty expert and 7 experts"));
}
