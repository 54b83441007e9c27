//! Weights of every type, activations, and reference products in f64.

use std::collections::HashMap;
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::cpu::glu::Glu;
use crate::cpu::quant::dequantize_row;
use crate::cuda::Ptr;
use crate::cuda::launch::Kernels;
use crate::cuda::launch::Weights;
use half::{bf16, f16};
use moe_gguf::GgmlType;

use crate::cuda::tests::device::{Device, Memory, noise};
use moe_testkit::Report;

/// The types that the product kernels support.
pub fn types() -> impl Iterator<Item = GgmlType> {
    let all = GgmlType::ALL.iter().copied();
    all.filter(|ty| Kernels::supports(*ty))
}

/// Matrices of one type, and their dequantized values.
pub struct Matrices {
    pub ty: GgmlType,
    pub n_in: usize,
    pub n_out: usize,
    pub bytes: Vec<u8>,
    pub values: Vec<f32>,
}

impl Matrices {
    /// `n` matrices of random elements, or of randomly selected blocks if the type is quantized.
    pub fn random(ty: GgmlType, n: usize, n_in: usize, n_out: usize, seed: u32) -> Matrices {
        let count = n * n_in * n_out;
        let bytes = match ty {
            GgmlType::F32 => elements(count, seed, f32::to_le_bytes),
            GgmlType::F16 => elements(count, seed, |x| f16::from_f32(x).to_le_bytes()),
            GgmlType::BF16 => elements(count, seed, |x| bf16::from_f32(x).to_le_bytes()),
            _ => {
                let blocks = blocks(ty);
                let picks = noise(count / ty.block_size() as usize, seed);
                let at = |x: f32| (((x + 1.0) * 1e6) as usize) % blocks.len();
                picks
                    .iter()
                    .flat_map(|x| blocks[at(*x)].iter().copied())
                    .collect()
            }
        };
        let mut values = vec![0.0; count];
        dequantize_row(ty, &bytes, &mut values).expect("complete blocks");
        Matrices {
            ty,
            n_in,
            n_out,
            bytes,
            values,
        }
    }

    pub fn row_size(&self) -> usize {
        self.ty.row_size(self.n_in as u64).expect("complete blocks") as usize
    }

    /// Row `row` of matrix `i`.
    pub fn row(&self, i: usize, row: usize) -> &[f32] {
        &self.values[(i * self.n_out + row) * self.n_in..][..self.n_in]
    }

    /// Copies the matrices to the GPU, with the bytes after them that kernels may read.
    pub fn upload(&self, device: &Device) -> (Memory<u8>, Weights) {
        let mut bytes = self.bytes.clone();
        bytes.extend([0xff; 16]);
        let memory = device.upload(&bytes);
        let weights = Weights {
            ptr: device.at(&memory),
            ty: self.ty,
            n_in: self.n_in,
            n_out: self.n_out,
            row_size: self.row_size(),
            expert_size: self.row_size() * self.n_out,
        };
        (memory, weights)
    }
}

fn elements<const N: usize>(n: usize, seed: u32, convert: impl Fn(f32) -> [u8; N]) -> Vec<u8> {
    noise(n, seed).into_iter().flat_map(convert).collect()
}

/// The blocks of the fixture for a type, without blocks of huge values.
fn blocks(ty: GgmlType) -> Vec<Vec<u8>> {
    type Blocks = HashMap<&'static str, Vec<Vec<u8>>>;
    static BLOCKS: OnceLock<Mutex<Blocks>> = OnceLock::new();
    let blocks = BLOCKS.get_or_init(Mutex::default);
    let mut blocks = blocks.lock().unwrap_or_else(PoisonError::into_inner);
    let read = || {
        let path = moe_testkit::fixture(format!("quants/{ty}.bin.zst"));
        let bytes = moe_testkit::reference::decompressed(&path);
        let (n, size) = (ty.block_size() as usize, ty.type_size() as usize);
        let is_moderate = |block: &&[u8]| {
            let mut values = vec![0.0; n];
            dequantize_row(ty, block, &mut values).expect("a block");
            values.iter().all(|x: &f32| x.abs() < 1e6)
        };
        let rows = bytes[..2048 / n * size]
            .chunks_exact(size)
            .filter(is_moderate);
        rows.map(<[u8]>::to_vec).collect()
    };
    blocks.entry(ty.name()).or_insert_with(read).clone()
}

/// Activations as a product reads them: converted to the type of floating-point weights, or quantized in groups of 32 like ggml's
/// Q8_1 if the weights are quantized.
pub fn rounded(ty: GgmlType, x: &[f32]) -> Vec<f32> {
    match ty {
        GgmlType::F32 => x.to_vec(),
        GgmlType::F16 => x.iter().map(|x| f16::from_f32(*x).to_f32()).collect(),
        GgmlType::BF16 => x.iter().map(|x| bf16::from_f32(*x).to_f32()).collect(),
        _ => x.chunks(32).flat_map(eight_bits).collect(),
    }
}

fn eight_bits(group: &[f32]) -> impl Iterator<Item = f32> {
    let amax = group.iter().fold(0f32, |amax, x| amax.max(x.abs()));
    let inverse = if amax > 0.0 { 127.0 / amax } else { 0.0 };
    let step = f16::from_f32(amax / 127.0).to_f32();
    group
        .iter()
        .map(move |x| (x * inverse).round_ties_even() * step)
}

/// Activations for tests of products.
pub const GLUS: [Glu; 4] = [
    Glu::Swiglu,
    Glu::SwigluOai,
    Glu::Reglu,
    Glu::SwigluLimited(0.25),
];

/// An expected sum, and the sum of the magnitudes of its terms, relative to which errors are measured.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    pub value: f64,
    pub magnitude: f64,
}

impl Wanted {
    /// `row · x + bias`
    pub fn product(row: &[f32], x: &[f32], bias: f32) -> Wanted {
        let products = row
            .iter()
            .zip(x)
            .map(|(w, x)| f64::from(*w) * f64::from(*x));
        let bias = f64::from(bias);
        products.fold(
            Wanted {
                value: bias,
                magnitude: bias.abs(),
            },
            |sum, product| Wanted {
                value: sum.value + product,
                magnitude: sum.magnitude + product.abs(),
            },
        )
    }

    /// The gated activation.
    pub fn activated(glu: Glu, gate: Wanted, up: Wanted) -> Wanted {
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        let (g, u) = (gate.value, up.value);
        let value = match glu {
            Glu::Swiglu => g * sigmoid(g) * u,
            Glu::SwigluOai => {
                let g = g.min(7.0);
                g * sigmoid(1.702 * g) * (u.clamp(-7.0, 7.0) + 1.0)
            }
            Glu::Reglu => g.max(0.0) * u,
            Glu::SwigluLimited(limit) => {
                let limit = f64::from(limit);
                (g * sigmoid(g)).min(limit) * u.clamp(-limit, limit)
            }
            Glu::Geglu => unreachable!("its rounding is larger than the tolerance"),
        };
        // The slope of the activation of the gate is at most 1.2.
        let magnitude =
            2.0 * gate.magnitude * (u.abs() + 1.0) + up.magnitude * g.abs() + value.abs();
        Wanted { value, magnitude }
    }
}

/// Compares values with the expected ones. `tolerance` is relative to the magnitude.
pub fn compare(
    report: &mut Report,
    case: &str,
    got: Result<Vec<f32>, String>,
    wanted: &[Wanted],
    tolerance: f64,
) {
    let unit = |wanted: &Wanted| wanted.magnitude.max(1e-30);
    let got = got.map(|got| {
        let shares = got.iter().zip(wanted);
        shares
            .map(|(got, wanted)| (f64::from(*got) / unit(wanted)) as f32)
            .collect()
    });
    let wanted: Vec<f64> = wanted.iter().map(|w| w.value / unit(w)).collect();
    report.compare(case, got, &wanted, tolerance);
}

/// Tolerance of a sum of `n` products in f32, relative to the magnitude.
pub fn tolerance(n: usize) -> f64 {
    (n / 8 + 16) as f64 * f64::from(f32::EPSILON) / 2.0
}

/// An optional bias.
pub struct Bias {
    values: Vec<f32>,
    memory: Option<Memory<f32>>,
}

impl Bias {
    pub fn new(device: &Device, n: Option<usize>, seed: u32) -> Bias {
        let values = n.map(|n| noise(n, seed)).unwrap_or_default();
        let memory = n.map(|_| device.upload(&values));
        Bias { values, memory }
    }

    pub fn at(&self, device: &Device) -> Ptr {
        self.memory.as_ref().map_or(Ptr::NULL, |m| device.at(m))
    }

    pub fn value(&self, i: usize) -> f32 {
        self.values.get(i).copied().unwrap_or(0.0)
    }
}
