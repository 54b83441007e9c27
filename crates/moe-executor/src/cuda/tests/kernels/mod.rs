//! All kernels except for products with weights.

mod attention;
mod elementwise;
mod recurrent;
mod router;
mod rows;
mod slots;
mod starts;
mod timings;
