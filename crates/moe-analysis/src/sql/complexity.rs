//! Limits of queries. polars parses, plans and computes expressions by recursion, one level for each operator.

use sqlparser::tokenizer::Token;

use super::Error;
use super::tokens::{tokens, word};

/// Maximum length of a query in bytes.
const MAX_BYTES: usize = 64 << 10;
/// Maximum number of operators of an expression, along one path through its parentheses.
const MAX_OPERATORS: usize = 128;
/// Maximum number of SELECT, UNION, EXCEPT, INTERSECT and JOIN in a query.
const MAX_PARTS: usize = 256;

/// Keywords that are operators.
const OPERATORS: [&str; 14] = [
    "AND", "AT", "BETWEEN", "COLLATE", "DIV", "ILIKE", "IN", "IS", "LIKE", "NOT", "OR", "REGEXP",
    "RLIKE", "XOR",
];
/// Keywords that start a part of the plan.
const PARTS: [&str; 5] = ["EXCEPT", "INTERSECT", "JOIN", "SELECT", "UNION"];
/// Other keywords after which another expression starts.
const CLAUSES: [&str; 11] = [
    "BY", "ELSE", "FROM", "HAVING", "LIMIT", "ON", "QUALIFY", "THEN", "WHEN", "WHERE", "WITH",
];

/// Operators of an expression in parentheses, or between CASE and END.
#[derive(Clone, Copy, Default)]
struct Level {
    /// Operators since the last comma or clause.
    n: usize,
    /// Maximum of the parentheses since then.
    inner: usize,
    /// Maximum of the expressions before.
    max: usize,
}

impl Level {
    fn end_expression(&mut self) {
        self.max = self.max.max(self.n + self.inner);
        (self.n, self.inner) = (0, 0);
    }
}

/// Rejects a query that is too long or too deeply nested. Returns its tokens.
pub(super) fn check(sql: &str) -> Result<Vec<Token>, Error> {
    let too_complex = |what: String| Err(Error::TooComplex { what });
    if sql.len() > MAX_BYTES {
        return too_complex(format!("more than {} KiB", MAX_BYTES >> 10));
    }
    let tokens = tokens(sql);
    let (n_operators, n_parts) = count(&tokens);
    if n_operators > MAX_OPERATORS {
        return too_complex(format!(
            "an expression with more than {MAX_OPERATORS} operators"
        ));
    }
    if n_parts > MAX_PARTS {
        let parts = PARTS.join(", ");
        return too_complex(format!("more than {MAX_PARTS} of the keywords {parts}"));
    }
    Ok(tokens)
}

/// The number of operators along the longest path of an expression, and the number of parts.
fn count(tokens: &[Token]) -> (usize, usize) {
    let mut outer: Vec<Level> = Vec::new();
    let mut level = Level::default();
    let mut n_parts = 0;
    for token in tokens {
        let word = word(token);
        let is_one_of = |words: &[&str]| words.contains(&word.as_str());
        if *token == Token::LParen || word == "CASE" {
            outer.push(level);
            level = Level::default();
        } else if *token == Token::RParen || word == "END" {
            level.end_expression();
            let inner = level.max;
            level = outer.pop().unwrap_or_default();
            level.inner = level.inner.max(inner);
        } else if is_one_of(&PARTS) {
            n_parts += 1;
            level.end_expression();
        } else if matches!(token, Token::Comma | Token::SemiColon) || is_one_of(&CLAUSES) {
            level.end_expression();
        } else if is_one_of(&OPERATORS) || is_symbol(token) {
            level.n += 1;
        }
    }
    // Unbalanced parentheses are a syntax error.
    level.end_expression();
    let unclosed = outer
        .iter()
        .map(|level| level.n + level.inner.max(level.max));
    (level.max + unclosed.sum::<usize>(), n_parts)
}

/// Whether a token may be an operator. Texts with a prefix, such as `E'a'`, are counted, too.
fn is_symbol(token: &Token) -> bool {
    !matches!(
        token,
        Token::Word(_)
            | Token::Number(..)
            | Token::SingleQuotedString(_)
            | Token::Period
            | Token::RBracket
            | Token::RBrace
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_operators_on_the_longest_path() {
        for (sql, expected) in [
            ("SELECT 1", (0, 1)),
            ("SELECT a + 1, b - 2 * c", (2, 1)),
            ("SELECT NOT NOT a WHERE b OR c OR d OR e", (3, 1)),
            ("SELECT * FROM t WHERE (a = 1 AND b = 2) OR (c = 3)", (4, 1)),
            ("SELECT a::int || b <= c", (3, 1)),
            ("SELECT +++a", (3, 1)),
            ("SELECT 'a+b', \"a+b\" -- a+b\n, 1 /* + */", (0, 1)),
            ("SELECT a FROM t WHERE a IN (1, 2, 3, 4)", (1, 1)),
            ("SELECT 1 UNION ALL SELECT 2 UNION ALL SELECT 3", (0, 5)),
            (
                "SELECT CASE WHEN a = 1 THEN 2 WHEN a = 2 THEN 3 END",
                (1, 1),
            ),
            ("SELECT ((a + (b", (1, 1)),
            // polars reads this comment.
            ("SELECT 1 /*! + 2 + 3 */", (2, 1)),
            ("SELECT a->>'b' || N'c', \"and\".\"or\"", (3, 1)),
        ] {
            assert_eq!(count(&tokens(sql)), expected, "{sql}");
        }
    }

    #[test]
    fn rejects_long_and_deep_queries() {
        let what = |sql: &str| match check(sql) {
            Err(Error::TooComplex { what }) => what,
            other => panic!("{other:?}"),
        };
        let sum = |n: usize| format!("SELECT 1{}", "+1".repeat(n));
        check(&sum(128)).unwrap();
        assert_eq!(
            what(&sum(129)),
            "an expression with more than 128 operators"
        );
        let unions = |n: usize| vec!["SELECT 1"; n].join(" UNION ALL ");
        check(&unions(128)).unwrap();
        assert!(what(&unions(129)).starts_with("more than 256 of the keywords"));
        assert_eq!(what(&" ".repeat((64 << 10) + 1)), "more than 64 KiB");
    }
}
