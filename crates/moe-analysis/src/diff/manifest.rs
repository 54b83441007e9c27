//! Comparison of the manifests of two runs.

use moe_trace::Manifest;
use moe_trace::manifest::Model;

/// A manifest field that differs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ManifestDifference {
    /// Name of the field.
    pub name: &'static str,
    /// Value in run A; `None` without a manifest.
    pub a: Option<String>,
    /// Value in run B; `None` without a manifest.
    pub b: Option<String>,
}

/// Fields that differ and may explain differences in the traces. A bare trace has no fields.
pub(super) fn differences([a, b]: [Option<&Manifest>; 2]) -> Vec<ManifestDifference> {
    let [a, b] = [a, b].map(|manifest| manifest.map(fields));
    let names = a
        .as_ref()
        .or(b.as_ref())
        .into_iter()
        .flatten()
        .map(|(name, _)| *name);
    let value = |side: &Option<Vec<(&'static str, String)>>, i: usize| {
        let fields = side.as_ref()?;
        fields.get(i).map(|(_, value)| value.clone())
    };
    names
        .enumerate()
        .map(|(i, name)| ManifestDifference {
            name,
            a: value(&a, i),
            b: value(&b, i),
        })
        .filter(|field| field.a != field.b)
        .collect()
}

/// Fields of a manifest, always in the same order.
fn fields(manifest: &Manifest) -> Vec<(&'static str, String)> {
    let Model {
        path,
        files,
        header_xxh3,
        xxh3: _, // optional; the header hash is always present
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
        ("cpu", manifest.host.cpu.clone()),
        ("stopped", manifest.stopped.clone().unwrap_or_default()),
    ]
}
