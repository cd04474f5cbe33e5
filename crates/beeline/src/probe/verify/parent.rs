//! The side that asks, waits with a deadline, and kills.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use beeline_core::checks::{Outcome, Transfer};

use super::{Answer, Path, Request, VerifyOptions, paths, transfer};
use crate::gpu::Info;

/// Longest answer that is read, in bytes.
const ANSWER_BYTES_MAX: u64 = 64 << 10;
/// How long a killed child may take to be gone. One that the kernel keeps in a driver call is left
/// behind, and nothing more is run: the next child would most likely end the same way.
const REAP_TIMEOUT: Duration = Duration::from_secs(3);
/// Longest wait for one transfer, whatever was asked for.
const DEADLINE_MAX: Duration = Duration::from_secs(3600);

/// Runs every path between `devices` and says how each went; `tell` hears of each before it starts.
///
/// It returns within `deadline_all`, one `deadline` and a few seconds, whatever a device does.
pub fn verify(
    devices: &[Info],
    options: &VerifyOptions,
    mut tell: impl FnMut(usize, usize, &Path),
) -> Vec<Transfer> {
    let paths = paths(devices);
    let end = Instant::now().checked_add(options.deadline_all);
    let mut worker: Option<Worker> = None;
    let mut stop: Option<String> = None;
    let mut done = Vec::with_capacity(paths.len());
    for (index, path) in paths.iter().enumerate() {
        if stop.is_none() && end.is_some_and(|end| Instant::now() >= end) {
            stop =
                Some(format!("the time for all transfers, {:?}, was over", options.deadline_all));
        }
        let answer = match &stop {
            Some(why) => Answer::not_verified(Outcome::NotRun, why.clone()),
            None => {
                tell(index, paths.len(), path);
                let (answer, fatal) = one(&mut worker, index, path, options);
                stop = fatal;
                answer
            }
        };
        done.push(transfer(path, devices, options.bytes, answer));
    }
    if let Some(worker) = worker {
        worker.end();
    }
    done
}

/// One path, with why no other shall be run after it, if so.
fn one(
    worker: &mut Option<Worker>,
    index: usize,
    path: &Path,
    options: &VerifyOptions,
) -> (Answer, Option<String>) {
    let span = options.deadline.min(DEADLINE_MAX);
    let deadline = Instant::now() + span;
    let running = match worker.take() {
        Some(worker) => Ok(worker),
        None => Worker::start(options),
    };
    let mut running = match running {
        Ok(running) => running,
        Err(error) => {
            let why = format!("cannot start {}: {error}", options.program.display());
            return (Answer::not_verified(Outcome::NotRun, why.clone()), Some(why));
        }
    };
    let request = Request {
        path: path.clone(),
        bytes: options.bytes,
        folder: options.folder.clone(),
        fault: options.fault.and_then(|(at, fault)| (at == index).then_some(fault)),
        give_up_ms: u64::try_from(span.as_millis())
            .unwrap_or(u64::MAX)
            .saturating_mul(4)
            .saturating_add(10_000),
    };
    match running.ask(&request, deadline) {
        Ok(answer) => {
            *worker = Some(running);
            (answer, None)
        }
        Err(end) => {
            let status = running.kill();
            let left = status.is_none().then(|| {
                format!("a process stuck in the driver could not be killed after {path:?}")
            });
            let answer = match end {
                End::Deadline => {
                    let note = format!("no answer within {span:?}");
                    Answer::not_verified(Outcome::Hung, note)
                }
                End::Gone(why) => {
                    let status = status.map_or_else(String::new, |status| format!(", {status}"));
                    let note = format!("the process that ran it ended: {why}{status}");
                    Answer::not_verified(Outcome::Failed, note)
                }
            };
            (answer, left)
        }
    }
}

/// Why there is no answer.
enum End {
    Deadline,
    Gone(String),
}

/// A child that runs transfers.
struct Worker {
    child: Child,
    stdin: Option<ChildStdin>,
    answers: Receiver<std::io::Result<String>>,
}

impl Worker {
    fn start(options: &VerifyOptions) -> std::io::Result<Self> {
        let mut child = Command::new(&options.program)
            .args(&options.args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let stdin = child.stdin.take();
        let stdout = child.stdout.take();
        // One answer a request, so one place is enough; the thread ends with the pipe.
        let (sender, answers) = sync_channel(1);
        let reader =
            std::thread::Builder::new().name("beeline-probe".to_owned()).spawn(move || {
                let Some(stdout) = stdout else { return };
                let mut lines = BufReader::new(stdout);
                loop {
                    let mut line = String::new();
                    let read = lines.by_ref().take(ANSWER_BYTES_MAX).read_line(&mut line);
                    let (answer, last) = match read {
                        Ok(0) => return,
                        Ok(_) => (Ok(line), false),
                        Err(error) => (Err(error), true),
                    };
                    if sender.send(answer).is_err() || last {
                        return;
                    }
                }
            });
        if let Err(error) = reader {
            let _ = child.kill();
            let _ = child.wait();
            return Err(error);
        }
        Ok(Self { child, stdin, answers })
    }

    fn ask(&mut self, request: &Request, deadline: Instant) -> Result<Answer, End> {
        let gone = |error: &dyn std::fmt::Display| End::Gone(error.to_string());
        let mut line = serde_json::to_string(request).map_err(|error| gone(&error))?;
        line.push('\n');
        let stdin = self.stdin.as_mut().ok_or_else(|| gone(&"it has no input"))?;
        // Far smaller than a pipe, which is empty: the child reads before it works.
        stdin.write_all(line.as_bytes()).map_err(|error| gone(&error))?;
        let left = deadline.saturating_duration_since(Instant::now());
        match self.answers.recv_timeout(left) {
            Ok(Ok(line)) => serde_json::from_str(&line)
                .map_err(|error| gone(&format_args!("an answer that is none: {error}"))),
            Ok(Err(error)) => Err(gone(&error)),
            Err(RecvTimeoutError::Timeout) => Err(End::Deadline),
            Err(RecvTimeoutError::Disconnected) => Err(gone(&"no answer")),
        }
    }

    /// Kills the child; its status, or nothing where it is not gone in time.
    fn kill(&mut self) -> Option<std::process::ExitStatus> {
        self.stdin = None;
        // An error means that it is gone already.
        let _ = self.child.kill();
        let end = Instant::now() + REAP_TIMEOUT;
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => return Some(status),
                Ok(None) if Instant::now() < end => std::thread::sleep(Duration::from_millis(5)),
                Ok(None) | Err(_) => return None,
            }
        }
    }

    /// Lets an idle child end by itself, or kills it.
    fn end(mut self) {
        self.stdin = None;
        let end = Instant::now() + REAP_TIMEOUT;
        while Instant::now() < end {
            match self.child.try_wait() {
                Ok(Some(_)) | Err(_) => return,
                Ok(None) => std::thread::sleep(Duration::from_millis(2)),
            }
        }
        let _ = self.kill();
    }
}
