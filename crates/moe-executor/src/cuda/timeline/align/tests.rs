//! Times of simulated passes, in µs: the clock of the simulation is the CPU clock, and each GPU clock has an offset, a rate and a
//! launch latency.

use moe_engine::random::SplitMix64;

use super::*;

/// Time of a copy.
const COPY: i64 = 5;
/// Time from the end of the work of a GPU to the return of a wait for it.
const RETURN: i64 = 4;

/// An event: GPU, and index on that GPU.
type At = (usize, usize);

struct SimulatedGpu {
    /// Shortest time from a call to the event that it records.
    latency: i64,
    /// GPU time per CPU time.
    rate: f64,
    /// End of all work so far.
    end: i64,
    /// Time of each event.
    times: Vec<i64>,
    pass: GpuPass,
}

/// A pass that some GPUs run.
struct Simulation {
    now: i64,
    gpus: Vec<SimulatedGpu>,
    /// Events that are ordered: the second is not before the first.
    ordered: Vec<(At, At)>,
    /// Start and end of each kernel.
    kernels: Vec<(At, At)>,
    /// By how much measured kernel times are rounded.
    rounding: u64,
}

impl Simulation {
    /// Starts a pass on GPUs with these launch latencies, whose clocks do not drift: the first event on each of them.
    fn new(latencies: &[i64]) -> Simulation {
        let gpus = latencies.iter().map(|&latency| SimulatedGpu {
            latency,
            rate: 1.0,
            end: 0,
            times: Vec::new(),
            pass: GpuPass::default(),
        });
        let mut simulation = Simulation {
            now: 0,
            gpus: gpus.collect(),
            ordered: Vec::new(),
            kernels: Vec::new(),
            rounding: 0,
        };
        for gpu in 0..latencies.len() {
            simulation.event(gpu, Stream::Compute);
        }
        simulation
    }

    fn event(&mut self, gpu: usize, stream: Stream) -> At {
        let SimulatedGpu {
            latency,
            rate,
            end,
            times,
            pass,
        } = &mut self.gpus[gpu];
        *end = (*end).max(self.now + *latency);
        times.push(*end);
        pass.events.push(Some(Recorded {
            issued: self.now,
            gpu: ((*end - times[0]) as f64 * *rate) as i64,
            segment: pass.waits.len(),
            stream,
        }));
        let at = (gpu, times.len() - 1);
        if at.1 > 0 {
            self.ordered.push(((gpu, at.1 - 1), at));
        }
        self.now += 1;
        at
    }

    /// Launches a kernel between two events.
    fn kernel(&mut self, gpu: usize, time: i64) {
        let start = self.event(gpu, Stream::Compute);
        self.gpus[gpu].end += time;
        let end = self.event(gpu, Stream::Compute);
        self.kernels.push((start, end));
    }

    /// Launches a kernel that reads what another GPU has written.
    fn kernel_after_copy(&mut self, from: usize, gpu: usize, time: i64) {
        let sent = (from, self.gpus[from].times.len() - 1);
        self.gpus[gpu].end = self.gpus[gpu].end.max(self.gpus[from].end) + COPY;
        let received = self.event(gpu, Stream::AfterCopyFrom(from));
        self.gpus[from].end = self.gpus[from].end.max(self.gpus[gpu].end);
        self.ordered.push((sent, received));
        // The event that is recorded on the other GPU next.
        self.ordered.push((received, (from, sent.1 + 1)));
        self.gpus[gpu].end += time;
        let end = self.event(gpu, Stream::Compute);
        self.kernels.push((received, end));
    }

    /// The CPU waits for a GPU.
    fn wait(&mut self, gpu: usize) {
        self.now = self.now.max(self.gpus[gpu].end) + RETURN;
        self.gpus[gpu].pass.waits.push(self.now);
    }

    /// Ends the pass. Returns the times that are found, and what is wrong with them.
    fn end(&mut self) -> (Vec<Vec<i64>>, Vec<String>) {
        for gpu in 0..self.gpus.len() {
            self.wait(gpu);
            self.gpus[gpu].pass.end = self.now;
        }
        let passes: Vec<GpuPass> = self.gpus.iter().map(|gpu| gpu.pass.clone()).collect();
        let found = align(&passes).into_iter();
        let found: Vec<Vec<i64>> = found
            .map(|times| times.into_iter().map(Option::unwrap).collect())
            .collect();
        let time = |(gpu, i): At| found[gpu].get(i).copied();
        let mut wrong = Vec::new();
        for &(earlier, later) in &self.ordered {
            if time(later).is_some_and(|later| Some(later) < time(earlier)) {
                wrong.push(format!("{later:?} is before {earlier:?}"));
            }
        }
        for (gpu, pass) in passes.iter().enumerate() {
            for (i, event) in pass.events.iter().flatten().enumerate() {
                let (at, wait) = (found[gpu][i], pass.waits[event.segment]);
                if at < event.issued || at > wait {
                    wrong.push(format!(
                        "{:?} at {at} is not within {}..={wait}",
                        (gpu, i),
                        event.issued
                    ));
                }
            }
        }
        (found, wrong)
    }

    /// Start of the pass and time of each kernel that differ from those of the simulation.
    fn other_kernel_times(&self, found: &[Vec<i64>]) -> Vec<String> {
        let took = |times: &dyn Fn(At) -> i64, (start, end): (At, At)| times(end) - times(start);
        let kernels = self.kernels.iter().filter_map(|&kernel| {
            let simulated = took(&|(gpu, i)| self.gpus[gpu].times[i], kernel);
            let found = took(&|(gpu, i)| found[gpu][i], kernel);
            (found.abs_diff(simulated) > self.rounding)
                .then(|| format!("{kernel:?} takes {found}, not {simulated}"))
        });
        kernels.collect()
    }
}

/// By how much the found time of each event of a GPU is earlier than the simulated one.
fn early(pass: &Simulation, found: &[Vec<i64>], gpu: usize) -> Vec<i64> {
    let simulated = pass.gpus[gpu].times.iter();
    let both = simulated.zip(&found[gpu]);
    both.map(|(simulated, found)| simulated - found).collect()
}

const NONE: [String; 0] = [];

#[test]
fn destination_whose_first_call_was_delayed_does_not_start_before_the_source() {
    // The CPU thread was preempted in the first call for GPU 1. Alone, this GPU would be placed 2000 too early.
    let mut pass = Simulation::new(&[3, 2000]);
    pass.kernel(0, 3000);
    pass.kernel_after_copy(0, 1, 100);
    pass.kernel(1, 200);
    let (found, wrong) = pass.end();
    assert_eq!(wrong, NONE);
    assert_eq!(pass.other_kernel_times(&found), NONE);
    // Nothing shows the launch latency of GPU 0. So its events are 3 early, and those of GPU 1 are as early as that allows.
    assert_eq!(early(&pass, &found, 0), [3; 3]);
    assert_eq!(early(&pass, &found, 1), [3 + COPY; 5]);
}

#[test]
fn source_whose_first_call_was_delayed_moves_no_other_gpu() {
    let mut pass = Simulation::new(&[2000, 3]);
    pass.kernel(0, 1000);
    pass.kernel_after_copy(0, 1, 100);
    let (found, wrong) = pass.end();
    assert_eq!(wrong, NONE);
    assert_eq!(pass.other_kernel_times(&found), NONE);
    let simulated = &pass.gpus[1].times;
    let early: Vec<i64> = simulated
        .iter()
        .zip(&found[1])
        .map(|(a, b)| a - b)
        .collect();
    assert_eq!(early, [3, 3, 3]);
}

#[test]
fn copies_there_and_back_limit_both_clocks() {
    for latencies in [[3, 3], [3, 500], [500, 3], [400, 500]] {
        let mut pass = Simulation::new(&latencies);
        for _ in 0..10 {
            pass.kernel(0, 30);
            pass.kernel_after_copy(0, 1, 40);
            pass.kernel_after_copy(1, 0, 20);
        }
        let (found, wrong) = pass.end();
        assert_eq!(wrong, NONE, "{latencies:?}");
        assert_eq!(pass.other_kernel_times(&found), NONE, "{latencies:?}");
    }
}

#[test]
fn limits_lead_through_three_gpus() {
    // Alone, one or two of the GPUs would be placed too early by much more than the time of a kernel.
    for latencies in [[3, 900, 2000], [2000, 3, 900], [900, 2000, 3], [3, 2000, 3]] {
        let mut pass = Simulation::new(&latencies);
        pass.kernel(0, 50);
        pass.kernel_after_copy(0, 1, 50);
        pass.kernel_after_copy(1, 2, 50);
        pass.kernel_after_copy(2, 0, 50);
        let (found, wrong) = pass.end();
        assert_eq!(wrong, NONE, "{latencies:?}");
        assert_eq!(pass.other_kernel_times(&found), NONE, "{latencies:?}");
    }
}

#[test]
fn offset_is_the_same_before_and_after_the_copy_that_limits_it() {
    let mut pass = Simulation::new(&[3, 2000]);
    // GPU 1 runs a kernel on its own before it reads from GPU 0, which had less to do.
    pass.kernel(1, 10);
    pass.kernel(0, 3000);
    pass.kernel_after_copy(0, 1, 100);
    let (found, wrong) = pass.end();
    assert_eq!(wrong, NONE);
    let simulated = &pass.gpus[1].times;
    let early: Vec<i64> = simulated
        .iter()
        .zip(&found[1])
        .map(|(a, b)| a - b)
        .collect();
    assert!(early.iter().all(|&at| at == early[0]), "{early:?}");
}

#[test]
fn gpu_that_receives_nothing_keeps_its_times() {
    let mut both = Simulation::new(&[3, 2000, 7]);
    both.kernel(0, 1000);
    both.kernel(2, 400);
    both.kernel_after_copy(0, 1, 100);
    both.wait(2);
    both.kernel(2, 10);
    let (found, wrong) = both.end();
    assert_eq!(wrong, NONE);
    assert_eq!(
        found[2],
        *align(&[both.gpus[2].pass.clone()])[0]
            .iter()
            .flatten()
            .copied()
            .collect::<Vec<_>>()
    );
}

#[test]
fn drifting_clocks_keep_order_and_kernel_times() {
    // No constant offsets satisfy the limits: in a pass of 500 000, the clocks drift apart by 500.
    for rates in [[1.0, 1.001], [1.001, 1.0], [1.0, 0.999], [0.999, 1.0]] {
        let mut pass = Simulation::new(&[3, 700]);
        pass.rounding = 1;
        for (gpu, rate) in pass.gpus.iter_mut().zip(rates) {
            gpu.rate = rate;
        }
        for _ in 0..5000 {
            pass.kernel(0, 30);
            pass.kernel_after_copy(0, 1, 30);
            pass.kernel_after_copy(1, 0, 30);
        }
        let (found, wrong) = pass.end();
        assert_eq!(wrong, NONE, "{rates:?}");
        let n_other = pass.other_kernel_times(&found).len();
        // If a clock is fast, the events of the last 500 are moved to the wait at the end of the pass.
        assert!(
            n_other <= 20,
            "{rates:?}: {n_other} of {}",
            pass.kernels.len()
        );
    }
}

#[test]
fn waits_take_precedence_over_a_copy_that_contradicts_them() {
    let mut pass = Simulation::new(&[3, 3]);
    pass.kernel(1, 50);
    pass.wait(1);
    pass.kernel(0, 1000);
    pass.kernel_after_copy(0, 1, 100);
    // As if the CPU had waited for GPU 1 before GPU 0 had computed what it read.
    let passes = pass.gpus.iter().map(|gpu| gpu.pass.clone());
    let mut passes: Vec<GpuPass> = passes.collect();
    passes[1].waits.push(200);
    passes[1].end = 200;
    passes[0].end = 2000;
    let found = align(&passes);
    assert!(found[1].iter().flatten().all(|&at| at <= 200), "{found:?}");
    assert_eq!(found.iter().map(Vec::len).collect::<Vec<_>>(), [3, 5]);
}

#[test]
fn limits_hold_in_random_passes() {
    let mut random = SplitMix64::new(1);
    let mut below = |n: u64| (random.next_u64() % n) as i64;
    for round in 0..500 {
        let n_gpus = 1 + below(4) as usize;
        let latencies: Vec<i64> = (0..n_gpus).map(|_| below(3000)).collect();
        let mut pass = Simulation::new(&latencies);
        let drifts = round % 2 == 1;
        for gpu in &mut pass.gpus {
            // Only the first launch has the long latency.
            gpu.latency = below(20);
            if drifts {
                gpu.rate = 1.0 + below(2000) as f64 * 1e-6;
            }
        }
        for _ in 0..below(200) {
            let gpu = below(n_gpus as u64) as usize;
            let from = below(n_gpus as u64) as usize;
            let time = below(300);
            match below(8) {
                0 => pass.wait(gpu),
                1..4 if from != gpu => pass.kernel_after_copy(from, gpu, time),
                _ => pass.kernel(gpu, time),
            }
        }
        let (found, wrong) = pass.end();
        assert_eq!(wrong, NONE, "round {round}");
        if !drifts {
            assert_eq!(pass.other_kernel_times(&found), NONE, "round {round}");
            let mut early = (0..n_gpus).flat_map(|gpu| early(&pass, &found, gpu));
            assert!(early.all(|by| by >= 0), "round {round}: an event is late");
        }
    }
}
