//! What a client measures, and the tables it comes out in.

use std::time::Instant;

use beeline::verbs::{CompletionOp, RemoteMemory, SendOp};
use serde_json::{Value, json};

use super::Side;
use crate::failure::Failure;
use crate::output;

/// What a client measures.
pub(super) struct Run<'a> {
    pub(super) side: &'a Side,
    pub(super) remote: RemoteMemory,
    pub(super) len: u32,
    pub(super) slots: u64,
    pub(super) iterations: u64,
}

impl Run<'_> {
    /// One after the other. `ping` is half of a SEND there and a SEND back; the others are from the
    /// post to the completion.
    pub(super) fn latency(&self, what: &'static str) -> Result<(String, Value), Failure> {
        let (side, len) = (self.side, self.len);
        self.prepare()?;
        let mut nanos = Vec::new();
        // Pings whose SEND is not completed: its ACK may come behind the answer.
        let mut open = 0_u64;
        for turn in 0..self.iterations {
            let start = Instant::now();
            match what {
                "ping" => {
                    side.receive(len)?;
                    side.post(turn, SendOp::Send { imm: None }, 0, len)?;
                    open += 1;
                    while side.done()?.op != CompletionOp::Recv {
                        open = open.saturating_sub(1);
                    }
                }
                "read" => {
                    side.post(turn, SendOp::Read { remote: self.remote.at(0) }, 0, len)?;
                    side.done()?;
                }
                _ => {
                    let remote = self.remote.at(0);
                    side.post(turn, SendOp::Write { remote, imm: None }, 0, len)?;
                    side.done()?;
                }
            }
            let spent = start.elapsed().as_nanos();
            nanos.push(if what == "ping" { spent / 2 } else { spent });
        }
        // Or what is compared would be taken for done when they come.
        for _ in 0..open {
            side.done()?;
        }
        self.compare()?;
        Ok(latency_row(what, u64::from(len), nanos))
    }

    /// Many at a time.
    pub(super) fn bandwidth(&self, what: &'static str) -> Result<(String, Value), Failure> {
        self.prepare()?;
        let bytes = u64::from(self.len);
        let (mut posted, mut done) = (0_u64, 0_u64);
        let start = Instant::now();
        while done < self.iterations {
            while posted < self.iterations && posted - done < self.slots {
                let remote = self.remote.at(0);
                let op = match what {
                    "read" => SendOp::Read { remote },
                    _ => SendOp::Write { remote, imm: None },
                };
                self.side.post(posted, op, posted % self.slots * bytes, self.len)?;
                posted += 1;
            }
            self.side.done()?;
            done += 1;
        }
        let seconds = start.elapsed().as_secs_f64();
        self.compare()?;
        let rate = output::gb_per_s(bytes.saturating_mul(done), seconds);
        let messages = (seconds > 0.0).then(|| done as f64 / seconds / 1e6);
        let text = format!(
            " operation      #bytes #iterations   average GB/s    message rate Mpps\n \
             {what:<9} {bytes:>11} {done:>11} {:>14} {:>20}\n",
            output::figure(rate, "").trim(),
            messages.map_or_else(|| "-".to_owned(), |rate| format!("{rate:.6}")),
        );
        let json = json!({
            "operation": what, "gb_per_s": rate, "million_messages_per_s": messages,
        });
        Ok((text, json))
    }

    /// The same pattern in every slot here, and in the server's memory.
    fn prepare(&self) -> Result<(), Failure> {
        let bytes = u64::from(self.len);
        for slot in 0..self.slots {
            self.side.mem.write(slot * bytes, &pattern(self.len))?;
        }
        let op = SendOp::Write { remote: self.remote.at(0), imm: None };
        self.side.post(0, op, 0, self.len)?;
        self.side.done().map(|_| ())
    }

    /// Here and there, the pattern is what it was.
    fn compare(&self) -> Result<(), Failure> {
        let (bytes, expected) = (u64::from(self.len), pattern(self.len));
        let mut got = vec![0; self.len as usize];
        let differ = || Failure::failed("bytes-differ", "the bytes that arrived differ");
        for slot in 0..self.slots {
            self.side.mem.read(slot * bytes, &mut got)?;
            if got != expected {
                return Err(differ());
            }
        }
        self.side.mem.fill(0, bytes, 0)?;
        self.side.post(0, SendOp::Read { remote: self.remote.at(0) }, 0, self.len)?;
        self.side.done()?;
        self.side.mem.read(0, &mut got)?;
        if got == expected { Ok(()) } else { Err(differ()) }
    }
}

fn latency_row(what: &str, bytes: u64, mut nanos: Vec<u128>) -> (String, Value) {
    nanos.sort_unstable();
    let us = |nanos: u128| nanos as f64 / 1e3;
    let at = |share: usize| nanos.get(nanos.len() * share / 100).or(nanos.last()).copied();
    let figure = |value: Option<u128>| us(value.unwrap_or(0));
    let count = nanos.len().max(1) as u128;
    let average = us(nanos.iter().sum::<u128>() / count);
    let (min, typical, p99, max) =
        (figure(at(0)), figure(at(50)), figure(at(99)), figure(nanos.last().copied()));
    let text = format!(
        " operation      #bytes #iterations   t_min us   t_max us t_typical us   t_avg us     99% us\n \
         {what:<9} {bytes:>11} {:>11} {min:>10.2} {max:>10.2} {typical:>12.2} {average:>10.2} \
         {p99:>10.2}\n",
        nanos.len(),
    );
    let json = json!({
        "operation": what, "us_min": min, "us_max": max, "us_typical": typical,
        "us_average": average, "us_p99": p99,
    });
    (text, json)
}

/// Bytes that differ at every position, so that a shift or a hole shows.
fn pattern(len: u32) -> Vec<u8> {
    (0..len).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}
