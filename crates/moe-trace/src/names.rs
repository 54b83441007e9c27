//! Base names of tensors: removes the suffixes that ggml appends to the names of views and copies.
//!
//! A view, a reshape or a copy of `Kcur-3` is a separate tensor in ggml, whose name starts with the base name: `Kcur-3 (view)`,
//! `Kcur-3 (view) (permuted)`, `cache_k_l3 (view) (copy of Kcur-3 (view))`. If a graph is split over devices, the copy of an
//! input is `CUDA0#Kcur-3#0`. Its data is that of the base tensor.

/// Suffixes that ggml appends to a name in parentheses.
const SUFFIXES: [&str; 6] = ["view", "reshaped", "permuted", "transposed", "cont", "copy"];
/// Start of the suffix of a copy that names its source.
const COPY_OF: &str = "copy of ";
/// Maximum length of a name in ggml without its NUL, in bytes (`GGML_MAX_NAME` is 64). Longer names are truncated.
const MAX_NAME: usize = 63;

/// The name of the tensor that `name` is a view, a reshape or a copy of; otherwise `name` itself.
pub fn base_name(name: &str) -> &str {
    let mut name = cut_suffix(name).unwrap_or(name);
    while let Some(shorter) = without_suffix(name).or_else(|| without_device(name)) {
        name = shorter;
    }
    name
}

/// The part after the base name: ` (view) (permuted)`; empty for the base tensor.
pub fn view_suffix(name: &str) -> &str {
    name.strip_prefix(base_name(name)).unwrap_or_default()
}

/// `Kcur-3 (view)` → `Kcur-3`.
fn without_suffix(name: &str) -> Option<&str> {
    let inner = name.strip_suffix(')')?;
    let mut depth = 1;
    let opening = inner.bytes().rposition(|byte| {
        match byte {
            b')' => depth += 1,
            b'(' => depth -= 1,
            _ => {}
        }
        depth == 0
    })?;
    let (base, what) = (inner.get(..opening)?, inner.get(opening + 1..)?);
    let known = SUFFIXES.contains(&what) || what.starts_with(COPY_OF);
    known.then(|| base.trim_end())
}

/// `CUDA0#Kcur-3#0` → `Kcur-3`.
fn without_device(name: &str) -> Option<&str> {
    let (_, rest) = name.split_once('#')?;
    let (inner, copy) = rest.rsplit_once('#')?;
    let is_number = !copy.is_empty() && copy.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then_some(inner)
}

/// Removes a truncated last suffix from a name of maximum length: `… (permu`.
fn cut_suffix(name: &str) -> Option<&str> {
    if name.len() < MAX_NAME || name.ends_with(')') {
        return None;
    }
    let (base, rest) = name.rsplit_once(" (")?;
    let mut begun = SUFFIXES.iter().chain([&COPY_OF]).copied();
    (begun.any(|what| what.starts_with(rest)) || rest.starts_with(COPY_OF)).then_some(base)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn removes_suffixes_of_ggml_only() {
        for (name, base) in [
            ("Kcur-3", "Kcur-3"),
            ("Kcur-3 (view)", "Kcur-3"),
            ("Kcur-3 (reshaped) (permuted)", "Kcur-3"),
            (
                "blk.0.attn_q.weight (transposed) (cont)",
                "blk.0.attn_q.weight",
            ),
            ("cache_k_l3 (view) (copy of Kcur-3 (view))", "cache_k_l3"),
            ("Kcur-3 (copy)", "Kcur-3"),
            ("CUDA0#attn_norm-3 (view)#0", "attn_norm-3"),
            ("CUDA0#attn_norm-3#12", "attn_norm-3"),
            ("CUDA0#attn_norm-3", "CUDA0#attn_norm-3"),
            ("a (fork)", "a (fork)"),
            ("a (view", "a (view"),
            ("(view)", ""),
            (" (view)", ""),
            ("", ""),
            (")", ")"),
            ("é (view)", "é"),
        ] {
            assert_eq!(base_name(name), base, "{name}");
        }
    }

    #[test]
    fn removes_truncated_suffix() {
        let long = "x".repeat(56);
        for rest in [" (permu", " (copy "] {
            let name = format!("{long}{rest}");
            assert_eq!(name.len(), 63);
            assert_eq!(base_name(&name), long);
        }
        let name = format!("{long} (forks");
        assert_eq!(base_name(&name), name);
    }

    #[test]
    fn returns_the_suffix_after_the_base_name() {
        assert_eq!(
            view_suffix("Kcur-3 (view) (permuted)"),
            " (view) (permuted)"
        );
        assert_eq!(view_suffix("Kcur-3"), "");
        assert_eq!(view_suffix("CUDA0#Kcur-3#0"), "");
    }
}
