//! Many messages in flight whose buffers are used again the moment they are done.

use super::*;

/// Buffers in use at a time, and the longest message.
const SLOTS: u64 = 8;
const SLOT: u64 = 1 << 18;

/// Every message has bytes of its own, is compared the moment it is reported, and its buffer is then
/// overwritten: whatever is reported before it is done, or fetched after, shows. Clocks that run out all
/// the time make everything go out more than once.
fn soak(a: &Side, b: &Side, messages: u64) {
    let len = |n: u64| ((n * 7_919 + n * n) % SLOT + 1) as u32;
    let seed = |n: u64| (n % 251) as u8;
    let slot = |n: u64| n % SLOTS * SLOT;
    let mut state = (0, 0);
    while state.1 < messages {
        let (posted, done) = &mut state;
        if *posted < messages && *posted - *done < SLOTS {
            let (n, bytes) = (*posted, pattern(len(*posted) as usize, seed(*posted)));
            let remote = b.mr.remote_at(slot(n));
            if n % 3 == 2 {
                b.mem.write(slot(n), &bytes).unwrap();
                a.mem.fill(slot(n), SLOT, 0).unwrap();
                a.post(n, SendOp::Read { remote }, slot(n), len(n));
            } else {
                a.mem.write(slot(n), &bytes).unwrap();
                a.post(n, SendOp::Write { remote, imm: None }, slot(n), len(n));
            }
            *posted += 1;
            continue;
        }
        let (n, completion) = (*done, a.done());
        assert_eq!((completion.wr_id, completion.status), (n, Status::Success));
        let at = if n % 3 == 2 { a } else { b };
        let same = at.bytes(slot(n), len(n) as usize) == pattern(len(n) as usize, seed(n));
        assert!(same, "message {n} of {} bytes", len(n));
        // What the peer still wanted of this message would come out wrong now.
        a.mem.fill(slot(n), SLOT, 0xee).unwrap();
        *done += 1;
    }
}

/// A network on which everything goes out more than once, and not in order.
fn bad() -> Faults {
    Faults { seed: 5, loss: 20, duplication: 20, reorder: 20, ..Faults::default() }
}

/// As `Nic::local`, with those faults.
fn bad_local() -> (Nic, Nic) {
    let (a, b) = UnixStream::pair().unwrap();
    let nic = |socket| {
        let link = LocalLink::join(socket).unwrap();
        start(SoftOptions::new(link.local()).faults(bad()), Link::Local(link), Mtu::LOCAL).unwrap()
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(move || nic(b));
        (nic(a), other.join().unwrap())
    })
}

/// More than the usual number where `BEELINE_SOAK` says so.
fn messages() -> u64 {
    std::env::var("BEELINE_SOAK").ok().and_then(|text| text.parse().ok()).unwrap_or(400)
}

#[test]
fn buffers_are_used_again_the_moment_they_are_done() {
    let bytes = (SLOTS * SLOT) as usize;
    let options = || SoftOptions::new(address()).faults(bad());
    let (a, b) = Nic::pair(options(), options()).unwrap();
    let (a, b) = joined(&a, &b, bytes);
    soak(&a, &b, messages() / 4);
    for shareable in [true, false] {
        let mem = || {
            if shareable { HostMem::shareable(bytes) } else { HostMem::anonymous(bytes) }.unwrap()
        };
        for (a, b) in [local(), bad_local()] {
            let (a, b) = connected(Side::with(&a, mem()), Side::with(&b, mem()));
            soak(&a, &b, messages());
            let (kind, repeats) = (a.context.resolved().link, a.context.counters().repeats);
            println!("{kind:?}, shareable {shareable}: {repeats} repeats");
        }
    }
}
