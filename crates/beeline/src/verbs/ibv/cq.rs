//! Completion queues.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Weak};

use beeline_core::rc::{
    Completion, CompletionOp, CqOverrun, CreateError, Notify, QUEUE_ENTRIES_MAX, QpKind, Status,
};
use beeline_core::roce::Qpn;
use beeline_sys::ibverbs as sys;

use super::super::objects::{create_error, overrun_error};
use super::device::Device;
use super::driver_error;
use super::queue::{Posted, RecvQueue, SendQueue, is_recv};
use super::srq::Last;
use crate::error::Result;
use crate::lock;

/// `IBV_WC_RECV_RDMA_WITH_IMM`.
const RECV_RDMA_WITH_IMM: u32 = 129;

/// Polls in vain between two looks for the event that tells of an overrun.
const POLLS_A_LOOK: u32 = 1024;

/// A completion queue of the kernel's.
#[derive(Debug)]
pub(in crate::verbs) struct Cq {
    device: Arc<Device>,
    pub(super) cq: Arc<sys::Cq>,
    capacity: u32,
    /// Who reports here.
    users: Mutex<Users>,
    /// Taken from the kernel's queue, and not yet from here.
    pending: Mutex<VecDeque<Completion>>,
    overrun: AtomicBool,
    /// Polls in vain.
    vain: AtomicU32,
}

/// The queues of a queue pair.
#[derive(Debug)]
pub(super) struct Queues {
    pub(super) kind: QpKind,
    pub(super) send: Mutex<SendQueue>,
    /// Its own, or the shared one.
    pub(super) recv: Arc<Mutex<RecvQueue>>,
    /// A completion said so: a connection is in ERR then (IBA 10.10.2.1), and whoever saw the completion
    /// must not find another state because the driver is still at it.
    pub(super) failed: AtomicBool,
    /// With a shared receive queue.
    pub(super) last: Option<Last>,
}

impl Queues {
    /// The queue pair can receive from here on.
    pub(super) fn begin_to_take(&self) {
        if let Some(last) = &self.last {
            lock(&self.recv).begin(last.taker);
        }
    }

    /// It cannot any more, and what it completed is taken.
    pub(super) fn end_taking(&self) {
        if let Some(last) = &self.last {
            lock(&self.recv).end(last.taker);
        }
    }

    fn received(&self, name: u64) -> Option<Posted> {
        let mut recv = lock(&self.recv);
        match &self.last {
            Some(last) => recv.complete_by(name, last.taker),
            None => recv.complete(name),
        }
    }
}

/// Whose completions come to a queue.
#[derive(Debug, Default)]
struct Users {
    /// Queue pairs by their number.
    qps: HashMap<u32, Arc<Queues>>,
    /// Shared receive queues that they take from, or took from.
    shared: Vec<Weak<Mutex<RecvQueue>>>,
}

impl Cq {
    pub(in crate::verbs) fn new(device: &Arc<Device>, capacity: u32) -> Result<Arc<Self>> {
        let max = device.attr.max_cqe.min(QUEUE_ENTRIES_MAX);
        if capacity == 0 || capacity > max {
            let what = "completion queue entries";
            let error = CreateError::TooMany { what, value: capacity, max };
            return Err(create_error("completion queue", error));
        }
        let made = sys::Cq::new(&device.context, capacity);
        let cq =
            made.map_err(|error| driver_error(device.name(), "create a completion queue", error))?;
        let new = Arc::new(Self {
            device: Arc::clone(device),
            cq,
            capacity,
            users: Mutex::default(),
            pending: Mutex::default(),
            overrun: AtomicBool::new(false),
            vain: AtomicU32::new(0),
        });
        lock(&device.cqs).insert(new.cq.id(), Arc::downgrade(&new));
        Ok(new)
    }

    pub(in crate::verbs) fn is_of(&self, device: &Arc<Device>) -> bool {
        Arc::ptr_eq(&self.device, device)
    }

    pub(super) fn join(&self, qpn: u32, queues: &Arc<Queues>) {
        if lock(&self.users).qps.contains_key(&qpn) {
            // Of one that is destroyed and has not left yet: what it completed is not this one's.
            self.drain();
        }
        lock(&self.users).join(qpn, queues);
    }

    /// The queue pair is gone. Its number may be that of another one by now.
    pub(super) fn leave(&self, qpn: u32, queues: &Arc<Queues>) {
        let mut users = lock(&self.users);
        if users.qps.get(&qpn).is_some_and(|known| Arc::ptr_eq(known, queues)) {
            users.qps.remove(&qpn);
        }
    }

    pub(in crate::verbs) fn poll(&self) -> Result<Option<Completion>> {
        let mut pending = lock(&self.pending);
        if let Some(completion) = pending.pop_front() {
            return Ok(Some(completion));
        }
        let mut taken = Vec::with_capacity(16);
        let mut found = None;
        // What is left of queue pairs that are gone is passed over, so that what stands behind it is found.
        for _ in 0..self.capacity / 16 + 2 {
            taken.clear();
            let count = self.cq.poll(&mut taken).map_err(|error| {
                driver_error(self.device.name(), "poll a completion queue", error)
            })?;
            pending.extend(taken.iter().filter_map(|wc| lock(&self.users).completion(wc)));
            found = pending.pop_front();
            if found.is_some() || count == 0 {
                break;
            }
        }
        drop(pending);
        if found.is_none() {
            self.vain_poll()?;
        }
        Ok(found)
    }

    /// Takes what is there, so that it is not lost with a queue pair; as much as the queue is long.
    pub(super) fn drain(&self) {
        let mut pending = lock(&self.pending);
        let mut taken = Vec::with_capacity(16);
        while pending.len() < self.capacity as usize {
            taken.clear();
            if self.cq.poll(&mut taken).unwrap_or(0) == 0 {
                return;
            }
            pending.extend(taken.iter().filter_map(|wc| lock(&self.users).completion(wc)));
        }
    }

    /// The queue is empty: for good, where it was overrun.
    fn vain_poll(&self) -> Result<()> {
        if self.vain.fetch_add(1, Ordering::Relaxed).is_multiple_of(POLLS_A_LOOK) {
            self.look_for_events();
        }
        if self.overrun.load(Ordering::Acquire) {
            return Err(overrun_error(CqOverrun { capacity: self.capacity }));
        }
        Ok(())
    }

    pub(in crate::verbs) fn request_notify(&self, notify: Notify) {
        // A queue that cannot be armed is broken, and polling it says so.
        let _ = self.cq.request_notify(notify == Notify::Solicited);
    }

    pub(in crate::verbs) fn channel(&self) -> BorrowedFd<'_> {
        self.cq.channel().as_fd()
    }

    pub(in crate::verbs) fn acknowledge(&self) -> u64 {
        self.cq.take_events()
    }

    /// Where the kernel tells that a queue was overrun.
    pub(in crate::verbs) fn events(&self) -> BorrowedFd<'_> {
        self.device.context.async_fd()
    }

    pub(in crate::verbs) fn look_for_events(&self) {
        self.device.take_events();
    }

    pub(super) fn set_overrun(&self) {
        self.overrun.store(true, Ordering::Release);
    }
}

impl Users {
    fn join(&mut self, qpn: u32, queues: &Arc<Queues>) {
        self.qps.insert(qpn, Arc::clone(queues));
        if queues.last.is_some() {
            self.shared.retain(|known| known.strong_count() > 0);
            if !self.shared.iter().any(|known| known.as_ptr() == Arc::as_ptr(&queues.recv)) {
                self.shared.push(Arc::downgrade(&queues.recv));
            }
        }
    }

    /// Gives up the receive of that name, whichever shared queue it is of.
    fn release_shared(&self, name: u64) {
        if is_recv(name) {
            let mut queues = self.shared.iter().filter_map(Weak::upgrade);
            queues.find_map(|queue| lock(&queue).complete(name));
        }
    }

    /// What a completion of the kernel's says; `None` where it is of a queue pair that is gone.
    fn completion(&self, wc: &sys::Wc) -> Option<Completion> {
        let (status, received) = (Status(wc.status), is_recv(wc.id));
        let good = status == Status::Success;
        let queues = self.qps.get(&wc.qpn);
        let posted = queues.and_then(|queues| match received {
            true => queues.received(wc.id),
            false => lock(&queues.send).complete(wc.id),
        });
        let (Some(queues), Some(posted)) = (queues, posted) else {
            // Of a queue pair that is gone. A receive that it took from a shared queue is done all the same.
            self.release_shared(wc.id);
            return None;
        };
        if !good && queues.kind == QpKind::Rc {
            queues.failed.store(true, Ordering::Release);
        }
        let op = match (received, wc.opcode) {
            (false, _) => posted.op,
            (true, RECV_RDMA_WITH_IMM) if good => CompletionOp::RecvWriteImm,
            (true, _) => CompletionOp::Recv,
        };
        Some(Completion {
            wr_id: posted.id,
            status,
            op,
            byte_len: if received { wc.byte_len } else { posted.len },
            // Some drivers set the flag on the sender's side too.
            imm: wc.imm.filter(|_| received && good),
            qpn: Qpn::new(wc.qpn),
            src_qp: (received && good && queues.kind == QpKind::Ud).then(|| Qpn::new(wc.src_qp)),
        })
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        lock(&self.device.cqs).remove(&self.cq.id());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queues(recv: &Arc<Mutex<RecvQueue>>, shared: bool) -> Arc<Queues> {
        Arc::new(Queues {
            kind: QpKind::Rc,
            send: Mutex::new(SendQueue::new()),
            recv: Arc::clone(recv),
            failed: AtomicBool::new(false),
            last: shared.then(Last::default),
        })
    }

    fn post(recv: &Mutex<RecvQueue>) -> Option<u64> {
        let posted = Posted { id: 7, op: CompletionOp::Recv, len: 0, held: Vec::new(), ah: None };
        lock(recv).push(posted).ok()
    }

    /// Completions that come when their queue pair is gone: the receive has its place no more.
    #[test]
    fn a_receive_of_a_shared_queue_is_done_although_its_queue_pair_is_gone() {
        let recv = Arc::new(Mutex::new(RecvQueue::shared(1, 1, None)));
        let own = Arc::new(Mutex::new(RecvQueue::new(1, 1)));
        // The number of the queue pair is nobody's by then, or that of another one.
        for another in [false, true] {
            let mut users = Users::default();
            users.join(5, &queues(&recv, true));
            let name = post(&recv).unwrap();
            assert_eq!(post(&recv), None);
            users.qps.clear();
            if another {
                users.join(5, &queues(&own, false));
            }
            let flushed = sys::Wc { id: name, status: Status::Flushed.0, qpn: 5, ..wc() };
            assert!(users.completion(&flushed).is_none(), "it is nobody's");
            let name = post(&recv).expect("its place is free again");
            lock(&recv).complete(name).unwrap();
            let failed = users.qps.get(&5).is_some_and(|new| new.failed.load(Ordering::Acquire));
            assert!(!failed, "the other queue pair has nothing to do with it");
        }
    }

    fn wc() -> sys::Wc {
        let (id, status, vendor_err, byte_len) = (0, 0, 0, 0);
        sys::Wc { id, status, opcode: 128, vendor_err, byte_len, imm: None, qpn: 0, src_qp: 0 }
    }
}
