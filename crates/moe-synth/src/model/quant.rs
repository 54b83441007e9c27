//! The type of each weight.

use moe_gguf::GgmlType;

use super::blocks::{is_supported, lifted_moments};

/// The purpose of a weight, as far as its type depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    /// Norms, biases, routers and other small tensors, which are always F32.
    Small,
    /// Token embeddings.
    Embedding,
    /// The output matrix.
    Output,
    /// Value projections of attention.
    AttnV,
    /// Down projections of experts.
    ExpertDown,
    /// Other weights of experts.
    Expert,
    /// Every other matrix.
    Matrix,
}

/// The types of the weights of a model, mixed like in llama.cpp's quantizer (`llama-quant.cpp`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Quant {
    expert: GgmlType,
    other: GgmlType,
    /// Whether the mix is `_M`: more bits for the output, and in some layers for value and down projections.
    medium: bool,
    /// The value of `general.file_type` (`llama_ftype` in `llama.h`).
    pub(super) file_type: u32,
}

impl Quant {
    /// Parses the name of a type or mix. Returns `None` if it is not supported.
    pub(super) fn parse(name: &str) -> Option<Quant> {
        use GgmlType as T;
        let quant = |expert, other, medium, file_type| Quant {
            expert,
            other,
            medium,
            file_type,
        };
        Some(match name {
            "Q4_K_M" => quant(T::Q4_K, T::Q4_K, true, 15),
            "Q5_K_M" => quant(T::Q5_K, T::Q5_K, true, 17),
            "MXFP4_MOE" => quant(T::MXFP4, T::Q8_0, false, 38),
            // Published files with MXFP4 experts have F16 for other weights and in `general.file_type`.
            "MXFP4" => quant(T::MXFP4, T::F16, false, 1),
            "NVFP4" => quant(T::NVFP4, T::F16, false, 39),
            _ => {
                let ty = GgmlType::ALL.iter().find(|ty| ty.name() == name)?;
                quant(*ty, *ty, false, file_type(*ty)?)
            }
        })
    }

    /// The type of the weights of experts, unless their rows are too short.
    pub(super) fn expert(&self) -> GgmlType {
        self.expert
    }

    /// Returns all names that [`Quant::parse`] accepts.
    pub(super) fn names() -> Vec<&'static str> {
        let types = GgmlType::ALL.iter().map(|ty| ty.name());
        let mixes = ["Q4_K_M", "Q5_K_M", "MXFP4_MOE"];
        types
            .chain(mixes)
            .filter(|name| Quant::parse(name).is_some())
            .collect()
    }

    /// Returns the type of a weight with rows of `ne0` elements in layer `layer` of `n_layer`.
    pub(super) fn ty(&self, usage: Use, ne0: u64, layer: u32, n_layer: u32) -> GgmlType {
        let preferred = match usage {
            Use::Small => return GgmlType::F32,
            Use::Expert | Use::ExpertDown | Use::AttnV if self.more_bits(usage, layer, n_layer) => {
                GgmlType::Q6_K
            }
            Use::Output if self.medium => GgmlType::Q6_K,
            Use::Expert | Use::ExpertDown => self.expert,
            _ => self.other,
        };
        let ty = fitting(preferred, ne0);
        // Routers need embeddings with a common part. llama.cpp, too, does not use the smallest types for embeddings.
        if usage == Use::Embedding && lifted_moments(ty).is_none() {
            return fitting(GgmlType::Q8_0, ne0);
        }
        ty
    }

    /// `use_more_bits` of `llama-quant.cpp`.
    fn more_bits(&self, usage: Use, layer: u32, n_layer: u32) -> bool {
        let eighth = n_layer / 8;
        let is_selected =
            layer < eighth || layer >= 7 * n_layer / 8 || (layer.wrapping_sub(eighth)) % 3 == 2;
        self.medium && usage != Use::Expert && is_selected
    }
}

/// Returns the type itself, or llama.cpp's fallback type if a row is not a multiple of its block size.
fn fitting(preferred: GgmlType, ne0: u64) -> GgmlType {
    use GgmlType as T;
    if preferred.row_size(ne0).is_some() {
        return preferred;
    }
    let smaller = match preferred {
        T::Q4_K => T::Q5_0,
        T::Q5_K => T::Q5_1,
        T::Q6_K => T::Q8_0,
        T::Q2_K | T::Q3_K | T::TQ1_0 | T::TQ2_0 | T::Q2_0 => T::Q4_0,
        ty if ty.block_size() == 256 => T::IQ4_NL,
        _ => T::F16,
    };
    match smaller.row_size(ne0) {
        Some(_) => smaller,
        None => T::F16,
    }
}

/// Returns the `general.file_type` of a file with one type (`llama_ftype` in `llama.h`).
fn file_type(ty: GgmlType) -> Option<u32> {
    use GgmlType as T;
    if !is_supported(ty) {
        return None;
    }
    Some(match ty {
        T::F32 => 0,
        T::F16 => 1,
        T::Q4_0 => 2,
        T::Q4_1 => 3,
        T::Q8_0 => 7,
        T::Q5_0 => 8,
        T::Q5_1 => 9,
        T::Q2_K => 10,
        T::Q3_K => 11,
        T::Q4_K => 14,
        T::Q5_K => 16,
        T::Q6_K => 18,
        T::IQ2_XXS => 19,
        T::IQ2_XS => 20,
        T::IQ3_XXS => 23,
        T::IQ1_S => 24,
        T::IQ4_NL => 25,
        T::IQ3_S => 26,
        T::IQ2_S => 28,
        T::IQ4_XS => 30,
        T::IQ1_M => 31,
        T::BF16 => 32,
        T::TQ1_0 => 36,
        T::TQ2_0 => 37,
        T::Q1_0 => 40,
        T::Q2_0 => 41,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mix_has_more_bits_in_the_same_layers_as_llama_cpp() {
        let mix = Quant::parse("Q4_K_M").unwrap();
        let down = |layer| mix.ty(Use::ExpertDown, 768, layer, 48);
        assert_eq!(down(0), GgmlType::Q6_K);
        assert_eq!(down(6), GgmlType::Q4_K);
        assert_eq!(down(8), GgmlType::Q6_K);
        assert_eq!(down(42), GgmlType::Q6_K);
        assert_eq!(mix.ty(Use::Expert, 2048, 0, 48), GgmlType::Q4_K);
        assert_eq!(mix.ty(Use::Output, 2048, 0, 48), GgmlType::Q6_K);
        assert_eq!(mix.ty(Use::Small, 3, 0, 48), GgmlType::F32);
    }

    #[test]
    fn falls_back_to_types_with_smaller_blocks() {
        // 2880 is not a multiple of 256, 40 is not a multiple of 32.
        let ty = |name: &str, ne0| Quant::parse(name).unwrap().ty(Use::Expert, ne0, 0, 1);
        assert_eq!(ty("Q4_K", 2880), GgmlType::Q5_0);
        assert_eq!(ty("IQ2_XXS", 2880), GgmlType::IQ4_NL);
        assert_eq!(ty("Q6_K", 40), GgmlType::F16);
        assert_eq!(ty("MXFP4", 2880), GgmlType::MXFP4);
    }

    #[test]
    fn types_of_embeddings_can_be_lifted() {
        for name in Quant::names() {
            let ty = Quant::parse(name).unwrap().ty(Use::Embedding, 2048, 0, 1);
            assert!(lifted_moments(ty).is_some(), "{name}");
        }
        assert!(Quant::parse("Q8_K").is_none() && Quant::parse("I32").is_none());
    }
}
