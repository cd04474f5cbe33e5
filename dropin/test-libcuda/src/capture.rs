//! Captures: what is queued in a stream becomes a node of a graph, and which calls a capture does not survive.
//!
//! The rules are those of the driver API's documentation (stream management, "stream capture"; `CUstreamCaptureMode`; the
//! codes 900 to 908), and what driver 580 answered to each call beside a capture, in each mode (measured on 2026-11-30):
//! `cuStreamGetId`, `cuStreamGetFlags` and `cuCtxSynchronize` end the capture that they meet, whatever its mode, while copies
//! and fills that wait, new streams and the numbers of other streams are allowed. What was not measured and is not documented
//! as allowed is refused; so is memory of a graph (`cuMemAllocAsync`), which the real driver has and this one does not
//! simulate. A refused call spoils the captures that forbid it, and is counted.

use std::collections::HashMap;
use std::sync::Arc;

use beeline::Result;
use beeline::gpu::Stream;

use crate::ffi::{Cu, Out, export};
use crate::graph::{Graph, Node};
use crate::state::{self, Driver, MODE_GLOBAL, MODE_RELAXED, Recorded, driver, lock};

/// What a stream does when the turn of an operation comes; more than once where it is part of a graph.
pub(crate) type Work = Arc<dyn Fn(&Stream) -> Result<()> + Send + Sync>;

/// Nodes of one capture.
const NODES_MAX: usize = 4096;

/// All that go on, and what was counted.
#[derive(Default)]
pub(crate) struct Captures {
    number: u64,
    going: Vec<Capture>,
    /// Operations that became nodes.
    pub(crate) nodes: i64,
    /// Calls that were refused for the sake of a capture.
    pub(crate) refused: i64,
}

struct Capture {
    /// No other of the process has it.
    number: u64,
    /// The stream it began in, by key.
    origin: u64,
    mode: i32,
    /// The thread that began it.
    thread: u64,
    spoilt: bool,
    nodes: Vec<Node>,
    /// The streams that take part, by key.
    streams: HashMap<u64, Part>,
}

/// A stream of a capture.
struct Part {
    /// The legacy stream that waits for it and it for that, unless it was made not to.
    legacy: Option<u64>,
    device: usize,
    /// What its next node comes after.
    after: Vec<usize>,
}

/// How `cuStreamWaitEvent` goes on.
pub(crate) enum Wait {
    /// As it would without captures.
    Outside,
    /// The order is in the graph.
    Inside,
}

/// A stream, as the rules see it.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    pub(crate) key: u64,
    /// The legacy stream it keeps order with; its own key for that stream itself.
    pub(crate) legacy: Option<u64>,
    pub(crate) device: usize,
}

impl Place {
    fn is_legacy(self) -> bool {
        self.legacy == Some(self.key)
    }
}

export! {
    fn cuStreamBeginCapture_v2(stream: u64, mode: i32) {
        let driver = driver()?;
        driver.stream(stream)?;
        let place = driver.place(stream)?;
        lock(&driver.captures).begin(place, mode, driver.thread())
    }

    fn cuStreamEndCapture(stream: u64, graph: Out<u64>) {
        let driver = driver()?;
        driver.stream(stream)?;
        let key = driver.key(stream)?;
        let ended = lock(&driver.captures).end(key, driver.thread());
        match ended {
            Ok(nodes) => {
                let handle = driver.handle();
                driver.objects().graphs.insert(handle, Graph { nodes });
                graph.set(handle)
            }
            Err(code) => {
                graph.set(0)?;
                Err(code)
            }
        }
    }

    fn cuStreamIsCapturing(stream: u64, status: Out<i32>) {
        let driver = driver()?;
        driver.stream(stream)?;
        let place = driver.place(stream)?;
        let (is, _) = lock(&driver.captures).status(place)?;
        status.set(is)
    }

    fn cuStreamGetCaptureInfo_v2(
        stream: u64, status: Out<i32>, number: Out<u64>, graph: usize, after: usize, count: usize,
    ) {
        let driver = driver()?;
        driver.stream(stream)?;
        let place = driver.place(stream)?;
        let (is, of) = lock(&driver.captures).status(place)?;
        // Nobody has asked for the graph itself so far.
        if graph != 0 || after != 0 || count != 0 { return Err(Cu::NOT_SUPPORTED); }
        status.set(is)?;
        match number.is_null() {
            true => Ok(()),
            false => number.set(of),
        }
    }

    fn cuThreadExchangeStreamCaptureMode(mode: *mut i32) {
        let new: i32 = crate::ffi::read(mode.cast())?;
        if !(MODE_GLOBAL..=MODE_RELAXED).contains(&new) { return Err(Cu::INVALID_VALUE); }
        crate::ffi::write(mode.cast(), state::mode().replace(new))
    }
}

impl Driver {
    /// Queues an operation in a stream, or makes it a node of the graph that the stream is captured into.
    pub(crate) fn submit(
        &self,
        handle: u64,
        work: impl Fn(&Stream) -> Result<()> + Send + Sync + 'static,
    ) -> Result<(), Cu> {
        let (index, stream) = self.stream(handle)?;
        let place = self.place(handle)?;
        let work: Work = Arc::new(work);
        if lock(&self.captures).take(place, index, &work)? {
            return Ok(());
        }
        *self.objects().queued.entry(place.key).or_default() += 1;
        work(&stream).map_err(|error| self.code(index, &error))
    }

    /// [`Self::stream`], for a call that conflicts with the stream's capture, whatever the mode.
    pub(crate) fn apart(&self, handle: u64) -> Result<(usize, Arc<Stream>), Cu> {
        let found = self.stream(handle)?;
        let place = self.place(handle)?;
        lock(&self.captures).conflict(place)?;
        Ok(found)
    }

    /// Refuses what asks about a captured stream itself, whatever the mode and the current context.
    pub(crate) fn unasked(&self, handle: u64) -> Result<(), Cu> {
        lock(&self.captures).conflict(Place { key: handle, legacy: None, device: 0 })
    }

    /// Refuses to wait for all streams of a device while one of them is captured, whatever the mode.
    pub(crate) fn quiet(&self, device: usize) -> Result<(), Cu> {
        lock(&self.captures).quiet(device)
    }

    /// Refuses a call that is not safe beside a capture, unless the calling thread says that it is.
    pub(crate) fn guard(&self) -> Result<(), Cu> {
        lock(&self.captures).guard(state::mode().get(), self.thread())
    }
}

impl Captures {
    fn begin(&mut self, place: Place, mode: i32, thread: u64) -> Result<(), Cu> {
        if !(MODE_GLOBAL..=MODE_RELAXED).contains(&mode) {
            return Err(Cu::INVALID_VALUE);
        }
        if place.is_legacy() {
            return self.refuse(Cu::CAPTURE_UNSUPPORTED);
        }
        if self.of(place.key).is_some() {
            return self.refuse(Cu::ILLEGAL_STATE);
        }
        self.number += 1;
        let part = Part::new(place);
        self.going.push(Capture {
            number: self.number,
            origin: place.key,
            mode,
            thread,
            spoilt: false,
            nodes: Vec::new(),
            streams: HashMap::from([(place.key, part)]),
        });
        Ok(())
    }

    /// The nodes of the graph.
    fn end(&mut self, key: u64, thread: u64) -> Result<Vec<Node>, Cu> {
        let Some(at) = self.going.iter().position(|one| one.streams.contains_key(&key)) else {
            return self.refuse(Cu::ILLEGAL_STATE);
        };
        let Some(one) = self.going.get_mut(at) else { return Err(Cu::UNKNOWN) };
        let matched = one.origin == key;
        if !matched || (one.mode != MODE_RELAXED && one.thread != thread) {
            one.spoilt = true;
            let code = if matched { Cu::CAPTURE_WRONG_THREAD } else { Cu::CAPTURE_UNMATCHED };
            return self.refuse(code);
        }
        let one = self.going.swap_remove(at);
        match one.spoilt {
            true => self.refuse(Cu::CAPTURE_INVALIDATED),
            false if !one.is_joined() => self.refuse(Cu::CAPTURE_UNJOINED),
            false => Ok(one.nodes),
        }
    }

    /// 0 none, 1 active, 2 spoilt; and the number of the capture.
    fn status(&mut self, place: Place) -> Result<(i32, u64), Cu> {
        // An answer that leaves the capture as it is.
        if place.is_legacy() && self.blocked(place.key).next().is_some() {
            return Err(Cu::CAPTURE_IMPLICIT);
        }
        let one = self.of(place.key);
        Ok(one.map_or((0, 0), |one| (1 + i32::from(one.spoilt), one.number)))
    }

    /// Takes an operation into the graph of its stream; whether that has one.
    fn take(&mut self, place: Place, device: usize, work: &Work) -> Result<bool, Cu> {
        self.implicit(place)?;
        let Some(one) = self.of(place.key) else { return Ok(false) };
        if one.spoilt || one.nodes.len() >= NODES_MAX {
            one.spoilt = true;
            return self.refuse(Cu::CAPTURE_INVALIDATED);
        }
        let node = one.nodes.len();
        if let Some(part) = one.streams.get_mut(&place.key) {
            let after = std::mem::replace(&mut part.after, vec![node]);
            one.nodes.push(Node { device, after, work: Arc::clone(work) });
        }
        self.nodes += 1;
        Ok(true)
    }

    /// What an event that is recorded in the stream stands for; `None` outside of captures.
    pub(crate) fn record(&mut self, place: Place) -> Result<Option<Recorded>, Cu> {
        self.implicit(place)?;
        let Some(one) = self.of(place.key) else { return Ok(None) };
        if one.spoilt {
            return self.refuse(Cu::CAPTURE_INVALIDATED);
        }
        let after = one.streams.get(&place.key).map(|part| part.after.clone());
        Ok(Some(Recorded::Captured { capture: one.number, after: after.unwrap_or_default() }))
    }

    /// Has a stream wait for an event, which may take it into the event's capture.
    pub(crate) fn wait(&mut self, place: Place, event: &Recorded) -> Result<Wait, Cu> {
        self.implicit(place)?;
        let own = self.of(place.key).map(|one| (one.number, one.spoilt));
        let Recorded::Captured { capture, after } = event else {
            return match own {
                None => Ok(Wait::Outside),
                // What runs outside of a graph cannot be waited for inside of it.
                Some((number, _)) => self.spoil(&[number], Cu::CAPTURE_ISOLATION),
            };
        };
        let there = self.going.iter().find(|one| one.number == *capture);
        match (own, there.map(|one| one.spoilt)) {
            (Some((_, true)), _) | (_, Some(true)) => self.refuse(Cu::CAPTURE_INVALIDATED),
            // Of a capture that is over.
            (None, None) => self.refuse(Cu::INVALID_VALUE),
            (Some((number, _)), None) => self.spoil(&[number], Cu::CAPTURE_ISOLATION),
            (Some((number, _)), Some(_)) if number != *capture => {
                self.spoil(&[number, *capture], Cu::CAPTURE_MERGE)
            }
            (_, Some(_)) => {
                let one = self.going.iter_mut().find(|one| one.number == *capture);
                if let Some(one) = one {
                    let part = one.streams.entry(place.key).or_insert_with(|| Part::new(place));
                    part.after.extend(after);
                    part.after.sort_unstable();
                    part.after.dedup();
                }
                Ok(Wait::Inside)
            }
        }
    }

    /// Refuses to say whether an event that was recorded in a capture has come.
    pub(crate) fn ask(&mut self, event: &Recorded) -> Result<(), Cu> {
        match event {
            Recorded::Captured { capture, .. } => {
                match self.going.iter().any(|one| one.number == *capture) {
                    true => self.spoil(&[*capture], Cu::CAPTURED_EVENT),
                    false => self.refuse(Cu::INVALID_VALUE),
                }
            }
            _ => Ok(()),
        }
    }

    /// A stream is destroyed: the capture that began in it ends without a graph.
    pub(crate) fn destroyed(&mut self, key: u64) -> Result<(), Cu> {
        match self.of(key).map(|one| (one.number, one.origin == key)) {
            Some((number, true)) => self.going.retain(|one| one.number != number),
            // Not measured.
            Some((number, false)) => return self.spoil(&[number], Cu::CAPTURE_UNSUPPORTED),
            None => {}
        }
        Ok(())
    }

    /// Whether the stream is captured.
    pub(crate) fn has(&mut self, place: Place) -> bool {
        self.of(place.key).is_some()
    }

    fn conflict(&mut self, place: Place) -> Result<(), Cu> {
        self.implicit(place)?;
        match self.of(place.key).map(|one| one.number) {
            Some(number) => self.spoil(&[number], Cu::CAPTURE_UNSUPPORTED),
            None => Ok(()),
        }
    }

    fn quiet(&mut self, device: usize) -> Result<(), Cu> {
        let there = |one: &&Capture| one.streams.values().any(|part| part.device == device);
        let all: Vec<u64> = self.going.iter().filter(there).map(|one| one.number).collect();
        if all.is_empty() { Ok(()) } else { self.spoil(&all, Cu::CAPTURE_UNSUPPORTED) }
    }

    fn guard(&mut self, mode: i32, thread: u64) -> Result<(), Cu> {
        let forbids = |one: &&Capture| match one.thread == thread {
            true => one.mode != MODE_RELAXED,
            false => mode == MODE_GLOBAL && one.mode == MODE_GLOBAL,
        };
        if mode == MODE_RELAXED {
            return Ok(());
        }
        let all: Vec<u64> = self.going.iter().filter(forbids).map(|one| one.number).collect();
        if all.is_empty() { Ok(()) } else { self.spoil(&all, Cu::CAPTURE_UNSUPPORTED) }
    }

    /// The legacy stream cannot be used while a stream that keeps order with it is captured.
    fn implicit(&mut self, place: Place) -> Result<(), Cu> {
        let all: Vec<u64> = match place.is_legacy() {
            true => self.blocked(place.key).map(|one| one.number).collect(),
            false => Vec::new(),
        };
        if all.is_empty() { Ok(()) } else { self.spoil(&all, Cu::CAPTURE_IMPLICIT) }
    }

    /// Captures with streams that keep order with this legacy stream.
    fn blocked(&self, legacy: u64) -> impl Iterator<Item = &Capture> {
        let blocks =
            move |one: &&Capture| one.streams.values().any(|part| part.legacy == Some(legacy));
        self.going.iter().filter(blocks)
    }

    fn of(&mut self, key: u64) -> Option<&mut Capture> {
        self.going.iter_mut().find(|one| one.streams.contains_key(&key))
    }

    fn spoil<T>(&mut self, numbers: &[u64], code: Cu) -> Result<T, Cu> {
        for one in &mut self.going {
            one.spoilt |= numbers.contains(&one.number);
        }
        self.refuse(code)
    }

    fn refuse<T>(&mut self, code: Cu) -> Result<T, Cu> {
        self.refused += 1;
        Err(code)
    }

    /// 0 none, 1 going on, 2 one is spoilt.
    pub(crate) fn worst(&self) -> i64 {
        self.going.iter().map(|one| 1 + i64::from(one.spoilt)).max().unwrap_or(0)
    }
}

impl Part {
    const fn new(place: Place) -> Self {
        Self { legacy: place.legacy, device: place.device, after: Vec::new() }
    }
}

impl Capture {
    /// Whether the end of the first stream comes after everything.
    fn is_joined(&self) -> bool {
        let mut reached = vec![false; self.nodes.len()];
        let end = self.streams.get(&self.origin).map(|part| part.after.clone());
        let mut ahead = end.unwrap_or_default();
        while let Some(node) = ahead.pop() {
            match reached.get_mut(node) {
                Some(known) if !*known => *known = true,
                _ => continue,
            }
            ahead.extend(self.nodes.get(node).map(|node| node.after.as_slice()).unwrap_or(&[]));
        }
        reached.into_iter().all(|reached| reached)
    }
}
