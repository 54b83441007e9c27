//! What policies are called on command lines and in results.

use std::fmt;
use std::str::FromStr;

use super::build::BuildError;

/// A policy that loads what is asked for and knows the past alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Online {
    /// Least recently used.
    Lru,
    /// Least often looked up.
    Lfu,
    /// Least often looked up, with dynamic aging.
    LfuDa,
    /// Frequency over age.
    Lfru,
    /// Segmented LRU.
    Slru,
    /// S3-FIFO.
    S3Fifo,
    /// ARC.
    Arc,
    /// CLOCK.
    Clock,
    /// Any.
    Random,
}

impl Online {
    /// All of them.
    pub const ALL: [Online; 9] = [
        Online::Lru,
        Online::Lfu,
        Online::LfuDa,
        Online::Lfru,
        Online::Slru,
        Online::S3Fifo,
        Online::Arc,
        Online::Clock,
        Online::Random,
    ];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Online::Lru => "lru",
            Online::Lfu => "lfu",
            Online::LfuDa => "lfuda",
            Online::Lfru => "lfru",
            Online::Slru => "slru",
            Online::S3Fifo => "s3fifo",
            Online::Arc => "arc",
            Online::Clock => "clock",
            Online::Random => "random",
        }
    }
}

/// A policy. `Display` and `FromStr` agree; `layer` and `layerlfu` are the published names of `layerlru` and its like.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PolicyName {
    /// The optimum for equal sizes.
    Belady,
    /// The same, weighed with sizes.
    BeladySize,
    /// One cache for all layers.
    Whole(Online),
    /// A cache for each layer.
    Layered(Online),
    /// The hottest of the trace's first part.
    Static,
    /// The hottest of the whole trace.
    StaticOracle,
    /// The hottest of a learn file.
    StaticLearn,
    /// The hot-cache runtime's.
    HotCache,
}

impl PolicyName {
    /// All policies, in the order in which results are told; of the layered ones those of LRU and LFU.
    pub fn all() -> Vec<PolicyName> {
        let mut all = vec![PolicyName::Belady, PolicyName::BeladySize];
        all.extend(Online::ALL.map(PolicyName::Whole));
        all.extend([
            PolicyName::Layered(Online::Lru),
            PolicyName::Layered(Online::Lfu),
            PolicyName::Static,
            PolicyName::StaticOracle,
            PolicyName::StaticLearn,
            PolicyName::HotCache,
        ]);
        all
    }

    /// Whether it needs a learn file.
    pub fn needs_learn_file(self) -> bool {
        matches!(self, PolicyName::StaticLearn | PolicyName::HotCache)
    }
}

impl fmt::Display for PolicyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PolicyName::Belady => f.pad("belady"),
            PolicyName::BeladySize => f.pad("beladysize"),
            PolicyName::Whole(online) => f.pad(online.name()),
            PolicyName::Layered(Online::Lru) => f.pad("layer"),
            PolicyName::Layered(online) => f.pad(&format!("layer{}", online.name())),
            PolicyName::Static => f.pad("static"),
            PolicyName::StaticOracle => f.pad("staticoracle"),
            PolicyName::StaticLearn => f.pad("staticlearn"),
            PolicyName::HotCache => f.pad("hotcache"),
        }
    }
}

impl FromStr for PolicyName {
    type Err = BuildError;

    fn from_str(name: &str) -> Result<PolicyName, BuildError> {
        let layered = Online::ALL.map(PolicyName::Layered);
        let mut known = PolicyName::all().into_iter().chain(layered);
        known
            .find(|policy| policy.to_string() == name)
            .or_else(|| (name == "layerlru").then_some(PolicyName::Layered(Online::Lru)))
            .ok_or_else(|| BuildError::Name { name: name.into() })
    }
}
