//! Mapping of llama.cpp's operation numbers to those of a run.

use std::collections::BTreeMap;

use llama_cpp_sys_2 as sys;
use moe_trace::ops::{OpTable, default_table};

use crate::backend;

/// Maps operation numbers of llama.cpp to numbers in the run's table.
///
/// A name has the same number as in runs of the executor. Names that are not in its table get the following numbers.
pub struct OpNumbers {
    numbers: Vec<u8>,
    table: OpTable,
}

impl OpNumbers {
    /// The mapping for the linked llama.cpp.
    pub fn new() -> OpNumbers {
        let known = default_table();
        let mut names: BTreeMap<u8, String> =
            known.iter().map(|(n, name)| (n, name.to_owned())).collect();
        let mut next = names
            .last_key_value()
            .map_or(0, |(&last, _)| u16::from(last) + 1);
        let numbers = (0..sys::GGML_OP_COUNT)
            .map(|op| {
                // SAFETY: the number is that of an operation; the name is a constant.
                let name = unsafe { backend::text(sys::ggml_op_name(op)) };
                known.number(&name).unwrap_or_else(|| {
                    // There are about a hundred operations. Any above 255 would share that number.
                    let number = u8::try_from(next).unwrap_or(u8::MAX);
                    next += 1;
                    names.insert(number, name);
                    number
                })
            })
            .collect();
        OpNumbers {
            numbers,
            table: names.into_iter().collect(),
        }
    }

    /// The run's number of an operation.
    pub fn number(&self, op: sys::ggml_op) -> u8 {
        self.numbers.get(op as usize).copied().unwrap_or(u8::MAX)
    }

    /// The name of an operation.
    pub fn name(&self, op: sys::ggml_op) -> &str {
        self.table.name(self.number(op)).unwrap_or_default()
    }

    /// The table of numbers and names, for the manifest.
    pub fn table(&self) -> &OpTable {
        &self.table
    }
}

impl Default for OpNumbers {
    fn default() -> OpNumbers {
        OpNumbers::new()
    }
}
