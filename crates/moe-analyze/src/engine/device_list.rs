//! The value of `--device`: the list of devices.

use std::fmt::{self, Display, Formatter};
use std::str::FromStr;

use moe_executor::devices::MAX_GPUS;

use crate::option_values::ValueError;

/// Value of `--device`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DeviceList {
    /// Only the CPU.
    #[default]
    Cpu,
    /// The CPU and the GPUs with these ordinals. A GPU can be listed more than once.
    Cuda(Vec<usize>),
    /// The CPU, and the first GPU if it works.
    Auto,
}

impl DeviceList {
    /// Returns the ordinals of the GPUs.
    pub fn gpus(&self) -> &[usize] {
        match self {
            DeviceList::Cpu => &[],
            DeviceList::Cuda(gpus) => gpus,
            DeviceList::Auto => &[0],
        }
    }
}

impl FromStr for DeviceList {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<DeviceList, ValueError> {
        const EXPECTED: ValueError = ValueError::Expected(
            "cpu, auto, or up to 16 GPUs such as cuda, cuda:1 or cuda:0,cuda:1",
        );
        match text {
            "cpu" => Ok(DeviceList::Cpu),
            "auto" => Ok(DeviceList::Auto),
            _ => {
                let gpus: Option<Vec<usize>> = text.split(',').map(ordinal).collect();
                let gpus = gpus.filter(|gpus| gpus.len() <= MAX_GPUS);
                gpus.map(DeviceList::Cuda).ok_or(EXPECTED)
            }
        }
    }
}

/// Parses the ordinal of a GPU in `cuda` or `cuda:1`.
fn ordinal(name: &str) -> Option<usize> {
    match name.strip_prefix("cuda")? {
        "" => Some(0),
        number => {
            let digits = number.strip_prefix(':')?;
            let is_number = digits.bytes().all(|byte| byte.is_ascii_digit());
            digits.parse().ok().filter(|_| is_number)
        }
    }
}

impl Display for DeviceList {
    fn fmt(&self, f: &mut Formatter) -> fmt::Result {
        match self {
            DeviceList::Cpu => f.write_str("cpu"),
            DeviceList::Auto => f.write_str("auto"),
            DeviceList::Cuda(gpus) if *gpus == [0] => f.write_str("cuda"),
            DeviceList::Cuda(gpus) => {
                let names: Vec<String> = gpus.iter().map(|gpu| format!("cuda:{gpu}")).collect();
                f.write_str(&names.join(","))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_lists_of_gpus() {
        let read = |text: &str| text.parse::<DeviceList>().unwrap();
        assert_eq!(read("cpu"), DeviceList::default());
        assert_eq!(read("cuda"), DeviceList::Cuda(vec![0]));
        for text in [
            "cpu",
            "auto",
            "cuda",
            "cuda:1",
            "cuda:0,cuda:0",
            "cuda:2,cuda:0",
        ] {
            assert_eq!(read(text).to_string(), text);
        }
        assert_eq!(read("cuda:2,cuda").gpus(), [2, 0]);
        let many = |n| vec!["cuda"; n].join(",");
        assert_eq!(read(&many(MAX_GPUS)).gpus().len(), MAX_GPUS);
        let refused = [
            "", "gpu", "cuda:", "cuda:x", "cuda:+1", "cuda1", "cuda,", "cpu,cuda", "CUDA",
        ];
        for text in refused.into_iter().chain([many(MAX_GPUS + 1).as_str()]) {
            assert!(text.parse::<DeviceList>().is_err(), "{text}");
        }
    }
}
