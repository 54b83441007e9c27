//! Weights read per second by products with a few tokens, compared with the read bandwidth. Passes over the weights and
//! measurements of the bandwidth alternate, so that other programs slow down both.
//!
//!   cargo bench -p moe-executor --bench products -- TYPES THREADS TOKENS [ISA] [MIB]
//!   cargo bench -p moe-executor --bench products -- Q4_K,Q8_0 1,2 1,4 Avx2 512
//!
//! `MIB` is the size of the weights, several times the last-level cache. Columns: type, instruction set, threads, tokens; best
//! and median GB/s of the products; best GB/s of the bandwidth; best product as a percentage of the best bandwidth.

use std::cell::RefCell;
use std::hint::black_box;
use std::time::Instant;

use moe_executor::cpu::bandwidth::read_bandwidth;
use moe_executor::cpu::quant::{Isa, Kernel, Product, Scratch};
use moe_executor::cpu::threads::Threads;
use moe_gguf::GgmlType;

/// Elements of a row.
const N: usize = 2048;
/// Bytes of the matrix of one product.
const MATRIX: usize = 6 << 20;
const ROUNDS: usize = 7;

fn main() {
    // Cargo adds `--bench`.
    let args: Vec<String> = std::env::args()
        .skip(1)
        .filter(|arg| arg != "--bench")
        .collect();
    let list = |i: usize, default: &str| -> Vec<String> {
        let list = args.get(i).map_or(default, String::as_str);
        list.split(',').map(str::to_owned).collect()
    };
    let numbers = |i, default| -> Vec<usize> {
        let list = list(i, default);
        list.iter().map(|n| n.parse().expect("a number")).collect()
    };
    let isas = Isa::available();
    let isa = |name: &String| {
        *isas
            .iter()
            .find(|isa| format!("{isa:?}") == *name)
            .expect("an instruction set")
    };
    let isa = args.get(3).map_or(Isa::best(), isa);
    let mut weights = vec![0; numbers(4, "512")[0] << 20];
    // Bytes that are ordinary numbers in every type.
    for (i, byte) in weights.iter_mut().enumerate() {
        *byte = 0x30 + (i * i / 7 % 16) as u8;
    }
    for n_threads in numbers(1, "1,2") {
        let threads = Threads::new(n_threads).expect("threads");
        for ty in list(0, "Q4_K,Q6_K,Q8_0,MXFP4,F16") {
            let ty = *GgmlType::ALL
                .iter()
                .find(|t| t.name() == ty)
                .expect("a type");
            let kernel = Kernel::for_isa(ty, isa).expect("a kernel");
            for n_tokens in numbers(2, "1") {
                let (mut products, mut bandwidth) = (Vec::new(), 0.0f64);
                for _ in 0..ROUNDS {
                    products.push(pass(&threads, &kernel, &weights, n_tokens) / 1e9);
                    bandwidth = bandwidth.max(read_bandwidth(&threads, weights.len()) / 1e9);
                }
                products.sort_by(f64::total_cmp);
                let (median, best) = (products[ROUNDS / 2], products[ROUNDS - 1]);
                println!(
                    "{:8} {isa:?} {n_threads:2} threads {n_tokens} tokens: {best:6.1} {median:6.1} {bandwidth:6.1} {:4.0} %",
                    ty.name(),
                    best / bandwidth * 100.0
                );
            }
        }
    }
}

/// Multiplies all weights with `n_tokens` tokens, in products of [`MATRIX`] bytes. Returns bytes of weights per second.
fn pass(threads: &Threads, kernel: &Kernel, weights: &[u8], n_tokens: usize) -> f64 {
    thread_local! {
        static SCRATCH: RefCell<Scratch> = RefCell::default();
    }
    let row_size = kernel.ty().row_size(N as u64).expect("complete blocks") as usize;
    let values: Vec<f32> = (0..N)
        .map(|i| (i * 37 % 251) as f32 / 125.0 - 1.0)
        .collect();
    let mut act = vec![0; kernel.activation().row_size(N)];
    kernel.activation().quantize(&values, &mut act);
    let matrices = weights.chunks_exact(MATRIX / row_size * row_size);
    let n_matrices = matrices.len();
    let start = Instant::now();
    for matrix in matrices {
        threads.split(matrix.len() / row_size, matrix.len(), |range| {
            let product = Product {
                rows: &matrix[range.start * row_size..range.end * row_size],
                row_size,
                n: N,
                n_tokens,
                act: &|_| &act,
            };
            let mut put = |_: usize, _: usize, products: &[f32]| {
                black_box(products);
            };
            SCRATCH.with_borrow_mut(|scratch| kernel.gemm(&product, scratch, &mut put));
        });
    }
    (n_matrices * (MATRIX / row_size * row_size)) as f64 / start.elapsed().as_secs_f64()
}
