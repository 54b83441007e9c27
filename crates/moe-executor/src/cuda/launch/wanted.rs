//! Methods whose kernels are still to come, in the form that the operations call. Each moves to a file of its own with its
//! kernel; till then the host does the work.
#![allow(missing_docs, clippy::too_many_arguments)]

use cudarc::driver::CudaStream;
use moe_gguf::GgmlType;

use super::Kernels;
use crate::cpu::glu::Glu;
use crate::cuda::{Error, Ptr, Result};

fn missing(kernel: &'static str) -> Result<()> {
    Err(Error::Unsupported {
        kernel,
        what: "any shape".into(),
    })
}

pub struct Weights {
    pub ptr: Ptr,
    pub ty: GgmlType,
    pub n_in: usize,
    pub n_out: usize,
    pub row_size: usize,
    pub expert_size: usize,
}
pub struct GateUp {
    pub gate: Weights,
    pub up: Weights,
    pub gate_bias: Ptr,
    pub up_bias: Ptr,
    pub glu: Glu,
    pub x: Ptr,
    pub ids: Ptr,
    pub tokens: usize,
    pub k: usize,
    pub n_expert: usize,
    pub out: Ptr,
    pub scratch: Ptr,
    pub work: Ptr,
}
pub struct MulMatId {
    pub weights: Weights,
    pub bias: Ptr,
    pub x: Ptr,
    pub rows_per: usize,
    pub ids: Ptr,
    pub tokens: usize,
    pub k: usize,
    pub n_expert: usize,
    pub out: Ptr,
    pub scratch: Ptr,
    pub work: Ptr,
}
pub struct Fetched {
    pub table: Ptr,
    pub ty: GgmlType,
    pub n_in: usize,
    pub n_out: usize,
    pub row_size: usize,
    pub bias: Ptr,
    pub x: Ptr,
    pub rows_per: usize,
    pub ids: Ptr,
    pub entries: usize,
    pub out: Ptr,
    pub scratch: Ptr,
}
impl Kernels {
    pub fn mul_mat_fetched(&self, _: &CudaStream, _: &Fetched) -> Result<()> {
        missing("mul_mat_fetched")
    }
    pub fn supports(_: GgmlType) -> bool {
        false
    }
    pub fn scratch_size(_: usize, _: usize) -> usize {
        0
    }
    pub fn work_size(_: usize, _: usize, _: usize) -> usize {
        0
    }
    pub fn mul_mat(
        &self,
        _: &CudaStream,
        _: &Weights,
        _bias: Ptr,
        _x: Ptr,
        _rows: usize,
        _out: Ptr,
        _scratch: Ptr,
    ) -> Result<()> {
        missing("mul_mat")
    }
    pub fn mul_mat_id(&self, _: &CudaStream, _: &MulMatId) -> Result<()> {
        missing("mul_mat_id")
    }
    pub fn experts_gate_up(&self, _: &CudaStream, _: &GateUp) -> Result<()> {
        missing("experts_gate_up")
    }
    pub fn merge(
        &self,
        _: &CudaStream,
        _: Ptr,
        _: Ptr,
        _: usize,
        _: usize,
        _: usize,
        _: Ptr,
    ) -> Result<()> {
        missing("merge")
    }
}
