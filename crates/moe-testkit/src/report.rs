//! A report of all cases of a test.

/// What came of the cases of a test: a line for each, and all failures at the end.
#[derive(Default)]
pub struct Report {
    failures: Vec<String>,
}

impl Report {
    /// Compares values: each may be off by `tolerance · (1 + |wanted|)`; what is no number must be none in both.
    pub fn compare(
        &mut self,
        case: &str,
        got: Result<Vec<f32>, String>,
        want: &[f64],
        tolerance: f64,
    ) {
        let got = match got {
            Ok(got) => got,
            Err(error) => return self.fail(format!("{case}: {error}")),
        };
        if got.len() != want.len() {
            return self.fail(format!("{case}: {} values, not {}", got.len(), want.len()));
        }
        let error = |(got, want): (&f32, &f64)| match (f64::from(*got), *want) {
            (got, want) if got.is_nan() && want.is_nan() || got == want => 0.0,
            (got, want) => ((got - want) / (1.0 + want.abs())).abs(),
        };
        // A NaN on one side only is the worst error.
        let errors = got.iter().zip(want).map(error);
        let errors: Vec<f64> = errors
            .map(|e| if e.is_nan() { f64::INFINITY } else { e })
            .collect();
        let worst = errors.iter().copied().fold(0.0, f64::max);
        let wrong = errors.iter().filter(|e| **e > tolerance).count();
        match errors.iter().position(|e| *e > tolerance) {
            None => println!("{case}: {} values, worst error {worst:.2e}", got.len()),
            Some(at) => self.fail(format!(
                "{case}: {wrong} of {} values wrong, worst error {worst:.2e} (tolerance {tolerance:.0e}), the first at {at}: \
                 {}, not {}",
                got.len(),
                got[at],
                want[at]
            )),
        }
    }

    /// A failure of a case.
    pub fn fail(&mut self, failure: String) {
        println!("FAILED {failure}");
        self.failures.push(failure);
    }

    /// Failures so far.
    pub fn n_failures(&self) -> usize {
        self.failures.len()
    }

    /// Fails the test if a case failed.
    pub fn finish(self) {
        let failures = self.failures;
        let list = failures.join("\n  ");
        assert!(failures.is_empty(), "{} cases:\n  {list}", failures.len());
    }
}
