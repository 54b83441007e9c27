//! Conversion of activations.

use super::{Random, activation_rows, convert};
use crate::cpu::quant::ActivationType;
use crate::cpu::quant::activation::{Q8Row, floats};

#[test]
fn q8_0_rounds_to_even_and_keeps_a_half_precision_scale() {
    let mut row = vec![0.0; 64];
    // The scale is 127 / 254 = 0.5, so the quotients of 1, 3 and 5 are ties.
    row[..6].copy_from_slice(&[254.0, 1.0, 3.0, 5.0, -1.0, -254.0]);
    row[32] = 0.1;
    let bytes = convert(ActivationType::Q8_1, &row);
    let found = Q8Row::new(ActivationType::Q8_1, 64, &bytes);
    assert_eq!(found.q[..7], [127, 0, 2, 2, 0, -127, 0]);
    assert_eq!(found.scale[0].get(), 2.0);
    assert_eq!(found.scaled_sum[0].get(), 8.0);
    assert_eq!(
        (found.sum[0].get(), found.sum[1].get(), found.sum[2].get()),
        (4, 0, 127)
    );
    // 0.1 / 127 = 7.874e-4 in half precision: 1651 * 2^-21.
    assert_eq!(found.scale[1].get(), 1651.0 / 2_097_152.0);
    assert_eq!(found.scaled_sum[1].get(), half::f16::from_f32(0.1).to_f32());
}

#[test]
fn q8_k_maps_the_largest_magnitude_to_minus_127() {
    let mut row = vec![0.0; 512];
    row[3] = 254.0;
    row[4] = -254.0;
    row[255] = 3.0;
    let bytes = convert(ActivationType::Q8K, &row);
    let found = Q8Row::new(ActivationType::Q8K, 512, &bytes);
    assert_eq!(found.q[..6], [0, 0, 0, -127, 127, 0]);
    assert_eq!(found.q[255], -2);
    assert_eq!(found.scale[0].get(), -2.0);
    assert_eq!(found.scale[1].get(), 0.0);
    assert_eq!(found.sum[15].get(), -2);
}

#[test]
fn all_instruction_sets_yield_the_same_bytes() {
    let mut random = Random(4);
    for n in [256, 512, 1280] {
        for row in activation_rows(n, &mut random) {
            for ty in [
                ActivationType::F16,
                ActivationType::Bf16,
                ActivationType::Q8_0,
                ActivationType::Q8_1,
                ActivationType::Q8K,
            ] {
                let mut expected = vec![0xa5; ty.row_size(n)];
                ty.convert(&row, &mut expected);
                assert_eq!(convert(ty, &row), expected, "{ty:?} n = {n}");
            }
        }
    }
    let odd = [0.1, 70000.0, -1e-8, 3.0e-5, 2049.0];
    let mut expected = vec![0xa5; ActivationType::F16.row_size(5)];
    ActivationType::F16.convert(&odd, &mut expected);
    assert_eq!(convert(ActivationType::F16, &odd), expected);
}

#[test]
fn nan_propagates_to_the_scale() {
    let mut row = vec![1.0; 256];
    row[100] = f32::NAN;
    for ty in [
        ActivationType::Q8_0,
        ActivationType::Q8_1,
        ActivationType::Q8K,
    ] {
        let bytes = convert(ty, &row);
        let found = Q8Row::new(ty, 256, &bytes);
        assert_eq!(
            found.scale.iter().filter(|s| s.get().is_nan()).count(),
            1,
            "{ty:?}"
        );
    }
}

#[test]
fn rounds_activations_to_the_type_of_the_weights() {
    let row = [1.0 / 3.0, -65504.0, 1e-7, 1e6];
    let bits = |ty| {
        floats(4, &convert(ty, &row))
            .iter()
            .map(|v| v.get())
            .collect::<Vec<f32>>()
    };
    assert_eq!(bits(ActivationType::F32), row);
    assert_eq!(
        bits(ActivationType::F16),
        [1365.0 / 4096.0, -65504.0, 2f32.powi(-23), f32::INFINITY]
    );
    assert_eq!(
        bits(ActivationType::Bf16),
        [171.0 / 512.0, -65536.0, 215.0 * 2f32.powi(-31), 999424.0]
    );
}
