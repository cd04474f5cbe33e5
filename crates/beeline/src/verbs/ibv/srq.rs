//! Shared receive queues, and how a queue pair gives back what it took from one.
//!
//! Only a completion tells that a queue pair took a receive. One that ends in the middle of a message has taken
//! one that it will not complete by itself: moved to ERR it does, and says so with an event behind its last
//! (`IBV_EVENT_LAST_WQE_REACHED`, IBA 11.6.3.2). `rdma_rxe` sends the event and forgets the receive.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use beeline_core::rc::RecvWr;
use beeline_sys::ibverbs as sys;

use super::super::objects::create_error;
use super::device::{Pd, SOFT_ROCE_VENDOR};
use super::driver_error;
use super::qp::{entries, receive, sges_most};
use super::queue::RecvQueue;
use crate::error::Result;

/// How long a queue pair that ends waits for the event behind its last receive. Firmware sends it at once; what
/// a device that sends none had taken is held until the shared queue is gone.
const LAST_WAIT: Duration = Duration::from_millis(500);

/// Between two looks for it.
const LAST_NAP: Duration = Duration::from_micros(50);

/// A shared receive queue of the kernel's.
#[derive(Debug)]
pub(in crate::verbs) struct Srq {
    pub(super) srq: Arc<sys::Srq>,
    pub(super) posted: Arc<Mutex<RecvQueue>>,
    pd: Arc<Pd>,
}

impl Srq {
    pub(in crate::verbs) fn new(pd: &Arc<Pd>, max_wr: u32, max_sge: u32) -> Result<Arc<Self>> {
        let attr = &pd.device.attr;
        entries("shared receive queue entries", max_wr, attr.max_srq_wr)
            .and_then(|()| sges_most("scatter/gather elements", max_sge, attr.max_srq_sge))
            .map_err(|error| create_error("shared receive queue", error))?;
        let made = sys::Srq::new(&pd.pd, max_wr, max_sge);
        let srq = made.map_err(|error| {
            driver_error(pd.device.name(), "create a shared receive queue", error)
        })?;
        let ring = (attr.vendor_id == SOFT_ROCE_VENDOR).then(|| rxe_ring(max_wr));
        let posted = Arc::new(Mutex::new(RecvQueue::shared(max_wr, max_sge, ring)));
        Ok(Arc::new(Self { srq, posted, pd: Arc::clone(pd) }))
    }

    pub(in crate::verbs) fn is_of(&self, pd: &Arc<Pd>) -> bool {
        Arc::ptr_eq(&self.pd, pd)
    }

    pub(in crate::verbs) fn post_recv(&self, wr: RecvWr) -> Result<()> {
        let post = |name, sges: &[sys::Sge]| self.srq.post_recv(name, sges);
        receive(&self.pd.device, &self.posted, &wr, post)
    }

    pub(in crate::verbs) fn arm(&self, limit: u32) -> Result<()> {
        self.srq.arm(limit).map_err(|error| {
            driver_error(self.pd.device.name(), "arm a shared receive queue", error)
        })
    }
}

/// How many receives a shared queue of `rdma_rxe` holds: its ring has a power of two of places, one of them unused.
fn rxe_ring(max_wr: u32) -> u32 {
    max_wr.saturating_add(1).checked_next_power_of_two().unwrap_or(u32::MAX) - 1
}

/// Of a queue pair with a shared receive queue: whether it is done with the receives that it took.
#[derive(Debug)]
pub(super) struct Last {
    /// Its name among those that take from the queue: the number of a queue pair is given out again.
    pub(super) taker: u64,
    /// It is ended from this side, so the event is nobody else's business.
    expected: AtomicBool,
    reached: AtomicBool,
}

impl Default for Last {
    fn default() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let taker = NEXT.fetch_add(1, Ordering::Relaxed);
        Self { taker, expected: AtomicBool::new(false), reached: AtomicBool::new(false) }
    }
}

impl Last {
    /// The event came; answers whether the consumer is to hear of it.
    pub(super) fn reach(&self) -> bool {
        self.reached.store(true, Ordering::Release);
        !self.expected.load(Ordering::Acquire)
    }

    /// The queue pair is about to be ended.
    pub(super) fn expect(&self) {
        self.expected.store(true, Ordering::Release);
    }

    /// Waits for the event, which `look` takes from the kernel.
    pub(super) fn wait(&self, look: impl Fn()) {
        let end = Instant::now() + LAST_WAIT;
        loop {
            look();
            if self.reached.load(Ordering::Acquire) || Instant::now() >= end {
                return;
            }
            std::thread::sleep(LAST_NAP);
        }
    }

    /// The queue pair was reset.
    pub(super) fn begin_again(&self) {
        self.reached.store(false, Ordering::Release);
        self.expected.store(false, Ordering::Release);
    }
}
