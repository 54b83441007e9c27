//! Launches that are fused, and launches that are not.

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
    call(MAT_VEC_1.name, module, n_out as u32 / 32, &params)
}

/// The inputs of attention with four heads and two KV heads of 32 elements.
fn inputs(module_of_v: &'static str) -> Vec<Call> {
    let norm = |x, weight, out, start| call("rms_norm", "rows", 4, &[x, weight, 5, 32, out, start]);
    let rope = |x, width, start| call("rope_halves", "rows", 1, &[x, 800, width, 32, 16, start]);
    let store = |x, out, start| call("store_rows_f16", "attention", 1, &[x, 900, 64, out, start]);
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
            100, 110, 120, 101, 111, 11, 31, 5, 800, 4, 2, 32, 16, 0, 900, 910, 920, 1, 2, 3, 4, 5,
            6, 7, 8, 9
        ]
    );
    assert_eq!(steps[1].call.grid.grid_dim, (8, 1, 1));
}

#[test]
fn products_with_rows_in_shared_memory_are_one_launch() {
    let mut calls = inputs("q4");
    let n_warps = [16, 2, 2];
    let products = calls.iter_mut().filter(|it| it.kernel == MAT_VEC_1.name);
    for (it, warps) in products.zip(n_warps) {
        let p = it.params;
        let of_rows = [
            p[0], 0, 0, p[5], p[6], 0, 0, p[8], p[9], p[12], p[13], 0, 0, 48, 96, p[15], 0, 0,
            p[16],
        ];
        *it = call(ROWS_OF_ONE.name, "q4", 4, &of_rows);
        it.grid.block_dim.0 = 32 * warps;
        it.grid.shared_mem_bytes = 96 + 48 * warps;
    }
    let steps = of(&calls);
    assert_eq!(names(&steps), [ROWS_OF_ONE.name, "attention_inputs"]);
    let call = &steps[0].call;
    assert_eq!(
        call.params[..call.n_params],
        [
            10, 20, 30, 18, 11, 21, 31, 700, 701, 64, 128, 64, 64, 48, 96, 100, 120, 110, 1
        ]
    );
    // 32 rows per block.
    assert_eq!(call.grid.grid_dim, (4 + 2 + 2, 1, 1));
    assert_eq!(
        (call.grid.block_dim.0, call.grid.shared_mem_bytes),
        (512, 864)
    );
}

#[test]
fn products_of_different_types_are_separate_launches() {
    let steps = of(&inputs("q6"));
    assert_eq!(
        names(&steps),
        ["mat_vec_three", "mat_vec_1", "attention_inputs"]
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
        .filter(|call| call.kernel == MAT_VEC_1.name)
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
