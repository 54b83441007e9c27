//! CUDA graphs of consecutive kernels. The CPU starts a graph with one call instead of one per kernel.

use std::ptr::{null, null_mut};
use std::sync::Arc;

use cudarc::driver::sys::{self, CUgraphDependencyType, CUgraphEdgeData};
use cudarc::driver::{CudaContext, CudaStream, DriverError};

use super::launches::Launch;

/// The port of a kernel from which a kernel that may start early continues (`CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC`).
const EARLY: u8 = 1;

/// A graph of kernels that follow each other.
pub(super) struct Graph {
    context: Arc<CudaContext>,
    graph: sys::CUgraph,
    /// What the driver starts. Null until it is instantiated.
    executable: sys::CUgraphExec,
    nodes: Vec<sys::CUgraphNode>,
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
        };
        // SAFETY: the driver writes a handle, which `drop` destroys.
        unsafe { sys::cuGraphCreate(&mut new.graph, 0) }.result()?;
        for launch in launches {
            let mut node = null_mut();
            let mut params = launch.pointers();
            let kernel = launch.node(&mut params);
            // SAFETY: the driver copies the parameters, which have the types of the kernel's signature (`Module::launch`).
            let added =
                unsafe { sys::cuGraphAddKernelNode_v2(&mut node, new.graph, null(), 0, &kernel) };
            added.result()?;
            if let Some(&before) = new.nodes.last() {
                let edge = CUgraphEdgeData {
                    from_port: if launch.overlaps { EARLY } else { 0 },
                    to_port: 0,
                    type_: if launch.overlaps {
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

    /// Changes the grid, the shared memory and the parameters of node `index` for later starts.
    ///
    /// # Errors
    /// The driver rejects the change.
    pub fn update(&mut self, index: usize, launch: &Launch) -> Result<(), DriverError> {
        let mut params = launch.pointers();
        let kernel = launch.node(&mut params);
        let node = self.nodes[index];
        // SAFETY: as in `new`; the node is of this graph, and runs the same kernel.
        unsafe { sys::cuGraphExecKernelNodeSetParams_v2(self.executable, node, &kernel) }.result()
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
