//! All kernels except for products with weights.

mod attention;
mod router;
mod rows;
mod starts;
mod slots;
mod timings;
