//! All kernels except for products with weights.

mod attention;
mod recurrent;
mod router;
mod rows;
mod slots;
mod starts;
mod timings;
