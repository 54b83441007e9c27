//! CUDA graphs of consecutive kernels. The CPU starts a graph with one call instead of one per kernel.

use std::ptr::{null, null_mut};
use std::sync::Arc;

use cudarc::driver::sys::{self, CUgraphDependencyType, CUgraphEdgeData};
use cudarc::driver::{CudaContext, CudaFunction, CudaStream, DriverError};

use super::launch::fusion::{Step, steps};
use super::launches::{Call, Launch};

/// The port of a kernel from which a kernel that may start early continues (`CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC`).
const EARLY: u8 = 1;

/// A graph of kernels that follow each other. One kernel may compute several launches ([`steps`]).
pub(super) struct Graph {
    context: Arc<CudaContext>,
    graph: sys::CUgraph,
    /// What the driver starts. Null until it is instantiated.
    executable: sys::CUgraphExec,
    nodes: Vec<sys::CUgraphNode>,
    /// What the nodes compute.
    steps: Vec<Step>,
}

// SAFETY: the driver allows the use of its handles from any thread, and `&mut` or the drop excludes concurrent changes.
unsafe impl Send for Graph {}

impl Graph {
    /// A graph of `launches` on a stream of `context`, which is current. At least one launch.
    ///
    /// # Errors
    /// The driver does not support such a graph.
    pub fn new(context: &Arc<CudaContext>, launches: &[Launch]) -> Result<Graph, DriverError> {
        let mut new = Graph {
            context: context.clone(),
            graph: null_mut(),
            executable: null_mut(),
            nodes: Vec::with_capacity(launches.len()),
            steps: steps(&calls(launches)),
        };
        // SAFETY: the driver writes a handle, which `drop` destroys.
        unsafe { sys::cuGraphCreate(&mut new.graph, 0) }.result()?;
        for step in &new.steps {
            let mut node = null_mut();
            let mut params = step.call.pointers();
            let kernel = step.call.node(function(step, launches), &mut params);
            // SAFETY: the driver copies the parameters, which have the types of the kernel's signature (`Module::launch`).
            let added =
                unsafe { sys::cuGraphAddKernelNode_v2(&mut node, new.graph, null(), 0, &kernel) };
            added.result()?;
            if let Some(&before) = new.nodes.last() {
                let edge = CUgraphEdgeData {
                    from_port: if step.call.overlaps { EARLY } else { 0 },
                    to_port: 0,
                    type_: if step.call.overlaps {
                        CUgraphDependencyType::CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC as u8
                    } else {
                        0
                    },
                    reserved: [0; 5],
                };
                // SAFETY: both nodes are of this graph.
                unsafe { sys::cuGraphAddDependencies_v2(new.graph, &before, &node, &edge, 1) }
                    .result()?;
            }
            new.nodes.push(node);
        }
        // SAFETY: the graph is complete, and `drop` destroys the executable.
        unsafe { sys::cuGraphInstantiateWithFlags(&mut new.executable, new.graph, 0) }.result()?;
        Ok(new)
    }

    /// A graph of other launches of the same kernels on a stream of `context`: this one with other arguments if possible.
    ///
    /// # Errors
    /// As [`Graph::new`].
    pub fn updated(
        mut self,
        context: &Arc<CudaContext>,
        launches: &[Launch],
    ) -> Result<Graph, DriverError> {
        let now = steps(&calls(launches));
        let is_same = |(a, b): (&Step, &Step)| a.call.kernel == b.call.kernel && a.of == b.of;
        if now.len() != self.steps.len() || !self.steps.iter().zip(&now).all(is_same) {
            return Graph::new(context, launches);
        }
        for ((before, now), node) in self.steps.iter().zip(&now).zip(&self.nodes) {
            if now.call.has_same_arguments(&before.call) {
                continue;
            }
            let mut params = now.call.pointers();
            let kernel = now.call.node(function(now, launches), &mut params);
            // SAFETY: as in `new`; the node is of this graph, and runs the same kernel.
            unsafe { sys::cuGraphExecKernelNodeSetParams_v2(self.executable, *node, &kernel) }
                .result()?;
        }
        self.steps = now;
        Ok(self)
    }

    /// Starts the kernels on `stream`, whose context is current.
    ///
    /// # Errors
    /// The driver reports an error.
    pub fn start(&self, stream: &CudaStream) -> Result<(), DriverError> {
        // SAFETY: the pointers among the parameters are valid, because they equal those of launches that the caller was given now.
        unsafe { sys::cuGraphLaunch(self.executable, stream.cu_stream()) }.result()
    }
}

fn calls(launches: &[Launch]) -> Vec<&Call> {
    launches.iter().map(|launch| &launch.call).collect()
}

/// The function of a step.
fn function<'l>(step: &Step, launches: &'l [Launch]) -> &'l CudaFunction {
    let launch = &launches[step.of];
    let fused = launch.fused.as_ref().filter(|_| step.is_fused);
    fused.unwrap_or(&launch.function)
}

impl Drop for Graph {
    fn drop(&mut self) {
        // The driver destroys an executable that still runs when it has ended. Errors have no consequence here.
        let _ = self.context.bind_to_thread();
        // SAFETY: the handles are from `new`, and nothing else uses them.
        unsafe {
            if !self.executable.is_null() {
                let _ = sys::cuGraphExecDestroy(self.executable);
            }
            if !self.graph.is_null() {
                let _ = sys::cuGraphDestroy(self.graph);
            }
        }
    }
}
