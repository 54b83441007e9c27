//! Compares the declarations of the kernels with the PTX.

use std::collections::HashMap;

use moe_gguf::GgmlType;

use super::{
    attention, experts, mat_mul, product_tiles, products, router, rows, store, tiles, token,
    token_rows, wide,
};
use crate::cuda::kernel::{Kernel, Kind};
use crate::cuda::module::{self, Embedded};

/// Parameter types of each kernel in a PTX file, such as `u64`, or `b8[24]` for a struct of 24 bytes.
fn signatures(ptx: &str) -> HashMap<&str, Vec<String>> {
    let entries = ptx.split(".entry ").skip(1);
    let signature = |entry| {
        let (name, rest) = str::split_once(entry, '(').expect("a kernel has parameters");
        let (params, _) = rest.split_once(')').expect("the list of parameters ends");
        let params = params.split(',').filter(|param| !param.trim().is_empty());
        (name.trim(), params.map(type_of).collect())
    };
    entries.map(signature).collect()
}

/// The type of a parameter such as `.param .align 8 .b8 name[24]`.
fn type_of(param: &str) -> String {
    let words = param.split_whitespace();
    let mut types = words.filter_map(|word| word.strip_prefix('.'));
    let last = types.next_back().unwrap_or_default();
    let size = param.find('[').map_or("", |at| param[at..].trim_end());
    format!("{last}{size}")
}

/// The PTX type of a parameter.
fn in_ptx(kind: Kind) -> &'static str {
    match kind {
        Kind::Ptr | Kind::U64 => "u64",
        Kind::U32 => "u32",
        Kind::F32 => "f32",
        Kind::Bool => "u8",
    }
}

#[test]
fn parses_signatures_in_ptx() {
    let ptx = "\n.visible .entry first(\n\t.param .u64 .ptr .align 16 first_param_0,\n\t.param .f32 first_param_1\n)\n{ ret; }\n\
               .visible .entry second(\n\t.param .align 8 .b8 second_param_0[24]\n)\n.maxntid 256, 1, 1\n{ ret; }\n.visible .entry none()";
    let found = signatures(ptx);
    assert_eq!(found["second"], ["b8[24]"]);
    assert_eq!(found["none"], [""; 0]);
    assert_eq!(found.len(), 3);
}

#[test]
fn declarations_match_the_ptx() {
    fn of_types<K>(all: &'static [(K, Embedded)]) -> Vec<&'static Embedded> {
        all.iter().map(|(_, it)| it).collect()
    }
    let files: [(Vec<&Embedded>, &[Kernel]); 9] = [
        (vec![&module::ATTENTION], store::KERNELS),
        (of_types(&module::ATTENTION_OF), attention::KERNELS),
        (vec![&module::ATTENTION_WIDE], wide::KERNELS),
        (vec![&module::ROUTER], router::KERNELS),
        (vec![&module::ROWS], rows::KERNELS),
        (vec![&module::EXPERTS], experts::KERNELS),
        (of_types(&module::PRODUCTS), products::KERNELS),
        (of_types(&module::TOKEN), token::KERNELS),
        (of_types(&module::TOKEN), token_rows::KERNELS),
    ];
    let mut n = 0;
    let recurrent = (vec![&module::RECURRENT], super::recurrent::KERNELS);
    for (modules, kernels) in files.into_iter().chain([recurrent]) {
        for (file, ptx) in modules.iter().flat_map(|module| module.sections()) {
            // Other kernels on tensor cores replace those for F16.
            let is_tiled = file.starts_with("attention_f16") && has_tensor_cores(&file);
            let kernels = if is_tiled { tiles::KERNELS } else { kernels };
            n += compare(&file, &ptx, kernels);
        }
    }
    for (ty, module) in &module::PRODUCTS {
        for (file, ptx) in module.sections() {
            let is_tiled = *ty != GgmlType::F32 && has_tensor_cores(&file);
            let is_in_module = |kernel: &&Kernel| match kernel.name {
                "mat_vec_few" => true,
                "mat_mul" => ty.block_size() == 1 || !is_tiled,
                "mat_mul_128_64" => is_tiled && product_tiles::has_large_tiles(*ty),
                _ => is_tiled,
            };
            let kernels = mat_mul::KERNELS.iter().chain(product_tiles::KERNELS);
            let kernels: Vec<Kernel> = kernels.filter(is_in_module).copied().collect();
            n += compare(&file, &ptx, &kernels);
        }
    }
    assert!(n > 3 * 100, "{n} kernels");
}

/// Whether a section contains the kernels on tensor cores.
fn has_tensor_cores(file: &str) -> bool {
    !file.ends_with("sm_75")
}

/// Compares the declarations of `kernels` with the PTX, and returns their number.
fn compare(file: &str, ptx: &str, kernels: &[Kernel]) -> usize {
    let found = signatures(ptx);
    for kernel in kernels {
        let params = kernel.params.iter();
        let start = in_ptx(Kind::Ptr);
        let declared = params.map(|param| in_ptx(param.kind)).chain([start]);
        let declared: Vec<&str> = declared.collect();
        let name = kernel.name;
        let found = found.get(name);
        let found = found.unwrap_or_else(|| panic!("{file} has no kernel {name}"));
        assert_eq!(*found, declared, "{name} in {file}: PTX, declaration");
    }
    kernels.len()
}
