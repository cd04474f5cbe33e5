//! One end of a connection, and the line by which both processes talk.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use beeline::gpu::{Buffer, Gpu, PinnedMem, Stream};
use beeline::verbs::{
    Access, Completion, Connect, Context, Cq, Endpoint, Mr, Nic, Payload, Qp, QpCaps, QpKind,
    RecvWr, SendOp, SendWr, Status,
};

use crate::{MIB, Outcome, WAIT};

/// What is filled and compared at a time.
pub(crate) const PIECE: u64 = 32 * MIB;

/// One end: a NIC with a region of GPU memory.
pub(crate) struct Side {
    pub(crate) stream: Stream,
    pub(crate) staging: PinnedMem,
    pub(crate) buffer: Buffer,
    pub(crate) context: Context,
    pub(crate) cq: Cq,
    pub(crate) qp: Qp,
    pub(crate) mr: Mr,
    /// For a region of foreign memory: the owner's handle.
    pub(crate) owner: Option<Buffer>,
}

fn allocate(gpu: &Gpu, kind: &str, bytes: u64) -> Outcome<(Buffer, Option<Buffer>)> {
    Ok(match kind {
        "shareable" => (gpu.alloc_shareable(bytes)?, None),
        "foreign" => {
            let owner = gpu.alloc(bytes)?;
            let nobody = Arc::new(());
            (Buffer::from_foreign(gpu, owner.ptr(), bytes, nobody)?, Some(owner))
        }
        _ => (gpu.alloc(bytes)?, None),
    })
}

impl Side {
    pub(crate) fn new(nic: &Nic, gpu: &Gpu, kind: &str, bytes: u64) -> Outcome<Self> {
        let context = nic.open();
        let pd = context.alloc_pd()?;
        let cq = context.create_cq(4096)?;
        let qp = pd.create_qp(QpKind::Rc, &cq, &cq, QpCaps::default())?;
        let (buffer, owner) = allocate(gpu, kind, bytes)?;
        let mr = pd.reg_gpu(&buffer, Access::ALL)?;
        let (stream, staging) = (gpu.stream()?, gpu.pin(PIECE)?);
        Ok(Self { stream, staging, buffer, context, cq, qp, mr, owner })
    }

    pub(crate) fn connect(&self, peer: &Endpoint) -> Outcome {
        let mut connect = Connect::default();
        connect.timeout = 17;
        Ok(self.qp.connect(peer, &connect)?)
    }

    /// Fills device memory with the words of `seed`.
    pub(crate) fn fill(&self, seed: u64, offset: u64, len: u64) -> Outcome {
        for (at, step) in pieces(len) {
            self.staging.mem().write(0, &words(seed, at, step))?;
            self.stream.copy_to_device(&self.buffer, offset + at, &self.staging, 0, step)?;
            self.stream.synchronize(Instant::now() + WAIT)?;
        }
        Ok(())
    }

    /// Compares device memory with the words of `seed`.
    pub(crate) fn check(&self, seed: u64, offset: u64, len: u64) -> Outcome<bool> {
        let mut same = true;
        let mut bytes = Vec::new();
        for (at, step) in pieces(len) {
            self.stream.copy_to_host(&self.staging, 0, &self.buffer, offset + at, step)?;
            self.stream.synchronize(Instant::now() + WAIT)?;
            bytes.clear();
            self.staging.mem().append_to(0, step as usize, &mut bytes)?;
            same &= bytes == words(seed, at, step);
        }
        Ok(same)
    }

    pub(crate) fn word(&self, offset: u64) -> Outcome<u64> {
        self.stream.copy_to_host(&self.staging, 0, &self.buffer, offset, 8)?;
        self.stream.synchronize(Instant::now() + WAIT)?;
        Ok(self.staging.mem().load_u64(0)?)
    }

    pub(crate) fn set_word(&self, offset: u64, value: u64) -> Outcome {
        self.staging.mem().store_u64(0, value)?;
        self.stream.copy_to_device(&self.buffer, offset, &self.staging, 0, 8)?;
        Ok(self.stream.synchronize(Instant::now() + WAIT)?)
    }

    pub(crate) fn post(&self, id: u64, op: SendOp, offset: u64, len: u64) -> Outcome {
        let payload = Payload::Sges(vec![self.mr.sge(offset, u32::try_from(len)?)?]);
        Ok(self.qp.post_send(SendWr::new(id, op, payload))?)
    }

    pub(crate) fn receive(&self, offset: u64, len: u64) -> Outcome {
        let sges = vec![self.mr.sge(offset, u32::try_from(len)?)?];
        Ok(self.qp.post_recv(RecvWr { id: 0, sges })?)
    }

    pub(crate) fn any(&self) -> Outcome<Completion> {
        let end = Instant::now() + WAIT;
        loop {
            for _ in 0..1024 {
                if let Some(completion) = self.cq.poll()? {
                    return Ok(completion);
                }
            }
            if Instant::now() > end {
                return Err("no completion within 60 s".into());
            }
        }
    }

    pub(crate) fn done(&self) -> Outcome {
        let completion = self.any()?;
        if completion.status == Status::Success {
            return Ok(());
        }
        Err(format!("{completion:?}").into())
    }
}

fn pieces(len: u64) -> impl Iterator<Item = (u64, u64)> {
    (0..len.div_ceil(PIECE)).map(move |n| (n * PIECE, PIECE.min(len - n * PIECE)))
}

/// Bytes `[at, at + len)` of a sequence of words that all differ; `at` is a multiple of 8.
fn words(seed: u64, at: u64, len: u64) -> Vec<u8> {
    let first = at / 8;
    let mut bytes = Vec::with_capacity(len as usize + 8);
    for n in first..first + len.div_ceil(8) {
        let word = n.wrapping_add(seed << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        bytes.extend_from_slice(&word.to_le_bytes());
    }
    bytes.truncate(len as usize);
    bytes
}

/// A control connection: one line there, one line back.
pub(crate) struct Control {
    stream: UnixStream,
    reader: BufReader<UnixStream>,
}

impl Control {
    pub(crate) fn new(stream: UnixStream) -> Outcome<Self> {
        stream.set_read_timeout(Some(Duration::from_secs(120)))?;
        Ok(Self { reader: BufReader::new(stream.try_clone()?), stream })
    }

    pub(crate) fn say(&mut self, line: &str) -> Outcome {
        Ok(self.stream.write_all(format!("{line}\n").as_bytes())?)
    }

    pub(crate) fn hear(&mut self) -> Outcome<String> {
        let mut line = String::new();
        if self.reader.by_ref().take(4096).read_line(&mut line)? == 0 {
            return Err("the other process ended".into());
        }
        match line.trim_end().strip_prefix("error ") {
            Some(text) => Err(format!("the other process: {text}").into()),
            None => Ok(line.trim_end().to_owned()),
        }
    }

    pub(crate) fn ask(&mut self, line: &str) -> Outcome<String> {
        self.say(line)?;
        self.hear()
    }

    /// Whether a line is there.
    pub(crate) fn is_ready(&mut self) -> bool {
        if !self.reader.buffer().is_empty() {
            return true;
        }
        let _ = self.stream.set_nonblocking(true);
        let ready =
            !matches!(self.reader.fill_buf(), Err(e) if e.kind() == std::io::ErrorKind::WouldBlock);
        let _ = self.stream.set_nonblocking(false);
        ready
    }
}
