//! Consecutive launches that one kernel computes. The graphs of a pass use these kernels: the results are the same, and a small kernel
//! takes less time than the gap between two.
//!
//! - A sum and the RMS norm of the sum.
//! - The inputs of attention for a single token: the products of queries, keys and values in one kernel, and their norms, rotary embedding
//!   and stores in another.
//!
//! A start of an operation is stored by the kernel that computes it, except that of a product of keys or values: the operations before it
//! in the graph are computed after it, and times must not decrease. The kernel after the products stores it.

use cudarc::driver::LaunchConfig;

use super::products::{MAT_VEC_1, MAT_VEC_THREE};
use super::rows::ADD_RMS_NORM;
use super::store::ATTENTION_INPUTS;
use super::token_rows::{ROWS_OF_ONE, blocks};
use crate::cuda::kernel::Kernel;
use crate::cuda::launches::{Call, MAX_PARAMS};

/// Largest head of `attention_inputs`.
const MAX_HEAD: u64 = 128;

/// The kernel of the same source file that may compute a launch of `kernel` together with others.
pub(in crate::cuda) fn fused_with(kernel: &str) -> Option<Kernel> {
    match kernel {
        "add" => Some(ADD_RMS_NORM),
        "mat_vec_1" => Some(MAT_VEC_THREE),
        "store_rows_f32" | "store_rows_f16" | "store_rows_q8_0" => Some(ATTENTION_INPUTS),
        _ => None,
    }
}

/// A launch that computes one or more of the given ones.
pub(in crate::cuda) struct Step {
    pub call: Call,
    /// A launch whose function or [fused](fused_with) function is that of the call.
    pub of: usize,
    pub is_fused: bool,
}

impl Step {
    fn single(calls: &[&Call], of: usize) -> Step {
        Step {
            call: *calls[of],
            of,
            is_fused: false,
        }
    }
}

/// The launches that compute `calls`, in order.
pub(in crate::cuda) fn steps(calls: &[&Call]) -> Vec<Step> {
    let mut steps = Vec::with_capacity(calls.len());
    let mut at = 0;
    while at < calls.len() {
        if let Some(step) = add_and_norm(calls, at) {
            steps.push(step);
            at += 2;
        } else if let Some(inputs) = Inputs::find(calls, at) {
            at = inputs.end;
            inputs.steps(calls, &mut steps);
        } else {
            steps.push(Step::single(calls, at));
            at += 1;
        }
    }
    steps
}

/// A call of `add` and the call of `rms_norm_row` after it.
fn add_and_norm(calls: &[&Call], at: usize) -> Option<Step> {
    let (add, norm) = (calls.get(at)?, calls.get(at + 1)?);
    let [a, b, n, sum] = *add.args::<4>("add")?;
    let [x, weight, eps, width, out, codes, groups] = *norm.args::<7>("rms_norm_row")?;
    if x != sum || n != width || [a, b, sum].contains(&out) {
        return None;
    }
    let params = [
        a,
        b,
        sum,
        weight,
        eps,
        width,
        out,
        codes,
        groups,
        add.start(),
        norm.start(),
    ];
    Some(Step {
        call: Call::new(
            ADD_RMS_NORM.name,
            add.module,
            norm.grid,
            add.overlaps,
            &params,
        ),
        of: at,
        is_fused: true,
    })
}

/// A product of a matrix with one row of activations. Arguments as in the call.
#[derive(Clone, Copy)]
struct Product {
    /// Index of the call.
    at: usize,
    weights: u64,
    row_size: u64,
    bias: u64,
    x: u64,
    quantized: u64,
    n_in: u64,
    n_out: u64,
    /// Layout of shared memory, for `rows_of_one`.
    layout: [u64; 2],
    out: u64,
}

impl Product {
    /// The product `calls[at]`; `None` if it is another call, or a product of selected experts.
    fn of(calls: &[&Call], at: usize) -> Option<Product> {
        let call = calls.get(at)?;
        if let Some(&args) = call.args::<16>(MAT_VEC_1.name) {
            let [
                weights,
                up,
                table,
                ids,
                _,
                row_size,
                bias,
                _,
                x,
                quantized,
                ..,
            ] = args;
            let [.., n_in, n_out, glu, out] = args;
            let is_plain = [up, table, ids, glu] == [0; 4] && call.grid.grid_dim.1 == 1;
            return is_plain.then_some(Product {
                at,
                weights,
                row_size,
                bias,
                x,
                quantized,
                n_in,
                n_out,
                layout: [0; 2],
                out,
            });
        }
        let args = *call.args::<18>(ROWS_OF_ONE.name)?;
        let [weights, _, _, row_size, bias, _, _, x, quantized, n_in, ..] = args;
        let [.., n_out, _, _, segment, staged, out, _, _] = args;
        Some(Product {
            at,
            weights,
            row_size,
            bias,
            x,
            quantized,
            n_in,
            n_out,
            layout: [segment, staged],
            out,
        })
    }
}

/// The launches that compute the inputs of attention, by their indices.
struct Inputs {
    /// The first product in the order of the calls.
    first: usize,
    /// Products of queries, keys and values.
    products: [Product; 3],
    /// Norms of queries and keys.
    norms: Option<[usize; 2]>,
    /// Rotary embedding of queries and keys.
    ropes: Option<[usize; 2]>,
    /// Stores of keys and values.
    stores: [usize; 2],
    /// The index after the last one.
    end: usize,
}

impl Inputs {
    /// The inputs that start with the product `calls[at]`.
    fn find(calls: &[&Call], at: usize) -> Option<Inputs> {
        let (mut products, mut norms, mut ropes, mut stores) = (vec![], vec![], vec![], vec![]);
        Product::of(calls, at)?;
        let mut end = at;
        while stores.len() < 2 {
            match calls.get(end)?.kernel {
                "rms_norm" => norms.push(end),
                "rope_halves" | "rope_neighbours" => ropes.push(end),
                "store_rows_f32" | "store_rows_f16" | "store_rows_q8_0" => stores.push(end),
                _ => products.push(Product::of(calls, end)?),
            }
            end += 1;
        }
        let [store_k, store_v] = stores[..] else {
            return None;
        };
        let (k, v) = (calls[store_k].params[0], calls[store_v].params[0]);
        let norm_of_k = norms.iter().find(|&&norm| calls[norm].params[4] == k);
        let projected_k = norm_of_k.map_or(k, |&norm| calls[norm].params[0]);
        let product = |out| products.iter().find(|it| it.out == out);
        let (&product_k, &product_v) = (product(projected_k)?, product(v)?);
        let mut others = products.iter();
        let &product_q = others.find(|it| it.at != product_k.at && it.at != product_v.at)?;
        let mut q = product_q.out;
        let norm_of_q = norms.iter().find(|&&norm| calls[norm].params[0] == q);
        if let Some(&norm) = norm_of_q {
            q = calls[norm].params[4];
        }
        let rope = |x| ropes.iter().find(|&&rope| calls[rope].params[0] == x);
        let pair = |q: Option<&usize>, k: Option<&usize>, n| match (q, k, n) {
            (Some(&q), Some(&k), 2) => Some(Some([q, k])),
            (None, None, 0) => Some(None),
            _ => None,
        };
        let inputs = Inputs {
            first: at,
            products: [product_q, product_k, product_v],
            norms: pair(norm_of_q, norm_of_k, norms.len())?,
            ropes: pair(rope(q), rope(k), ropes.len())?,
            stores: [store_k, store_v],
            end,
        };
        (products.len() == 3 && inputs.are_valid(calls)?).then_some(inputs)
    }

    /// Elements of a head.
    fn head_dim(&self, calls: &[&Call]) -> Option<u64> {
        match (self.norms, self.ropes) {
            (_, Some([q, _])) => Some(calls[q].params[3]),
            (Some([q, _]), None) => Some(calls[q].params[3]),
            (None, None) => None,
        }
    }

    /// Whether the kernels support the shapes, and no launch depends on another one except as [`Inputs::find`] assumes.
    fn are_valid(&self, calls: &[&Call]) -> Option<bool> {
        let head_dim = self.head_dim(calls)?;
        let [store_k, store_v] = self.stores.map(|it| calls[it]);
        let is_single = store_k.grid.grid_dim.0 == 1 && store_v.grid.grid_dim.0 == 1;
        let same_stores =
            store_k.kernel == store_v.kernel && store_k.params[1..3] == store_v.params[1..3];
        let products = &self.products;
        let [q, k, v] = products.map(|product| product.out);
        let row = |it: &Product| (it.x, it.quantized, it.n_in);
        let same_input = products.iter().all(|it| row(it) == row(&products[0]));
        let mut written = vec![q, k, v];
        let mut same_width = true;
        if let Some(norms) = self.norms {
            let [a, b] = norms.map(|it| calls[it]);
            written.extend([a.params[4], b.params[4]]);
            same_width &=
                a.params[3] == head_dim && b.params[3] == head_dim && a.params[2] == b.params[2];
        }
        if let Some(ropes) = self.ropes {
            let [a, b] = ropes.map(|it| calls[it]);
            same_width &= a.kernel == b.kernel
                && a.params[1] == b.params[1]
                && a.params[3..5] == b.params[3..5];
        }
        let (n_q, n_kv) = (products[0].n_out, products[1].n_out);
        let whole = n_q % head_dim == 0 && n_kv % head_dim == 0 && store_k.params[2] == n_kv;
        let fits = head_dim <= MAX_HEAD && head_dim % 32 == 0;
        let independent = !written.contains(&products[0].x);
        Some(is_single && same_stores && same_input && same_width && whole && fits && independent)
    }

    fn steps(&self, calls: &[&Call], steps: &mut Vec<Step>) {
        // The products with weights of the same type are one launch.
        let mut left = self.products.to_vec();
        left.sort_unstable_by_key(|it| it.at);
        while let Some(&leader) = left.first() {
            let is_same = |it: &Product| calls[it.at].module == calls[leader.at].module;
            let (together, others): (Vec<Product>, Vec<Product>) =
                left.into_iter().partition(is_same);
            left = others;
            let start = if leader.at == self.first {
                calls[leader.at].start()
            } else {
                0
            };
            steps.push(products(calls, &together, start));
        }
        steps.push(self.heads(calls));
    }

    /// Norms, rotary embedding and stores.
    fn heads(&self, calls: &[&Call]) -> Step {
        let [q, k, v] = self.products.map(|it| it.out);
        let [store_k, store_v] = self.stores.map(|it| calls[it]);
        let (mut q_out, mut k_out, mut weights, mut eps) = (q, k, [0; 2], 0);
        if let Some(norms) = self.norms {
            let [a, b] = norms.map(|it| calls[it]);
            (q_out, k_out, eps) = (a.params[4], b.params[4], a.params[2]);
            weights = [a.params[1], b.params[1]];
        }
        let (mut angles, mut n_dims, mut neighbours) = (0, 0, 0);
        if let Some([rope, _]) = self.ropes {
            let rope = calls[rope];
            (angles, n_dims) = (rope.params[1], rope.params[4]);
            neighbours = u64::from(rope.kernel == "rope_neighbours");
        }
        let head_dim = self.head_dim(calls).unwrap_or(1);
        let [n_head, n_head_kv] = [0, 1].map(|it| self.products[it].n_out / head_dim);
        let ty = match store_k.kernel {
            "store_rows_f32" => 0,
            "store_rows_f16" => 1,
            _ => 2,
        };
        let mut params = vec![
            q,
            k,
            v,
            q_out,
            k_out,
            weights[0],
            weights[1],
            eps,
            angles,
            n_head,
            n_head_kv,
            head_dim,
            n_dims,
            neighbours,
            store_k.params[1],
            store_k.params[3],
            store_v.params[3],
            ty,
        ];
        let later = (self.first..self.end).filter(|&it| it != self.first);
        params.extend(later.map(|it| calls[it].start()));
        params.resize(ATTENTION_INPUTS.params.len() + 1, 0);
        let blocks = (n_head + 2 * n_head_kv) as u32;
        let grid = LaunchConfig {
            grid_dim: (blocks, 1, 1),
            block_dim: (head_dim as u32, 1, 1),
            shared_mem_bytes: 0,
        };
        Step {
            call: Call::new(
                ATTENTION_INPUTS.name,
                store_k.module,
                grid,
                store_k.overlaps,
                &params,
            ),
            of: self.stores[0],
            is_fused: true,
        }
    }
}

/// Up to three products in one launch.
fn products(calls: &[&Call], together: &[Product], start: u64) -> Step {
    let leader = together[0];
    let first = calls[leader.at];
    if together.len() == 1 {
        let mut step = Step::single(calls, leader.at);
        step.call.set_start(start);
        return step;
    }
    let three =
        |of: fn(&Product) -> u64| [0usize, 1, 2].map(|slot| together.get(slot).map_or(0, of));
    let is_rows = first.kernel == ROWS_OF_ONE.name;
    let mut params = Vec::with_capacity(MAX_PARAMS);
    params.extend(three(|it| it.weights));
    params.push(leader.row_size);
    params.extend(three(|it| it.bias));
    params.extend([leader.x, leader.quantized, leader.n_in]);
    params.extend(three(|it| it.n_out));
    if is_rows {
        params.extend(leader.layout);
    }
    params.extend(three(|it| it.out));
    params.push(start);
    // The largest of their blocks.
    let grids = together.iter().map(|it| calls[it.at].grid);
    let mut grid = grids.max_by_key(|it| it.block_dim.0).unwrap_or(first.grid);
    grid.grid_dim = if is_rows {
        let of_each = together.iter().map(|it| blocks(it.n_out as usize, &grid));
        (of_each.sum::<u32>(), 1, 1)
    } else {
        let of_each = together.iter().map(|it| calls[it.at].grid.grid_dim.0);
        (of_each.max().unwrap_or(1), together.len() as u32, 1)
    };
    // `rows_of_one` itself is for up to three matrices.
    let kernel = if is_rows { ROWS_OF_ONE } else { MAT_VEC_THREE };
    Step {
        call: Call::new(kernel.name, first.module, grid, first.overlaps, &params),
        of: leader.at,
        is_fused: !is_rows,
    }
}

#[cfg(test)]
mod tests;
