//! Correlation by name: what ggml appends to the name of a tensor that is looked at through a view.
//!
//! A view, a reshape or a copy of `Kcur-3` is a tensor of its own, named after the first: `Kcur-3 (view)`,
//! `Kcur-3 (view) (permuted)`, `cache_k_l3 (view) (copy of Kcur-3 (view))`. Where a graph is split over devices, the copy
//! of an input is `CUDA0#Kcur-3#0`. The bytes, and what they mean, are those of the tensor named first.

/// What ggml puts in parentheses behind a name.
const SUFFIXES: [&str; 6] = ["view", "reshaped", "permuted", "transposed", "cont", "copy"];
/// What begins the parentheses of a copy that names its source.
const COPY_OF: &str = "copy of ";
/// Bytes at which ggml cuts a name, its NUL excluded (`GGML_MAX_NAME` is 64).
const MAX_NAME: usize = 63;

/// The name of the tensor that `name` is a view, a reshape or a copy of; `name` itself if it is none.
pub fn base_name(name: &str) -> &str {
    let mut name = cut_suffix(name).unwrap_or(name);
    while let Some(shorter) = without_suffix(name).or_else(|| without_device(name)) {
        name = shorter;
    }
    name
}

/// What stands behind the base name: ` (view) (permuted)`, empty for a tensor itself.
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

/// A name as long as ggml lets it be may end within its last suffix: `… (permu`.
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
    fn suffixes_go_and_names_stay() {
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
    fn a_name_that_ggml_cut_loses_what_is_left_of_its_suffix() {
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
    fn the_suffix_is_what_the_base_lacks() {
        assert_eq!(
            view_suffix("Kcur-3 (view) (permuted)"),
            " (view) (permuted)"
        );
        assert_eq!(view_suffix("Kcur-3"), "");
        assert_eq!(view_suffix("CUDA0#Kcur-3#0"), "");
    }
}
