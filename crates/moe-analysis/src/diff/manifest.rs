//! What two runs say of themselves.

use moe_trace::Manifest;
use moe_trace::manifest::Model;

/// Something that two manifests fields differently.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fact {
    /// What it is.
    pub name: &'static str,
    /// What the run A tells, if it tells anything.
    pub a: Option<String>,
    /// What the run B tells.
    pub b: Option<String>,
}

/// What differs of what could explain other results; a bare trace tells nothing.
pub(super) fn facts([a, b]: [Option<&Manifest>; 2]) -> Vec<Fact> {
    let [a, b] = [a, b].map(|manifest| manifest.map(fields));
    let names = a
        .as_ref()
        .or(b.as_ref())
        .into_iter()
        .flatten()
        .map(|(name, _)| *name);
    let value = |side: &Option<Vec<(&'static str, String)>>, i: usize| {
        let facts = side.as_ref()?;
        facts.get(i).map(|(_, value)| value.clone())
    };
    names
        .enumerate()
        .map(|(i, name)| Fact {
            name,
            a: value(&a, i),
            b: value(&b, i),
        })
        .filter(|fact| fact.a != fact.b)
        .collect()
}

/// The facts of a manifest, the same ones in the same order for each.
fn fields(manifest: &Manifest) -> Vec<(&'static str, String)> {
    let Model {
        path,
        files,
        header_xxh3,
        xxh3: _, // only some runs have it, and the header's is there always
        arch,
        n_layer,
        n_nextn_layer,
        n_expert,
        n_expert_used,
        expert_types,
    } = &manifest.model;
    let files = files
        .iter()
        .map(|file| format!("{} ({} bytes)", file.name, file.size_bytes));
    let sampling = &manifest.sampling;
    let seed = sampling.seed.map(|seed| format!(", seed {seed}"));
    let parameters = sampling.parameters.iter();
    let parameters = parameters.map(|(name, value)| format!(", {name} {value}"));
    vec![
        (
            "engine",
            format!("{} {}", manifest.engine.name, manifest.engine.version),
        ),
        ("model", path.clone()),
        ("files", files.collect::<Vec<_>>().join(", ")),
        ("header hash", header_xxh3.clone()),
        ("architecture", arch.clone()),
        ("layers", n_layer.to_string()),
        ("layers of the MTP head", n_nextn_layer.to_string()),
        ("experts in a layer", n_expert.to_string()),
        ("experts for a token", n_expert_used.to_string()),
        ("expert types", expert_types.join(", ")),
        ("prompt tokens", manifest.tokens.prompt.to_string()),
        ("generated tokens", manifest.tokens.generated.to_string()),
        ("sequences", manifest.tokens.sequences.to_string()),
        (
            "sampling",
            sampling.method.clone() + &seed.unwrap_or_default() + &parameters.collect::<String>(),
        ),
        ("policy", manifest.policy.clone()),
        ("threads", manifest.n_threads.to_string()),
        ("processor", manifest.host.cpu.clone()),
        ("stopped", manifest.stopped.clone().unwrap_or_default()),
    ]
}
