//! The merge loop of all vocabularies: it starts with single characters and merges the neighboring pair with the lowest rank
//! until no pair can be merged.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// A part of the text, initially a character. It is empty after it was merged into the part before it.
#[derive(Clone, Copy)]
struct Symbol<V> {
    value: V,
    start: usize,
    end: usize,
    before: Option<usize>,
    after: Option<usize>,
}

/// A mergeable pair of neighbors. The order of merges is that of the fields: lowest rank, then leftmost.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Pair<V> {
    rank: u32,
    left: usize,
    right: usize,
    /// Bytes of both when the pair was queued: another size means that one of the parts has changed.
    size: usize,
    made: V,
}

/// The parts of `text` after all merges, in order.
///
/// `value` returns the value of a character, which the vocabulary defines. `merge` receives the values of two neighbors and
/// their concatenated text, and returns the rank and value of the result; `None` if they cannot be merged.
pub(super) fn merge<V: Copy + Ord>(
    text: &str,
    value: impl Fn(&str) -> V,
    merge: impl Fn(V, V, &str) -> Option<(u32, V)>,
) -> Vec<&str> {
    let mut symbols: Vec<Symbol<V>> = Vec::new();
    for (start, char) in text.char_indices() {
        let (at, end) = (symbols.len(), start + char.len_utf8());
        symbols.push(Symbol {
            value: value(&text[start..end]),
            start,
            end,
            before: at.checked_sub(1),
            after: Some(at + 1),
        });
    }
    if let Some(last) = symbols.last_mut() {
        last.after = None;
    }
    let pair = |symbols: &[Symbol<V>], left: Option<usize>, right: Option<usize>| {
        let (left, right) = (left?, right?);
        let (l, r) = (symbols[left], symbols[right]);
        let (rank, made) = merge(l.value, r.value, &text[l.start..r.end])?;
        Some(Reverse(Pair {
            rank,
            left,
            right,
            size: r.end - l.start,
            made,
        }))
    };
    let mut pairs = BinaryHeap::new();
    for right in 1..symbols.len() {
        pairs.extend(pair(&symbols, Some(right - 1), Some(right)));
    }
    while let Some(Reverse(best)) = pairs.pop() {
        let (left, right) = (best.left, best.right);
        let (l, r) = (symbols[left], symbols[right]);
        // One of the two has been merged since the pair was queued.
        if l.is_empty() || r.is_empty() || r.end - l.start != best.size {
            continue;
        }
        symbols[left].value = best.made;
        symbols[left].end = r.end;
        symbols[left].after = r.after;
        symbols[right].end = r.start;
        if let Some(after) = r.after {
            symbols[after].before = Some(left);
        }
        pairs.extend(pair(&symbols, l.before, Some(left)));
        pairs.extend(pair(&symbols, Some(left), r.after));
    }
    let parts = symbols.iter().filter(|symbol| !symbol.is_empty());
    parts
        .map(|symbol| &text[symbol.start..symbol.end])
        .collect()
}

impl<V> Symbol<V> {
    fn is_empty(&self) -> bool {
        self.start == self.end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn merged<'t>(text: &'t str, ranks: &[(&str, u32)]) -> Vec<&'t str> {
        merge(
            text,
            |_| (),
            |(), (), both| {
                let found = ranks.iter().find(|(token, _)| *token == both);
                found.map(|&(_, rank)| (rank, ()))
            },
        )
    }

    #[test]
    fn merges_lowest_rank_then_leftmost() {
        assert_eq!(merged("abc", &[("ab", 1), ("bc", 0)]), ["a", "bc"]);
        assert_eq!(merged("abc", &[("ab", 0), ("bc", 0)]), ["ab", "c"]);
        assert_eq!(merged("aaaaa", &[("aa", 0), ("aaaa", 1)]), ["aaaa", "a"]);
        assert_eq!(merged("äbä", &[("bä", 0), ("äbä", 0)]), ["äbä"]);
        assert_eq!(merged("", &[]), [""; 0]);
    }
}
