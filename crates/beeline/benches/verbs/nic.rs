//! The software NIC over its links.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use beeline::verbs::{
    Access, Connect, Context, Cq, LinkKind, Mr, Mtu, Nic, Payload, Qp, QpCaps, QpKind, SendOp,
    SendWr, SoftOptions, Status,
};
use beeline_sys::mem::HostMem;

use crate::bare::pings;
use crate::cores;
use crate::{IN_FLIGHT, MESSAGE, Result, SMALL_LOCAL, SMALL_UDP, address};

/// Where the words of a ping lie: behind everything that bandwidth moves.
const PING_AT: u64 = IN_FLIGHT * MESSAGE as u64;
const BYTES: u64 = PING_AT + 8192;

/// Completions asked for at a time, and how long one may take.
const PATIENCE: Duration = Duration::from_secs(10);

pub(crate) fn udp_bandwidth(span: Duration) -> Result<Option<f64>> {
    on(LinkKind::Udp, |a, b| bandwidth(a, b, span))
}

pub(crate) fn udp_bandwidth_without_pieces(span: Duration) -> Result<Option<f64>> {
    with(|options| options.link(LinkKind::Udp).segmentation(false), |a, b| bandwidth(a, b, span))
}

pub(crate) fn raw_bandwidth(span: Duration) -> Result<Option<f64>> {
    on(LinkKind::Raw, |a, b| bandwidth(a, b, span))
}

pub(crate) fn udp_latency() -> Result<Option<f64>> {
    on(LinkKind::Udp, |a, b| latency(a, b, SMALL_UDP))
}

pub(crate) fn udp_latency_without_pieces() -> Result<Option<f64>> {
    with(|options| options.link(LinkKind::Udp).segmentation(false), |a, b| latency(a, b, SMALL_UDP))
}

pub(crate) fn raw_latency() -> Result<Option<f64>> {
    on(LinkKind::Raw, |a, b| latency(a, b, SMALL_UDP))
}

pub(crate) fn pair_latency() -> Result<f64> {
    let options = |n| SoftOptions::new(address(n)).mtu(Mtu::MAX);
    let (a, b) = Nic::pair(options(1), options(2))?;
    let (a, b) = joined(&a, &b)?;
    latency(&a, &b, SMALL_UDP)
}

pub(crate) fn local_bandwidth(span: Duration) -> Result<f64> {
    let (a, b) = local()?;
    bandwidth(&a, &b, span)
}

pub(crate) fn local_latency() -> Result<f64> {
    let (a, b) = local()?;
    latency(&a, &b, SMALL_LOCAL)
}

/// Two NICs over a link of this kind; `None` where it may not be opened.
fn on(link: LinkKind, measure: impl FnOnce(&Side, &Side) -> Result<f64>) -> Result<Option<f64>> {
    with(|options| options.link(link), measure)
}

fn with(
    options: impl Fn(SoftOptions) -> SoftOptions,
    measure: impl FnOnce(&Side, &Side) -> Result<f64>,
) -> Result<Option<f64>> {
    let nic = |n| Nic::soft(options(SoftOptions::new(address(n)).mtu(Mtu::MAX)));
    let (a, b) = match (nic(1), nic(2)) {
        (Err(error), _) if error.is_permission_denied() => return Ok(None),
        (a, b) => joined(&a?, &b?)?,
    };
    measure(&a, &b).map(Some)
}

/// Two NICs joined as those of two processes are.
fn local() -> Result<(Side, Side)> {
    let (one, other) = std::os::unix::net::UnixStream::pair()?;
    let (a, b) = std::thread::scope(|scope| {
        let b = scope.spawn(|| Nic::local(other));
        (Nic::local(one), b.join())
    });
    let b = b.map_err(|_| "the other side failed")?;
    joined(&a?, &b?)
}

struct Side {
    _context: Context,
    cq: Cq,
    qp: Qp,
    mr: Mr,
    mem: Arc<HostMem>,
}

fn joined(a: &Nic, b: &Nic) -> Result<(Side, Side)> {
    let (a, b) = (Side::new(a)?, Side::new(b)?);
    let connect = Connect::default();
    a.qp.connect(&b.qp.endpoint(), &connect)?;
    b.qp.connect(&a.qp.endpoint(), &connect)?;
    Ok((a, b))
}

impl Side {
    fn new(nic: &Nic) -> Result<Self> {
        let context = nic.open();
        let pd = context.alloc_pd()?;
        let cq = context.create_cq(1024)?;
        let qp = pd.create_qp(QpKind::Rc, &cq, &cq, QpCaps::default())?;
        let mem = Arc::new(HostMem::shareable(BYTES as usize)?);
        mem.populate()?;
        let mr = pd.reg_mr(Arc::clone(&mem), Access::ALL)?;
        Ok(Self { _context: context, cq, qp, mr, mem })
    }

    fn write(&self, to: &Self, id: u64, offset: u64, len: u32) -> Result<()> {
        let op = SendOp::Write { remote: to.mr.remote_at(offset), imm: None };
        let payload = Payload::Sges(vec![self.mr.sge(offset, len)?]);
        Ok(self.qp.post_send(SendWr::new(id, op, payload))?)
    }

    /// How many work requests have completed since the last call; a failed one is an error.
    fn done(&self) -> Result<u64> {
        let mut count = 0;
        while let Some(completion) = self.cq.poll()? {
            if completion.status != Status::Success {
                return Err(format!("{completion:?}").into());
            }
            count += 1;
        }
        Ok(count)
    }

    /// Polls until the word at `at` is `turn`, adding to `done` what completes meanwhile. `false` when told
    /// to stop.
    fn reached(&self, at: u64, turn: u64, stop: &AtomicBool, done: &mut u64) -> Result<bool> {
        let (mut polls, start) = (0_u32, Instant::now());
        while self.mem.load_u64(at)? < turn {
            *done += self.done()?;
            polls = polls.wrapping_add(1);
            if stop.load(Ordering::Relaxed) {
                return Ok(false);
            }
            if polls.is_multiple_of(1024) && start.elapsed() > PATIENCE {
                return Err(format!("ping {turn} did not arrive within {PATIENCE:?}").into());
            }
        }
        Ok(true)
    }

    /// Waits until `count` more work requests have completed: nothing is under way then.
    fn drain(&self, mut count: u64) -> Result<()> {
        let start = Instant::now();
        while count > 0 {
            count = count.saturating_sub(self.done()?);
            if start.elapsed() > PATIENCE {
                return Err("completions are missing".into());
            }
        }
        Ok(())
    }
}

/// Bytes per second of WRITEs from `a` to `b`, whose memory is compared at the end.
fn bandwidth(a: &Side, b: &Side, span: Duration) -> Result<f64> {
    let len = u64::from(MESSAGE);
    for slot in 0..IN_FLIGHT {
        a.mem.write(slot * len, &pattern(slot))?;
        b.mem.fill(slot * len, len, 0)?;
    }
    let stop = AtomicBool::new(false);
    let rate = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                if b.cq.poll().is_err() {
                    break;
                }
            }
        });
        let rate = writes(a, b, span);
        stop.store(true, Ordering::Relaxed);
        rate
    })?;
    let mut bytes = vec![0; MESSAGE as usize];
    for slot in 0..IN_FLIGHT {
        b.mem.read(slot * len, &mut bytes)?;
        if bytes != pattern(slot) {
            return Err(format!("the bytes of slot {slot} differ").into());
        }
    }
    Ok(rate)
}

fn writes(a: &Side, b: &Side, span: Duration) -> Result<f64> {
    let (mut posted, mut done) = (0, 0);
    let start = Instant::now();
    // Every slot once at least, or there would be nothing to compare.
    while start.elapsed() < span || posted < IN_FLIGHT {
        if posted - done < IN_FLIGHT {
            a.write(b, posted, posted % IN_FLIGHT * u64::from(MESSAGE), MESSAGE)?;
            posted += 1;
        } else {
            done += a.done()?;
        }
    }
    a.drain(posted - done)?;
    Ok(posted as f64 * f64::from(MESSAGE) / start.elapsed().as_secs_f64())
}

/// Bytes of a slot: different at every position and in every slot, so that a shift or a hole shows.
fn pattern(slot: u64) -> Vec<u8> {
    let at = |at: u32| (at.wrapping_add(slot as u32 * 77).wrapping_mul(2_654_435_761) >> 24) as u8;
    (0..MESSAGE).map(at).collect()
}

/// Seconds one way: each side writes a rising number into the other's memory, and polls its own.
fn latency(a: &Side, b: &Side, len: u32) -> Result<f64> {
    let (at_a, at_b) = (PING_AT, PING_AT + 4096);
    a.mem.store_u64(at_a, 0)?;
    b.mem.store_u64(at_b, 0)?;
    let stop = AtomicBool::new(false);
    let echo = || -> Result<()> {
        let (mut turn, mut done) = (0, 0);
        while b.reached(at_b, turn + 1, &stop, &mut done)? {
            turn += 1;
            b.mem.store_u64(at_a, turn)?;
            b.write(a, turn, at_a, len)?;
        }
        b.drain(turn - done)
    };
    std::thread::scope(|scope| {
        let echo = scope.spawn(|| {
            let _stay = cores::stay(true);
            let echoed = echo().map_err(|error| error.to_string());
            stop.store(true, Ordering::Relaxed);
            echoed
        });
        let _stay = cores::stay(false);
        let (mut turn, mut done) = (0, 0);
        let median = pings(|| {
            turn += 1;
            a.mem.store_u64(at_b, turn)?;
            a.write(b, turn, at_b, len)?;
            match a.reached(at_a, turn, &stop, &mut done)? {
                true => Ok(()),
                false => Err("the other side has ended".into()),
            }
        });
        let drained = a.drain(turn - done);
        stop.store(true, Ordering::Relaxed);
        echo.join().map_err(|_| "the echo panicked")??;
        drained?;
        median
    })
}
