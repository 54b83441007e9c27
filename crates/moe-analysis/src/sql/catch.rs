//! Conversion of errors and panics of polars to errors of this module.

use std::panic::{set_hook, take_hook};
use std::sync::Once;
use std::sync::atomic::{AtomicUsize, Ordering};

use moe_files::stack::{StackError, with_stack};
use polars::prelude::{PolarsError, PolarsResult};

use super::Error;

/// Stack of the thread that calls polars. Builds without optimization need more than 40 KiB for each level of a query.
const STACK_SIZE: usize = 512 << 20;

/// Number of calls of [`catch`] in progress.
static RUNNING: AtomicUsize = AtomicUsize::new(0);

/// Calls polars on a thread with a large stack, because polars plans nested expressions by recursion. Some queries cause a panic instead of an error; it becomes [`Error::Panicked`].
///
/// The first call wraps the program's panic hook, so that messages of these panics are not printed, not even those from
/// polars' threads. With `panic = "abort"` the program still aborts.
pub(super) fn catch<T: Send>(run: impl FnOnce() -> PolarsResult<T> + Send) -> Result<T, Error> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let print = take_hook();
        set_hook(Box::new(move |panic| {
            if RUNNING.load(Ordering::Relaxed) == 0 {
                print(panic);
            }
        }));
    });
    RUNNING.fetch_add(1, Ordering::Relaxed);
    let outcome = with_stack("query", STACK_SIZE, run);
    RUNNING.fetch_sub(1, Ordering::Relaxed);
    outcome?.map_err(Error::from)
}

impl From<StackError> for Error {
    fn from(error: StackError) -> Self {
        match error {
            StackError::Start { source } => Self::Thread { source },
            error => Self::Panicked {
                message: first_paragraph(&error.to_string()),
            },
        }
    }
}

impl From<PolarsError> for Error {
    fn from(error: PolarsError) -> Self {
        let mut text = without_syntax_tree(first_paragraph(&error.to_string()));
        if text.starts_with("duplicate: ")
            && let Some(end) = text.find(". ")
        {
            // The rest is advice for users of the polars API.
            text.truncate(end);
            text.push_str("; rename columns with AS");
        }
        Self::Query {
            source: text.into(),
        }
    }
}

/// The text without the fields of a node of the syntax tree. polars prints nodes in Rust's debug format.
fn without_syntax_tree(text: String) -> String {
    let start = text.find(['{', '(']);
    let end = text.rfind(['}', ')']);
    match (start, end) {
        (Some(start), Some(end)) if start < end && text.contains("Span(") => {
            format!("{}{}", text[..start].trim_end(), &text[end + 1..])
        }
        _ => text,
    }
}

/// The first paragraph on one line. The following paragraphs contain the plan of the query.
fn first_paragraph(text: &str) -> String {
    let lines = text
        .lines()
        .map(str::trim)
        .skip_while(|line| line.is_empty());
    let paragraph: Vec<&str> = lines.take_while(|line| !line.is_empty()).collect();
    paragraph.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn converts_panic_to_error() {
        let error = catch(|| -> PolarsResult<()> { panic!("no {}\n\nplan", "feature") });
        let Err(Error::Panicked { message }) = error else {
            panic!("{error:?}");
        };
        assert_eq!(message, "no feature");
        assert_eq!(RUNNING.load(Ordering::Relaxed), 0);
    }
}
