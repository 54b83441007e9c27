//! Declarations of kernels. A test compares them with the signatures in the PTX, and a debug assertion compares them with the
//! arguments of every launch.

use super::module::Arg;

/// Type of a kernel parameter or argument.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// A pointer.
    Ptr,
    /// `size_t`.
    U64,
    /// `unsigned`.
    U32,
    /// `float`.
    F32,
    /// `bool`.
    Bool,
}

/// A kernel parameter.
#[derive(Debug)]
pub(super) struct Param {
    pub name: &'static str,
    pub kind: Kind,
}

/// A kernel: its name in the PTX and its parameters in order. Each kernel has one more, the last: the address at which it stores
/// the time of its start ([`Launches::store_start`](super::launches::Launches::store_start)).
#[derive(Clone, Copy, Debug)]
pub(super) struct Kernel {
    pub name: &'static str,
    pub params: &'static [Param],
}

impl Kernel {
    /// The first difference between `args` and the declaration; `None` if they match.
    pub fn mismatch(&self, args: &[Arg]) -> Option<String> {
        let (name, wanted, given) = (self.name, self.params.len(), args.len());
        if given != wanted {
            return Some(format!("{name} has {wanted} parameters, not {given}"));
        }
        let wrong = |(param, arg): &(&Param, &Arg)| !param.kind.takes(arg);
        let (param, arg) = self.params.iter().zip(args).find(wrong)?;
        let Param { name: of, kind } = param;
        Some(format!("{of} of {name} is {kind:?}, not {arg:?}"))
    }
}

impl Kind {
    fn takes(self, arg: &Arg) -> bool {
        match (self, arg.kind) {
            // The driver reads the low 32 bits of a `usize`.
            (Kind::U32, Kind::U64) => u32::try_from(arg.bits).is_ok(),
            (param, arg) => param == arg,
        }
    }
}

/// Declares the kernels that a file launches: a constant for each, and `KERNELS` with all of them. One declaration may name
/// several kernels that have the same parameters.
macro_rules! kernels {
    (@params ($($param:ident: $kind:ident),* $(,)?)) => {
        &[$($crate::cuda::kernel::Param {
            name: stringify!($param),
            kind: $crate::cuda::kernel::Kind::$kind,
        }),*]
    };
    ($($($kernel:ident = $name:literal),+ => $params:tt;)+) => {
        $($(pub(super) const $kernel: $crate::cuda::kernel::Kernel = $crate::cuda::kernel::Kernel {
            name: $name,
            params: kernels!(@params $params),
        };)+)+

        #[cfg(test)]
        pub(super) const KERNELS: &[$crate::cuda::kernel::Kernel] = &[$($($kernel),+),+];
    };
}
pub(super) use kernels;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::Ptr;
    use crate::cuda::module::args;

    kernels! {
        COPY = "copy" => (from: Ptr, n: U64, width: U32, scale: F32, wide: Bool);
    }

    #[test]
    fn rejects_arguments_that_differ_from_the_declaration() {
        let [copy] = KERNELS else {
            panic!("expected one kernel")
        };
        let mismatch = |args: &[Arg]| copy.mismatch(args).unwrap_or_default();
        let (from, n) = (Ptr::NULL, 1usize << 33);
        assert_eq!(mismatch(&args![from, n, 7usize, 0.5f32, true]), "");
        assert_eq!(mismatch(&args![from, n, 7u32, 0.5f32, true]), "");
        assert_eq!(
            mismatch(&args![from, n, 7u32, 0.5f32]),
            "copy has 5 parameters, not 4"
        );
        let starts = |args: &[Arg], with| assert!(mismatch(args).starts_with(with), "{args:?}");
        starts(&args![n, from, 7u32, 0.5f32, true], "from of copy is Ptr,");
        starts(&args![from, n, n, 0.5f32, true], "width of copy is U32,");
        starts(&args![from, n, 7u32, 1u32, true], "scale of copy is F32,");
        starts(&args![from, n, 7u32, 0.5f32, 1u32], "wide of copy is Bool,");
    }
}
