//! Calls that may need more stack than their thread has.

use std::{io, thread};

/// Why [`with_stack`] has no result.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StackError {
    /// The thread cannot be started, usually for lack of memory.
    #[error("a thread with a large stack cannot be started: {source}")]
    Start {
        /// The error of the system.
        source: io::Error,
    },
    /// The call panicked.
    #[error("{message}")]
    Panicked {
        /// The panic message.
        message: String,
    },
}

/// Calls `run` on a thread with a stack of `size` bytes, for recursion whose depth depends on the input. `name` is the name of the
/// thread.
///
/// # Errors
/// [`StackError`].
pub fn with_stack<T: Send>(
    name: &str,
    size: usize,
    run: impl FnOnce() -> T + Send,
) -> Result<T, StackError> {
    thread::scope(|scope| {
        let thread = thread::Builder::new()
            .name(name.to_owned())
            .stack_size(size)
            .spawn_scoped(scope, run)
            .map_err(|source| StackError::Start { source })?;
        thread.join().map_err(|panic| {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
            StackError::Panicked {
                message: text.unwrap_or("it panicked").to_owned(),
            }
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sum of 1 to `n`, with a frame of more than 1 KiB for each number.
    fn sum(n: u64) -> u64 {
        let frame = std::hint::black_box([n; 128]);
        match n {
            0 => 0,
            _ => sum(n - 1) + frame[0],
        }
    }

    #[test]
    fn returns_result_of_deep_recursion() {
        let n = 20_000;
        let result = with_stack("sum", 256 << 20, || sum(n));
        assert_eq!(result.unwrap(), 200_010_000);
    }

    #[test]
    fn returns_panic_as_error() {
        let error = with_stack("panic", 1 << 20, || -> u64 { panic!("no {}", "feature") });
        assert_eq!(error.unwrap_err().to_string(), "no feature");
        let error = with_stack("panic", 1 << 20, || -> u64 { panic!("fixed") });
        assert_eq!(error.unwrap_err().to_string(), "fixed");
    }
}
