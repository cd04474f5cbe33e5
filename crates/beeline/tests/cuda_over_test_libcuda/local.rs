//! GPU memory of a CUDA driver over a local link: pinned at both ends, and what never goes that way.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use beeline::gpu::{Buffer, Gpu};
use beeline::verbs::{
    Access, Connect, Context, Cq, Mr, Nic, Payload, Pd, Qp, QpCaps, QpKind, SendOp, SendWr, Status,
};

use crate::cases::cuda;
use crate::pieces::{contents, loaded, noise};

const WAIT: Duration = Duration::from_secs(20);
const BYTES: usize = 5 << 20;

struct Side {
    gpu: Gpu,
    context: Context,
    pd: Pd,
    cq: Cq,
    qp: Qp,
}

fn sides() -> (Side, Side) {
    let (one, other) = UnixStream::pair().unwrap();
    let (a, b) = std::thread::scope(|scope| {
        let far = scope.spawn(|| Nic::local(other).unwrap());
        (Nic::local(one).unwrap(), far.join().unwrap())
    });
    let side = |nic: &Nic, ordinal| {
        let context = nic.open();
        let (pd, cq) = (context.alloc_pd().unwrap(), context.create_cq(64).unwrap());
        let qp = pd.create_qp(QpKind::Rc, &cq, &cq, QpCaps::default()).unwrap();
        Side { gpu: cuda(ordinal), context, pd, cq, qp }
    };
    let (a, b) = (side(&a, 0), side(&b, 1));
    a.qp.connect(&b.qp.endpoint(), &Connect::default()).unwrap();
    b.qp.connect(&a.qp.endpoint(), &Connect::default()).unwrap();
    (a, b)
}

impl Side {
    fn loaded(&self, bytes: &[u8]) -> Buffer {
        let stream = self.gpu.stream().unwrap();
        let buffer = loaded(&self.gpu, &stream, bytes);
        stream.synchronize(Instant::now() + WAIT).unwrap();
        buffer
    }

    fn region(&self, bytes: &[u8]) -> (Buffer, Mr) {
        let buffer = self.loaded(bytes);
        let mr = self.pd.reg_gpu(&buffer, Access::ALL).unwrap();
        (buffer, mr)
    }

    fn bytes(&self, buffer: &Buffer) -> Vec<u8> {
        contents(&self.gpu, &self.gpu.stream().unwrap(), buffer)
    }

    fn run(&self, op: SendOp, from: &Mr, len: usize) -> Status {
        let payload = Payload::Sges(vec![from.sge(0, len as u32).unwrap()]);
        self.qp.post_send(SendWr::new(1, op, payload)).unwrap();
        self.cq.wait(WAIT).unwrap().status
    }
}

/// Both NICs have moved what there was to move.
fn turn(a: &Side, b: &Side) {
    for _ in 0..20 {
        a.context.counters();
        b.context.counters();
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Memory of `cuMemAlloc` in both directions, before and after the peer has staging memory; every length.
pub fn plain_memory() {
    let (a, b) = sides();
    let data = noise(BYTES);
    for len in [1, 511, 512, 4095, 4096, 70_001, 3 << 20, BYTES] {
        let (_from, source) = a.region(&data);
        let (to, target) = b.region(&vec![0; BYTES]);
        turn(&a, &b);
        let op = SendOp::Write { remote: target.remote_at(0), imm: None };
        assert_eq!(a.run(op, &source, len), Status::Success, "WRITE of {len}");
        assert!(b.bytes(&to)[..len] == data[..len], "WRITE of {len}");
        let (back, home) = a.region(&vec![0; BYTES]);
        let op = SendOp::Read { remote: target.remote_at(0) };
        assert_eq!(a.run(op, &home, len), Status::Success, "READ of {len}");
        assert!(a.bytes(&back)[..len] == data[..len], "READ of {len}");
        target.drain(Instant::now() + WAIT).map_err(|(_, error)| error).unwrap();
    }
}

/// Foreign memory that is freed: the peer of a local link is refused, and gets nobody else's bytes.
pub fn foreign_memory() {
    for kept in [true, false] {
        let (a, b) = sides();
        let (_keep, _region) = a.region(&noise(4096));
        let owner = b.loaded(&noise(BYTES));
        let nobody = Arc::new(());
        let buffer = Buffer::from_foreign(&b.gpu, owner.ptr(), owner.len(), nobody).unwrap();
        let target = b.pd.reg_gpu(&buffer, Access::ALL).unwrap();
        let (into, home) = a.region(&vec![0xee; BYTES]);
        turn(&a, &b);
        let read = || SendOp::Read { remote: target.remote_at(0) };
        assert_eq!(a.run(read(), &home, BYTES), Status::Success);
        assert!(a.bytes(&into) == noise(BYTES));
        let stream = a.gpu.stream().unwrap();
        stream.fill(&into, 0, BYTES as u64, 0xee).unwrap();
        stream.synchronize(Instant::now() + WAIT).unwrap();
        drop(owner);
        // Somebody else's, most likely where the first was.
        let _other = kept.then(|| b.loaded(&[9; BYTES]));
        assert_eq!(a.run(read(), &home, BYTES), Status::RemoteAccess, "kept {kept}");
        assert!(a.bytes(&into).iter().all(|byte| *byte == 0xee), "nobody else's bytes");
    }
}
