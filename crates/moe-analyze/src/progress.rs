//! Progress bars and spinners on stderr for work that takes more than a second.

use std::io::{IsTerminal, stderr};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use moe_trace::Run;
use moe_trace::record::RECORD_SIZE;

use crate::context::Context;
use crate::output::message;

const BYTES: &str =
    "{wide_bar} {binary_bytes} of {binary_total_bytes}, {binary_bytes_per_sec}, {eta} left";
const ITEMS: &str = "{wide_bar} {human_pos} of {human_len} {msg}, {eta} left";
const SPINNER: &str = "{spinner} {msg}, {elapsed}";

/// The visible bar. Messages are printed above it.
static DRAWN: Mutex<Option<ProgressBar>> = Mutex::new(None);

/// Delay before the bar appears.
const DELAY: Duration = Duration::from_secs(1);
const INTERVAL: Duration = Duration::from_millis(200);

/// Shows the progress of some work, from one second after its start until the value is dropped. Shows nothing if stderr is not a
/// terminal, with `--quiet`, or in continuous integration (`CI` is set).
pub struct Progress {
    bar: ProgressBar,
    drawing: Option<(Sender<()>, JoinHandle<()>)>,
}

impl Progress {
    /// Bar over `size` bytes.
    pub fn bytes(ctx: &Context, size: u64) -> Progress {
        Progress::new(ctx, BYTES, "", size, None)
    }

    /// Bar over `n` items; `what` is their name, a plural.
    pub fn items(ctx: &Context, what: &'static str, n: u64) -> Progress {
        Progress::new(ctx, ITEMS, what, n, None)
    }

    /// Like [`Progress::items`], with the number of completed items in `done`.
    pub fn following(ctx: &Context, what: &'static str, n: u64, done: Arc<AtomicU64>) -> Progress {
        Progress::new(ctx, ITEMS, what, n, Some(done))
    }

    /// Bar over the records of a run. It follows the iterators over its operations.
    pub fn of_run(ctx: &Context, run: &Run) -> Progress {
        let n_records = run.trace.size_bytes() / RECORD_SIZE as u64;
        Progress::following(ctx, "records", n_records, run.trace.position())
    }

    /// Spinner while a file is read.
    pub fn reading(ctx: &Context, path: &Path) -> Progress {
        let name = path.file_name().unwrap_or(path.as_os_str());
        let what = format!("reading {}", name.display());
        Progress::new(ctx, SPINNER, message::line(&what), 0, None)
    }

    fn new(
        ctx: &Context,
        template: &str,
        what: impl Into<String>,
        n: u64,
        done: Option<Arc<AtomicU64>>,
    ) -> Progress {
        let is_ci = std::env::var_os("CI").is_some_and(|value| !value.is_empty());
        if ctx.quiet || is_ci || !stderr().is_terminal() {
            let bar = ProgressBar::hidden();
            return Progress { bar, drawing: None };
        }
        let style =
            ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = ProgressBar::with_draw_target(Some(n), ProgressDrawTarget::hidden())
            .with_style(style)
            .with_message(what.into());
        let (stop, stopped) = channel::<()>();
        let drawn = bar.clone();
        let draw = move || {
            if stopped.recv_timeout(DELAY) != Err(RecvTimeoutError::Timeout) {
                return;
            }
            drawn.set_draw_target(ProgressDrawTarget::stderr());
            *lock_drawn() = Some(drawn.clone());
            loop {
                if let Some(done) = &done {
                    drawn.set_position(done.load(Ordering::Relaxed));
                }
                drawn.tick();
                if stopped.recv_timeout(INTERVAL) != Err(RecvTimeoutError::Timeout) {
                    return;
                }
            }
        };
        let thread = thread::Builder::new().name("progress".into()).spawn(draw);
        let drawing = thread.ok().map(|thread| (stop, thread));
        Progress { bar, drawing }
    }

    /// Advances the bar by `n`.
    pub fn inc(&self, n: u64) {
        self.bar.inc(n);
    }
}

fn lock_drawn() -> MutexGuard<'static, Option<ProgressBar>> {
    DRAWN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `print` while the bar is hidden.
pub fn without_bar(print: impl FnOnce()) {
    match &*lock_drawn() {
        Some(bar) => bar.suspend(print),
        None => print(),
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some((stop, thread)) = self.drawing.take() {
            drop(stop);
            let _ = thread.join();
            *lock_drawn() = None;
        }
        self.bar.finish_and_clear();
    }
}
