//! Interoperability of the software NIC with `rdma_rxe`, both as requester and as responder.
//!
//! An *agent* owns one queue pair and does what it is told, line by line, over TCP. One agent is this
//! program (`serve`), on a software NIC; the other is `rig/src/verbs_agent.c`, on libibverbs. The driver
//! (`drive`) connects two of them, whichever they are, and runs the same cases over every pairing; what
//! two agents of the kernel answer each other is the reference for completion statuses.
//!
//! ```text
//! verbs_agent serve ADDRESS PORT [udp|raw] [pieces]
//! verbs_agent drive ADDRESS:PORT ADDRESS:PORT [--mtu N,..] [--sizes N,..] [--errors | --misaligned] [--timeout T]
//!     [--bursts N]
//! ```
//! `pieces`: over IPv4, too, several packets go to the kernel as one piece.
#![allow(clippy::print_stdout, clippy::print_stderr, clippy::unwrap_used, clippy::exit)]

mod agent;
mod drive;

use std::process::ExitCode;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let done = match words.as_slice() {
        ["serve", address, port, words @ ..] => agent::serve(address, port, words),
        ["drive", first, second, options @ ..] => drive::drive(first, second, options),
        _ => {
            Err("usage: verbs_agent serve ADDRESS PORT [udp|raw] [pieces] | drive A:PORT B:PORT .."
                .into())
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("verbs_agent: {error}");
            ExitCode::FAILURE
        }
    }
}
