//! Tests of the public interface, in one binary.

mod gpt_oss_20b;
mod model;
mod properties;
mod relayout;
