//! The formats, one file each.

mod bigmoeonedge;
mod coli_usage;
mod colibri_trace;
mod ds4_hotlist;
mod eplb;
mod expert_tracer;
mod iku1;
mod imatrix;
mod jsonl;
mod lattice;
mod layer_expert;
mod mbolt;
mod megatron;
mod mesh_llm;
mod moe_balance;
mod npy;
mod responses;
mod routed_experts;
mod rtrace;
mod sglang_json;
mod sglang_pt;
mod text;
pub(crate) mod thesis;
mod token_jsonl;

use super::Importer;

pub use responses::ResponseError;

/// All formats that this crate reads; the first one that recognises a file reads it, so the choosy ones come first.
pub const IMPORTERS: &[&dyn Importer] = &[
    &thesis::ThesisJson,
    &bigmoeonedge::BigMoeOnEdge,
    &mesh_llm::MeshLlm,
    &mbolt::Mbolt,
    &rtrace::RouterTrace,
    &iku1::Iku1,
    &imatrix::Imatrix,
    &npy::Npy,
    &sglang_pt::SglangPt,
    &thesis::Thesis,
    &responses::SglangResponse,
    &responses::Vllm,
    &sglang_json::SglangJson,
    &eplb::Eplb,
    &ds4_hotlist::Ds4Hotlist,
    &expert_tracer::ExpertTracer,
    &lattice::Lattice,
    &megatron::Megatron,
    &moe_balance::MoeBalance,
    &token_jsonl::TokenJsonl,
    &layer_expert::LayerExpert,
    &colibri_trace::ColibriTrace,
    &coli_usage::ColiUsage,
];
