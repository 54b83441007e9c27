//! Tokens of a query, as polars reads them.

use sqlparser::dialect::GenericDialect;
use sqlparser::tokenizer::{Token, Tokenizer};

/// The tokens of a query without white space and comments. Empty if the query has invalid tokens, which polars reports.
pub(super) fn tokens(sql: &str) -> Vec<Token> {
    let tokens = Tokenizer::new(&GenericDialect, sql).tokenize();
    let mut tokens = tokens.unwrap_or_default();
    tokens.retain(|token| !matches!(token, Token::Whitespace(_)));
    tokens
}

/// A keyword or a name without quotes, in upper case. Empty for other tokens.
pub(super) fn word(token: &Token) -> String {
    match token {
        Token::Word(word) if word.quote_style.is_none() => word.value.to_ascii_uppercase(),
        _ => String::new(),
    }
}

/// The names of the common table expressions of a query.
pub(super) fn common_tables(tokens: &[Token]) -> Vec<&str> {
    let mut names = Vec::new();
    for (at, token) in tokens.iter().enumerate() {
        if word(token) != "WITH" {
            continue;
        }
        let mut rest = &tokens[at + 1..];
        if rest.first().is_some_and(|token| word(token) == "RECURSIVE") {
            rest = &rest[1..];
        }
        while let Some((name, after)) = common_table(rest) {
            names.push(name);
            rest = after;
        }
    }
    names
}

/// The name of the common table expression at the start of `tokens`, and the tokens after it and its comma.
fn common_table(tokens: &[Token]) -> Option<(&str, &[Token])> {
    let (Token::Word(name), after_name) = tokens.split_first()? else {
        return None;
    };
    let after_columns = after_parentheses(after_name).unwrap_or(after_name);
    let (keyword, mut query) = after_columns.split_first()?;
    if word(keyword) != "AS" {
        return None;
    }
    while let Some((keyword, after)) = query.split_first()
        && ["NOT", "MATERIALIZED"].contains(&word(keyword).as_str())
    {
        query = after;
    }
    let rest = after_parentheses(query)?;
    let next = rest.strip_prefix(&[Token::Comma]).unwrap_or_default();
    Some((name.value.as_str(), next))
}

/// The tokens after the parentheses at the start of `tokens`; `None` if it has none. Unclosed parentheses include the rest.
fn after_parentheses(tokens: &[Token]) -> Option<&[Token]> {
    if tokens.first() != Some(&Token::LParen) {
        return None;
    }
    let mut depth = 0usize;
    for (at, token) in tokens.iter().enumerate() {
        match token {
            Token::LParen => depth += 1,
            Token::RParen => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(&tokens[at + 1..]);
        }
    }
    Some(&[])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_names_of_common_table_expressions() {
        for (sql, expected) in [
            ("WITH a AS (SELECT 1) SELECT * FROM a", &["a"][..]),
            ("SELECT a AS b FROM t", &[]),
            (
                "with a(x, y) as ((SELECT 1, 2)), \"B c\" AS NOT MATERIALIZED (SELECT 3) SELECT 1",
                &["a", "B c"],
            ),
            ("WITH RECURSIVE a AS (SELECT 1) SELECT 1", &["a"]),
            (
                "WITH a AS (WITH b AS (SELECT 1), c AS (SELECT 2) SELECT 3), d AS (SELECT 4) SELECT 5",
                &["a", "d", "b", "c"],
            ),
            (
                "SELECT * FROM (WITH a AS (SELECT 1) SELECT * FROM a) AS b, (SELECT 1) AS c",
                &["a"],
            ),
            ("SELECT 'WITH a AS (' /* WITH b AS ( */, \"WITH\"", &[]),
            ("SELECT 1 OVER w FROM t WINDOW w AS (ORDER BY a)", &[]),
            ("SELECT CAST(a AS TIMESTAMP WITH TIME ZONE)", &[]),
            ("WITH a AS (SELECT 1", &["a"]),
            ("WITH a", &[]),
            ("WITH", &[]),
        ] {
            assert_eq!(common_tables(&tokens(sql)), expected, "{sql}");
        }
        assert!(tokens("WITH a AS (SELECT 'not closed)").is_empty());
    }
}
