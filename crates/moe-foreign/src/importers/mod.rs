//! Importers: one module per format, or for related formats of the same tools. [`shared`] contains the helpers of several formats.

pub(crate) mod bigmoeonedge;
pub(crate) mod coli_usage;
pub(crate) mod colibri_trace;
pub(crate) mod ds4_hotlist;
pub(crate) mod eplb;
pub(crate) mod expert_tracer;
pub(crate) mod iku1;
pub(crate) mod imatrix;
pub(crate) mod jsonl;
pub(crate) mod lattice;
pub(crate) mod layer_expert;
pub(crate) mod learn;
pub(crate) mod mbolt;
pub(crate) mod megatron;
pub(crate) mod mesh_llm;
pub(crate) mod moe_balance;
pub(crate) mod npy;
pub(crate) mod responses;
pub(crate) mod rtrace;
pub(crate) mod sglang_json;
pub(crate) mod sglang_pt;
pub(crate) mod shared;
pub(crate) mod thesis;
