//! Numbers of the executor's operations: indices in the table of ggml operations that traces contain (`moe_trace::ops`).

pub use moe_trace::ops::{ADD_ID, GET_ROWS, MUL_MAT, MUL_MAT_ID};

macro_rules! numbers {
    ($($name:ident = $number:literal),+ $(,)?) => {
        $(
            #[doc = concat!("Number of `", stringify!($name), "`.")]
            pub const $name: u8 = $number;
        )+

        #[cfg(test)]
        const ALL: &[(&str, u8)] = &[$((stringify!($name), $name)),+];
    };
}

numbers! {
    ADD = 2,
    MUL = 7,
    DIV = 8,
    SQR = 9,
    SUM_ROWS = 15,
    REPEAT = 20,
    CONCAT = 22,
    NORM = 24,
    RMS_NORM = 25,
    SCALE = 32,
    CONT = 35,
    SET_ROWS = 42,
    SOFT_MAX = 46,
    ROPE = 48,
    CLAMP = 50,
    ARGSORT = 68,
    FILL = 72,
    FLASH_ATTN_EXT = 73,
    SSM_CONV = 75,
    SSM_SCAN = 76,
    UNARY = 85,
    GLU = 94,
    GATED_DELTA_NET = 95,
}

#[cfg(test)]
mod tests {
    #[test]
    fn numbers_agree_with_the_trace_table() {
        for (name, number) in super::ALL {
            assert_eq!(moe_trace::ops::name(*number), Some(*name));
        }
    }
}
