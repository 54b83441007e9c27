//! Parts of the heads of rows.

use super::threads::Threads;

/// A part of each head of a row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Part {
    /// First element in the first head.
    pub first: usize,
    /// Number of elements.
    pub n: usize,
    /// Elements between two heads; 0 if all heads have the same part.
    pub stride: usize,
}

/// Copies the part `from` of each head of each row of `src` to the part `to` of the same head of `dst`, and calls `edit` with the index of the
/// row and the copy. Each is values and elements of a row; a row of `dst` consists of heads of `to.stride` elements.
pub fn copy(
    threads: &Threads,
    (src, src_width): (&[f32], usize),
    from: Part,
    (dst, dst_width): (&mut [f32], usize),
    to: Part,
    edit: impl Fn(usize, &mut [f32]) + Sync,
) {
    threads.rows(dst, dst_width, |i, row| {
        let src = &src[i * src_width..][..src_width];
        for (head, out) in row.chunks_exact_mut(to.stride).enumerate() {
            let out = &mut out[to.first..][..to.n];
            out.copy_from_slice(&src[head * from.stride + from.first..][..from.n]);
            edit(i, out);
        }
    });
}
