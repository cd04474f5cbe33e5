//! Graphs: nodes that were captured, and their replay in streams of the graph's own.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use beeline::gpu::{Event, Stream};

use crate::capture::Work;
use crate::ffi::{Cu, Out, export};
use crate::state::{Driver, driver, lock};

/// Streams that one graph runs in.
const LANES_MAX: usize = 64;
/// Nodes and waits in one of them: a stream of the simulated device takes 1024 operations before the caller waits, and what
/// it waits for may not be queued yet.
const LANE_MAX: usize = 1000;

/// An operation of a graph.
#[derive(Clone)]
pub(crate) struct Node {
    pub(crate) device: usize,
    /// The nodes before it; all have smaller numbers.
    pub(crate) after: Vec<usize>,
    pub(crate) work: Work,
}

pub(crate) struct Graph {
    pub(crate) nodes: Vec<Node>,
}

/// A graph that can be launched.
pub(crate) struct Exec {
    lanes: Vec<(usize, Stream)>,
    steps: Vec<Step>,
    /// Where the last launch ended: launches of one graph come one after the other.
    last: Mutex<Option<Event>>,
}

struct Step {
    lane: usize,
    /// Nodes in other lanes that it waits for.
    after: Vec<usize>,
    /// Whether another lane waits for it.
    awaited: bool,
    work: Work,
}

export! {
    fn cuGraphInstantiateWithFlags(exec: Out<u64>, graph: u64, flags: u64) {
        let driver = driver()?;
        driver.current_unsafe()?;
        if flags != 0 { return Err(Cu::INVALID_VALUE); }
        let nodes = driver.objects().graphs.get(&graph).map(|graph| graph.nodes.clone());
        let made = Exec::new(driver, &nodes.ok_or(Cu::INVALID_VALUE)?)?;
        let handle = driver.handle();
        driver.objects().execs.insert(handle, Arc::new(made));
        exec.set(handle)
    }

    fn cuGraphLaunch(exec: u64, stream: u64) {
        let driver = driver()?;
        let (index, stream) = driver.apart(stream)?;
        let found = driver.objects().execs.get(&exec).cloned();
        let launched = found.ok_or(Cu::INVALID_VALUE)?.launch(&stream);
        launched.map_err(|error| driver.code(index, &error))
    }

    fn cuGraphGetNodes(graph: u64, nodes: usize, count: Out<usize>) {
        let driver = driver()?;
        let objects = driver.objects();
        let found = objects.graphs.get(&graph).ok_or(Cu::INVALID_VALUE)?;
        // Only how many there are.
        if nodes != 0 { return Err(Cu::NOT_SUPPORTED); }
        count.set(found.nodes.len())
    }

    fn cuGraphDestroy(graph: u64) {
        driver()?.objects().graphs.remove(&graph).map(drop).ok_or(Cu::INVALID_VALUE)
    }

    fn cuGraphExecDestroy(exec: u64) {
        let gone = driver()?.objects().execs.remove(&exec);
        gone.map(drop).ok_or(Cu::INVALID_VALUE)
    }
}

impl Exec {
    /// A node goes on in the stream of one that it comes after, where that has gone no further.
    fn new(driver: &Driver, nodes: &[Node]) -> Result<Self, Cu> {
        let mut lanes: Vec<(usize, Stream)> = Vec::new();
        let mut ends: Vec<usize> = Vec::new();
        let mut loads: Vec<usize> = Vec::new();
        let mut steps: Vec<Step> = Vec::with_capacity(nodes.len());
        for (number, node) in nodes.iter().enumerate() {
            let lane_of = |before: &usize| steps.get(*before).map(|step| step.lane);
            let goes_on = |before: &usize| {
                let lane = lane_of(before)?;
                let same = lanes.get(lane).is_some_and(|(device, _)| *device == node.device);
                (same && ends.get(lane) == Some(before)).then_some(lane)
            };
            let lane = match node.after.iter().find_map(goes_on) {
                Some(lane) => lane,
                None if lanes.len() < LANES_MAX => {
                    let device = driver.devices.get(node.device).ok_or(Cu::INVALID_DEVICE)?;
                    let made = device.gpu.stream();
                    lanes.push((node.device, made.map_err(|e| driver.code(node.device, &e))?));
                    ends.push(number);
                    loads.push(2);
                    lanes.len() - 1
                }
                None => return Err(Cu::NOT_SUPPORTED),
            };
            let after: Vec<usize> =
                node.after.iter().filter(|before| lane_of(before) != Some(lane)).copied().collect();
            ends[lane] = number;
            // The operation, an event, and what it waits for.
            loads[lane] += 2 + after.len();
            if loads[lane] > LANE_MAX {
                return Err(Cu::NOT_SUPPORTED);
            }
            for before in &after {
                steps[*before].awaited = true;
            }
            let work = Arc::clone(&node.work);
            steps.push(Step { lane, after, awaited: false, work });
        }
        Ok(Self { lanes, steps, last: Mutex::new(None) })
    }

    /// Queues everything: after what `stream` has, and before what it gets.
    fn launch(&self, stream: &Stream) -> beeline::Result<()> {
        let mut last = lock(&self.last);
        let begin = stream.record()?;
        for (_, lane) in &self.lanes {
            lane.wait_event(&begin)?;
            if let Some(last) = &*last {
                lane.wait_event(last)?;
            }
        }
        let mut events: HashMap<usize, Event> = HashMap::new();
        for (number, step) in self.steps.iter().enumerate() {
            let Some((_, lane)) = self.lanes.get(step.lane) else { continue };
            for before in step.after.iter().filter_map(|before| events.get(before)) {
                lane.wait_event(before)?;
            }
            (step.work)(lane)?;
            if step.awaited {
                events.insert(number, lane.record()?);
            }
        }
        for (_, lane) in &self.lanes {
            stream.wait_event(&lane.record()?)?;
        }
        *last = Some(stream.record()?);
        Ok(())
    }
}
