//! Names of the devices of a session.

use std::fmt::{self, Display, Formatter};
use std::str::FromStr;

/// A device by its index in a session's list: the CPU, then the GPUs. Its text is llama.cpp's name: `CPU`, `CUDA0`,
/// `CUDA1`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum DeviceId {
    /// The CPU and its memory.
    #[default]
    Cpu,
    /// A GPU by its index among the GPUs of the list. The same physical GPU may be listed more than once.
    Gpu(usize),
}

impl Display for DeviceId {
    fn fmt(&self, f: &mut Formatter) -> fmt::Result {
        match self {
            DeviceId::Cpu => f.write_str("CPU"),
            DeviceId::Gpu(index) => write!(f, "CUDA{index}"),
        }
    }
}

/// The error of a text that is not the name of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the name of a device is CPU, CUDA0, CUDA1, ...")]
pub struct NotADevice;

impl FromStr for DeviceId {
    type Err = NotADevice;

    fn from_str(name: &str) -> Result<DeviceId, NotADevice> {
        match name.strip_prefix("CUDA") {
            Some(index) if index.bytes().all(|byte| byte.is_ascii_digit()) => {
                index.parse().map(DeviceId::Gpu).map_err(|_| NotADevice)
            }
            None if name == "CPU" => Ok(DeviceId::Cpu),
            _ => Err(NotADevice),
        }
    }
}
