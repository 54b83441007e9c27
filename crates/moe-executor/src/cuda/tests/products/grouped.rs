//! Sorting the entries by expert on the GPU: the bounds of each expert, and the list of entries.

use moe_gguf::GgmlType;

use super::experts::{TestRouting, product_of, wanted};
use super::operands::{Bias, Matrices, compare, tolerance};
use crate::cuda::tests::device::{Device, noise};
use moe_testkit::Report;

/// Random experts. A token may select an expert several times, so `k` may exceed `n_expert`.
fn any(tokens: usize, k: usize, n_expert: usize) -> TestRouting {
    let expert = |x: f32| (((x + 1.0) / 2.0 * n_expert as f32) as i32).min(n_expert as i32 - 1);
    TestRouting {
        tokens,
        k,
        n_expert,
        ids: noise(tokens * k, 3).into_iter().map(expert).collect(),
    }
}

/// The expected bounds, and token and slot of each entry in the order of the experts.
fn sorted(routing: &TestRouting) -> (Vec<u32>, Vec<[u32; 2]>) {
    let below = |expert: usize| {
        let ids = routing.ids.iter();
        ids.filter(|&&id| (id as usize) < expert).count() as u32
    };
    let mut entries: Vec<usize> = (0..routing.ids.len()).collect();
    // The sort is stable: entries of an expert keep their order.
    entries.sort_by_key(|&entry| routing.ids[entry]);
    let place = |entry: usize| [(entry / routing.k) as u32, (entry % routing.k) as u32];
    (
        (0..=routing.n_expert).map(below).collect(),
        entries.into_iter().map(place).collect(),
    )
}

/// Bounds and entries in the `work` memory.
fn read(work: &[u8], routing: &TestRouting, wide: bool) -> (Vec<u32>, Vec<[u32; 2]>) {
    let words: Vec<u32> = work
        .chunks_exact(4)
        .map(|word| u32::from_le_bytes(word.try_into().expect("four bytes")))
        .collect();
    let bounds = words[..=routing.n_expert].to_vec();
    // The list starts at a multiple of 16 bytes.
    let list = &words[(routing.n_expert + 1).next_multiple_of(4)..];
    let list = if wide {
        list.chunks_exact(2)
            .map(|code| [code[0], code[1]])
            .collect()
    } else {
        list.iter()
            .map(|code| [code & 0x3f_ffff, code >> 22])
            .collect()
    };
    (bounds, list)
}

#[test]
fn entries_are_sorted_by_expert() {
    let Some(device) = Device::open() else { return };
    let mut report = Report::default();
    let one_expert = TestRouting {
        ids: vec![5; 200 * 3],
        ..any(200, 3, 9)
    };
    // Entries are wide if slots need more than ten bits. Experts have few or many entries.
    for (routing, wide) in [
        (any(33, 3, 7), false),
        (any(300, 4, 8), false),
        (any(2, 1024, 8), false),
        (any(5000, 8, 512), false),
        (one_expert, false),
        (any(2, 1025, 8), true),
        (any(4, 1025, 1024), true),
        (any(3, 3000, 40), true),
    ] {
        let (n_in, n_out) = (64, 10);
        let matrices = Matrices::random(GgmlType::Q8_0, routing.n_expert, n_in, n_out, 1);
        let (_memory, weights) = matrices.upload(device);
        let x = noise(routing.tokens * n_in, 2);
        let work = routing.work(device);
        let bias = Bias::new(device, None, 6);
        let got = product_of(device, &routing, (weights, &bias), (&x, routing.k), &work);
        let case = format!("grouped {routing}, wide {wide}");
        match device.download(&work) {
            Ok(work) => {
                let (have, want) = (read(&work, &routing, wide), sorted(&routing));
                for (what, at) in [
                    ("bound", differ(&have.0, &want.0)),
                    ("entry", differ(&have.1, &want.1)),
                ] {
                    if let Some(at) = at {
                        report.fail(format!("{case}: {what} {at}"));
                    }
                }
            }
            Err(error) => report.fail(format!("{case}: {error}")),
        }
        // The product kernels must read the list in the format in which it was written.
        let want = wanted(&matrices, &x, routing.k, &routing, &bias);
        compare(&mut report, &case, got, &want, tolerance(n_in));
    }
    report.finish();
}

/// A description of the first difference of two lists.
fn differ<T: PartialEq + std::fmt::Debug>(have: &[T], want: &[T]) -> Option<String> {
    if have.len() != want.len() {
        return Some(format!("length is {}, not {}", have.len(), want.len()));
    }
    let at = have
        .iter()
        .zip(want)
        .position(|(have, want)| have != want)?;
    Some(format!("{at} is {:?}, not {:?}", have[at], want[at]))
}
