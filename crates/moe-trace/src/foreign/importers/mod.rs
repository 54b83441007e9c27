//! The formats, one file each.

mod bigmoeonedge;
mod eplb;
mod iku1;
mod imatrix;
mod mbolt;
mod mesh_llm;
mod npy;
mod routed_experts;
mod rtrace;
mod sglang_json;
mod sglang_pt;
mod sglang_response;
mod vllm;

use super::Importer;

/// All formats that this crate reads; the first one that recognises a file reads it, so the choosy ones come first.
pub const IMPORTERS: &[&dyn Importer] = &[
    &bigmoeonedge::BigMoeOnEdge,
    &mesh_llm::MeshLlm,
    &mbolt::Mbolt,
    &rtrace::RouterTrace,
    &iku1::Iku1,
    &imatrix::Imatrix,
    &npy::Npy,
    &sglang_pt::SglangPt,
    &sglang_response::SglangResponse,
    &vllm::Vllm,
    &sglang_json::SglangJson,
    &eplb::Eplb,
];
