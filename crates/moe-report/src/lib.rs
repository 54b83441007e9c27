//! Interactive reports of mixture-of-experts traces: one HTML file, which loads nothing from the network.
//!
//! [`InputReport::read`] reads a run, a table of routing or a trace of another tool, and computes its charts. [`Report`] writes one
//! input, or two side by side. The page is the front end in `web/`, which `web/dist/report.html.gz` contains as one file. Both share a JSON
//! block (`schemas/report.schema.json`), and the tables `records`, `routing` and `spans` as Parquet (`schemas/report.md`).
//!
//! The memory is bounded by [`Source::max_records`] and the analysis, not by the size of a trace. Times are relative to the first record.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod analysis;
mod buffers;
mod charts;
mod document;
mod error;
mod graph;
mod input;
mod lanes;
mod model;
mod records;
mod report;
mod routing;
mod rows;
mod spans;
mod table;
mod tokens;

pub use error::Error;
pub use input::{InputReport, Source, TokenText};
pub use report::{MAX_BYTES, Report, live_page};
