//! The router of a MoE layer: one kernel for everything after the logits.

use crate::activation::Activation;
use crate::cuda::launch::{MAX_EXPERTS, Route};
use crate::cuda::{Device, Ptr, Result};
use crate::ops::RouterSpec;
use crate::recorder::Routing;

impl Device {
    /// Whether the kernel supports a router with `n_expert` experts.
    pub(crate) fn supports_router(n_expert: usize) -> bool {
        n_expert <= MAX_EXPERTS
    }

    /// Selects the experts of every token from its logits `scores (tokens, n_expert)`. Stores ids and weights in `routing`, which
    /// has the right size. If `is_wanted`, the CPU gets copies of them when the pass has ended (`routing.copy`), unless there is no
    /// memory for them.
    pub(crate) fn route(
        &mut self,
        spec: &RouterSpec,
        scores: &mut Activation,
        routing: &mut Routing,
        is_wanted: bool,
    ) -> Result<()> {
        let log = is_wanted
            .then(|| self.reserve_log(routing.ids.len()))
            .flatten();
        let (log, copy) = log.map_or((Ptr::NULL, None), |(log, copy)| (log, Some(copy)));
        let selection_bias = self.optional(spec.selection_bias)?;
        let gpu = self.gpu();
        let route = Route {
            logits: scores.values.device(gpu)?,
            selection_bias,
            gating: spec.gating,
            norm: spec.norm_weights,
            scale: spec.weights_scale,
            tokens: scores.rows,
            n_expert: scores.width,
            k: spec.n_expert_used,
            groups: spec.groups,
            log,
        };
        let ids = routing.ids.fill_device(gpu)?;
        let weights = routing.weights.fill_device(gpu)?;
        self.kernels().route(self.stream(), &route, ids, weights)?;
        routing.copy = copy;
        Ok(())
    }
}
