//! An agent on a software NIC. The protocol is that of `rig/src/verbs_agent.c`.

use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use beeline::verbs::{
    Access, Connect, Cq, Endpoint, LinkKind, Mr, Mtu, Nic, Payload, Pd, Psn, Qp, QpCaps, QpKind,
    QpState, Qpn, RecvWr, Remote, Rkey, RnrTimer, SendOp, SendWr, SoftOptions,
};
use beeline_sys::mem::HostMem;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

pub(crate) fn serve(address: &str, port: &str, words: &[&str]) -> Result<()> {
    let local: IpAddr = address.parse()?;
    let mut options = SoftOptions::new(local);
    for word in words {
        options = match *word {
            "udp" => options.link(LinkKind::Udp),
            "raw" => options.link(LinkKind::Raw),
            "pieces" => options.segmentation(true),
            _ => return Err(format!("no link {word}").into()),
        };
    }
    let nic = Nic::soft(options)?;
    println!("verbs_agent: {local} on {:?}", nic.open().resolved());
    let listener = TcpListener::bind((local, port.parse()?))?;
    loop {
        let (stream, _) = listener.accept()?;
        stream.set_nodelay(true)?;
        let mut out = stream.try_clone()?;
        let mut agent = None;
        for line in BufReader::new(stream).lines() {
            let line = line?;
            if line.trim() == "quit" {
                break;
            }
            let answer = match answer(&nic, &mut agent, &line) {
                Ok(answer) => answer,
                Err(error) => format!("err {error}"),
            };
            // In one piece: two small segments would wait for each other's ACK.
            out.write_all(format!("{answer}\n").as_bytes())?;
        }
        let counters = nic.open().counters();
        println!(
            "verbs_agent: {} packets in, {} out, {} bad ICRC, {} repeats, {} timeouts, {} gaps",
            counters.received,
            counters.sent,
            counters.icrc_errors,
            counters.repeats,
            counters.timeouts,
            counters.gaps
        );
    }
}

/// One queue pair and what it needs.
struct Agent {
    cq: Cq,
    qp: Qp,
    mr: Mr,
    mem: Arc<HostMem>,
    access: Access,
}

fn answer(nic: &Nic, agent: &mut Option<Agent>, line: &str) -> Result<String> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let number = |at: usize| -> u64 { words.get(at).map_or(0, |word| parse(word)) };
    if words.first() == Some(&"new") {
        *agent = None;
        let made = Agent::new(nic, number(1), number(2), number(3))?;
        let Endpoint { qpn, psn, addr, mtu } = made.qp.endpoint();
        let (va, len, rkey) = (made.mr.addr().as_u64(), made.mr.len(), made.mr.rkey().as_u32());
        *agent = Some(made);
        return Ok(format!(
            "ok qpn={} psn={} addr={addr} mtu={mtu} va={va} len={len} rkey={rkey}",
            qpn.as_u32(),
            psn.as_u32()
        ));
    }
    let agent = agent.as_ref().ok_or("nothing was made")?;
    let (offset, len, seed) = (number(1), number(2) as usize, number(3) as u8);
    match words.first().copied().unwrap_or("") {
        "connect" => agent.connect(&words)?,
        "recv" => {
            let sges = vec![agent.mr.sge(number(2), number(3) as u32)?];
            agent.qp.post_recv(RecvWr { id: number(1), sges })?;
        }
        "poll" => return agent.poll(Duration::from_millis(number(1))),
        "fill" => agent.mem.write(offset, &pattern(len, seed))?,
        "zero" => agent.mem.fill(offset, number(2), 0)?,
        "check" => {
            let mut bytes = vec![0; len];
            agent.mem.read(offset, &mut bytes)?;
            let expected = pattern(len, seed);
            if let Some(at) = bytes.iter().zip(&expected).position(|(a, b)| a != b) {
                return Ok(format!("bad byte {at}"));
            }
        }
        "word" => return Ok(format!("ok {}", agent.mem.load_u64(offset)?)),
        "setword" => agent.mem.store_u64(offset, number(2))?,
        "state" => {
            return Ok(match agent.qp.state() {
                QpState::Err => "ok ERR".into(),
                QpState::Rts => "ok RTS".into(),
                _ => "ok other".into(),
            });
        }
        kind => agent.post(kind, number)?,
    }
    Ok("ok".into())
}

impl Agent {
    fn new(nic: &Nic, bytes: u64, mr_access: u64, qp_access: u64) -> Result<Self> {
        let context = nic.open();
        let pd: Pd = context.alloc_pd()?;
        let cq = context.create_cq(512)?;
        let qp = pd.create_qp(QpKind::Rc, &cq, &cq, QpCaps::default())?;
        let mem = Arc::new(HostMem::anonymous(usize::try_from(bytes)?)?);
        let mr = pd.reg_mr(Arc::clone(&mem), rights(mr_access))?;
        let access = rights(qp_access);
        qp.init(&connect_options(access))?;
        Ok(Self { cq, qp, mr, mem, access })
    }

    /// connect QPN PSN ADDR MTU TIMEOUT RETRY RNR RD_ATOMIC
    fn connect(&self, words: &[&str]) -> Result<()> {
        let number = |at: usize| words.get(at).map_or(0, |word| parse(word));
        let mtu = Mtu::new(number(4) as u32).ok_or("no such MTU")?;
        let peer = Endpoint {
            qpn: Qpn::new(number(1) as u32),
            psn: Psn::new(number(2) as u32),
            addr: words.get(3).ok_or("no address")?.parse()?,
            mtu,
        };
        let mut connect = connect_options(self.access);
        connect.mtu = Some(mtu);
        connect.timeout = number(5) as u8;
        connect.retry_cnt = number(6) as u8;
        connect.rnr_retry = number(7) as u8;
        connect.rd_atomic = number(8) as u8;
        Ok(self.qp.connect(&peer, &connect)?)
    }

    /// KIND ID OFFSET LEN VA RKEY IMM A B
    fn post(&self, kind: &str, number: impl Fn(usize) -> u64) -> Result<()> {
        let remote = Remote {
            addr: beeline::core::addr::Iova::new(number(4)),
            rkey: Rkey::new(number(5) as u32),
        };
        let imm = u32::try_from(number(6)).ok();
        let op = match kind {
            "send" => SendOp::Send { imm },
            "write" => SendOp::Write { remote, imm },
            "read" => SendOp::Read { remote },
            "cas" => SendOp::CompareSwap { remote, compare: number(7), swap: number(8) },
            "fadd" => SendOp::FetchAdd { remote, add: number(7) },
            _ => return Err(format!("no command {kind}").into()),
        };
        let payload = Payload::Sges(vec![self.mr.sge(number(2), number(3) as u32)?]);
        Ok(self.qp.post_send(SendWr::new(number(1), op, payload))?)
    }

    fn poll(&self, wait: Duration) -> Result<String> {
        match self.cq.wait(wait) {
            Ok(done) => {
                use beeline::verbs::{CompletionOp, Status};
                let received = matches!(done.op, CompletionOp::Recv | CompletionOp::RecvWriteImm)
                    && done.status == Status::Success;
                let len = if received { done.byte_len } else { 0 };
                let imm = done.imm.filter(|_| received).map_or(-1, i64::from);
                Ok(format!("wc {} {} {len} {imm}", done.wr_id, done.status.0))
            }
            Err(error) if error.is_timeout() => Ok("none".into()),
            Err(error) => Err(error.into()),
        }
    }
}

fn connect_options(access: Access) -> Connect {
    let mut connect = Connect::default();
    connect.access = access;
    connect.min_rnr_timer = RnrTimer::new(1);
    connect
}

/// `ibv_access_flags`: local write 1, remote write 2, remote read 4, remote atomic 8.
fn rights(flags: u64) -> Access {
    [Access::LOCAL_WRITE, Access::REMOTE_WRITE, Access::REMOTE_READ, Access::REMOTE_ATOMIC]
        .into_iter()
        .enumerate()
        .filter(|(bit, _)| flags >> bit & 1 != 0)
        .fold(Access::LOCAL_READ, |all, (_, right)| all | right)
}

/// Decimal, as an unsigned 64-bit number; -1 is the largest.
fn parse(word: &str) -> u64 {
    word.parse().or_else(|_| word.parse::<i64>().map(|value| value as u64)).unwrap_or(0)
}

fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| ((i * 31) as u8).wrapping_add((i >> 8) as u8) ^ seed).collect()
}
