//! Tests of the scheduler with the executor, and of the endpoints with a backend that generates a fixed script.
#![allow(clippy::unwrap_used, reason = "tests")]

mod cache;
mod chat;
mod client;
mod completions;
mod connections;
mod docs;
mod fake;
mod limits;
mod llama;
mod load;
mod metrics;
mod openapi;
mod scheduler;
mod ui;
