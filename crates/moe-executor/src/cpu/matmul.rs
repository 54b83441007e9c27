//! Matrix products of quantized weights with activations: `mul_mat` and `mul_mat_id` of ggml.

use std::cell::RefCell;

use moe_gguf::ExpertId;

use crate::cpu::disjoint::Disjoint;
use crate::cpu::quant::{MAX_STREAMED, Product, Scratch};
use crate::cpu::threads::Threads;
use crate::weights::{Matrix, Stack};

/// Activations of one product, converted to the type that ggml multiplies with the type of the weights. The memory is reused
/// between products.
#[derive(Default)]
pub struct Quantized {
    bytes: Vec<u8>,
    row_size: usize,
}

impl Quantized {
    /// Converts the first `n_in` elements of each row of `rows (row, width)`.
    fn fill(&mut self, threads: &Threads, weights: Stack, rows: &[f32], width: usize) {
        let n_in = weights.n_in;
        let activation = weights.kernel.activation();
        self.row_size = activation.row_size(n_in);
        let n = self.row_size * (rows.len() / width);
        self.bytes.reserve_exact(n.saturating_sub(self.bytes.len()));
        self.bytes.resize(n, 0);
        let (row_size, bytes) = (self.row_size, &mut self.bytes);
        threads.zip_rows(rows, width, bytes, row_size, |row, out| {
            activation.quantize(&row[..n_in], out)
        });
    }

    /// The memory, for the inventory of buffers.
    pub(crate) fn room(&self) -> &Vec<u8> {
        &self.bytes
    }

    fn row(&self, i: usize) -> &[u8] {
        &self.bytes[i * self.row_size..(i + 1) * self.row_size]
    }
}

/// `out[t] = weights · rows[t]` for each token `t`; `rows (token, n_in)`, `out (token, n_out)`.
pub fn mul_mat(
    threads: &Threads,
    weights: &Matrix,
    rows: &[f32],
    out: &mut [f32],
    scratch: &mut Quantized,
) {
    let weights = weights.stack();
    let n_out = weights.n_out;
    let n_rows = rows.len() / weights.n_in;
    scratch.fill(threads, weights, rows, weights.n_in);
    let out = Disjoint::new(out);
    let scratch = &*scratch;
    let panel = panel(n_rows);
    let bytes = n_out * weights.row_size * n_rows.max(1);
    threads.split(n_out.div_ceil(panel), bytes, |panels| {
        let range = panels.start * panel..n_out.min(panels.end * panel);
        let block = weights.rows(0, range.clone());
        let act = |t| scratch.row(t);
        products(weights, block, n_rows, &act, &mut |t, row, values| {
            let at = t * n_out + range.start + row;
            // SAFETY: `split` passes disjoint ranges of panels, and a panel is a range of output elements of its own in each
            // token.
            unsafe { out.slice(at..at + values.len()) }.copy_from_slice(values);
        });
    });
}

/// `out[t, h] = weights[h] · rows[t, h]` for each token `t` and head `h`; `weights` has a matrix for each head. The inputs are the first
/// `n_in` elements of the heads of `rows (token, head, widths[0])`, and the results the first `n_out` elements of the heads of
/// `out (token, head, widths[1])`, whose other elements do not change.
pub fn mul_mat_heads(
    threads: &Threads,
    weights: &Matrix,
    rows: &[f32],
    out: &mut [f32],
    widths: [usize; 2],
    scratch: &mut Quantized,
) {
    let n_head = weights.n_expert;
    let weights = weights.stack();
    let n_out = weights.n_out;
    assert!(weights.n_in <= widths[0] && n_out <= widths[1]);
    let n_tokens = rows.len() / (n_head * widths[0]);
    scratch.fill(threads, weights, rows, widths[0]);
    let out = Disjoint::new(out);
    let scratch = &*scratch;
    let panel = panel(n_tokens);
    let panels = n_out.div_ceil(panel);
    let bytes = n_head * n_out * weights.row_size * n_tokens.max(1);
    threads.split(n_head * panels, bytes, |range| {
        let mut at = range.start;
        while at < range.end {
            let (head, p) = (at / panels, at % panels);
            let end = panels.min(p + range.end - at);
            let first = p * panel;
            let block = weights.rows(head, first..n_out.min(end * panel));
            let act = |t: usize| scratch.row(t * n_head + head);
            products(weights, block, n_tokens, &act, &mut |t, row, values| {
                let at = (t * n_head + head) * widths[1] + first + row;
                // SAFETY: threads have disjoint ranges of (head, panel), and each is a range of output elements of its own in each
                // token.
                unsafe { out.slice(at..at + values.len()) }.copy_from_slice(values);
            });
            at += end - p;
        }
    });
}

/// Minimum number of weight rows per chunk: the number of rows that a GEMM kernel decodes together, 1 for kernels that stream.
fn panel(n_tokens: usize) -> usize {
    if n_tokens > MAX_STREAMED { 32 } else { 1 }
}

/// Products of a block of weight rows with the activations `act(0..n)`. `put(i, r, values)` receives the products of
/// activation `i` with row `r` of the block and the rows after it.
fn products<'a>(
    weights: Stack<'a>,
    block: &'a [u8],
    n: usize,
    act: &'a (dyn Fn(usize) -> &'a [u8] + 'a),
    put: &mut dyn FnMut(usize, usize, &[f32]),
) {
    thread_local! {
        static PANELS: RefCell<Scratch> = RefCell::default();
    }
    let product = Product {
        rows: block,
        row_size: weights.row_size,
        n: weights.n_in,
        n_tokens: n,
        act,
    };
    PANELS.with_borrow_mut(|panels| weights.kernel.gemm(&product, panels, put));
}

/// The entries of each expert: a counting sort of the selected experts.
#[derive(Default)]
pub struct Worklist {
    /// Experts with at least one entry, ascending.
    pub active: Vec<ExpertId>,
    /// Start of the entries of each active expert, then the total number of entries.
    starts: Vec<usize>,
    /// `token * n_expert_used + slot` of each entry, grouped by expert.
    entries: Vec<u32>,
    counts: Vec<usize>,
}

impl Worklist {
    /// Groups `ids (token, slot)` by expert.
    pub fn fill(&mut self, ids: &[i32], n_expert: usize) {
        self.fill_where(ids, n_expert, |_| true);
    }

    /// Groups those `ids (token, slot)` by expert for which `is_included` returns true for the index of the entry. Another
    /// device computes the other entries.
    pub fn fill_where(
        &mut self,
        ids: &[i32],
        n_expert: usize,
        is_included: impl Fn(usize) -> bool,
    ) {
        self.counts.clear();
        self.counts.resize(n_expert + 1, 0);
        let entries = (0u32..).zip(ids);
        let ids = || {
            let entries = entries.clone();
            entries.filter(|(entry, _)| is_included(*entry as usize))
        };
        for (_, &id) in ids() {
            self.counts[id as usize + 1] += 1;
        }
        self.active.clear();
        self.starts.clear();
        let mut total = 0;
        for expert in (0..).map(ExpertId).take(n_expert) {
            let count = self.counts[expert.index() + 1];
            self.counts[expert.index()] = total;
            if count > 0 {
                self.active.push(expert);
                self.starts.push(total);
            }
            total += count;
        }
        self.starts.push(total);
        self.entries.resize(total, 0);
        for (entry, &id) in ids() {
            let at = &mut self.counts[id as usize];
            self.entries[*at] = entry;
            *at += 1;
        }
    }

    fn entries(&self, i: usize) -> &[u32] {
        &self.entries[self.starts[i]..self.starts[i + 1]]
    }
}

/// The row of activations that each entry reads.
#[derive(Clone, Copy)]
pub enum RowOf<'a> {
    /// Row `entry / n`: `n` is `n_expert_used` if the experts of a token read the same row, else 1.
    Every(usize),
    /// A row for each entry.
    Listed(&'a [u32]),
}

impl RowOf<'_> {
    fn entry(self, entry: u32) -> usize {
        match self {
            RowOf::Every(n) => entry as usize / n,
            RowOf::Listed(rows) => rows[entry as usize] as usize,
        }
    }
}

/// Activations of the selected experts.
#[derive(Clone, Copy)]
pub struct Entries<'a> {
    /// Activations `(row, n_in)`.
    pub rows: &'a [f32],
    /// The row of each entry.
    pub row_of: RowOf<'a>,
    /// The entries of each expert.
    pub work: &'a Worklist,
}

/// Products of the selected experts: `out[entry] = weights[expert of entry] · row of entry`; `out (entry, n_out)`. The calling
/// thread calls `callback` meanwhile: see [`Threads::split_with_callback`].
///
/// The threads share one range with the weight rows of all active experts. So the number of tokens of a single expert does
/// not limit the parallelism.
pub fn mul_mat_id(
    threads: &Threads,
    weights: Stack,
    x: Entries,
    out: &mut [f32],
    scratch: &mut Quantized,
    callback: impl FnOnce(),
) {
    let n_out = weights.n_out;
    let work = x.work;
    scratch.fill(threads, weights, x.rows, weights.n_in);
    let out = Disjoint::new(out);
    let scratch = &*scratch;
    let panel = panel(work.entries.len() / work.active.len().max(1));
    let panels = n_out.div_ceil(panel);
    let bytes = work.entries.len() * n_out * weights.row_size;
    threads.split_with_callback(work.active.len() * panels, bytes, callback, |range| {
        let mut at = range.start;
        while at < range.end {
            let (i, p) = (at / panels, at % panels);
            let end = panels.min(p + range.end - at);
            let first = p * panel;
            let block = weights.rows(work.active[i].index(), first..n_out.min(end * panel));
            let entries = work.entries(i);
            let act = |e: usize| scratch.row(x.row_of.entry(entries[e]));
            products(
                weights,
                block,
                entries.len(),
                &act,
                &mut |e, row, values| {
                    let at = entries[e] as usize * n_out + first + row;
                    // SAFETY: an entry belongs to one expert, and threads have disjoint ranges of (expert, panel).
                    unsafe { out.slice(at..at + values.len()) }.copy_from_slice(values);
                },
            );
            at += end - p;
        }
    });
}

#[cfg(test)]
mod tests {
    use moe_gguf::{GgmlType, Gguf};
    use moe_synth::model::{Description, Synth};

    use super::*;
    use crate::weights::Loader;

    /// Heads of 16 elements of 20, and results of 32 elements of 40.
    #[test]
    fn multiplies_each_head_by_its_matrix() {
        const N_HEAD: usize = 4;
        let path = moe_testkit::fixture("architectures/deepseek2.json");
        let json = std::fs::read(path).unwrap();
        let description: Description = serde_json::from_slice(&json).unwrap();
        let synth = Synth::described(&description, GgmlType::F32, 5).unwrap();
        let gguf = Gguf::from_bytes("heads", synth.write(Vec::new()).unwrap()).unwrap();
        let loader = Loader::new(&gguf, "deepseek2");
        let name = "blk.1.attn_k_b.weight";
        let weights = loader.stack(name, 16, 32, N_HEAD).unwrap();
        let threads = Threads::new(2).unwrap();
        for n_tokens in [1, 3, 70] {
            let value = |i: usize| (i * 37 % 101) as f32 / 50.0 - 1.0;
            let rows: Vec<f32> = (0..n_tokens * N_HEAD * 20).map(value).collect();
            let mut out = vec![7.0; n_tokens * N_HEAD * 40];
            let scratch = &mut Quantized::default();
            mul_mat_heads(&threads, &weights, &rows, &mut out, [20, 40], scratch);
            let heads = rows.chunks_exact(20).zip(out.chunks_exact(40));
            for (i, (row, out)) in heads.enumerate() {
                for (r, got) in out[..32].iter().enumerate() {
                    let bytes = weights.rows(i % N_HEAD, r..r + 1).as_chunks::<4>().0;
                    let weights = bytes.iter().map(|bytes| f32::from_le_bytes(*bytes));
                    let products = weights.zip(row).map(|(w, x)| f64::from(w) * f64::from(*x));
                    let want: f64 = products.sum();
                    assert!((f64::from(*got) - want).abs() < 1e-5, "{got} {want}");
                }
                assert_eq!(out[32..], [7.0; 8]);
            }
        }
    }

    #[test]
    fn worklist_groups_entries_by_expert_in_order() {
        let mut work = Worklist::default();
        // Three tokens with two experts each.
        work.fill(&[5, 1, 1, 0, 5, 1], 8);
        assert_eq!(work.active, [0, 1, 5].map(ExpertId));
        assert_eq!(work.entries(0), [3]);
        assert_eq!(work.entries(1), [1, 2, 5]);
        assert_eq!(work.entries(2), [0, 4]);
        work.fill_where(&[5, 3, 1, 3], 8, |entry| entry % 2 == 0);
        assert_eq!(work.active, [1, 5].map(ExpertId));
        assert_eq!((work.entries(0), work.entries(1)), (&[2][..], &[0][..]));
        work.fill(&[], 8);
        assert!(work.active.is_empty());
    }
}
