//! Codebooks of the IQ formats: the tables of ggml's `ggml-common.h`.

/// Entries of all codebooks, in the order of this file. An entry has 16 bits in little-endian order, its first element in the lowest
/// bits.
const PACKED: &[u8; 9216] = include_bytes!("iq_grids.bin");

/// Unpacks `ENTRIES` entries, starting with entry `first` of [`PACKED`], of `N` indices of `bits` bits into `values`.
const fn expand<const ENTRIES: usize, const N: usize>(
    first: usize,
    bits: u32,
    values: [i8; 8],
) -> [[i8; N]; ENTRIES] {
    let mut grid = [[0; N]; ENTRIES];
    let mut entry = 0;
    while entry < ENTRIES {
        let at = 2 * (first + entry);
        let packed = u16::from_le_bytes([PACKED[at], PACKED[at + 1]]);
        let mut j = 0;
        while j < N {
            let digit = packed >> (j as u32 * bits) & ((1 << bits) - 1);
            grid[entry][j] = values[digit as usize];
            j += 1;
        }
        entry += 1;
    }
    grid
}

/// Magnitudes of the 2-bit formats.
const IQ2_VALUES: [i8; 8] = [8, 25, 43, 0, 0, 0, 0, 0];

/// Codebook of IQ2_XXS, groups of eight.
pub static IQ2_XXS: [[i8; 8]; 256] = expand(0, 2, IQ2_VALUES);
/// Codebook of IQ2_XS, groups of eight.
pub static IQ2_XS: [[i8; 8]; 512] = expand(256, 2, IQ2_VALUES);
/// Codebook of IQ2_S, groups of eight.
pub static IQ2_S: [[i8; 8]; 1024] = expand(768, 2, IQ2_VALUES);
/// Codebook of IQ3_XXS, groups of four.
pub static IQ3_XXS: [[i8; 4]; 256] = expand(1792, 3, [4, 12, 20, 28, 36, 44, 52, 62]);
/// Codebook of IQ3_S, groups of four.
pub static IQ3_S: [[i8; 4]; 512] = expand(2048, 3, [1, 3, 5, 7, 9, 11, 13, 15]);
/// Codebook of IQ1_S and IQ1_M, groups of eight, multiplied by 8.
pub static IQ1: [[i8; 8]; 2048] = expand(2560, 2, [-8, 0, 8, 0, 0, 0, 0, 0]);
