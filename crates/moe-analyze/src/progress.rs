//! Progress bars on stderr.

use indicatif::{ProgressBar, ProgressStyle};

use crate::context::Context;

/// A bar over `size` bytes; hidden where stderr is no terminal, and with `--quiet`.
pub fn bar(ctx: &Context, size: u64) -> ProgressBar {
    if ctx.quiet {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template(
        "{wide_bar} {binary_bytes} of {binary_total_bytes}, {binary_bytes_per_sec}, {eta} left",
    )
    .unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(size).with_style(style)
}
