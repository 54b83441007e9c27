//! How transfers are started, by whichever thread.

use std::sync::Arc;

use cudarc::driver::{CudaEvent, CudaStream};

use crate::cuda::gpu::upload_on;
use crate::cuda::{Error, Ptr, Result};

/// A transfer that is to be started.
pub(super) struct Order {
    /// Bytes of the host; they stay where they are until the order's outcome is known.
    pub from: *const [u8],
    /// Room for them on the GPU.
    pub to: Ptr,
    /// Recorded behind the transfer.
    pub arrived: Arc<CudaEvent>,
    /// Whether it is made to fail.
    pub fails: bool,
}

// SAFETY: the bytes are read alone, and nobody writes them or lets go of them before the outcome is known: so says the caller
// of `PostFetch::begin`. The rest of it may go from thread to thread by itself.
unsafe impl Send for Order {}

/// What became of orders, which are started in turn.
#[derive(Debug)]
pub(super) struct Started {
    /// Orders that were started, the first ones.
    pub n: usize,
    /// Why no more were.
    pub error: Option<Error>,
}

/// Starts transfers on `stream`.
pub(super) fn start(stream: &CudaStream, orders: &[Order]) -> Started {
    match stream.context().bind_to_thread() {
        Ok(()) => in_turn(orders, |order| order.start(stream)),
        Err(source) => Started {
            n: 0,
            error: Some(Error::driver("the thread that starts transfers", source)),
        },
    }
}

impl Order {
    fn start(&self, stream: &CudaStream) -> Result<()> {
        if self.fails {
            return Err(Error::Injected { what: "a transfer" });
        }
        // SAFETY: the bytes are there until the outcome of this is known, as above.
        upload_on(stream, self.to, unsafe { &*self.from })?;
        let recorded = self.arrived.record(stream);
        recorded.map_err(|source| Error::driver("an event", source))
    }
}

/// Starts one after another, until one fails.
fn in_turn<T>(all: &[T], mut start: impl FnMut(&T) -> Result<()>) -> Started {
    for (n, one) in all.iter().enumerate() {
        if let Err(error) = start(one) {
            return Started {
                n,
                error: Some(error),
            };
        }
    }
    Started {
        n: all.len(),
        error: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn none_is_started_behind_one_that_fails() {
        let mut seen = Vec::new();
        let started = in_turn(&[5, 6, 7, 8], |&n| {
            seen.push(n);
            match n {
                7 => Err(Error::NoDevice),
                _ => Ok(()),
            }
        });
        assert_eq!(seen, [5, 6, 7]);
        assert_eq!(started.n, 2);
        assert!(matches!(started.error, Some(Error::NoDevice)));
    }

    #[test]
    fn all_are_started_where_none_fails() {
        let started = in_turn(&[1, 2, 3], |_| Ok(()));
        assert_eq!(started.n, 3);
        assert!(started.error.is_none());
        assert_eq!(in_turn(&[(); 0], |()| Err(Error::NoDevice)).n, 0);
    }
}
