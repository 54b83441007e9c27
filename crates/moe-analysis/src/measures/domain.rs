//! Whether experts of a layer belong to domains.

/// How one expert of a layer belongs to one domain.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Specialisation {
    /// The expert that the domain chose most.
    pub expert: usize,
    /// Share of the domain's tokens that went to it: N(e, D) / N(D), the domain specialisation of OLMoE (Muennighoff et al. 2024,
    /// section 5.3, arXiv 2409.02060). Without any, it is k / N.
    pub share_of_tokens: f64,
}

/// The expert that a domain's tokens went to most; of equal ones the lower id. `None` without tokens.
pub fn specialisation(counts: &[u64], rows: u64) -> Option<Specialisation> {
    let expert = super::hottest(counts, 1).first().copied()?;
    let count = counts.get(expert).filter(|_| rows > 0)?;
    Some(Specialisation {
        expert,
        share_of_tokens: *count as f64 / rows as f64,
    })
}

/// Mutual information of domain and expert in bits, each domain weighing the same: how much a choice tells of the domain.
/// 0 = the domains choose alike, log2 of their number = no expert serves two of them. It is the mean Kullback-Leibler
/// divergence of the domains' shares from their mean, the Jensen-Shannon divergence (Lin 1991).
///
/// Few choices give too high a figure: domains that choose alike look apart by chance.
pub fn mutual_information(domains: &[&[u64]]) -> f64 {
    let totals = domains.iter().map(|counts| {
        let total = counts.iter().map(|&count| count as f64).sum::<f64>();
        (*counts, total)
    });
    let domains: Vec<_> = totals.filter(|(_, total)| *total > 0.0).collect();
    let n_expert = domains.iter().map(|(counts, _)| counts.len()).max();
    let n_domain = domains.len() as f64;
    let mut bits = 0.0;
    for expert in 0..n_expert.unwrap_or(0) {
        let shares: Vec<f64> = domains
            .iter()
            .map(|(counts, total)| counts.get(expert).map_or(0.0, |&c| c as f64) / total)
            .collect();
        let mean = shares.iter().sum::<f64>() / n_domain;
        let used = shares.iter().filter(|&&share| share > 0.0);
        bits += used.map(|share| share * (share / mean).log2()).sum::<f64>() / n_domain;
    }
    bits.max(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn information_by_hand() {
        assert_eq!(mutual_information(&[&[3, 1], &[6, 2]]), 0.0);
        assert_eq!(mutual_information(&[&[3, 0], &[0, 2]]), 1.0);
        assert_eq!(
            mutual_information(&[&[1], &[0, 1], &[0, 0, 1], &[0; 4]]),
            3f64.log2()
        );
        assert_eq!(mutual_information(&[]), 0.0);
        // ½ ½ 0 and 0 ½ ½: half of the choices tell the domain, the others nothing.
        assert!((mutual_information(&[&[1, 1, 0], &[0, 1, 1]]) - 0.5).abs() < 1e-12);
    }

    #[test]
    fn the_favourite() {
        let favourite = specialisation(&[1, 6, 6], 8).unwrap();
        assert_eq!((favourite.expert, favourite.share_of_tokens), (1, 0.75));
        assert_eq!(specialisation(&[1], 0), None);
        assert_eq!(specialisation(&[0], 3), None);
    }
}
