//! One method for each kernel: what it reads, what it writes, how its grid is cut.
