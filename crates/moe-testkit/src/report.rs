//! A report of the cases of a test.

/// Prints a line for each case of a test, and collects the failures.
#[derive(Default)]
pub struct Report {
    failures: Vec<String>,
}

impl Report {
    /// Compares values. `|got - want| / (1 + |want|)` must be at most `tolerance` for each value; NaN must be NaN in both.
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
        // A NaN in only one of the values is an infinite error.
        let errors = got.iter().zip(want).map(error);
        let errors: Vec<f64> = errors
            .map(|e| if e.is_nan() { f64::INFINITY } else { e })
            .collect();
        let worst = errors.iter().copied().fold(0.0, f64::max);
        let wrong = errors.iter().filter(|e| **e > tolerance).count();
        match errors.iter().position(|e| *e > tolerance) {
            None => println!("{case}: {} values, largest error {worst:.2e}", got.len()),
            Some(i) => self.fail(format!(
                "{case}: {wrong} of {} values wrong, largest error {worst:.2e} (tolerance {tolerance:.0e}), first at index {i}: \
                 {}, not {}",
                got.len(),
                got[i],
                want[i]
            )),
        }
    }

    /// Adds a failure of a case.
    pub fn fail(&mut self, failure: String) {
        println!("FAILED {failure}");
        self.failures.push(failure);
    }

    /// Number of failures so far.
    pub fn n_failures(&self) -> usize {
        self.failures.len()
    }

    /// Panics if a case failed.
    pub fn finish(self) {
        let failures = self.failures;
        let list = failures.join("\n  ");
        assert!(failures.is_empty(), "{} cases:\n  {list}", failures.len());
    }
}
