//! `beeline rdma`: a server and clients as processes of their own.

use std::io::{BufRead, BufReader};
use std::net::TcpStream;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::support::{Run, SIGNALS_AS_USUAL, beeline, command, command_by, folder};

/// A server, and what it listens on.
struct Server {
    child: Child,
    at: String,
}

impl Server {
    fn start(args: &[&str]) -> Self {
        let mut command = command_by("env", &[SIGNALS_AS_USUAL]);
        command.args(["rdma", "serve"]).args(args);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::with_capacity(1, child.stderr.as_mut().unwrap()).read_line(&mut line).unwrap();
        let at = line.trim().rsplit(' ').next().unwrap().to_owned();
        assert!(line.contains("listening on"), "{line}");
        Self { child, at }
    }

    fn port(&self) -> &str {
        self.at.rsplit(':').next().unwrap()
    }

    fn end(self) -> Run {
        self.child.wait_with_output().unwrap().into()
    }
}

/// Loopback addresses of this process: each NIC needs one of its own.
fn address(n: u8) -> String {
    let process = std::process::id();
    format!("127.{}.{}.{n}", process / 250 % 200 + 30, process % 250)
}

#[test]
fn two_processes_share_memory() {
    let folder = folder();
    let socket = folder.path().join("rdma.sock");
    let socket = socket.to_str().unwrap();
    let server = Server::start(&["--local", socket, "--count", "5", "--json"]);
    for (what, size) in [("ping", "64"), ("write", "1"), ("read", "70000"), ("bw", "1M")] {
        let args = ["rdma", what, "--local", socket, "--size", size, "-n", "50", "--json"];
        let json = beeline(&args).ok().json();
        assert_eq!(json["command"], format!("rdma {what}"));
        assert_eq!((&json["link"], &json["compared"]), (&"local".into(), &true.into()), "{json}");
        assert!(json["segmentation"].is_null(), "nothing is cut there: {json}");
        let result = &json["results"][0];
        let key = if what == "bw" { "gb_per_s" } else { "us_typical" };
        assert!(result[key].as_f64().unwrap() > 0.0, "{json}");
    }
    let text = beeline(&["rdma", "write", "--local", socket, "-n", "5"]).ok().stdout;
    assert!(text.contains("t_typical us") && text.contains("all bytes equal"), "{text}");
    let run = server.end().ok();
    assert_eq!((run.json()["served"].as_u64(), run.json()["failed"].as_u64()), (Some(5), Some(0)));
    assert!(!Path::new(socket).exists(), "the socket is removed");
}

#[test]
fn a_server_whose_terminal_closes_leaves_no_socket() {
    let folder = folder();
    let socket = folder.path().join("rdma.sock");
    let server = Server::start(&["--local", socket.to_str().unwrap(), "--json"]);
    assert!(socket.exists());
    kill_process(Pid::from_child(&server.child), Signal::HUP).unwrap();
    let run = server.end();
    assert_eq!((run.code, &run.json()["error"]["code"]), (Some(129), &"cancelled".into()));
    assert!(!socket.exists());
}

#[test]
fn packets_between_two_addresses_leave_a_trace() {
    let (here, there) = (address(2), address(3));
    let folder = folder();
    let trace = folder.path().join("trace.pcap");
    let server = Server::start(&["--bind", &there, "--port", "0", "--link", "udp", "--count", "4"]);
    let port = server.port().to_owned();
    let run = |what, more: &[&str]| {
        let args = ["rdma", what, &there, "--from", &here, "--port", &port, "--link", "udp"];
        let args: Vec<&str> = args.iter().chain(more).copied().collect();
        beeline(&args)
    };
    let text = run("ping", &["-n", "20", "--pcap", trace.to_str().unwrap()]).ok().stdout;
    assert!(text.contains("ping") && text.contains("pieces     off: a trace"), "{text}");
    let bytes = std::fs::read(&trace).unwrap();
    assert_eq!(bytes[..4], 0xa1b2_3c4d_u32.to_le_bytes());
    assert!(bytes.len() > 24 + 40 * (16 + 28 + 16), "{}", bytes.len());
    // One that cannot be written does not end the traffic, and is told.
    let full = run("ping", &["-n", "20", "--pcap", "/dev/full", "--json"]).ok();
    assert!(full.stderr.contains("/dev/full ends early"), "{full:?}");
    assert!(full.json()["trace_error"].as_str().unwrap().contains("No space left"), "{full:?}");
    let json = run("bw", &["-n", "20", "--size", "100000", "--json"]).ok().json();
    // A kernel of before 4.18 does not cut.
    let of = json["segmentation"].as_str().unwrap();
    assert!(["loopback", "off"].contains(&of), "{json}");
    assert!(json["segmentation_text"].as_str().unwrap().contains(if of == "off" {
        "off"
    } else {
        "on"
    }));
    // More than is lent: the server says so.
    let refused = run("write", &["--size", "128M", "--json"]);
    assert_eq!(refused.code, Some(2), "{refused:?}");
    assert_eq!(refused.json()["error"]["code"], "refused-by-peer");
    let ended = server.end();
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stderr.contains("--memory") && ended.stderr.contains("1 of 4 clients failed"));
}

/// Connections that say nothing hold nobody up, and one that goes without its last word has failed.
#[test]
fn a_server_serves_past_the_silent_and_counts_the_failed() {
    let folder = folder();
    let socket = folder.path().join("rdma.sock");
    let path = socket.to_str().unwrap();
    for local in [true, false] {
        let at: &[&str] = if local { &["--local", path] } else { &["--port", "0"] };
        let server = Server::start(&[at, &["--count", "2", "--json"]].concat());
        let port = if local { String::new() } else { server.port().to_owned() };
        let silent: Vec<Box<dyn std::io::Write>> = (0..3)
            .map(|_| -> Box<dyn std::io::Write> {
                if local {
                    Box::new(UnixStream::connect(path).unwrap())
                } else {
                    Box::new(TcpStream::connect(format!("127.0.0.1:{port}")).unwrap())
                }
            })
            .collect();
        let since = Instant::now();
        let to: &[&str] = if local { &["--local", path] } else { &["127.0.0.1", "--port", &port] };
        beeline(&[&["rdma", "write", "-n", "5"], to].concat()).ok();
        // No measure of speed: they would be dropped 10 s after they came.
        let quick = since.elapsed() < Duration::from_secs(10);
        let mut silent = silent;
        silent[0].write_all(b"beeline-rdma-2 bytes=4096\n").unwrap();
        drop(silent);
        let run = server.end();
        assert_eq!(run.code, Some(1), "{run:?}");
        let json = run.json();
        assert_eq!((&json["served"], &json["failed"]), (&1.into(), &1.into()), "{json}");
        assert_eq!(json["error"]["code"], "clients-failed");
        assert!(quick || run.stderr.contains("said nothing"), "{run:?}");
    }
}

/// Each is two connections, which are not taken for another's.
#[test]
fn clients_that_come_at_once_are_served_in_turn() {
    let folder = folder();
    let socket = folder.path().join("rdma.sock");
    let path = socket.to_str().unwrap();
    let server = Server::start(&["--local", path, "--count", "6", "--json"]);
    let clients: Vec<Child> = (0..6)
        .map(|_| {
            let mut client = command();
            client.args(["rdma", "write", "--local", path, "-n", "5", "--json"]);
            client.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        })
        .collect();
    for client in clients {
        let run: Run = client.wait_with_output().unwrap().into();
        assert_eq!(run.ok().json()["compared"], true);
    }
    assert_eq!(server.end().ok().json()["served"].as_u64(), Some(6));
}

/// A signal ends a client as it does the other commands: with whole JSON, and the server serves the next.
#[test]
fn a_client_that_is_ended_says_so() {
    let folder = folder();
    let socket = folder.path().join("rdma.sock");
    let path = socket.to_str().unwrap();
    let server = Server::start(&["--local", path, "--json"]);
    for (what, signal, code) in
        [("bw", Signal::INT, 130), ("ping", Signal::TERM, 143), ("read", Signal::HUP, 129)]
    {
        let mut client = command_by("env", &[SIGNALS_AS_USUAL]);
        client.args(["rdma", what, "--local", path, "-n", "10000000", "--json"]);
        let child = client.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        ended_once_it_runs(child, signal, code);
    }
    beeline(&["rdma", "write", "--local", path, "-n", "5"]).ok();
    ended_once_it_runs(server.child, Signal::TERM, 143);
    // One that waits for a server that says nothing, and a benchmark.
    let silent = UnixListener::bind(folder.path().join("silent")).unwrap();
    let silent_path = folder.path().join("silent");
    let waits = ["rdma", "ping", "--json", "--local", silent_path.to_str().unwrap()];
    let bench = ["bench", "p2p", "--json", "--bytes", "64M"];
    for args in [&waits[..], &bench[..]] {
        let mut command = command_by("env", &[SIGNALS_AS_USUAL]);
        command.args(args).env("BEELINE_SIM_DEVICES", "16");
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        ended_once_it_runs(child, Signal::INT, 130);
    }
    drop(silent);
}

/// Sends the signal once the process catches it.
fn ended_once_it_runs(child: Child, signal: Signal, code: i32) {
    let caught = || {
        let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
        let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap_or("0");
        u64::from_str_radix(mask.trim(), 16).unwrap_or(0) & 1 << 1 != 0
    };
    let since = Instant::now();
    while !caught() {
        assert!(since.elapsed() < Duration::from_secs(60), "{} catches no signal", child.id());
        std::thread::sleep(Duration::from_millis(1));
    }
    // The work begins; a signal before that ends it as well.
    std::thread::sleep(Duration::from_millis(50));
    kill_process(Pid::from_child(&child), signal).unwrap();
    let run: Run = child.wait_with_output().unwrap().into();
    assert_eq!(
        (run.code, &run.json()["error"]["code"]),
        (Some(code), &"cancelled".into()),
        "{run:?}"
    );
}

#[test]
fn what_cannot_be_is_refused_before_anything_is_sent() {
    let cases: [&[&str]; 6] = [
        &["rdma"],
        &["rdma", "ping", "--size", "0"],
        &["rdma", "ping", "--size", "2GiB"],
        &["rdma", "write", "--local", "x", "--pcap", "y"],
        &["rdma", "read", "127.0.0.1", "--local", "x"],
        &["rdma", "bw", "-n", "0"],
    ];
    for args in cases {
        assert_eq!(beeline(args).code, Some(2), "{args:?}");
    }
    for (args, text) in [
        (["rdma", "serve", "--nic", "mlx5_0", "--link", "udp"], "--link and --pcap"),
        (["rdma", "serve", "--nic", "none9", "--port", "0"], "rdma"),
        (["rdma", "serve", "--nic", "none9:0", "--port", "0"], "ports count from 1"),
    ] {
        let run = beeline(&args);
        assert!(matches!(run.code, Some(1 | 2)), "{run:?}");
        assert!(run.stderr.contains(text), "{run:?}");
    }
    let run = beeline(&["rdma", "ping", "--port", "1"]);
    assert_eq!(run.code, Some(1), "{run:?}");
    assert!(run.stderr.contains("rdma serve"), "{run:?}");
}

#[test]
fn memory_of_a_device_at_both_ends() {
    let folder = folder();
    let socket = folder.path().join("rdma.sock");
    let socket = socket.to_str().unwrap();
    let args = ["--local", socket, "--memory", "sim:0", "--memory", "8M", "--count", "4", "--json"];
    let server = Server::start(&args);
    for (what, size, memory) in
        [("ping", "64", "sim:0"), ("bw", "1M", "sim:0"), ("bw", "4097", "host")]
    {
        let args =
            ["rdma", what, "--local", socket, "--size", size, "-n", "20", "--memory", memory];
        let json = beeline(&[&args[..], &["--json"]].concat()).ok().json();
        assert_eq!((&json["memory"], &json["compared"]), (&memory.into(), &true.into()), "{json}");
    }
    let args = ["rdma", "write", "--local", socket, "-n", "5", "--memory", "sim:0"];
    let text = beeline(&args).ok().stdout;
    assert!(text.contains("sim:0 here (SIMULATED)"), "{text}");
    assert_eq!(server.end().ok().json()["served"].as_u64(), Some(4));
    for odd in ["gpu", "cuda:x", "12Q"] {
        let run = beeline(&["rdma", "serve", "--memory", odd, "--count", "1", "--port", "0"]);
        assert_eq!(run.code, Some(2), "{odd}: {run:?}");
    }
}

#[test]
fn the_names_of_a_byte_are_shown() {
    let text = beeline(&["explain", "--addresses", "host"]).ok().stdout;
    assert!(text.contains("client host") && text.contains("-> Iova 0x"), "{text}");
    let run = command()
        .args(["explain", "--addresses", "sim:0", "--json"])
        .env("BEELINE_SIM_PROFILE", "bar")
        .output();
    let json = Run::from(run.unwrap()).ok().json();
    let of = |n: usize| &json["addresses"][n];
    assert_eq!(of(0)["client"], "simulated GPU");
    assert_eq!(of(1)["client"], "pinned host");
    assert_eq!(of(2)["client"], "BAR window");
    // What a device beside it would name is the bus address.
    let run = &of(2)["runs"][0];
    assert!(run["bus"].is_string() && run["bus"] == run["iova"], "{json}");
    assert_eq!(beeline(&["explain", "--addresses", "nothing"]).code, Some(2));
}
