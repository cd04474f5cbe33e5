//! The second process: does what it is told.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Instant;

use beeline::core::addr::ByteRange;
use beeline::gpu::{Gpu, KernelArg, Stream};
use beeline::verbs::{CompletionOp, Nic, SendOp, SoftOptions, Status};

use crate::measure::{flood, rates};
use crate::side::{Control, PIECE, Side};
use crate::{Outcome, WAIT};

pub(crate) fn child(device: &str, socket: &Path) -> Outcome {
    let gpu = Gpu::open(&device.parse()?)?;
    let mut control = Control::new(UnixStream::connect(socket)?)?;
    let mut nic: Option<Nic> = None;
    let mut side: Option<Side> = None;
    let mut received = 0_u64;
    let mut kernel: Option<Stream> = None;
    loop {
        // Polls between two orders, as a program does that waits for messages.
        while !control.is_ready() {
            for _ in 0..256 {
                if let Some(side) = &side
                    && let Some(completion) = side.cq.poll()?
                {
                    let fine = completion.status == Status::Success;
                    received += u64::from(fine && completion.op == CompletionOp::Recv);
                }
            }
        }
        let line = control.hear()?;
        let words: Vec<&str> = line.split(' ').collect();
        let number = |n: usize| words.get(n).and_then(|text| text.parse::<u64>().ok()).unwrap_or(0);
        let answer: Outcome<String> = (|| match words[0] {
            "local" => {
                (side, nic) = (None, None);
                nic = Some(Nic::local(UnixStream::connect(socket)?)?);
                Ok("ok".to_owned())
            }
            "udp" => {
                (side, nic) = (None, None);
                nic = Some(Nic::soft(SoftOptions::new(words[1].parse()?))?);
                Ok("ok".to_owned())
            }
            "side" => {
                side = None;
                received = 0;
                let made = Side::new(nic.as_ref().ok_or("no NIC")?, &gpu, words[1], number(2))?;
                let answer = format!("{}|{}", made.qp.endpoint(), made.mr.remote());
                side = Some(made);
                Ok(answer)
            }
            "connect" => {
                on(&side)?.connect(&words[1..].join(" ").parse()?).map(|()| "ok".to_owned())
            }
            "fill" => on(&side)?.fill(number(1), number(2), number(3)).map(|()| "ok".to_owned()),
            "check" => {
                on(&side)?.check(number(1), number(2), number(3)).map(|same| same.to_string())
            }
            "word" => on(&side)?.word(number(1)).map(|word| word.to_string()),
            "set" => on(&side)?.set_word(number(1), number(2)).map(|()| "ok".to_owned()),
            "receive" => on(&side)?.receive(number(1), number(2)).map(|()| "ok".to_owned()),
            "received" => {
                let end = Instant::now() + WAIT;
                while received == 0 && Instant::now() < end {
                    if let Some(completion) = on(&side)?.cq.poll()? {
                        received += u64::from(completion.status == Status::Success);
                    }
                }
                Ok(std::mem::take(&mut received).to_string())
            }
            "send" => {
                let side = on(&side)?;
                side.post(1, SendOp::Send { imm: None }, number(1), number(2))?;
                side.done().map(|()| "ok".to_owned())
            }
            "free" => {
                let side = side.as_mut().ok_or("no side")?;
                let len = side.buffer.len();
                drop(side.owner.take());
                // Most likely at the same address: somebody else's bytes.
                let other = gpu.alloc(len)?;
                let same = other.ptr() == side.buffer.ptr();
                side.stream.fill(&other, 0, len, 0x5e)?;
                side.stream.synchronize(Instant::now() + WAIT)?;
                side.owner = Some(other);
                Ok(format!("same-address={same}"))
            }
            "stolen" => {
                // Whether the other allocation was written.
                let side = on(&side)?;
                let other = side.owner.as_ref().ok_or("no other allocation")?;
                side.stream.copy_to_host(&side.staging, 0, other, 0, other.len().min(PIECE))?;
                side.stream.synchronize(Instant::now() + WAIT)?;
                let mut bytes = vec![0; other.len().min(PIECE) as usize];
                side.staging.mem().read(0, &mut bytes)?;
                Ok(bytes.iter().any(|byte| *byte != 0x5e).to_string())
            }
            "kernel" => {
                let side = on(&side)?;
                let word = side.buffer.slice(ByteRange::new(number(1), 8).ok_or("range")?)?;
                let stream = gpu.stream()?;
                let times = u32::try_from(number(2))?;
                stream.launch("add_many_u64", &[KernelArg::Buffer(word), KernelArg::U32(times)])?;
                kernel = Some(stream);
                Ok("ok".to_owned())
            }
            "join" => {
                kernel.take().ok_or("no kernel")?.synchronize(Instant::now() + WAIT)?;
                Ok("ok".to_owned())
            }
            "write" => {
                let remote = words[4..].join(" ").parse()?;
                let span = std::time::Duration::from_millis(number(3));
                flood(on(&side)?, &remote, false, (number(1), number(2)), span)
                    .map(|rate| rate.to_string())
            }
            "rates" => rates(&gpu).map(|(out, into)| format!("{out} {into}")),
            "drop" => {
                side = None;
                Ok(format!("{}", gpu.usage().allocated))
            }
            "quit" => Ok("bye".to_owned()),
            other => Err(format!("what is {other}?").into()),
        })();
        match answer {
            Ok(text) => control.say(&text)?,
            Err(error) => {
                control.say(&format!("error {}", error.to_string().replace('\n', " ")))?;
            }
        }
        if words[0] == "quit" {
            return Ok(());
        }
    }
}

fn on(side: &Option<Side>) -> Result<&Side, &'static str> {
    side.as_ref().ok_or("no side")
}
