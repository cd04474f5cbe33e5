//! Memory that is slow, goes away, or is none of the host's.

use std::sync::Mutex;

use super::*;
use crate::lock;

/// H-RDMA-NET-15: the memory of a region dropped under work requests stays until they are done.
#[test]
fn a_region_in_use_is_not_deregistered_and_its_memory_outlives_a_drop() {
    let (a, b) = Nic::pair(SoftOptions::new(address()), SoftOptions::new(address())).unwrap();
    let (a, b) = joined(&a, &b, 1 << 16);
    let mem = Arc::new(HostMem::anonymous(4096).unwrap());
    let region = || a.pd.reg_mr(Arc::clone(&mem), Access::ALL).unwrap();
    let posted = region();
    a.qp.post_recv(RecvWr { id: 1, sges: vec![posted.sge(0, 4096).unwrap()] }).unwrap();
    let (posted, error) = posted.deregister().unwrap_err();
    assert_eq!(error.code(), "region-in-use");
    drop(posted);
    assert_eq!(Arc::strong_count(&mem), 2, "the NIC keeps the memory");
    b.post(5, SendOp::Send { imm: None }, 0, 8);
    // The receive names a region without rights now.
    assert_eq!(a.done().status, Status::LocalProtection);
    assert_eq!(b.done().status, Status::RemoteOperation);
    a.context.counters();
    assert_eq!(Arc::strong_count(&mem), 1, "done: the memory is free");
    let idle = region();
    idle.deregister().map_err(|(_, error)| error).unwrap();
    assert_eq!(Arc::strong_count(&mem), 1);
}

/// Device memory as slow as one likes.
#[derive(Debug)]
struct Slow {
    bytes: Mutex<Vec<u8>>,
    wait: Duration,
}

impl DeviceMemory for Slow {
    fn addr(&self) -> u64 {
        0x7000_0000_0000
    }

    fn len(&self) -> u64 {
        lock(&self.bytes).len() as u64
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), MemFault> {
        std::thread::sleep(self.wait);
        let bytes = lock(&self.bytes);
        let from = bytes.get(offset as usize..).and_then(|rest| rest.get(..into.len()));
        into.copy_from_slice(from.ok_or(MemFault)?);
        Ok(())
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<(), MemFault> {
        std::thread::sleep(self.wait);
        let mut bytes = lock(&self.bytes);
        let into = bytes.get_mut(offset as usize..).and_then(|rest| rest.get_mut(..from.len()));
        into.ok_or(MemFault)?.copy_from_slice(from);
        Ok(())
    }
}

fn slow(side: &Side, len: usize) -> (Arc<Slow>, Mr) {
    let memory =
        Arc::new(Slow { bytes: Mutex::new(vec![0; len]), wait: Duration::from_micros(200) });
    let device: Arc<dyn DeviceMemory> = Arc::clone(&memory) as _;
    let mr = side.pd.reg_mr(device, Access::ALL).unwrap();
    (memory, mr)
}

/// H-RDMA-NET-13: inline data of device memory is a typed error.
#[test]
fn inline_data_is_refused_for_device_memory_only() {
    everywhere(1 << 16, |a, b| {
        let (_, mr) = slow(&a, 64);
        let write = |from: &Mr| {
            let op = SendOp::Write { remote: b.mr.remote_at(0), imm: None };
            a.qp.post_send_inline(SendWr::new(1, op, Payload::Sges(vec![from.sge(0, 8).unwrap()])))
        };
        let error = write(&mr).unwrap_err();
        assert!(error.is_refused());
        assert_eq!(error.code(), "inline-device-memory");
        a.mem.write(0, b"inlined!").unwrap();
        write(&a.mr).unwrap();
        // Read when it was posted: what happens to the memory then is of no matter.
        a.mem.fill(0, 8, 0).unwrap();
        assert_eq!(a.done().status, Status::Success);
        assert_eq!(b.bytes(0, 8), b"inlined!");
    });
}

/// Bytes go into slow device memory and a flag into host memory behind them: the flag is not seen first.
#[test]
fn device_memory_keeps_its_place_in_the_order() {
    everywhere(1 << 16, |a, b| {
        let (memory, mr) = slow(&b, 16_384);
        a.mem.fill(0, 1 << 16, 5).unwrap();
        a.post(1, SendOp::Write { remote: mr.remote_at(0), imm: None }, 0, 16_384);
        a.post(2, SendOp::Write { remote: b.mr.remote_at(0), imm: None }, 0, 8);
        while b.mem.load_u64(0).unwrap() == 0 {
            assert!(b.cq.poll().unwrap().is_none());
        }
        assert!(lock(&memory.bytes).iter().all(|byte| *byte == 5), "the flag came before the data");
        assert_eq!((a.done().wr_id, a.done().wr_id), (1, 2));
        a.post(3, SendOp::Read { remote: mr.remote_at(0) }, 32_768, 16_384);
        assert_eq!(a.done().status, Status::Success);
        assert_eq!(a.bytes(32_768, 16_384), vec![5; 16_384]);
        a.post(4, SendOp::FetchAdd { remote: mr.remote_at(8), add: 1 }, 0, 8);
        assert_eq!(a.done().status, Status::Success);
        assert_eq!(a.mem.load_u64(0).unwrap(), 0x0505_0505_0505_0505);
        assert_eq!(lock(&memory.bytes)[8], 6);
    });
}

/// A READ answers what the WRITEs before it left, also where they wait behind slow memory.
#[test]
fn a_read_sees_all_of_what_was_posted_before_it() {
    everywhere(1 << 16, |a, b| {
        let (_memory, mr) = slow(&b, 16_384);
        a.mem.fill(0, 16_384, 5).unwrap();
        a.post(1, SendOp::Write { remote: mr.remote_at(0), imm: None }, 0, 16_384);
        a.post(2, SendOp::Write { remote: b.mr.remote_at(0), imm: None }, 0, 4096);
        a.post(3, SendOp::Read { remote: b.mr.remote_at(0) }, 32_768, 4096);
        assert_eq!((a.done().wr_id, a.done().wr_id, a.done().wr_id), (1, 2, 3));
        assert_eq!(a.bytes(32_768, 4096), vec![5; 4096]);
    });
}
