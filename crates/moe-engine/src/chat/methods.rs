//! Methods of Python's strings, lists and dictionaries.

use minijinja::value::from_args;
use minijinja::{Error, State, Value};
use minijinja_contrib::pycompat::unknown_method_callback;

/// Calls a method that the template engine does not have.
pub(super) fn call(
    state: &mut State,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    if let Some(text) = value.as_str() {
        match method {
            "title" => {
                let () = from_args(args)?;
                return Ok(Value::from(title(text)));
            }
            "removeprefix" => {
                let (prefix,): (&str,) = from_args(args)?;
                return Ok(Value::from(text.strip_prefix(prefix).unwrap_or(text)));
            }
            "removesuffix" => {
                let (suffix,): (&str,) = from_args(args)?;
                return Ok(Value::from(text.strip_suffix(suffix).unwrap_or(text)));
            }
            "rsplit" => {
                if let (Some(separator), limit) = from_args::<(Option<&str>, Option<i64>)>(args)? {
                    return Ok(rsplit(text, separator, limit));
                }
            }
            "partition" => {
                let (separator,): (&str,) = from_args(args)?;
                let parts = text.split_once(separator);
                return Ok(match parts {
                    Some((before, after)) => [before, separator, after].into_iter().collect(),
                    None => [text, "", ""].into_iter().collect(),
                });
            }
            _ => {}
        }
    }
    unknown_method_callback(state, value, method, args)
}

/// The parts of `text` between separators, with at most `limit` splits from the end.
fn rsplit(text: &str, separator: &str, limit: Option<i64>) -> Value {
    let n_splits = limit.and_then(|limit| usize::try_from(limit).ok());
    let n_parts = n_splits.map_or(usize::MAX, |n| n.saturating_add(1));
    let mut parts: Vec<&str> = text.rsplitn(n_parts, separator).collect();
    parts.reverse();
    parts.into_iter().collect()
}

/// Upper case for the first letter of each run of letters, lower case for the others.
fn title(text: &str) -> String {
    let mut titled = String::with_capacity(text.len());
    let mut in_word = false;
    for c in text.chars() {
        if in_word {
            titled.extend(c.to_lowercase());
        } else {
            titled.extend(c.to_uppercase());
        }
        in_word = c.is_alphabetic();
    }
    titled
}
