//! Memory that moves under traffic: a hundred thousand moves, each block stamped and compared after its
//! completion. None is lost, stale or torn.
//!
//! `BEELINE_MOVES` sets how many moves (100000 for the full run); the default is sized for an ordinary one.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "tests")]

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use beeline::config::SimConfig;
use beeline::gpu::{Buffer, Gpu, Profile};
use beeline::memory::dmabuf::{Attach, DmaBuf};
use beeline::verbs::{
    Access, Connect, HostMem, Mr, Nic, Payload, Qp, QpCaps, QpKind, SendOp, SendWr, SoftOptions,
    Status,
};

const BLOCK: u64 = 4096;
/// A block that lies across two pages of the device is among them.
const START: u64 = 2048;
const BLOCKS: u64 = 30;
const WAIT: Duration = Duration::from_secs(60);

fn moves_wanted() -> u64 {
    std::env::var("BEELINE_MOVES").ok().and_then(|text| text.parse().ok()).unwrap_or(50_000)
}

fn movable() -> (Gpu, Buffer) {
    let mut config = SimConfig::default();
    (config.profile, config.memory_bytes) = (Profile::Movable, 1 << 20);
    let gpu = Gpu::simulated(&config).unwrap();
    let buffer = gpu.alloc(START + BLOCKS * BLOCK).unwrap();
    (gpu, buffer)
}

/// Words of a block that all differ and all name its turn.
fn stamp(turn: u64) -> Vec<u8> {
    (0..BLOCK / 8).flat_map(|word| ((turn << 16) | word).to_le_bytes()).collect()
}

/// Moves `buffer` until there were enough, or `stop`.
fn keep_moving(gpu: &Gpu, buffer: &Buffer, wanted: u64, moved: &AtomicU64, stop: &AtomicBool) {
    while moved.load(Ordering::Relaxed) < wanted && !stop.load(Ordering::Relaxed) {
        gpu.as_sim().unwrap().relocate(buffer).unwrap();
        moved.fetch_add(1, Ordering::Relaxed);
    }
}

/// Stops the mover also where an assertion fails.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn a_peers_writes_and_reads_survive_every_move() {
    let address = |n| IpAddr::from([127, 18, (std::process::id() % 250) as u8, n]);
    let (near, far) =
        Nic::pair(SoftOptions::new(address(2)), SoftOptions::new(address(3))).unwrap();
    let (gpu, buffer) = movable();
    let end = |nic: &Nic| {
        let context = nic.open();
        let (pd, cq) = (context.alloc_pd().unwrap(), context.create_cq(64).unwrap());
        let qp = pd.create_qp(QpKind::Rc, &cq, &cq, QpCaps::default()).unwrap();
        (pd, cq, qp)
    };
    let ((pd, cq, qp), (far_pd, _far_cq, far_qp)) = (end(&near), end(&far));
    let mem = Arc::new(HostMem::anonymous(2 * BLOCK as usize).unwrap());
    let mr = pd.reg_mr(Arc::clone(&mem), Access::ALL).unwrap();
    let target = far_pd.reg_gpu_dynamic(&buffer, Access::ALL).unwrap();
    let mut connect = Connect::default();
    connect.timeout = 18;
    qp.connect(&far_qp.endpoint(), &connect).unwrap();
    far_qp.connect(&qp.endpoint(), &connect).unwrap();

    let post = |qp: &Qp, mr: &Mr, id, op, offset| {
        let payload = Payload::Sges(vec![mr.sge(offset, BLOCK as u32).unwrap()]);
        qp.post_send(SendWr::new(id, op, payload)).unwrap();
    };
    let (moved, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let wanted = moves_wanted();
    let mut turn = 0_u64;
    std::thread::scope(|scope| {
        scope.spawn(|| keep_moving(&gpu, &buffer, wanted, &moved, &stop));
        let _stop = StopOnDrop(&stop);
        // Goes on a little after the last move.
        let mut after = 0;
        while after < 100 {
            after += u64::from(moved.load(Ordering::Relaxed) >= wanted);
            turn += 1;
            let expected = stamp(turn);
            mem.write(0, &expected).unwrap();
            mem.fill(BLOCK, BLOCK, 0xff).unwrap();
            let remote = target.remote_at(START + (turn % BLOCKS) * BLOCK);
            post(&qp, &mr, 1, SendOp::Write { remote, imm: None }, 0);
            post(&qp, &mr, 2, SendOp::Read { remote }, BLOCK);
            for _ in 0..2 {
                assert_eq!(cq.wait(WAIT).unwrap().status, Status::Success);
            }
            let mut read = vec![0; BLOCK as usize];
            mem.read(BLOCK, &mut read).unwrap();
            assert!(read == expected, "block of turn {turn} after {moved:?} moves");
        }
    });
    let (faults, revocations) = target.gpu_memory().unwrap().moves();
    println!("{turn} blocks, {revocations} moves, {faults} faults");
    assert_eq!(revocations, wanted, "each move took the translation away");
    assert!(faults > 100, "translations were faulted in again: {faults}");
    // What the GPU itself sees is the last block of each place.
    let (stream, pinned) = (gpu.stream().unwrap(), gpu.pin(BLOCK).unwrap());
    for turn in turn + 1 - BLOCKS..=turn {
        let at = START + (turn % BLOCKS) * BLOCK;
        stream.copy_to_host(&pinned, 0, &buffer, at, BLOCK).unwrap();
        stream.synchronize(Instant::now() + WAIT).unwrap();
        let mut seen = vec![0; BLOCK as usize];
        pinned.mem().read(0, &mut seen).unwrap();
        assert!(seen == stamp(turn), "the device sees the block of turn {turn}");
    }
}

#[test]
fn importers_of_a_dma_buf_survive_every_move() {
    let (gpu, buffer) = movable();
    let exported = DmaBuf::export(&buffer.slice(whole_pages(&buffer)).unwrap()).unwrap();
    let importers = [(); 2].map(|()| exported.attach(Attach::Dynamic).unwrap());
    let (moved, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    // The importers here access without a pause, which makes a move wait longer.
    let wanted = moves_wanted() / 10;
    let total = AtomicU64::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| keep_moving(&gpu, &buffer, wanted, &moved, &stop));
        let handles: Vec<_> = (0_u64..)
            .zip(&importers)
            .map(|(number, importer)| {
                let (moved, total, stop) = (&moved, &total, &stop);
                scope.spawn(move || {
                    let mut turn = 0_u64;
                    let mut read = vec![0; BLOCK as usize];
                    while moved.load(Ordering::Relaxed) < wanted || turn < 100 {
                        // Another importer failed: there are no more moves to wait for.
                        if stop.load(Ordering::Relaxed) {
                            return;
                        }
                        turn += 1;
                        // Places of its own: two importers never write the same block.
                        let at = START + (2 * (turn % (BLOCKS / 2 - 1)) + number) * BLOCK;
                        let expected = stamp(turn << 1 | number);
                        importer.write(at, &expected).unwrap();
                        importer.read(at, &mut read).unwrap();
                        assert!(read == expected, "importer {number}, turn {turn}");
                    }
                    total.fetch_add(turn, Ordering::Relaxed);
                })
            })
            .collect();
        let _stop = StopOnDrop(&stop);
        for handle in handles {
            handle.join().unwrap();
        }
    });
    let counts = importers.each_ref().map(|importer| importer.moves());
    println!("{} blocks, {moved:?} moves, (faults, revocations) {counts:?}", total.into_inner());
    assert!(counts.iter().all(|(faults, revoked)| *faults > 10 && *revoked == wanted));
    // A pin ends the moves, and its end lets them go on.
    let pinned = exported.attach(Attach::Pinned { holder: "a test".to_owned() }).unwrap();
    let before = pinned.bus_addr(0).unwrap();
    let error = gpu.as_sim().unwrap().relocate(&buffer).unwrap_err();
    assert!(error.code() == "memory-pinned" && error.to_string().contains("(a test)"), "{error}");
    assert_eq!(pinned.bus_addr(0).unwrap(), before);
    drop(pinned);
    gpu.as_sim().unwrap().relocate(&buffer).unwrap();
}

fn whole_pages(buffer: &Buffer) -> beeline::core::addr::ByteRange {
    beeline::core::addr::ByteRange { start: 0, len: buffer.len() / 4096 * 4096 }
}
