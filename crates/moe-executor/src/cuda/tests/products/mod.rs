//! Products with weights.

mod experts;
mod grouped;
mod operands;
mod plain;
mod timings;
mod token;
