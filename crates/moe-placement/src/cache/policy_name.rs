//! Names of policies on command lines and in results.

use std::fmt;
use std::str::FromStr;

use super::policy_inputs::BuildError;
use crate::names;

/// A policy that loads every missing expert and uses only past look-ups.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum OnlinePolicy {
    /// Least recently used.
    Lru,
    /// Least frequently used, counted over the entire trace.
    Lfu,
    /// LFU with dynamic aging.
    LfuDa,
    /// LFRU: frequency divided by recency.
    Lfru,
    /// Segmented LRU.
    Slru,
    /// S3-FIFO: a small and a main first-in, first-out queue.
    S3Fifo,
    /// ARC (adaptive replacement cache).
    Arc,
    /// CLOCK (second chance).
    Clock,
    /// Uniformly random eviction.
    Random,
}

impl OnlinePolicy {
    /// All online policies.
    pub const ALL: [OnlinePolicy; 9] = [
        OnlinePolicy::Lru,
        OnlinePolicy::Lfu,
        OnlinePolicy::LfuDa,
        OnlinePolicy::Lfru,
        OnlinePolicy::Slru,
        OnlinePolicy::S3Fifo,
        OnlinePolicy::Arc,
        OnlinePolicy::Clock,
        OnlinePolicy::Random,
    ];

    /// The name, for example `lru`.
    pub fn name(self) -> &'static str {
        match self {
            OnlinePolicy::Lru => "lru",
            OnlinePolicy::Lfu => "lfu",
            OnlinePolicy::LfuDa => "lfuda",
            OnlinePolicy::Lfru => "lfru",
            OnlinePolicy::Slru => "slru",
            OnlinePolicy::S3Fifo => "s3fifo",
            OnlinePolicy::Arc => "arc",
            OnlinePolicy::Clock => "clock",
            OnlinePolicy::Random => "random",
        }
    }

    /// Returns the names of the shared and of the layered policies, for messages.
    pub fn alternatives() -> String {
        let names = OnlinePolicy::ALL.map(OnlinePolicy::name).join(", ");
        format!("{names}, or layer followed by one of these (`layer` alone is `layerlru`)")
    }
}

/// A policy. `FromStr` parses what `Display` prints, and `layerlru` as another name of `layer`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PolicyName {
    /// Belady's algorithm, optimal for experts of equal size.
    Belady,
    /// Belady's algorithm weighted by size: evicts by (look-ups until the next one) × bytes.
    BeladySize,
    /// One cache shared by all layers.
    Shared(OnlinePolicy),
    /// One cache per layer.
    Layered(OnlinePolicy),
    /// Fixed contents: the hottest experts of the first part of the trace.
    Static,
    /// Fixed contents: the hottest experts of the entire trace.
    StaticOracle,
    /// Fixed contents: the hottest experts of a learn file.
    StaticLearn,
    /// The hot expert cache of adrianhoehne/llama.cpp: a plan, updated after each request.
    HotCache,
}

impl PolicyName {
    /// The policies in the order in which results list them. Contains only two of the layered policies, those of LRU and LFU.
    pub fn all() -> Vec<PolicyName> {
        let mut all = vec![PolicyName::Belady, PolicyName::BeladySize];
        all.extend(OnlinePolicy::ALL.map(PolicyName::Shared));
        all.extend([
            PolicyName::Layered(OnlinePolicy::Lru),
            PolicyName::Layered(OnlinePolicy::Lfu),
            PolicyName::Static,
            PolicyName::StaticOracle,
            PolicyName::StaticLearn,
            PolicyName::HotCache,
        ]);
        all
    }

    /// Whether the policy needs a learn file.
    pub fn needs_learn_file(self) -> bool {
        matches!(self, PolicyName::StaticLearn | PolicyName::HotCache)
    }
}

impl fmt::Display for PolicyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PolicyName::Belady => f.pad("belady"),
            PolicyName::BeladySize => f.pad("beladysize"),
            PolicyName::Shared(online) => f.pad(online.name()),
            PolicyName::Layered(OnlinePolicy::Lru) => f.pad("layer"),
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
        let layered = OnlinePolicy::ALL.map(PolicyName::Layered);
        let mut known = PolicyName::all().into_iter().chain(layered);
        known
            .find(|policy| policy.to_string() == name)
            .or_else(|| (name == "layerlru").then_some(PolicyName::Layered(OnlinePolicy::Lru)))
            .ok_or_else(|| BuildError::Name { name: name.into() })
    }
}

/// Returns all names, for messages. The layered policies are one entry.
pub(super) fn alternatives() -> String {
    let name = |policy: PolicyName| match policy {
        PolicyName::Layered(OnlinePolicy::Lru) => Some(format!(
            "layer followed by one of the last {} (`layer` alone is `layerlru`)",
            OnlinePolicy::ALL.len()
        )),
        PolicyName::Layered(_) => None,
        policy => Some(policy.to_string()),
    };
    let all: Vec<String> = PolicyName::all().into_iter().filter_map(name).collect();
    names::alternatives(&all)
}
