//! Importers: one file per format, and helpers that several of them share.

pub(crate) mod bigmoeonedge;
pub(crate) mod coli_usage;
pub(crate) mod colibri_trace;
pub(crate) mod ds4_hotlist;
pub(crate) mod eplb;
pub(crate) mod expert_tracer;
pub(crate) mod iku1;
pub(crate) mod imatrix;
mod jsonl;
pub(crate) mod lattice;
pub(crate) mod layer_expert;
pub(crate) mod learn;
pub(crate) mod mbolt;
pub(crate) mod megatron;
pub(crate) mod mesh_llm;
pub(crate) mod moe_balance;
pub(crate) mod npy;
pub(crate) mod responses;
mod routed_experts;
pub(crate) mod rtrace;
pub(crate) mod sglang_json;
pub(crate) mod sglang_pt;
pub(crate) mod text;
pub(crate) mod thesis;
pub(crate) mod token_jsonl;
