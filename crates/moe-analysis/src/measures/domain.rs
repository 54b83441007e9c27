//! Specialization of experts on domains.

/// Specialization of a layer on one domain.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Specialization {
    /// The expert that tokens of the domain select most often.
    pub expert: usize,
    /// Fraction of the domain's tokens that select this expert: N(e, D) / N(D). For a uniform router it is k / N.
    ///
    /// Source: domain specialization in OLMoE (Muennighoff et al. 2024, section 5.3, <https://arxiv.org/abs/2409.02060>).
    pub share_of_tokens: f64,
}

/// The most selected expert of a domain. `counts` (`[n_expert]`) are the selections of each expert by tokens of the domain, `n_tokens`
/// is the number of these tokens. Ties go to the lower id. `None` without tokens or selections.
pub fn specialization(counts: &[u64], n_tokens: u64) -> Option<Specialization> {
    let expert = super::hottest(counts, 1).first().copied()?;
    let count = counts.get(expert).filter(|_| n_tokens > 0)?;
    Some(Specialization {
        expert,
        share_of_tokens: *count as f64 / n_tokens as f64,
    })
}

/// Mutual information of domain and selected expert in bits, with equal weight for each domain. 0 means that the expert
/// distributions of all domains are equal. The maximum, log2(number of domains), means that no expert serves two domains.
///
/// It equals the Jensen-Shannon divergence of the distributions: their mean Kullback-Leibler divergence from their mean (Lin
/// 1991). Domains without selections are ignored. The estimate is biased upward for few selections.
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
    fn mutual_information_matches_manual_result() {
        assert_eq!(mutual_information(&[&[3, 1], &[6, 2]]), 0.0);
        assert_eq!(mutual_information(&[&[3, 0], &[0, 2]]), 1.0);
        assert_eq!(
            mutual_information(&[&[1], &[0, 1], &[0, 0, 1], &[0; 4]]),
            3f64.log2()
        );
        assert_eq!(mutual_information(&[]), 0.0);
        // ½ ½ 0 and 0 ½ ½: half of the selections identify the domain, the others contain no information.
        assert!((mutual_information(&[&[1, 1, 0], &[0, 1, 1]]) - 0.5).abs() < 1e-12);
    }

    #[test]
    fn specialisation_is_most_selected_expert() {
        let most = specialization(&[1, 6, 6], 8).unwrap();
        assert_eq!((most.expert, most.share_of_tokens), (1, 0.75));
        assert_eq!(specialization(&[1], 0), None);
        assert_eq!(specialization(&[0], 3), None);
    }
}
