//! Random blocks of all types of weights, with a given standard deviation.
//!
//! All bit patterns of codes are valid in these formats; only the scales of a block must be finite. A block is therefore
//! random bytes with overwritten scales. The sign of a scale is random, so that the mean is 0 although codes are not symmetric
//! (`-8..=7`).
//!
//! A block can be *lifted*: its codes are made positive, so that its elements have a known mean.

use half::{bf16, f16};
use moe_gguf::GgmlType;

use super::random::{SplitMix64, fill};

/// In each row of a lifted matrix, the first block and every eighth block after it are lifted.
pub(super) const LIFT_EVERY: usize = 8;

/// The scales of a block, with their byte offsets.
#[derive(Clone, Copy)]
enum Scale {
    /// No scales: elements are plain numbers.
    Values,
    /// An F16 scale.
    F16 { at: usize },
    /// An F16 scale, and an F16 minimum, which is `min` times the scale.
    F16Min {
        at: usize,
        min_at: usize,
        min: f32,
        sub: SubScales,
    },
    /// One E8M0 byte: a power of two.
    E8m0,
    /// Four unsigned E4M3 bytes.
    Ue4m3,
    /// An F16 in the top four bits of each of four 16-bit words, lowest first.
    Iq1m { at: usize },
}

/// The encoding of scales and minima of sub-blocks. Minima are set equal to scales, so that each sub-block has mean 0.
/// Otherwise all weights of a sub-block could have the same sign.
#[derive(Clone, Copy)]
enum SubScales {
    /// No scales of sub-blocks.
    None,
    /// 16 bytes, one per sub-block: the scale in the low bits, the minimum in the high bits.
    Nibbles,
    /// 8 scales and 8 minima of 6 bits in 12 bytes, which start at byte 4.
    SixBits,
}

/// How to make codes positive, and the mean and standard deviation of the result at scale 1.
#[derive(Clone, Copy)]
struct Lift {
    /// (start, end, mask): bits to set in these bytes.
    set: &'static [(usize, usize, u8)],
    /// (start, end, mask): bits to keep in these bytes.
    keep: &'static [(usize, usize, u8)],
    mean: f32,
    std: f32,
}

struct Recipe {
    scale: Scale,
    /// Root mean square of the elements at scale 1.
    rms: f32,
    lift: Option<Lift>,
}

/// Returns a lift that sets the minimum to 0 and does not change codes.
const fn no_min(mean: f32, std: f32) -> Option<Lift> {
    lift(&[], &[], mean, std)
}

const fn lift(
    set: &'static [(usize, usize, u8)],
    keep: &'static [(usize, usize, u8)],
    mean: f32,
    std: f32,
) -> Option<Lift> {
    Some(Lift {
        set,
        keep,
        mean,
        std,
    })
}

/// Returns the recipe of a type, or `None` for unsupported types (integers, F64, types of activations and of ik_llama.cpp).
///
/// The moments are computed for uniformly distributed codes and sub-scales; those of codebook types (IQ) are measured.
fn recipe(ty: GgmlType) -> Option<Recipe> {
    use GgmlType as T;
    let f16 = |at| Scale::F16 { at };
    let f16_min = |at, min_at, min, sub| Scale::F16Min {
        at,
        min_at,
        min,
        sub,
    };
    let (scale, rms, lift) = match ty {
        T::F32 | T::F16 | T::BF16 => (Scale::Values, 1.0, no_min(0.9, 0.5)),
        T::Q4_0 => (f16(0), 4.6368, lift(&[(2, 18, 0x88)], &[], 3.5, 2.2913)),
        T::Q4_1 => (
            f16_min(0, 2, -7.5, SubScales::None),
            4.6098,
            no_min(7.5, 4.6098),
        ),
        T::Q5_0 => (f16(0), 9.2466, lift(&[(2, 6, 0xFF)], &[], 7.5, 4.6098)),
        T::Q5_1 => (
            f16_min(0, 2, -15.5, SubScales::None),
            9.2331,
            no_min(15.5, 9.2331),
        ),
        T::Q8_0 => (f16(0), 73.902, lift(&[], &[(2, 34, 0x7F)], 63.5, 36.949)),
        T::Q2_K => (
            f16_min(80, 82, 1.5, SubScales::Nibbles),
            9.8425,
            no_min(11.25, 12.029),
        ),
        T::Q3_K => {
            let positive = lift(&[(0, 32, 0xFF), (104, 108, 0xAA)], &[], 23.25, 24.468);
            (f16(108), 43.339, positive)
        }
        T::Q4_K => (
            f16_min(0, 2, 7.5, SubScales::SixBits),
            168.34,
            no_min(236.25, 218.02),
        ),
        T::Q5_K => (
            f16_min(0, 2, 15.5, SubScales::SixBits),
            337.17,
            no_min(488.25, 442.34),
        ),
        T::Q6_K => {
            let positive = lift(&[(128, 192, 0xAA)], &[(192, 208, 0x7F)], 984.25, 887.77);
            (f16(208), 1365.7, positive)
        }
        T::IQ1_S => (f16(0), 7.194, None),
        T::IQ1_M => (Scale::Iq1m { at: 48 }, 7.194, None),
        T::IQ2_XXS => (f16(0), 53.31, None),
        T::IQ2_XS => (f16(0), 55.95, None),
        T::IQ2_S => (f16(0), 56.33, None),
        T::IQ3_XXS => (f16(0), 142.4, None),
        T::IQ3_S => (f16(0), 140.3, None),
        T::IQ4_NL => (f16(0), 67.44, lift(&[(2, 18, 0x88)], &[], 50.125, 36.05)),
        T::IQ4_XS => (f16(0), 1246.3, None),
        T::TQ1_0 => (f16(52), 0.8165, None),
        T::TQ2_0 => (f16(64), 1.2247, None),
        T::Q1_0 => (f16(0), 1.0, None),
        T::Q2_0 => (f16(0), 1.2247, None),
        T::MXFP4 => (
            Scale::E8m0,
            2.9262,
            lift(&[], &[(1, 17, 0x77)], 2.25, 1.8708),
        ),
        T::NVFP4 => (Scale::Ue4m3, 2.9262, None),
        _ => return None,
    };
    Some(Recipe { scale, rms, lift })
}

/// Whether weights of the type can be generated.
pub(super) fn is_supported(ty: GgmlType) -> bool {
    recipe(ty).is_some()
}

/// Returns the mean and standard deviation of a lifted block if other blocks have standard deviation 1. `None` if blocks of
/// the type cannot be lifted.
pub(super) fn lifted_moments(ty: GgmlType) -> Option<(f64, f64)> {
    let recipe = recipe(ty)?;
    let lift = recipe.lift?;
    let relative = |moment: f32| f64::from(moment) / f64::from(recipe.rms);
    Some((relative(lift.mean), relative(lift.std)))
}

/// A random 8-bit scale: the code `low + 1` with probability `p_high / 256`, otherwise `low`. The expected square is exact.
#[derive(Clone, Copy, Default)]
struct ByteScale {
    low: u8,
    p_high: u16,
}

impl ByteScale {
    /// Approximates `target`. `value` must increase with the code up to `highest`.
    fn new(target: f64, highest: u8, value: impl Fn(u8) -> f64) -> ByteScale {
        let low = (0..highest).rev().find(|&code| value(code) <= target);
        let low = low.unwrap_or(0);
        let (a, b) = (value(low), value(low + 1));
        let p = (target * target - a * a) / (b * b - a * a);
        ByteScale {
            low,
            p_high: (256.0 * p.clamp(0.0, 1.0)) as u16,
        }
    }

    fn code(self, random: u8) -> u8 {
        self.low + u8::from(u16::from(random) < self.p_high)
    }
}

fn e8m0(code: u8) -> f64 {
    (f64::from(code) - 127.0).exp2()
}

fn ue4m3(code: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(code >> 3), f64::from(code & 7) / 8.0);
    match exponent {
        0 => mantissa * 2f64.powi(-6),
        _ => (1.0 + mantissa) * 2f64.powi(exponent - 7),
    }
}

/// Generates random blocks of one type and scale.
pub(super) struct Blocks {
    ty: GgmlType,
    scale: Scale,
    lift: Option<Lift>,
    /// Scale as F16 bits.
    d: u16,
    /// Minimum as F16 bits.
    min: u16,
    byte: ByteScale,
    /// For types without blocks: bits of the possible values of plain elements, and of lifted elements.
    values: [Vec<u32>; 2],
}

/// Number of possible values of elements without blocks. 12 random bits select one.
const N_VALUES: usize = 1 << 12;

impl Blocks {
    /// Returns a generator of elements with standard deviation `std`, or `None` for unsupported types.
    pub(super) fn new(ty: GgmlType, std: f64) -> Option<Blocks> {
        let recipe = recipe(ty)?;
        let d = std / f64::from(recipe.rms);
        let min = match recipe.scale {
            Scale::F16Min { min, .. } => d * f64::from(min),
            _ => 0.0,
        };
        let byte = match recipe.scale {
            Scale::E8m0 => ByteScale::new(d, 0xFE, e8m0),
            Scale::Ue4m3 => ByteScale::new(d, 0x7E, ue4m3),
            _ => ByteScale::default(),
        };
        let values = match (recipe.scale, recipe.lift) {
            (Scale::Values, Some(lift)) => {
                let (mean, lifted) = (std * f64::from(lift.mean), std * f64::from(lift.std));
                [values(ty, 0.0, std), values(ty, mean, lifted)]
            }
            _ => [Vec::new(), Vec::new()],
        };
        Some(Blocks {
            ty,
            scale: recipe.scale,
            lift: recipe.lift,
            d: f16::from_f64(d).to_bits(),
            min: f16::from_f64(min).to_bits(),
            byte,
            values,
        })
    }

    /// Fills a row. With `lifted`, every eighth block is lifted.
    pub(super) fn fill_row(&self, random: &mut SplitMix64, lifted: bool, row: &mut [u8]) {
        fill(random, row);
        let size = self.ty.type_size() as usize;
        if matches!(self.scale, Scale::Values) {
            return match size {
                2 => self.put_values::<2>(lifted, row),
                _ => self.put_values::<4>(lifted, row),
            };
        }
        for (i, block) in row.chunks_exact_mut(size).enumerate() {
            self.finish(random, lifted && i % LIFT_EVERY == 0, block);
        }
    }

    /// Replaces random bytes by plain elements of `SIZE` bytes.
    fn put_values<const SIZE: usize>(&self, lifted: bool, row: &mut [u8]) {
        let [plain, with_mean] = &self.values;
        for (i, element) in row.as_chunks_mut::<SIZE>().0.iter_mut().enumerate() {
            let at = usize::from(u16::from_le_bytes([element[0], element[1]])) % N_VALUES;
            let values = if lifted && i % LIFT_EVERY == 0 {
                with_mean
            } else {
                plain
            };
            element.copy_from_slice(&values[at].to_le_bytes()[..SIZE]);
        }
    }

    /// Converts random bytes to a valid block.
    #[inline]
    fn finish(&self, random: &mut SplitMix64, lifted: bool, block: &mut [u8]) {
        if lifted && let Some(lift) = self.lift {
            for &(from, to, bits) in lift.set {
                block[from..to].iter_mut().for_each(|byte| *byte |= bits);
            }
            for &(from, to, bits) in lift.keep {
                block[from..to].iter_mut().for_each(|byte| *byte &= bits);
            }
        }
        let mut put = |at: usize, bits: u16| block[at..at + 2].copy_from_slice(&bits.to_le_bytes());
        match self.scale {
            Scale::Values => {}
            Scale::F16 { at } => put(at, self.signed_scale(random, lifted)),
            Scale::F16Min {
                at, min_at, sub, ..
            } => {
                put(at, self.d);
                put(min_at, if lifted { 0 } else { self.min });
                let twice = |byte: &mut u8| *byte = (*byte & 0x0F) * 0x11;
                match sub {
                    SubScales::None => {}
                    SubScales::Nibbles => block[..16].iter_mut().for_each(twice),
                    SubScales::SixBits => {
                        block.copy_within(4..8, 8);
                        block[12..16].iter_mut().for_each(twice);
                    }
                }
            }
            Scale::E8m0 => block[0] = self.byte.code(block[0]),
            Scale::Ue4m3 => block[..4]
                .iter_mut()
                .for_each(|scale| *scale = self.byte.code(*scale)),
            Scale::Iq1m { at } => {
                let d = self.signed_scale(random, lifted);
                for (i, word) in block[at..at + 8].chunks_exact_mut(2).enumerate() {
                    word[1] = word[1] & 0x0F | ((d >> (4 * i)) as u8) << 4;
                }
            }
        }
    }

    fn signed_scale(&self, random: &mut SplitMix64, lifted: bool) -> u16 {
        let sign = if lifted {
            0
        } else {
            random.next_u64() as u16 & 0x8000
        };
        self.d ^ sign
    }
}

/// Returns the bits of [`N_VALUES`] equidistant values with this mean and standard deviation, for a type without blocks.
fn values(ty: GgmlType, mean: f64, std: f64) -> Vec<u32> {
    let value = |i: usize| {
        let uniform = ((2 * i + 1) as f64 / N_VALUES as f64 - 1.0) * 3f64.sqrt();
        let value = mean + std * uniform;
        match ty {
            GgmlType::F16 => f16::from_f64(value).to_bits().into(),
            GgmlType::BF16 => bf16::from_f64(value).to_bits().into(),
            _ => (value as f32).to_bits(),
        }
    };
    (0..N_VALUES).map(value).collect()
}
