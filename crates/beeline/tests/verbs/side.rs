//! One side of a connection, on whichever NIC.

use std::sync::Arc;
use std::time::Duration;

use beeline::verbs::{
    Access, AsyncEvent, Completion, Connect, Context, Cq, HostMem, Mr, Nic, Payload, Pd, Qp,
    QpCaps, QpKind, RecvWr, SendOp, SendWr, Status,
};

/// How long anything may take: the rig is emulated.
pub(crate) const WAIT: Duration = Duration::from_secs(30);

/// Bytes of each side's region.
pub(crate) const REGION: usize = 8 << 20;

pub(crate) struct Side {
    pub(crate) context: Context,
    pub(crate) pd: Pd,
    pub(crate) cq: Cq,
    pub(crate) qp: Qp,
    pub(crate) mr: Mr,
    pub(crate) mem: Arc<HostMem>,
}

impl Side {
    pub(crate) fn new(nic: &Nic, mem: HostMem) -> Self {
        let context = nic.open();
        let pd = context.alloc_pd().unwrap();
        let cq = context.create_cq(1024).unwrap();
        let qp = pd.create_qp(QpKind::Rc, &cq, &cq, QpCaps::default()).unwrap();
        let mem = Arc::new(mem);
        let mr = pd.reg_mr(Arc::clone(&mem), Access::ALL).unwrap();
        Self { context, pd, cq, qp, mr, mem }
    }

    /// A new queue pair that reports to this side's queue.
    pub(crate) fn qp(&self) -> Qp {
        self.pd.create_qp(QpKind::Rc, &self.cq, &self.cq, QpCaps::default()).unwrap()
    }

    pub(crate) fn bytes(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.mem.read(offset, &mut bytes).unwrap();
        bytes
    }

    /// A send of registered memory.
    pub(crate) fn wr(&self, id: u64, op: SendOp, offset: u64, len: u32) -> SendWr {
        SendWr::new(id, op, Payload::Sges(vec![self.mr.sge(offset, len).unwrap()]))
    }

    pub(crate) fn post(&self, id: u64, op: SendOp, offset: u64, len: u32) {
        self.qp.post_send(self.wr(id, op, offset, len)).unwrap();
    }

    pub(crate) fn recv(&self, id: u64, offset: u64, len: u32) -> RecvWr {
        RecvWr { id, sges: vec![self.mr.sge(offset, len).unwrap()] }
    }

    pub(crate) fn done(&self) -> Completion {
        self.cq.wait(WAIT).unwrap()
    }

    /// The next completion, which is of that request and good.
    pub(crate) fn good(&self, id: u64) -> Completion {
        let done = self.done();
        assert_eq!((done.wr_id, done.status), (id, Status::Success));
        done
    }

    /// The next event, within a while.
    pub(crate) fn event(&self) -> Option<AsyncEvent> {
        let end = std::time::Instant::now() + Duration::from_secs(5);
        while std::time::Instant::now() < end {
            if let Some(event) = self.context.poll_async() {
                return Some(event);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        None
    }
}

/// How cases connect. Long enough that a machine busy with other things does not use up the retries.
pub(crate) fn usual() -> Connect {
    let mut connect = Connect::default();
    connect.timeout = 17;
    connect
}

/// Connects two queue pairs, with other options for each.
pub(crate) fn connect(a: &Qp, b: &Qp, (to_b, to_a): (&Connect, &Connect)) {
    let (of_a, of_b) = (a.endpoint().to_string(), b.endpoint().to_string());
    a.connect(&of_b.parse().unwrap(), to_b).unwrap();
    b.connect(&of_a.parse().unwrap(), to_a).unwrap();
}

pub(crate) fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(31).wrapping_add((i >> 8) as u8) ^ seed).collect()
}
