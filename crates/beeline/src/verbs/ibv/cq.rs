//! Completion queues.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use beeline_core::rc::{
    Completion, CompletionOp, CqOverrun, CreateError, Notify, QUEUE_ENTRIES_MAX, QpKind, Status,
};
use beeline_core::roce::Qpn;
use beeline_sys::ibverbs as sys;

use super::super::objects::{create_error, overrun_error};
use super::device::Device;
use super::driver_error;
use super::queue::{RecvQueue, SendQueue, is_recv};
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
    /// Queue pairs that report here.
    users: Mutex<HashMap<u32, Arc<Queues>>>,
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
        lock(&self.users).insert(qpn, Arc::clone(queues));
    }

    /// The queue pair is gone. Its number may be that of another one by now.
    pub(super) fn leave(&self, qpn: u32, queues: &Arc<Queues>) {
        let mut users = lock(&self.users);
        if users.get(&qpn).is_some_and(|known| Arc::ptr_eq(known, queues)) {
            users.remove(&qpn);
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
            pending.extend(taken.iter().filter_map(|wc| self.completion(wc)));
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
            pending.extend(taken.iter().filter_map(|wc| self.completion(wc)));
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

    /// What a completion of the kernel's says; `None` where it is of a queue pair that is gone.
    fn completion(&self, wc: &sys::Wc) -> Option<Completion> {
        let queues = Arc::clone(lock(&self.users).get(&wc.qpn)?);
        let (status, received) = (Status(wc.status), is_recv(wc.id));
        let good = status == Status::Success;
        let posted = match received {
            true => lock(&queues.recv).complete(wc.id)?,
            false => lock(&queues.send).complete(wc.id)?,
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

impl Drop for Cq {
    fn drop(&mut self) {
        lock(&self.device.cqs).remove(&self.cq.id());
    }
}
