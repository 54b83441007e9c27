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

use super::products::MAT_VEC_THREE;
use super::rows::ADD_RMS_NORM;
use super::store::ATTENTION_INPUTS;
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

/// The launches that compute the inputs of attention, by their indices.
struct Inputs {
    /// The first product in the order of the calls.
    first: usize,
    /// Products of queries, keys and values.
    products: [usize; 3],
    /// Norms of queries and keys.
    norms: Option<[usize; 2]>,
    /// Rotary embedding of queries and keys.
    ropes: Option<[usize; 2]>,
    /// Stores of keys and values.
    stores: [usize; 2],
    /// The index after the last one.
    end: usize,
}

const MAT_VEC: &str = "mat_vec_1";

impl Inputs {
    /// The inputs that start with the product `calls[at]`.
    fn find(calls: &[&Call], at: usize) -> Option<Inputs> {
        let (mut products, mut norms, mut ropes, mut stores) = (vec![], vec![], vec![], vec![]);
        calls.get(at).filter(|call| call.kernel == MAT_VEC)?;
        let mut end = at;
        while stores.len() < 2 {
            match calls.get(end)?.kernel {
                MAT_VEC => products.push(end),
                "rms_norm" => norms.push(end),
                "rope_halves" | "rope_neighbours" => ropes.push(end),
                "store_rows_f32" | "store_rows_f16" | "store_rows_q8_0" => stores.push(end),
                _ => return None,
            }
            end += 1;
        }
        let [store_k, store_v] = stores[..] else {
            return None;
        };
        let (k, v) = (calls[store_k].params[0], calls[store_v].params[0]);
        let norm_of_k = norms.iter().find(|&&norm| calls[norm].params[4] == k);
        let projected_k = norm_of_k.map_or(k, |&norm| calls[norm].params[0]);
        let product = |out| products.iter().find(|&&it| calls[it].params[15] == out);
        let (&product_k, &product_v) = (product(projected_k)?, product(v)?);
        let mut others = products.iter();
        let &product_q = others.find(|&&it| it != product_k && it != product_v)?;
        let mut q = calls[product_q].params[15];
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
        let products = self.products.map(|it| calls[it]);
        let [q, k, v] = products.map(|product| product.params[15]);
        let plain = |product: &Call| {
            let p = &product.params;
            (p[1], p[2], p[3], p[14]) == (0, 0, 0, 0) && product.grid.grid_dim.1 == 1
        };
        let row = |product: &Call| (product.params[8], product.params[9], product.params[12]);
        let same_input = products
            .iter()
            .all(|it| plain(it) && row(it) == row(products[0]));
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
        let (n_q, n_kv) = (products[0].params[13], products[1].params[13]);
        let whole = n_q % head_dim == 0 && n_kv % head_dim == 0 && store_k.params[2] == n_kv;
        let fits = head_dim <= MAX_HEAD && head_dim % 32 == 0;
        let independent = !written.contains(&products[0].params[8]);
        Some(is_single && same_stores && same_input && same_width && whole && fits && independent)
    }

    fn steps(&self, calls: &[&Call], steps: &mut Vec<Step>) {
        // The products with weights of the same type are one launch.
        let mut left: Vec<usize> = self.products.to_vec();
        left.sort_unstable();
        while let Some(&leader) = left.first() {
            let is_same = |it: &usize| calls[*it].module == calls[leader].module;
            let (together, others): (Vec<usize>, Vec<usize>) = left.into_iter().partition(is_same);
            left = others;
            let start = if leader == self.first {
                calls[leader].start()
            } else {
                0
            };
            steps.push(products(calls, &together, start));
        }
        steps.push(self.heads(calls));
    }

    /// Norms, rotary embedding and stores.
    fn heads(&self, calls: &[&Call]) -> Step {
        let [q, k, v] = self.products.map(|it| calls[it].params[15]);
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
        let [n_head, n_head_kv] = [0, 1].map(|it| calls[self.products[it]].params[13] / head_dim);
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
fn products(calls: &[&Call], together: &[usize], start: u64) -> Step {
    let of = together[0];
    let first = calls[of];
    let mut call = *first;
    if together.len() == 1 {
        call.set_start(start);
        return Step {
            call,
            of,
            is_fused: false,
        };
    }
    let param =
        |index: usize, slot: usize| together.get(slot).map_or(0, |&it| calls[it].params[index]);
    let three = |index| [0, 1, 2].map(|slot| param(index, slot));
    let mut params = Vec::with_capacity(MAX_PARAMS);
    params.extend(three(0));
    params.push(first.params[5]);
    params.extend(three(6));
    params.extend([first.params[8], first.params[9], first.params[12]]);
    params.extend(three(13));
    params.extend(three(15));
    params.push(start);
    let blocks = together.iter().map(|&it| calls[it].grid.grid_dim.0).max();
    let grid = LaunchConfig {
        grid_dim: (blocks.unwrap_or(1), together.len() as u32, 1),
        ..first.grid
    };
    Step {
        call: Call::new(
            MAT_VEC_THREE.name,
            first.module,
            grid,
            first.overlaps,
            &params,
        ),
        of,
        is_fused: true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(kernel: &'static str, module: &'static str, blocks: u32, params: &[u64]) -> Call {
        let grid = LaunchConfig {
            grid_dim: (blocks, 1, 1),
            block_dim: (256, 1, 1),
            shared_mem_bytes: 0,
        };
        Call::new(kernel, module, grid, true, params)
    }

    fn product(module: &'static str, weights: u64, n_out: u64, out: u64, start: u64) -> Call {
        let params = [
            weights,
            0,
            0,
            0,
            9,
            18,
            weights + 1,
            0,
            700,
            701,
            1,
            1,
            64,
            n_out,
            0,
            out,
            start,
        ];
        call(MAT_VEC, module, n_out as u32 / 32, &params)
    }

    /// The inputs of attention with four heads and two KV heads of 32 elements.
    fn inputs(module_of_v: &'static str) -> Vec<Call> {
        let norm =
            |x, weight, out, start| call("rms_norm", "rows", 4, &[x, weight, 5, 32, out, start]);
        let rope =
            |x, width, start| call("rope_halves", "rows", 1, &[x, 800, width, 32, 16, start]);
        let store =
            |x, out, start| call("store_rows_f16", "attention", 1, &[x, 900, 64, out, start]);
        vec![
            product("q4", 10, 128, 100, 1),
            norm(100, 11, 101, 2),
            rope(101, 128, 3),
            product(module_of_v, 20, 64, 120, 4),
            product("q4", 30, 64, 110, 5),
            norm(110, 31, 111, 6),
            rope(111, 64, 7),
            store(111, 910, 8),
            store(120, 920, 9),
        ]
    }

    fn of(calls: &[Call]) -> Vec<Step> {
        steps(&calls.iter().collect::<Vec<_>>())
    }

    fn names(steps: &[Step]) -> Vec<&'static str> {
        steps.iter().map(|step| step.call.kernel).collect()
    }

    #[test]
    fn attention_inputs_are_two_launches() {
        let steps = of(&inputs("q4"));
        assert_eq!(names(&steps), ["mat_vec_three", "attention_inputs"]);
        let params = |step: &Step| step.call.params[..step.call.n_params].to_vec();
        assert_eq!(
            params(&steps[0]),
            [
                10, 20, 30, 18, 11, 21, 31, 700, 701, 64, 128, 64, 64, 100, 120, 110, 1
            ]
        );
        assert_eq!(steps[0].call.grid.grid_dim, (4, 3, 1));
        assert_eq!(
            params(&steps[1]),
            [
                100, 110, 120, 101, 111, 11, 31, 5, 800, 4, 2, 32, 16, 0, 900, 910, 920, 1, 2, 3,
                4, 5, 6, 7, 8, 9
            ]
        );
        assert_eq!(steps[1].call.grid.grid_dim, (8, 1, 1));
    }

    #[test]
    fn products_of_different_types_are_separate_launches() {
        let steps = of(&inputs("q6"));
        assert_eq!(
            names(&steps),
            ["mat_vec_three", MAT_VEC, "attention_inputs"]
        );
        assert_eq!(steps[0].call.params[10..13], [128, 64, 0]);
        // The kernel after the products stores the start of values.
        assert_eq!((steps[1].call.start(), steps[2].call.params[20]), (0, 4));
    }

    #[test]
    fn other_launches_are_not_fused() {
        let unchanged = |calls: &[Call]| {
            let steps = of(calls);
            steps.len() == calls.len() && steps.iter().all(|step| !step.is_fused)
        };
        let mut norm_of_values = inputs("q4");
        norm_of_values[8].params[0] = 121;
        assert!(unchanged(&norm_of_values));
        let mut other_angles = inputs("q4");
        other_angles[6].params[1] = 801;
        assert!(unchanged(&other_angles));
        let mut reads_result = inputs("q4");
        reads_result
            .iter_mut()
            .filter(|call| call.kernel == MAT_VEC)
            .for_each(|call| call.params[8] = 101);
        assert!(unchanged(&reads_result));
        assert!(unchanged(&inputs("q4")[..8]));
        let mut large_head = inputs("q4");
        large_head
            .iter_mut()
            .filter(|call| call.kernel == "rope_halves")
            .for_each(|call| call.params[3] = 160);
        assert!(unchanged(&large_head));
    }

    #[test]
    fn a_sum_and_its_norm_are_one_launch() {
        let add = call("add", "rows", 4, &[40, 41, 64, 42, 1]);
        let norm = |x, width, out| {
            call(
                "rms_norm_row",
                "rows",
                1,
                &[x, 43, 5, width, out, 45, 46, 2],
            )
        };
        let of_groups = call("rms_norm", "rows", 2, &[42, 43, 5, 64, 44, 2]);
        let steps = of(&[add, norm(42, 64, 44)]);
        assert_eq!(names(&steps), ["add_rms_norm"]);
        let call = &steps[0].call;
        assert_eq!(
            call.params[..call.n_params],
            [40, 41, 42, 43, 5, 64, 44, 45, 46, 1, 2]
        );
        // Another input, another width, an output that is an operand, and norms of groups.
        let separate = [norm(40, 64, 44), norm(42, 32, 44), norm(42, 64, 41)];
        for norm in separate {
            assert_eq!(names(&of(&[add, norm])), ["add", "rms_norm_row"]);
        }
        assert_eq!(names(&of(&[add, of_groups])), ["add", "rms_norm"]);
    }
}
