//! Numbers in messages.

use std::fmt::Display;

/// Returns a number with a noun in singular or plural: `1 layer`, `2 layers`, `2 passes`. `thing` is the singular.
pub fn counted<N: PartialEq + From<u8> + Display>(n: N, thing: &str) -> String {
    let plural = if n == N::from(1) {
        ""
    } else if thing.ends_with('s') {
        "es"
    } else {
        "s"
    };
    format!("{n} {thing}{plural}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn appends_plural_endings() {
        assert_eq!(
            [0, 1, 2u64].map(|n| counted(n, "gap")),
            ["0 gaps", "1 gap", "2 gaps"]
        );
        assert_eq!(
            [1, 2usize].map(|n| counted(n, "pass")),
            ["1 pass", "2 passes"]
        );
    }
}
